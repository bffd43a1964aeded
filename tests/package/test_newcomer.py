"""A newcomer's path on hosts that have never seen the package, from its file to its purge.

Each lane walks the documented path once, with a clock beside it: the very commands of README's and
`docs/quickstart.md`'s blocks that are marked for this. Each test is one claim, made in each lane
that can make it. `qemu` has everything that production asks of a host: the configuration there is
the installed one, unchanged. `container` has no controllers for the limits, which production
refuses: the two settings that a host without them needs are changed, and the mechanism and the
credential stay those of production. `uml` takes the development configuration that is installed
beside it, as it is, under AppArmor and every limit.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.lab.host import REPOSITORY
from tests.package.hosts import Done, Host, booted

pytestmark = pytest.mark.needs("lab")

IMAGE = "/var/cache/sbxd-lab/image.tar"
IN_LAB = "/lab"
CONFIGURATION = "/etc/sbxd/config.toml"
EXAMPLE = "/usr/share/doc/sbxd/examples/development.toml"
PROFILES = "/sys/kernel/security/apparmor/profiles"
INSTALL = "apt install ./sbxd_*.deb"
IMPORT = "sbxctl image import rootfs.tar"
DOCTOR = "sbxctl doctor"
RUN = "sbxctl run -- python3 -c 'print(1)'"
# What a host without controllers has to say: nothing else of the installed file changes.
WITHOUT_CONTROLLERS = (
    f"sed -i 's/^deployment_mode = .*/deployment_mode = \"development\"/' {CONFIGURATION} && "
    f'printf \'\\n[limits]\\nallow_unenforced_limits = ["cpu", "memory", "pids"]\\n\' '
    f">>{CONFIGURATION}"
)
SLEEPER = "import time; print('up', flush=True); time.sleep(3600)"
HUNGRY = "x = bytearray(1 << 28)"
# Far above what any of them takes: a bound on a hang, not a claim about speed.
SECONDS_MAX = 600.0
WORKER = """
import os, sys
sys.path.insert(0, "/usr/lib/sbxd/python")
import trio
from sbxd.client.remote import connect
from sbxd.port.errors import ExecutionRejected, ExecutionUnavailable

async def main():
    given = sys.argv[1].encode() if len(sys.argv) > 1 else None
    try:
        async with connect("/run/sbxd/worker.sock", credential=given):
            print("welcome")
    except (ExecutionRejected, ExecutionUnavailable) as refusal:
        print(refusal.code)

