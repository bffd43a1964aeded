"""A slot is ready only when a process confined like a command looks confined from outside.

Source: SECURITY section 4, row 21. The negative controls are launchers with a fault in them: each
leaves out one step of the confinement, and none of them may hand out a slot.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sbxd.jail.plan import IdBlock
from sbxd.launcher import canary, verify
from sbxd.launcher.kernel import apparmor
from sbxd.launcher.requests import (
    CgroupLimits,
    Failed,
    LauncherReply,
    Prepare,
    Prepared,
    Probe,
    Probed,
    ProbeItem,
    VolumeSize,
)
from sbxd.launcher.verify import NotConfined
from sbxd.mechanism.protocol import ConfinementMismatch, MechanismError, SlotProfile
from tests.kernel import launcher_subject as subject
from tests.kernel.test_launcher_lab import Client, wait_until_gone

in_a_lane = pytest.mark.needs("systemd", "cgroup2", "root", "image", "loop", "idmap")
in_uml = pytest.mark.needs("systemd", "cgroup2", "root", "image", "apparmor")

REPOSITORY = Path(__file__).resolve().parents[2]
GUEST = REPOSITORY / "guest"
PROFILE = REPOSITORY / "apparmor" / apparmor.WORKLOAD_PROFILE
IDS = IdBlock(1_900_000_000)
INIT = {"Seccomp_filters": "3"}
COMMAND = {
    "Uid": "\t".join(["1900000001"] * 4),
    "Gid": "\t".join(["1900000001"] * 4),
    "Groups": "",
    "NoNewPrivs": "1",
    "Seccomp": "2",
    "Seccomp_filters": "4",
    **dict.fromkeys(verify.CAPABILITY_SETS, "0000000000000000"),
}


# --- what is looked at --------------------------------------------------------------------------


def test_a_confined_command_passes() -> None:
    verify.check_command_status(COMMAND, INIT, IDS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Uid", "1900000001\t1900000001\t1900000000\t1900000001"),
        ("Uid", "\t".join(["1900000000"] * 4)),
        ("Gid", "\t".join(["0"] * 4)),
        ("Groups", "0"),
        ("NoNewPrivs", "0"),
        ("Seccomp", "0"),
        ("Seccomp_filters", "3"),
        ("Seccomp_filters", "5"),
        *((name, "0000000000000001") for name in verify.CAPABILITY_SETS),
    ],
)
def test_a_command_that_is_not_confined_is_refused(field: str, value: str) -> None:
    with pytest.raises(NotConfined):
        verify.check_command_status(COMMAND | {field: value}, INIT, IDS)


@pytest.mark.parametrize("field", sorted(COMMAND))
def test_a_field_that_the_kernel_does_not_show_is_refused(field: str) -> None:
    missing = {name: text for name, text in COMMAND.items() if name != field}
    with pytest.raises(NotConfined):
        verify.check_command_status(missing, INIT, IDS)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("sbxd-workload (enforce)\nother (complain)\n", apparmor.State.ENFORCED),
        ("sbxd-workload (complain)\n", apparmor.State.NOT_ENFORCED),
        ("sbxd-workload (unconfined)\n", apparmor.State.NOT_ENFORCED),
        ("sbxd-workload-other (enforce)\nsbxd (enforce)\n", apparmor.State.NOT_LOADED),
        ("x/sbxd-workload (enforce)\n", apparmor.State.NOT_LOADED),
        ("", apparmor.State.NOT_LOADED),
    ],
)
def test_the_kernels_list_says_whether_the_profile_is_enforced(
    text: str, state: apparmor.State
) -> None:
    assert apparmor.parse_profiles(text) is state


@pytest.mark.parametrize(
    "current",
    ["unconfined", "sbxd-workload (complain)", "sbxd-workload//&unconfined (enforce)", ""],
)
def test_another_label_than_the_workloads_is_none(current: str) -> None:
    assert not apparmor.confined_as(current, "sbxd-workload")
    assert apparmor.confined_as("sbxd-workload (enforce)\n\0", "sbxd-workload")


def test_the_canary_waits_and_does_nothing_else() -> None:
    program = canary.program()
    child = subprocess.Popen(
        ["canary"], executable=f"/proc/self/fd/{program}", pass_fds=[program], env={}
    )
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)
    assert os.readlink(f"/proc/{child.pid}/exe").startswith("/memfd:")
    child.kill()
    assert child.wait() == -9
    with pytest.raises(PermissionError):
        os.write(program, b"x")
    os.close(program)


def test_there_is_a_canary_for_every_machine_that_the_jail_knows() -> None:
    from sbxd.jail.syscalls import NUMBERS

    assert {machine for machine in NUMBERS if canary.image(machine)} == set(NUMBERS)
    assert platform.machine() in NUMBERS


# --- faults -------------------------------------------------------------------------------------

FAULTY = """
import sys
from sbxd.jail import workload
from sbxd.launcher.kernel import hostpaths
left_out, program = set(sys.argv.pop(1).split(",")), sys.argv.pop(1)
workload.PARK_STEPS = tuple(s for s in workload.PARK_STEPS if s.__name__ not in left_out)
hostpaths.guest_init = lambda: program
from sbxd.launcher.__main__ import main
main()
"""


def program_without(directory: Path, steps: str) -> str:
    """guest/init.c, compiled without these of a command's steps."""
    source = directory / "guest"
    shutil.copytree(GUEST, source)
    header = source / "command.h"
    lines = header.read_text().splitlines(keepends=True)
    names = [re.fullmatch(r"    STEP\((\w+)\),\n", line) for line in lines]
    left_out = set(steps.split(","))
    header.write_text(
        "".join(
            f"    /* {line.strip()} */\n" if name is not None and name[1] in left_out else line
            for line, name in zip(lines, names, strict=True)
        )
    )
    program = directory / "sbx-guest-init"
    build = (source / "build.sh").read_text().replace("-Werror", "-Werror -Wno-unused-function")
    (source / "build.sh").write_text(build)
    subprocess.run(["sh", source / "build.sh", program], check=True)
    return str(program)


