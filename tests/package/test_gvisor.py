"""A newcomer's path on a host that has never seen the package: gVisor, as the package sets it.

The lane walks the documented path once, with a clock beside it: the very commands of README's and
`docs/quickstart.md`'s blocks that are marked for this. Each test is one claim. `container` has no
controllers for the limits, which production refuses: the two settings that a host without them
needs are changed, and the mechanism and the credential stay those of production. The configuration
as it is installed, unchanged, is walked in no lane yet: `qemu` is the one that could.
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


@dataclass
class Walk:
    """What was seen on the way, and when: seconds since the first command, by its name."""

    before: frozenset[str] = frozenset()
    purged: frozenset[str] = frozenset()
    done: dict[str, Done] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


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


def walk(package: Path) -> Walk:
    """The path, from the package to the purge."""
    seen = Walk()
    with booted("container", seconds=SECONDS_MAX) as host:
        host.bring(package)
        host.run("ln", "-s", IMAGE, f"{IN_LAB}/rootfs.tar").ok()
        host.run("useradd", "--no-create-home", "alice").ok()
        seen.before = host.inventory()
        started = time.monotonic()

        def step(name: str, done: Done) -> Done:
            seen.done[name] = done
            seen.seconds[name] = time.monotonic() - started
            return done

        for user, command in documented():
            done = host.as_user(user, "/bin/sh", "-c", f"cd {IN_LAB} && {command}")
            step(command, done)
            if command == INSTALL:
                step("configure", host.shell(WITHOUT_CONTROLLERS)).ok()
        _look_closer(host, seen)
        seen.done["purge"] = host.apt("purge", "sbxd")
        seen.purged = host.inventory()
    return seen


def _look_closer(host: Host, seen: Walk) -> None:
    seen.done["kernel"] = host.as_user(
        "alice", "sbxctl", "run", "--json", "--", "cat", "/proc/version"
    )
    seen.done["kernel of the host"] = host.run("cat", "/proc/version")
    seen.done["configuration"] = host.run("cat", CONFIGURATION)
    seen.done["verify"] = host.shell("cd /; dpkg --verify sbxd")
    python = ("/usr/bin/python3", "-IS", "-c", WORKER)
    seen.done["no credential"] = host.run(*python)
    credential = host.run("cat", "/etc/sbxd/service-credential").ok()
    seen.done["the credential"] = host.run(*python, credential)


@pytest.fixture(scope="module")
def seen(first_deb: Path) -> Walk:
    return walk(first_deb)


def test_a_member_of_the_group_has_output_from_a_kernel_of_the_sandboxs_own(
    seen: Walk,
) -> None:
    seen.done[IMPORT].ok()
    assert seen.done[RUN].ok() == "1\n"
    shown = json.loads(seen.done["kernel"].ok())["result"]["stdout"]["text"]
    assert shown.startswith("Linux version 4.4")
    # The control: the host's own kernel is another one.
    assert not seen.done["kernel of the host"].ok().startswith("Linux version 4.4")


def test_every_documented_command_was_typed_and_worked(seen: Walk) -> None:
    typed = [command for _, command in documented()]
    assert {INSTALL, IMPORT, DOCTOR, RUN} <= set(typed)
    for command in typed:
        # doctor says with its status that this lane has no controllers.
        assert seen.done[command].status == (246 if command == DOCTOR else 0), seen.done[command]


def test_doctor_names_gvisor_and_misses_nothing_but_what_the_lane_lacks(
    seen: Walk,
) -> None:
    doctor = seen.done[DOCTOR]
    assert "mechanism gvisor, development" in doctor.out
    missing = set(re.findall(r"^ +missing +(\S+)", doctor.out, re.M))
    assert missing == {"cgroup.memory", "cgroup.pids", "cgroup.cpu"}, doctor.out


def test_the_installed_configuration_is_the_one_that_was_served(
    seen: Walk,
) -> None:
    text = seen.done["configuration"].ok()
    assert 'sandbox = "gvisor"' in text
    assert 'auth_mode = "token"' in text
    # Nothing else that was packed has changed.
    assert [line.split()[-1] for line in seen.done["verify"].out.splitlines()] == [CONFIGURATION]


def test_a_worker_shows_the_credential_that_the_installation_made(
    seen: Walk,
) -> None:
    assert seen.done["the credential"].ok() == "welcome\n"
    assert seen.done["no credential"].ok() == "NOT_AUTHORIZED\n"


def test_a_purge_leaves_no_file_account_unit_mount_or_scope(seen: Walk) -> None:
    seen.done["purge"].ok()
    assert seen.purged - seen.before == frozenset()


def test_from_the_package_to_the_first_output_is_timed(
    seen: Walk,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ", ".join(f"{name} {at:.1f} s" for name, at in seen.seconds.items())
    with capsys.disabled():
        print(f"\nnewcomer: {line}")
    record_property("newcomer_seconds", seen.seconds[RUN])
    assert 0 < seen.seconds[INSTALL] < seen.seconds[RUN] < SECONDS_MAX