trio.run(main)
"""


@dataclass(frozen=True)
class Place:
    """A lane, and what is to be seen there.

    configure: what its operator types after the installation; None for nothing at all. served:
    doctor's words for mechanism and mode. lacks: what doctor misses.
    """

    lane: str
    configure: str | None
    served: str
    lacks: frozenset[str] = frozenset()

    @property
    def is_gvisor(self) -> bool:
        return "gvisor" in self.served


CONTAINER = Place(
    "container",
    WITHOUT_CONTROLLERS,
    "mechanism gvisor, development",
    frozenset({"cgroup.memory", "cgroup.pids", "cgroup.cpu"}),
)
QEMU = Place("qemu", None, "mechanism gvisor, production")
UML = Place("uml", f"cp {EXAMPLE} {CONFIGURATION}", "mechanism namespaces, development")


@dataclass
class Walk:
    """What was seen on the way, and when: seconds since the first command, by its name."""

    place: Place
    before: frozenset[str] = frozenset()
    running: frozenset[str] = frozenset()
    purged: frozenset[str] = frozenset()
    done: dict[str, Done] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = 0.0

    def step(self, name: str, done: Done) -> Done:
        """Keep what came of it, and when."""
        self.done[name] = done
        self.seconds[name] = time.monotonic() - self.started
        return done


def documented() -> list[tuple[str, str]]:
    """Who types what, in the order of the documents; what two of them say is done once."""
    found: dict[tuple[str, str], None] = {}
    for name in ("README.md", "docs/quickstart.md"):
        for block in blocks_of(REPOSITORY / name):
            if block.place in ("package", "package as alice"):
                user = "alice" if block.place.endswith("alice") else "root"
                for line in block.script.splitlines():
                    found.setdefault((user, line.partition("  #")[0].strip()))
    return list(found)


def walk(package: Path, place: Place) -> Walk:
    """The path, from the package to the purge."""
    seen = Walk(place)
    with booted(place.lane, seconds=SECONDS_MAX) as host:
        host.bring(package)
        host.run("ln", "-s", IMAGE, f"{IN_LAB}/rootfs.tar").ok()
        host.run("useradd", "--no-create-home", "alice").ok()
        seen.before = host.inventory()
        seen.started = time.monotonic()
        for user, command in documented():
            seen.step(command, host.as_user(user, "/bin/sh", "-c", f"cd {IN_LAB} && {command}"))
            if command == INSTALL and place.configure is not None:
                seen.step("configure", host.shell(place.configure)).ok()
        _look_closer(host, seen)
        _leave(host, seen)
    return seen


def _look_closer(host: Host, seen: Walk) -> None:
    # One sandbox for both: in emulation each takes a minute and more.
    seen.step(
        "kernel and label",
        host.as_user(
            *("alice", "sbxctl", "run", "--json", "--", "sh", "-c"),
            "cat /proc/version; cat /proc/self/attr/current 2>/dev/null",
        ),
    )
    seen.step("kernel of the host", host.run("cat", "/proc/version"))
    seen.step(
        "limit",
        host.as_user(*("alice", "sbxctl", "run", "--memory=64M", "--", "python3", "-c", HUNGRY)),
    )
    seen.step(
        "label of the daemon",
        host.shell("cat /proc/$(systemctl show -P MainPID sbxd)/attr/current"),
    )
    seen.step("profiles", host.shell(f"cat {PROFILES} 2>/dev/null || true"))
    seen.step("configuration", host.run("cat", CONFIGURATION))
    seen.step("verify", host.shell("cd /; dpkg --verify sbxd"))
    python = ("/usr/bin/python3", "-IS", "-c", WORKER)
    seen.step("no credential", host.run(*python))
    credential = host.run("cat", "/etc/sbxd/service-credential").ok()
    seen.step("the credential", host.run(*python, credential))


def _leave(host: Host, seen: Walk) -> None:
    """The purge, with a sandbox that runs."""
    host.run(
        *("systemd-run", "--unit=sleeper", "--property=StandardOutput=file:/tmp/sleeper"),
        *("--uid=alice", "sbxctl", "run", "--", "python3", "-c", SLEEPER),
    ).ok()
    up = host.shell(
        "until grep -q up /tmp/sleeper; do "
        "systemctl is-active -q sleeper || { cat /tmp/sleeper; exit 1; }; sleep 0.5; done"
    )
    seen.step("a sandbox that runs", up).ok()
    seen.running = host.inventory()
    seen.step("purge", host.apt("purge", "sbxd"))
    host.run("systemctl", "stop", "sleeper")
    host.run("systemctl", "reset-failed", "sleeper")
    seen.purged = host.inventory()


def _in(*places: Place) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "seen", places, indirect=True, scope="module", ids=[each.lane for each in places]
    )


everywhere = _in(CONTAINER, QEMU, UML)
with_gvisor = _in(CONTAINER, QEMU)
with_every_limit = _in(QEMU, UML)


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, first_deb: Path) -> Walk:
    return walk(first_deb, request.param)


@everywhere
def test_an_unprivileged_member_of_the_group_has_the_first_output(seen: Walk) -> None:
    seen.done[IMPORT].ok()
    assert seen.done[RUN].ok() == "1\n"


def inside(seen: Walk) -> list[str]:
    """What a sandbox sees of its kernel, and of its label where it has one."""
    shown: str = json.loads(seen.done["kernel and label"].out)["result"]["stdout"]["text"]
    return shown.split("\n")


@with_gvisor
def test_the_output_is_from_a_kernel_of_the_sandboxs_own(seen: Walk) -> None:
    assert inside(seen)[0].startswith("Linux version 4.4")
    # The control: the host's own kernel is another one.
    assert not seen.done["kernel of the host"].ok().startswith("Linux version 4.4")


@everywhere
def test_every_documented_command_was_typed_and_worked(seen: Walk) -> None:
    typed = [command for _, command in documented()]
    assert {INSTALL, IMPORT, DOCTOR, RUN} <= set(typed)
    for command in typed:
        # doctor says with its status that something is missing.
        expected = 246 if command == DOCTOR and seen.place.lacks else 0
        assert seen.done[command].status == expected, seen.done[command]


@everywhere
def test_doctor_names_what_is_served_and_misses_nothing_but_what_the_lane_lacks(
    seen: Walk,
) -> None:
    doctor = seen.done[DOCTOR]
    assert seen.place.served in doctor.out
    missing = set(re.findall(r"^ +missing +(\S+)", doctor.out, re.M))
    assert missing == seen.place.lacks, doctor.out


@everywhere
def test_the_installed_configuration_is_the_one_that_was_served(seen: Walk) -> None:
    text = seen.done["configuration"].ok()
    if seen.place.is_gvisor:
        assert 'sandbox = "gvisor"' in text
        assert 'auth_mode = "token"' in text
    # Nothing else that was packed has changed.
    changed = [line.split()[-1] for line in seen.done["verify"].out.splitlines()]
    assert changed == ([] if seen.place.configure is None else [CONFIGURATION])


@with_gvisor
def test_a_worker_shows_the_credential_that_the_installation_made(seen: Walk) -> None:
    assert seen.done["the credential"].ok() == "welcome\n"
    assert seen.done["no credential"].ok() == "NOT_AUTHORIZED\n"


@with_every_limit
def test_the_memory_limit_is_enforced_and_reported(seen: Walk) -> None:
    assert seen.done["limit"].status == 231, seen.done["limit"]


@with_every_limit
def test_the_profiles_are_loaded_and_enforce(seen: Walk) -> None:
    loaded = set(seen.done["profiles"].ok().splitlines())
    assert {"sbxd (enforce)", "sbxd-workload (enforce)", "sbxd-launcher (unconfined)"} <= loaded
    assert seen.done["label of the daemon"].ok().strip("\n\0") == "sbxd (enforce)"
    if not seen.place.is_gvisor:  # a guest's kernel knows no label of the host's
        assert inside(seen)[1].strip("\n\0") == "sbxd-workload (enforce)"


@everywhere
def test_a_purge_leaves_no_file_account_unit_mount_scope_or_profile(seen: Walk) -> None:
    seen.done["purge"].ok()
    assert seen.purged - seen.before == frozenset()
    # The control: the same inventory saw what came, and a sandbox that ran.
    came = seen.running - seen.before
    for kind in ("file", "user", "group", "unit", "unit file", "mount", "cgroup"):
        assert any(re.match(rf"{kind} .*sbx", line) for line in came), kind
    assert any(re.fullmatch(r"unit sbx-\S+\.scope", line) for line in came)
    if "sbxd (enforce)" in seen.done["profiles"].out:
        assert any(line.startswith("profile sbxd") for line in came)


@everywhere
def test_from_the_package_to_the_first_output_is_timed(
    seen: Walk,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ", ".join(f"{name} {at:.1f} s" for name, at in seen.seconds.items())
    with capsys.disabled():
        print(f"\nnewcomer, {seen.place.lane}: {line}")
    record_property("newcomer_seconds", seen.seconds[RUN])
    assert 0 < seen.seconds[INSTALL] < seen.seconds[RUN] < SECONDS_MAX