def prepared_by_a_launcher_without(
    directory: Path, image: str, steps: str
) -> tuple[LauncherReply, str]:
    environment_id = subject.fresh_id()
    program = program_without(directory, steps)
    with subject.launcher(directory, ("-c", FAULTY, steps, program)) as faulty:
        client = Client(faulty)
        reply, _ = client.ask(prepare(image, environment_id))
        client.close()
    return reply, environment_id


def prepare(image: str, environment_id: str) -> Prepare:
    return Prepare(
        ticket=1,
        environment_id=environment_id,  # type: ignore[arg-type]
        image_digest=image,
        volume=VolumeSize(workspace_bytes=32 << 20, inodes_max=1024),
        limits=CgroupLimits(cpu_millicores=1000, memory_bytes=96 << 20, pids_max=32),
        back_stop_seconds=600,
    )


@pytest.fixture(scope="module")
def image() -> str:
    return subject.unpacked_image()


@in_a_lane
@pytest.mark.parametrize(
    ("left_out", "detail"),
    [
        ("confine_system_calls", "command: the workload's seccomp filter is not on"),
        ("lock_out_privileges", "command: CapBnd is not empty"),
        ("become_the_workload,drop_capabilities", "command: Uid is not the workload's"),
        (
            "forbid_new_privileges,confine_files,confine_system_calls",
            "command: no_new_privs is not set",
        ),
    ],
)
def test_a_step_that_is_left_out_is_seen_from_outside(
    tmp_path: Path, image: str, left_out: str, detail: str
) -> None:
    reply, environment_id = prepared_by_a_launcher_without(tmp_path, image, left_out)
    assert isinstance(reply, Failed)
    assert (reply.step, reply.detail) == ("verify", detail)
    wait_until_gone(environment_id)


@in_uml
def test_a_label_that_is_left_out_is_seen_from_outside(tmp_path: Path, image: str) -> None:
    reply, _ = prepared_by_a_launcher_without(tmp_path, image, "take_a_label_on_exec")
    assert isinstance(reply, Failed)
    detail = "command: its AppArmor profile is not the workload's"
    assert (reply.step, reply.detail) == ("verify", detail)


@in_a_lane
def test_a_step_that_fails_is_named(tmp_path: Path, image: str) -> None:
    reply, _ = prepared_by_a_launcher_without(tmp_path, image, "become_the_workload")
    assert isinstance(reply, Failed)
    assert reply.step == "canary.drop_capabilities"


@in_a_lane
@pytest.mark.parametrize(
    ("left_out", "step"),
    [("confine_system_calls", "verify"), ("become_the_workload", "canary.drop_capabilities")],
)
async def test_a_layer_that_did_not_take_is_no_common_failure(
    tmp_path: Path, image: str, left_out: str, step: str
) -> None:
    profile = SlotProfile(image, subject.LIMITS)
    program = program_without(tmp_path, left_out)
    with subject.launcher(tmp_path, ("-c", FAULTY, left_out, program)) as faulty:
        async with subject.mechanism(faulty) as opened:
            with pytest.raises(ConfinementMismatch) as caught:
                await opened.prepare(subject.fresh_id(), profile, back_stop_seconds=600)
            unknown = SlotProfile("sha256:" + "0" * 64, subject.LIMITS)
            with pytest.raises(MechanismError) as common:
                await opened.prepare(subject.fresh_id(), unknown, back_stop_seconds=600)
    assert caught.value.step == step
    assert not isinstance(common.value, ConfinementMismatch)


@in_a_lane
def test_control_the_same_launcher_with_every_step_hands_out_a_slot(
    tmp_path: Path, image: str
) -> None:
    reply, _ = prepared_by_a_launcher_without(tmp_path, image, "no_such_step")
    assert isinstance(reply, Prepared), reply
    assert "verify" in [step.name for step in reply.steps]


# --- a host with AppArmor and without the profile -----------------------------------------------


def parser(option: str) -> None:
    subprocess.run(
        ["apparmor_parser", *option.split(), "--skip-cache", str(PROFILE)], check=True, timeout=60
    )


@pytest.fixture
def loaded_again() -> Iterator[None]:
    yield
    parser("--replace")


def apparmor_item(client: Client) -> ProbeItem:
    reply, _ = client.ask(Probe(ticket=5))
    assert isinstance(reply, Probed)
    return next(item for item in reply.items if item.name == "apparmor")


@in_uml
@pytest.mark.parametrize(
    ("option", "fix"),
    [("--remove", "apparmor_parser -r "), ("--replace --Complain", "aa-enforce ")],
)
def test_no_slot_is_built_while_the_profile_is_not_enforced(
    tmp_path: Path, image: str, option: str, fix: str, loaded_again: None
) -> None:
    with subject.launcher(tmp_path) as launcher:
        client = Client(launcher)
        assert apparmor_item(client).state == "ok"
        parser(option)
        reply, _ = client.ask(prepare(image, subject.fresh_id()))
        assert isinstance(reply, Failed)
        assert reply.step == "apparmor"
        item = apparmor_item(client)
        assert item.state == "missing"
        assert item.fix.startswith(fix)
        parser("--replace")
        again = msgspec.structs.replace(prepare(image, subject.fresh_id()), ticket=6)
        reply, _ = client.ask(again)
        assert isinstance(reply, Prepared), "loading the profile is the whole repair"
        client.close()
