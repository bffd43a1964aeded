"""The life of the package on a host that has never seen it, told once; each test is one claim.

The host has no network: what apt-get installs is the package and what Debian has brought already.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.package.conftest import Packages
from tests.package.hosts import Done, Host, booted

pytestmark = pytest.mark.needs("lab")

IMAGE = "/var/cache/sbxd-lab/image.tar"
EXAMPLE = "/usr/share/doc/sbxd/examples/development.toml"
CREDENTIAL = "/etc/sbxd/service-credential"
TIMERS = ("sbxd-worker-artifacts.timer", "sbxd-reap.timer", "sbxd-metrics.timer")
SOCKETS = ("sbxd.socket", "sbxd-admin.socket", "sbxd-launcher.socket")
ACCEPTING = 'accept_missing_layers = ["apparmor"]'
GUEST = ("sbxctl", "run", "--mechanism", "gvisor", "--", "cat", "/proc/version")
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


@dataclass
class Story:
    """What was seen, by the name of the moment."""

    before: frozenset[str] = frozenset()
    installed: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    purged: frozenset[str] = frozenset()
    done: dict[str, Done] = field(default_factory=dict)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with booted("container") as found:
        yield found


@pytest.fixture(scope="module")
def story(host: Host, packages: Packages) -> Story:
    """From the installation to the purge; the assertions here are the story's own steps."""
    told = Story()
    first, later = host.bring(packages.first), host.bring(packages.later)
    for user in ("alice", "bob"):
        host.run("useradd", "--no-create-home", user).ok()
    told.before = host.inventory()
    _install(host, told, first)
    _use(host, told)
    _upgrade(host, told, later)
    _leave(host, told, later)
    return told


def _install(host: Host, told: Story, package: str) -> None:
    told.done["install"] = host.apt("install", package)
    told.installed = host.inventory()
    told.done["sockets"] = host.run("systemctl", "is-active", *SOCKETS)
    told.done["services"] = host.run("systemctl", "is-active", "sbxd", "sbxd-launcher")
    told.done["credential"] = host.run("stat", "-c", "%a %U:%G %s", CREDENTIAL)
    told.done["the credential itself"] = host.run("cat", CREDENTIAL)
    told.done["verify"] = host.shell("cd /; dpkg --verify sbxd")
    # This kernel has no AppArmor: production does without on its operator's word alone.
    told.done["start, as installed"] = host.run("systemctl", "start", "sbxd.service")
    told.done["why not"] = host.run("journalctl", "--unit=sbxd", "--output=cat")
    host.run("systemctl", "stop", "sbxd.service").ok()
    host.shell(f"sed -i '/^sandbox = /a {ACCEPTING}' /etc/sbxd/config.toml").ok()
    told.done["doctor, as installed"] = host.run("sbxctl", "doctor")
    host.run("sbxctl", "image", "import", IMAGE).ok()
    told.done["run, as installed"] = host.run("sbxctl", "run", "--disk=64M", "--", "true")
    told.done["catalog"] = host.run("journalctl", "--list-catalog")
    told.done["configure again"] = host.run("/var/lib/dpkg/info/sbxd.postinst", "configure", "")


def _use(host: Host, told: Story) -> None:
    # This lane has no controllers for the limits; the lane `uml` takes the example as it is.
    host.shell(
        f"sed 's/^# \\(\\[limits\\]\\|allow_unenforced\\)/\\1/' {EXAMPLE} >/etc/sbxd/config.toml"
    ).ok()
    host.run("usermod", "--append", "--groups=sbxd-admin", "alice").ok()
    host.run("systemctl", "stop", "sbxd.service").ok()
    told.done["start"] = host.run("systemctl", "start", "sbxd.socket", "sbxd.service")
    told.done["import"] = host.as_user("alice", "sbxctl", "image", "import", IMAGE)
    told.done["run"] = host.as_user("alice", "sbxctl", "run", "--", "python3", "-c", "print(1)")
    told.done["doctor"] = host.as_user("alice", "sbxctl", "doctor")
    told.done["a stranger's run"] = host.as_user(
        "bob", "sbxctl", "run", "--", "python3", "-c", "print(1)"
    )
    told.done["another mechanism"] = host.as_user("alice", *GUEST)
    host.shell('sed -i \'s/"namespaces"/"gvisor"/\' /etc/sbxd/config.toml').ok()
    host.apt("install", "runsc").ok()
    host.run("systemctl", "restart", "sbxd.service").ok()
    told.done["gvisor"] = host.as_user("alice", *GUEST)
    host.shell('sed -i \'s/"gvisor"/"namespaces"/\' /etc/sbxd/config.toml').ok()
    host.run("systemctl", "restart", "sbxd.service").ok()
    told.done["completion"] = host.run(
        *("env", "_SBXCTL_COMPLETE=bash_complete", "COMP_WORDS=sbxctl im", "COMP_CWORD=1"),
        "sbxctl",
    )
    told.done["seccomp"] = host.as_user("alice", "sbxctl", "seccomp", "dump")
    told.done["bytecode"] = host.shell(
        "find /usr/lib/sbxd/python -name '*.py' -newer /usr/lib/sbxd/python/sbxd/daemon.py; "
        "test -e /usr/lib/sbxd/python/sbxd/__pycache__/daemon.cpython-313.pyc"
    )


