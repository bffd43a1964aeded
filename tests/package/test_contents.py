"""What is in the Debian package, before it is installed anywhere."""

import gzip
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from sbxctl.__main__ import cli
from sbxctl.exits import Exit
from sbxd.config import load
from sbxd.settings import Settings
from tests.lab.furnish import SHIPPED, SOCKETS
from tests.lab.host import REPOSITORY
from tests.package import building
from tests.package.conftest import Packages

pytestmark = pytest.mark.needs("lab")

DEB = REPOSITORY / "packaging" / "deb"


def page(packages: Packages, name: str) -> str:
    """A manual page as a reader sees it, on one line and without hyphenation."""
    file = packages.tree / "usr/share/man" / f"man{name[-1]}" / f"{name}.gz"
    done = subprocess.run(
        ["man", "--warnings", "--nh", "--nj", "-l", str(file)],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANWIDTH": "1000", "MANROFFOPT": "-c"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return re.sub(r".\x08", "", done.stdout)


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*words, name))
    else:
        yield words


def options(command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from options(inner)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield from parameter.opts


def keys(kind: type, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration that has a value of its own."""
    for field in msgspec.structs.fields(kind):
        name = f"{prefix}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from keys(field.type, f"{name}.")
        else:
            yield name


def test_the_same_tree_gives_the_same_bytes(packages: Packages) -> None:
    assert building.digest(packages.first) == building.digest(packages.again)
    # The control: a build of another time is another file, so the comparison sees something.
    assert building.digest(packages.first) != building.digest(packages.later)


def test_nothing_in_it_is_newer_than_the_source(packages: Packages) -> None:
    listed = subprocess.run(
        ["dpkg-deb", "-c", str(packages.first)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len({tuple(line.split()[3:5]) for line in listed}) == 1
    assert {line.split()[1] for line in listed} == {"root/root"}


def test_lintian_finds_nothing_but_what_an_override_explains(packages: Packages) -> None:
    assert shutil.which("lintian"), "packaging/prerequisites installs it"
    done = subprocess.run(
        ["lintian", "--fail-on=error,warning", "--allow-root", str(packages.first)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_lintian_is_told_why_with_each_override() -> None:
    lines = (DEB / "lintian-overrides").read_text().splitlines()
    assert lines[0].startswith("#")
    assert any(line.startswith("sbxd: ") for line in lines)


def test_what_lanes_get_is_in_the_package_byte_for_byte(packages: Packages) -> None:
    rows = tomllib.loads(SHIPPED.read_text())["host"]
    shipped = [(file, row["to"]) for row in rows for file in REPOSITORY.glob(row["from"])]
    assert len(shipped) > 15
    for file, folder in shipped:
        packaged = packages.tree / folder.lstrip("/") / file.name
        assert packaged.read_bytes() == file.read_bytes(), file


def test_every_file_that_the_units_execute_is_there(packages: Packages) -> None:
    units = [*(packages.tree / "usr/lib/systemd/system").iterdir()]
    started = {
        match[1]
        for unit in units
        for match in re.finditer(r"^ExecStart=(\S+)", unit.read_text(), re.M)
    }
    assert {"/usr/bin/sbxd", "/usr/lib/sbxd/sbxd-launcher"} <= started
    for program in started:
        assert (packages.tree / program.lstrip("/")).stat().st_mode & 0o777 == 0o755


def test_commands_see_no_module_of_the_system_or_of_a_user(packages: Packages) -> None:
    for program in ("usr/bin/sbxctl", "usr/bin/sbxd", "usr/lib/sbxd/sbxd-launcher"):
        text = (packages.tree / program).read_text()
        assert text.startswith("#!/usr/bin/python3 -IS\n")
        assert 'sys.path.insert(0, "/usr/lib/sbxd/python")' in text
    outside = [
        path
        for path in packages.tree.rglob("*.py")
        if not path.is_relative_to(packages.tree / "usr/lib/sbxd/python")
        and not path.is_relative_to(packages.tree / "usr/share/doc/sbxd/examples")
    ]
    assert outside == []


def test_only_configuration_is_a_configuration_file(packages: Packages) -> None:
    listed = (packages.tree / "DEBIAN/conffiles").read_text().split()
    assert "/etc/sbxd/config.toml" in listed
    assert "/etc/sbxd/service-credential" not in listed
    assert all(name.startswith(("/etc/sbxd/", "/etc/apparmor.d/")) for name in listed)


def test_the_default_configuration_is_the_strict_one(packages: Packages) -> None:
    shipped = load(packages.tree / "etc/sbxd/config.toml")
    assert (shipped.deployment_mode, shipped.auth_mode, shipped.sandbox) == (
        "production",
        "token",
        "gvisor",
    )
    assert shipped == Settings()


def test_the_development_configuration_can_be_used_as_it_is(packages: Packages) -> None:
    shipped = load(packages.tree / "usr/share/doc/sbxd/examples/development.toml")
    assert (shipped.deployment_mode, shipped.auth_mode, shipped.sandbox) == (
        "development",
        "dev",
        "namespaces",
    )
    assert not shipped.limits.allow_unenforced_limits


def test_the_manual_of_sbxctl_has_every_command_option_and_exit_code(packages: Packages) -> None:
    text = page(packages, "sbxctl.1")
    found = list(commands(cli))
    assert ("image", "import") in found
    for words in found:
        assert re.search(rf"^ +{' '.join(words)} ", text, re.M), words
    for option in options(cli):
        assert option in text, option
    for code in Exit:
        assert re.search(rf"^ +{int(code)} +{code.name}$", text, re.M), code


def test_the_manual_of_the_configuration_has_every_key(packages: Packages) -> None:
    text = page(packages, "sbxd.toml.5")
    found = list(keys(Settings))
    assert "limits.ceilings.memory_bytes" in found
    for key in found:
        assert re.search(rf"^ +{re.escape(key)}$", text, re.M), key


def test_the_manual_of_the_daemon_has_every_unit(packages: Packages) -> None:
    text = page(packages, "sbxd.8")
    for unit in (REPOSITORY / "units").iterdir():
        assert unit.name in text
    assert "NAME" in page(packages, "sbxd-worker.1")


def test_each_shell_has_a_completion(packages: Packages) -> None:
    for path in (
        "usr/share/bash-completion/completions/sbxctl",
        "usr/share/zsh/vendor-completions/_sbxctl",
        "usr/share/fish/vendor_completions.d/sbxctl.fish",
    ):
        assert "_SBXCTL_COMPLETE" in (packages.tree / path).read_text()


def test_the_scripts_name_every_socket_and_timer(packages: Packages) -> None:
    control = packages.tree / "DEBIAN"
    timers = [path.name for path in (REPOSITORY / "units").glob("*.timer")]
    assert len(timers) > 1
    for name in (*SOCKETS, *timers):
        for script in ("postinst", "prerm", "postrm"):
            assert re.search(rf"(\s|\"){re.escape(name)}\b", (control / script).read_text())
    assert sorted(path.name for path in (REPOSITORY / "units").glob("*.socket")) == sorted(SOCKETS)


def test_the_scripts_name_every_account_and_profile(packages: Packages) -> None:
    control = packages.tree / "DEBIAN"
    accounts = (REPOSITORY / "packaging/sysusers.d/sbxd.conf").read_text()
    for name in re.findall(r"^[ug] +(\S+)", accounts, re.M):
        assert re.search(rf"(\s|\b){name}\b", (control / "postrm").read_text())
    for profile in (REPOSITORY / "apparmor").iterdir():
        assert f"/var/cache/apparmor/*/{profile.name}" in (control / "postrm").read_text()
        for script in ("postinst", "prerm"):
            assert re.search(rf"for name in .*\b{profile.name}\b", (control / script).read_text())


def test_the_changelog_names_the_version(packages: Packages) -> None:
    text = gzip.decompress((packages.tree / "usr/share/doc/sbxd/changelog.gz").read_bytes())
    version = re.search(r"^Version: (.*)$", (packages.tree / "DEBIAN/control").read_text(), re.M)
    assert version
    assert text.decode().startswith(f"sbxd ({version[1]}) ")


def test_a_later_build_is_an_upgrade_and_comes_before_the_release(packages: Packages) -> None:
    def version(file: Path) -> str:
        return file.name.split("_")[1]

    release = version(packages.first).partition("~")[0]
    for lower, higher in (
        (version(packages.first), version(packages.later)),
        (version(packages.later), release),
    ):
        done = subprocess.run(["dpkg", "--compare-versions", lower, "lt", higher])
        assert done.returncode == 0, (lower, higher)
