"""The rpm: what is in it, and what its scriptlets do in a root.

Not run anywhere: a booted host of an rpm distribution. The scriptlets' calls to a running service
manager are taken in no test; what they do without one is.
"""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.lab.furnish import SOCKETS
from tests.lab.host import REPOSITORY
from tests.package import building
from tests.package.conftest import Rpms
from tests.package.rpm_roots import Step, told

pytestmark = pytest.mark.needs("lab")

RPM = REPOSITORY / "packaging" / "rpm"
CREDENTIAL = "/etc/sbxd/service-credential"
# What one kind of package has at another place than the other, or not at all.
OF_ONE_KIND = (
    "/usr/share/doc/sbxd/changelog.gz",
    "/usr/share/lintian",
    "/usr/share/zsh",
)
_FILES = "find / -xdev -path /proc -prune -o -path /packages -prune -o -print | grep -v rpm | sort"


def asked(package: str, *words: str) -> str:
    return subprocess.run(
        ["rpm", "--query", "--package", *words, package], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def story(rpms: Rpms) -> dict[str, Step]:
    """Installed, used, upgraded, erased, in one root."""
    first, later = "/packages/first.rpm", "/packages/later.rpm"
    shell = ("/bin/sh", "-c")
    return told(
        {
            "before": (*shell, _FILES),
            "units before": (*shell, "systemctl list-unit-files --plain --no-legend"),
            # The root's own packages are Debian's, of which this database knows nothing.
            "install": ("rpm", "--install", "--nodeps", "/packages/first.rpm"),
            "verify": ("rpm", "--verify", "--nodeps", "sbxd"),
            "credential": ("stat", "-c", "%a %U:%G %s", CREDENTIAL),
            "credential itself": ("cat", CREDENTIAL),
            "accounts": ("getent", "passwd", "sbxd", "sbxd-worker"),
            "groups": ("getent", "group", "sbxd-admin", "sbxd-workers"),
            "folders": ("stat", "-c", "%a %U:%G", "/var/lib/sbxd", "/var/lib/sbxd/journal"),
            "enabled": ("systemctl", "is-enabled", *SOCKETS),
            "catalog": ("journalctl", "--list-catalog"),
            "version": ("sbxctl", "--version"),
            "seccomp": ("sbxctl", "seccomp", "dump"),
            "doctor": ("sbxctl", "doctor"),
            "bytecode": (*shell, "ls /usr/lib/sbxd/python/sbxd/__pycache__/daemon.*.pyc"),
            "edit": (*shell, "echo '# mine' >>/etc/sbxd/config.toml"),
            "disable": ("systemctl", "disable", "sbxd.socket"),
            "upgrade": ("rpm", "--upgrade", "--nodeps", later),
            "upgraded": ("rpm", "--query", "sbxd"),
            "configuration after": ("cat", "/etc/sbxd/config.toml"),
            "credential after": ("cat", CREDENTIAL),
            "disabled after": ("systemctl", "is-enabled", "sbxd.socket"),
            "version after": ("sbxctl", "--version"),
            "erase": ("rpm", "--erase", "sbxd"),
            "after": (*shell, _FILES),
            "units after": (*shell, "systemctl list-unit-files --plain --no-legend"),
            "again": ("rpm", "--install", "--nodeps", first),
        },
        {"first.rpm": rpms.first, "later.rpm": rpms.later},
    )


def test_the_same_tree_gives_the_same_bytes(rpms: Rpms) -> None:
    assert building.digest(rpms.first) == building.digest(rpms.again)
    # The control: a build of another time is another file.
    assert building.digest(rpms.first) != building.digest(rpms.later)


def test_nothing_of_the_building_machine_is_in_it(rpms: Rpms) -> None:
    said = asked(str(rpms.first), "--queryformat", "%{BUILDHOST} %{BUILDTIME} %{COOKIE}\n")
    assert said.split()[0] == "localhost"
    everything = asked(str(rpms.first), "--scripts", "--list", "--requires", "--provides")
    assert str(REPOSITORY) not in everything
    assert "/tmp/" not in everything


def test_rpmlint_finds_nothing_but_what_a_filter_explains(rpms: Rpms) -> None:
    assert shutil.which("rpmlint"), "packaging/prerequisites installs it"
    done = subprocess.run(
        ["rpmlint", "--config", str(RPM / "rpmlint.toml"), str(rpms.first)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"0 errors, 0 warnings", done.stdout), done.stdout + done.stderr


def test_rpmlint_is_told_why_with_each_filter() -> None:
    text = (RPM / "rpmlint.toml").read_text()
    wanted = tomllib.loads(text)["Filters"]
    lines = text.splitlines()
    for each in wanted:
        (place,) = (n for n, line in enumerate(lines) if line.strip().startswith(f'"{each}"'))
        above = place - 1
        while lines[above].strip().startswith('"'):
            above -= 1
        assert lines[above].strip().startswith("#"), each


def test_it_has_the_files_of_the_other_package_byte_for_byte(
    rpms: Rpms, first_deb: Path, tmp_path: Path
) -> None:
    tree = building.extract(first_deb, tmp_path / "tree")

    def compared(name: str) -> bool:
        return not name.startswith(OF_ONE_KIND)

    ours = {}
    for line in asked(str(rpms.first), "--dump").splitlines():
        name, _, _, digest, mode = line.split()[:5]
        if mode.startswith("0100") and compared(name):
            ours[name] = (digest, int(mode, 8) & 0o777)
    theirs = {}
    for path in tree.rglob("*"):
        name = f"/{path.relative_to(tree)}"
        if path.is_file() and not name.startswith("/DEBIAN/") and compared(name):
            theirs[name] = (building.digest(path), path.stat().st_mode & 0o777)
    assert ours == theirs
    assert len(ours) > 500
    assert "/usr/share/zsh/site-functions/_sbxctl" in asked(str(rpms.first), "--list")


def test_only_configuration_is_configuration_and_is_never_replaced(rpms: Rpms) -> None:
    listed = asked(str(rpms.first), "--configfiles").split()
    assert "/etc/sbxd/config.toml" in listed
    assert all(name.startswith("/etc/") for name in listed)
    assert (RPM / "rpm_tree.py").read_text().count("%config(noreplace)") == 1


def test_it_wants_the_python_that_its_libraries_are_compiled_for(rpms: Rpms) -> None:
    wanted = asked(str(rpms.first), "--requires").splitlines()
    assert "python(abi) = 3.13" in wanted
    assert "libsystemd.so.0()(64bit)" in wanted
    names = [line.split()[0] for line in wanted]
    # What each scriptlet calls has to be there before it runs.
    assert {"/usr/bin/systemctl", "/usr/bin/systemd-sysusers"} <= set(names)


def test_the_scriptlets_name_every_socket_timer_and_profile(rpms: Rpms) -> None:
    scripts = asked(str(rpms.first), "--scripts")
    parts = re.split(r"^(\w+) scriptlet \(using /bin/sh\):$", scripts, flags=re.M)
    by_name = dict(zip(parts[1::2], parts[2::2], strict=True))
    timers = [path.name for path in (REPOSITORY / "units").glob("*.timer")]
    for scriptlet in ("preinstall", "preuninstall", "posttrans"):
        for name in (*SOCKETS, *timers):
            assert re.search(rf"\b{re.escape(name)}\b", by_name[scriptlet]), (scriptlet, name)
    for text in by_name.values():
        subprocess.run(["/bin/sh", "-n"], input=text, text=True, check=True)
        assert "@" not in re.sub(r'"\$@"', "", text)
    assert "${timer%.timer}.service" in by_name["preinstall"]
    for profile in (REPOSITORY / "apparmor").iterdir():
        assert profile.name in by_name["preuninstall"]


def test_it_installs_into_a_root_without_an_error_or_a_warning(story: dict[str, Step]) -> None:
    step = story["install"]
    step.ok()
    # What is said is of the accounts and links that were made.
    assert not re.search(r"error|warning|fail|cannot", step.out + step.err, re.IGNORECASE), step
    assert "Creating user 'sbxd'" in step.err


def test_every_file_is_as_it_was_packed(story: dict[str, Step]) -> None:
    assert (story["verify"].status, story["verify"].out) == (0, "")


def test_its_scriptlets_make_accounts_folders_and_a_credential(story: dict[str, Step]) -> None:
    assert story["credential"].ok().split() == ["600", "root:root", "64"]
    assert re.fullmatch(r"[0-9a-f]{64}", story["credential itself"].ok())
    assert len(story["accounts"].ok().splitlines()) == 2
    assert len(story["groups"].ok().splitlines()) == 2
    assert story["folders"].ok().split() == ["755", "root:root", "700", "sbxd:sbxd"]
    assert "sbxd: The execution service started" in story["catalog"].ok()
    story["bytecode"].ok()


def test_the_preset_decides_what_is_enabled(story: dict[str, Step]) -> None:
    """Debian's presets enable what nobody names; Fedora's do not."""
    assert story["enabled"].ok().split() == ["enabled"] * 3


def test_what_it_installed_works(story: dict[str, Step]) -> None:
    assert story["version"].ok().startswith("sbxctl")
    assert "# profile workload" in story["seccomp"].ok()
    assert story["doctor"].status == 246
    assert "systemctl enable --now sbxd-admin.socket" in story["doctor"].out


def test_an_upgrade_keeps_what_the_operator_set(story: dict[str, Step], rpms: Rpms) -> None:
    assert (story["upgrade"].status, story["upgrade"].err) == (0, "")
    assert story["upgraded"].ok().strip() == rpms.later.name.removesuffix(".rpm")
    assert story["configuration after"].ok().endswith("# mine\n")
    assert story["credential after"].ok() == story["credential itself"].ok()
    assert story["disabled after"].out.strip() == "disabled"
    assert story["version after"].ok() == story["version"].ok()


def test_an_erasure_keeps_what_is_the_operators_and_nothing_else(story: dict[str, Step]) -> None:
    story["erase"].ok()
    left = set(story["after"].ok().splitlines()) - set(story["before"].ok().splitlines())
    ours = {name for name in left if "sbx" in name}
    expected = ("/etc/sbxd", "/var/lib/sbxd", "/var/cache/apparmor")
    assert {name for name in ours if not name.startswith(expected)} == set()
    assert CREDENTIAL in ours
    assert story["units after"].ok() == story["units before"].ok()
    # The control: a package that is there is seen by the same look.
    story["again"].ok()