def _upgrade(host: Host, told: Story, package: str) -> None:
    host.run("systemctl", "disable", "sbxd.socket").ok()
    host.run("systemctl", "enable", "--now", "sbxd-worker-artifacts.timer").ok()
    host.run(
        *("systemd-run", "--unit=sleeper", "--property=StandardOutput=file:/tmp/sleeper"),
        *("--uid=alice", "sbxctl", "run", "--", "python3", "-u", "-c", SLEEPER),
    ).ok()
    host.shell("until grep -q up /tmp/sleeper; do sleep 0.2; done").ok()
    told.done["scopes while it runs"] = host.shell("ls -d /sys/fs/cgroup/sbx.slice/*.scope")
    told.done["upgrade"] = host.apt("install", package)
    told.done["the sandbox's end"] = host.shell(
        "until systemctl show -P SubState sleeper | grep -qE 'failed|dead|exited'; do sleep 0.2; "
        "done; systemctl show -P ExecMainStatus sleeper"
    )
    host.run("systemctl", "reset-failed", "sleeper")
    told.done["scopes after"] = host.shell("ls -d /sys/fs/cgroup/sbx.slice/*.scope")
    told.done["version"] = host.run("dpkg-query", "-W", "-f=${Version}", "sbxd")
    told.done["credential after"] = host.run("cat", CREDENTIAL)
    told.done["configuration after"] = host.run("cat", "/etc/sbxd/config.toml")
    told.done["timers after"] = host.run("systemctl", "is-active", *TIMERS)
    told.done["disabled after"] = host.run("systemctl", "is-enabled", "sbxd.socket")
    host.run("systemctl", "enable", "--now", "sbxd.socket").ok()
    told.done["run after"] = host.as_user(
        "alice", "sbxctl", "run", "--", "python3", "-c", "print(2)"
    )
    told.done["over itself"] = host.apt("install", "--reinstall", package)


def _leave(host: Host, told: Story, package: str) -> None:
    host.as_user("alice", "sbxctl", "run", "--", "true").ok()
    told.done["remove"] = host.apt("remove", "sbxd")
    told.removed = host.inventory()
    told.done["processes"] = host.shell("pgrep -fa '/usr/(bin|lib/sbxd)/sbx'")
    host.apt("install", package).ok()
    told.done["run after all"] = host.as_user(
        "alice", "sbxctl", "run", "--", "python3", "-c", "print(3)"
    )
    host.shell("install -D -o sbxd-worker /dev/null /var/lib/sbxd-worker/artifacts/one").ok()
    told.done["purge with artifacts"] = host.apt("purge", "sbxd")
    told.done["the artifact"] = host.run("stat", "-c", "%U", "/var/lib/sbxd-worker/artifacts/one")
    host.apt("install", package).ok()
    host.run("rm", "/var/lib/sbxd-worker/artifacts/one").ok()
    told.done["purge"] = host.apt("purge", "sbxd")
    told.purged = host.inventory()


def test_it_installs_without_a_network(story: Story) -> None:
    story.done["install"].ok()
    assert "Created symlink" in story.done["install"].out + story.done["install"].err


def test_the_sockets_listen_at_once_and_nothing_else_runs(story: Story) -> None:
    assert story.done["sockets"].ok().split() == ["active"] * 3
    assert story.done["services"].out.split() == ["inactive"] * 2


def test_the_credential_is_made_for_this_host_and_for_root_alone(story: Story) -> None:
    assert story.done["credential"].ok().split() == ["600", "root:root", "64"]
    assert re.fullmatch(r"[0-9a-f]{64}", story.done["the credential itself"].ok())


def test_every_file_is_as_it_was_packed(story: Story) -> None:
    assert story.done["verify"].ok() == ""


def test_as_installed_it_is_for_production_and_asks_for_the_operators_word(story: Story) -> None:
    assert story.done["start, as installed"].status != 0
    assert "apparmor of this host = degraded" in story.done["why not"].ok()
    assert ACCEPTING in story.done["why not"].ok(), "how to go on"


