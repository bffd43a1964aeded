"""Packs the rpm from the tree that the Debian package is made of.

Invariants: as of `tree`: the same input gives the same bytes, and everything that is read lies in
the repository or in the folder of parts. Deliberately absent: a source package, and dependencies
that rpmbuild would find by itself, which would name what this machine has and not what a target
has (decision 0140).
"""

import os
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import tree

HERE = Path(__file__).resolve().parent
SCRIPTLETS = ("pre", "post", "preun", "postun", "posttrans")

# The names that Fedora and openSUSE both know them by. The libraries in the package are compiled
# for this Python; runsc is in neither distribution.
REQUIRES = (
    "e2fsprogs",
    "libseccomp.so.2()(64bit)",
    "libstdc++.so.6()(64bit)",
    "libsystemd.so.0()(64bit)",
    "python(abi) = 3.13",
    "systemd >= 257",
    "util-linux",
)
# What a scriptlet runs is there before the scriptlet does.
REQUIRES_POST = (
    "/usr/bin/journalctl",
    "/usr/bin/python3",
    "/usr/bin/systemctl",
    "/usr/bin/systemd-sysusers",
    "/usr/bin/systemd-tmpfiles",
    "coreutils",
    "findutils",
)
RECOMMENDS = ("bash-completion", "runsc")
# Where a distribution of this family looks for what the tree has at Debian's place.
_MOVED = {"usr/share/zsh/vendor-completions": "usr/share/zsh/site-functions"}
# Folders that are nobody's but this package's.
_OWN = ("etc/sbxd", "usr/lib/sbxd", "usr/share/doc/sbxd", "usr/share/sbxd")


def build(parts: Path, output: Path, source_date: int) -> Path:
    """Make the package; arguments and errors as of `tree.build`."""
    version = tree.debian_version(tree.project_version(), source_date)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sbxd-package-") as scratch:
        root = Path(scratch) / "root"
        tree.lay(root, parts, source_date)
        for old, new in _MOVED.items():
            (root / new).parent.mkdir(parents=True, exist_ok=True)
            (root / old).rename(root / new)
        copyright_text = (HERE.parent / "deb" / "copyright").read_bytes()
        tree.write(tree.inside(root, "/usr/share/doc/sbxd/copyright"), copyright_text)
        tree.settle(root, source_date)
        Path(f"{root}.files").write_text("".join(f"{line}\n" for line in listed(root)))
        spec = Path(scratch) / "sbxd.spec"
        spec.write_text(_spec(version, source_date))
        made = _pack(spec, root, Path(scratch), source_date)
        target = output / made.name
        unfinished = target.with_name(f".{target.name}")
        shutil.copyfile(made, unfinished)
        unfinished.replace(target)
    return target


def listed(root: Path) -> list[str]:
    """The lines of %files: own folders, configuration files, documents, the rest."""
    lines = ["%defattr(-,root,root,-)"]
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            if any(name == own or name.startswith(f"{own}/") for own in _OWN):
                lines.append(f'%dir "/{name}"')
        elif name.startswith("etc/"):
            lines.append(f'%config(noreplace) "/{name}"')
        elif name.startswith(("usr/share/doc/", "usr/share/man/")):
            lines.append(f'%doc "/{name}"')
        else:
            lines.append(f'"/{name}"')
    return lines


def _spec(version: str, source_date: int) -> str:
    requires = [
        *(f"Requires: {each}" for each in REQUIRES),
        *(f"Requires(post): {each}" for each in REQUIRES_POST),
        *(f"Recommends: {each}" for each in RECOMMENDS),
        f"Provides: sbxd = {version}-1",
    ]
    values = {
        "@VERSION@": version,
        "@REQUIRES@": "\n".join(requires),
        "@TIMERS@": tree.timers(),
        "@DATE@": f"{datetime.fromtimestamp(source_date, UTC):%a %b %d %Y}",
    }
    for name in SCRIPTLETS:
        # A scriptlet is macro-expanded: a % of the shell's own is doubled.
        script = tree.filled(HERE / f"{name}.sh", values).rstrip()
        values[f"@{name.upper()}@"] = script.replace("%", "%%")
    return tree.filled(HERE / "sbxd.spec", values)


def _pack(spec: Path, root: Path, scratch: Path, source_date: int) -> Path:
    # The rpm of another distribution may have other defaults: what matters is said here.
    settings = {
        "_topdir": scratch / "rpmbuild",
        "_rpmdir": scratch / "rpms",
        "_rpmfilename": "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm",
        "_dbpath": scratch / "rpmdb",
        "tree": root,
    }
    words = [word for name, value in settings.items() for word in ("--define", f"{name} {value}")]
    tree.run(
        *("rpmbuild", "-bb", "--target=x86_64-linux", "--quiet", *words, str(spec)),
        source_date=source_date,
    )
    made = list((scratch / "rpms").glob("*.rpm"))
    if len(made) != 1:
        raise tree.BuildError(f"rpmbuild made {len(made)} packages: {sorted(os.listdir(scratch))}")
    return made[0]
