"""Which destinations are package registries: the public ones, and those that a deployment names.

Installing a package is running a program that fetches code and runs it, so nothing but the missing
destination can tell it from any other program. This module says which destinations those are; it
is no list of everything that code can be fetched from.

Invariants: pure; an entry of a policy that covers any host of a registry counts as one.
"""

from collections.abc import Iterable
from typing import Final

from sbxd.port.egress import EgressPolicy

_WILDCARD: Final = "*."

# Each with everything below it. Python, JavaScript, Rust, Ruby, Go, JVM, .NET, PHP, conda, R,
# Haskell, Erlang, Perl; then distributions.
REGISTRIES: Final = frozenset(
    {
        "pypi.org", "pythonhosted.org", "pypi.python.org", "npmjs.org", "npmjs.com",
        "yarnpkg.com", "jsr.io", "npm.pkg.github.com", "crates.io", "rubygems.org",
        "proxy.golang.org", "repo.maven.apache.org", "maven.org", "plugins.gradle.org",
        "nuget.org", "packagist.org", "anaconda.org", "anaconda.com", "cran.r-project.org",
        "hackage.haskell.org", "hex.pm", "cpan.org", "debian.org", "archive.ubuntu.com",
        "security.ubuntu.com", "ports.ubuntu.com", "alpinelinux.org", "fedoraproject.org",
        "centos.org", "rockylinux.org", "archlinux.org", "opensuse.org",
    }
)  # fmt: skip


def registries_of(policy: EgressPolicy, named: Iterable[str] = ()) -> tuple[str, ...]:
    """The hosts of a policy's destinations that cover a package registry, in the policy's order.

    named: registries of the deployment's own, each a host with everything below it.
    """
    known = REGISTRIES | {name.lower() for name in named}
    found = [each.host for each in policy.destinations if _is_registry(each.host.lower(), known)]
    return tuple(dict.fromkeys(found))


def _is_registry(host: str, known: Iterable[str]) -> bool:
    bare = host.removeprefix(_WILDCARD)
    return any(
        bare == registry
        or bare.endswith(f".{registry}")
        or (bare != host and registry.partition(".")[2] == bare)  # one label more, as a rule has it
        for registry in known
    )