def test_a_member_of_the_group_runs_a_command_on_gvisor_with_debians_runsc(story: Story) -> None:
    assert "Linux version 4.4.0" in story.done["gvisor"].ok()
    # The control: a daemon of another mechanism runs nothing in its place.
    assert story.done["another mechanism"].status == 240
    assert story.done["another mechanism"].out == ""
    assert "this daemon runs namespaces, not gvisor" in story.done["another mechanism"].err


def test_as_installed_it_is_for_production_and_refuses_a_host_without_limits(story: Story) -> None:
    assert story.done["doctor, as installed"].status == 246
    assert "mechanism gvisor, production" in story.done["doctor, as installed"].out
    # Debian's runsc is of July 2024: doctor warns, and the sandboxes run.
    assert re.search(r"degraded +runsc +version", story.done["doctor, as installed"].out)
    refused = story.done["run, as installed"]
    assert (refused.status, refused.out) == (240, ""), refused
    assert "cannot enforce memory" in refused.err


def test_the_journal_knows_the_catalog(story: Story) -> None:
    assert "sbxd: The execution service started" in story.done["catalog"].ok()


def test_its_script_can_be_run_again(story: Story) -> None:
    story.done["configure again"].ok()


def test_a_member_of_the_group_runs_a_command(story: Story) -> None:
    story.done["start"].ok()
    story.done["import"].ok()
    assert story.done["run"].ok() == "1\n"
    assert re.search(r"ok +sbxd .*mechanism namespaces", story.done["doctor"].out)
    # The control: who is not in the group does not, and is told what to do.
    assert story.done["a stranger's run"].status == 241
    assert story.done["a stranger's run"].out == ""


def test_the_shell_completes_and_the_filters_are_found(story: Story) -> None:
    assert story.done["completion"].ok() == "plain,image\n"
    assert "# profile workload" in story.done["seccomp"].ok()


def test_the_services_find_their_modules_compiled(story: Story) -> None:
    story.done["bytecode"].ok()


def test_an_upgrade_ends_a_running_sandbox_and_says_so(story: Story) -> None:
    assert story.done["scopes while it runs"].ok()
    story.done["upgrade"].ok()
    assert story.done["the sandbox's end"].ok().strip() == "237"
    assert story.done["scopes after"].out == ""


def test_an_upgrade_keeps_what_the_operator_set(story: Story, packages: Packages) -> None:
    assert story.done["version"].ok() == packages.later.name.split("_")[1]
    assert story.done["credential after"].ok() == story.done["the credential itself"].ok()
    assert 'sandbox = "namespaces"' in story.done["configuration after"].ok()
    assert story.done["disabled after"].out.strip() == "disabled"
    assert story.done["timers after"].out.split() == ["active", "inactive", "inactive"]
    assert story.done["run after"].ok() == "2\n"
    story.done["over itself"].ok()


def test_a_removal_ends_everything_and_keeps_configuration_and_images(story: Story) -> None:
    story.done["remove"].ok()
    assert story.done["processes"].out == ""
    left = {line for line in story.removed if line.startswith(("cgroup", "loop", "mount"))}
    assert left <= story.before
    files = {line for line in story.removed - story.before if line.startswith("file ")}
    assert "file /etc/sbxd/config.toml" in files
    assert f"file {CREDENTIAL}" in files
    assert [line for line in files if line.startswith("file /usr/")] == []
    assert story.done["run after all"].ok() == "3\n"


def test_a_purge_keeps_artifacts_and_their_owner(story: Story) -> None:
    story.done["purge with artifacts"].ok()
    assert "holds artifacts: it is kept" in story.done["purge with artifacts"].out
    assert story.done["the artifact"].ok().strip() == "sbxd-worker"


def test_a_purge_leaves_nothing_behind(story: Story) -> None:
    story.done["purge"].ok()
    assert story.purged - story.before == frozenset()
    # The control: the same inventory has seen what came with the package.
    came = story.installed - story.before
    for line in (
        "file /etc/sbxd/service-credential",
        "file /usr/bin/sbxctl",
        "file /var/lib/sbxd/images",
        "unit sbxd.socket",
        "unit file sbxd-launcher.service",
    ):
        assert line in came, line
    assert any(line.startswith("user sbxd:") for line in came)
    assert any(line.startswith("group sbxd-admin:") for line in came)


def test_the_package_shadows_nothing_of_the_system(story: Story) -> None:
    """Whatever was there before the installation is there after it."""
    assert story.before - story.installed == frozenset()
