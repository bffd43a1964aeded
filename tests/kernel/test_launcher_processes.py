"""What the launcher starts without copying itself, and what its own process must not have loaded.

Source: decision 0155. The holder of a user namespace is a program of some hundred bytes: what it
was a Python process for is asserted of it here, call by call.
"""

import os
import platform
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.jail.syscalls import NUMBERS
from sbxd.launcher.kernel import mounts, process, static_program

SECONDS = 20
as_root = pytest.mark.needs("root")


@pytest.fixture
def holder() -> Iterator[mounts.Holder]:
    made = mounts.start_holder("0 1900000000 1\n10001 1900000001 1\n")
    yield made
    os.close(made.user_namespace)
    made.end()


@as_root
def test_a_holder_is_the_first_of_a_user_namespace_with_the_maps_that_were_given(
    holder: mounts.Holder,
) -> None:
    for name in ("uid_map", "gid_map"):
        lines = Path(f"/proc/{holder.pid}/{name}").read_text().splitlines()
        assert [line.split() for line in lines] == [
            ["0", "1900000000", "1"],
            ["10001", "1900000001", "1"],
        ]
    ours, its = (os.stat(f"/proc/{pid}/ns/user").st_ino for pid in ("self", holder.pid))
    assert ours != its == os.fstat(holder.user_namespace).st_ino


@as_root
def test_a_holder_keeps_no_descriptor_and_waits(holder: mounts.Holder) -> None:
    folder = Path(f"/proc/{holder.pid}/fd")
    deadline = time.monotonic() + SECONDS  # it says that it is there before it closes them
    while os.listdir(folder) and time.monotonic() < deadline:
        select.poll().poll(5)
    assert os.listdir(folder) == []
    assert os.readlink(f"/proc/{holder.pid}/exe").startswith("/memfd:")


@as_root
def test_a_holder_dies_with_the_process_that_started_it() -> None:
    here, there = os.pipe()
    parent = os.fork()
    if parent == 0:
        made = mounts.start_holder("0 1900000000 1\n")
        os.write(there, b"%d\n" % made.pid)
        signal.pause()
        os._exit(0)
    pidfd = os.pidfd_open(int(os.read(here, 32)))
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert not poll.poll(0), "the control: it lives as long as its parent does"
        os.kill(parent, signal.SIGKILL)
        assert poll.poll(SECONDS * 1000)
    finally:
        os.waitpid(parent, 0)
        for descriptor in (pidfd, here, there):
            os.close(descriptor)


@as_root
def test_a_holder_whose_parent_is_gone_before_it_speaks_ends() -> None:
    here, there = os.pipe2(os.O_CLOEXEC)
    os.close(here)
    program = static_program.sealed("sbx-holder", image_of(platform.machine()))
    pid = os.posix_spawn(
        f"/proc/self/fd/{program}",
        ["sbx-holder"],
        {},
        file_actions=[(os.POSIX_SPAWN_DUP2, there, 1)],
        setsigdef=[signal.SIGPIPE],
    )
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGPIPE
    os.close(there)
    os.close(program)


@as_root
def test_a_map_that_the_kernel_refuses_leaves_no_holder() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        mounts.start_holder("0 1900000000 1\n0 1900000000 1\n")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_the_holder_of_the_other_machine_makes_the_same_calls() -> None:
    assert set(mounts.HOLDER) == set(NUMBERS)
    code = mounts.HOLDER["aarch64"][1]
    words = struct.unpack(f"<{len(code) // 4}I", code)
    numbers = [word >> 5 & 0xFFFF for word in words if word & 0xFFE0_001F == 0xD280_0008]
    # unshare, prctl, write, close_range, ppoll, exit_group; each followed by its `svc 0`
    assert numbers == [97, 167, 64, 436, 73, 94]
    assert words.count(0xD400_0001) == len(numbers)
    leave = len(words) - 3
    for word, position in ((words[3], 3), (words[14], 14)):  # cbnz x0 and b.ne, to the last call
        assert position + (word >> 5 & 0x7FFFF) == leave
    assert words[0] == 0xD2A2_0000  # movz x0, 0x1000, lsl 16: CLONE_NEWUSER
    assert image_of("aarch64")[18:20] == struct.pack("<H", 183)


def image_of(machine: str) -> bytes:
    return static_program.image(machine, mounts.HOLDER)


# --- programs of the host -----------------------------------------------------------------------


def test_a_program_is_told_apart_by_its_status_and_read_on_one_stream() -> None:
    command = ["/bin/sh", "-c", "echo out; echo err >&2; exit 3"]
    assert process.run(command, {}, SECONDS, 1) == (3, b"out\n")
    assert process.run(command, {}, SECONDS, 2) == (3, b"err\n")
    killed = process.run(["/bin/sh", "-c", "kill -9 $$"], {}, SECONDS, 1)
    assert killed == (-signal.SIGKILL, b"")


def test_a_program_has_the_environment_and_the_descriptors_that_it_is_given() -> None:
    kept = os.memfd_create("kept", os.MFD_CLOEXEC)
    other = os.memfd_create("other", os.MFD_CLOEXEC)
    names = ["/bin/sh", "-c", f"readlink /proc/$$/fd/{kept} /proc/$$/fd/{other}; echo $WORD"]
    environment = {"PATH": "/usr/bin:/bin", "WORD": "given"}
    _, said = process.run(names, environment, SECONDS, 1, kept)
    assert said.splitlines() == [b"/memfd:kept (deleted)", b"given"]
    os.close(kept)
    os.close(other)


def test_a_program_that_does_not_end_in_time_is_killed_and_reaped() -> None:
    with pytest.raises(TimeoutError):
        process.run(["/bin/sleep", "100"], {}, 0.05, 1)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_program_that_is_not_there_is_an_error_of_its_start() -> None:
    with pytest.raises(FileNotFoundError):
        process.run(["/nowhere/program"], {}, SECONDS, 1)


# --- what each fork would pay for -----------------------------------------------------------------


def test_the_launcher_loads_nothing_that_works_in_every_fork_and_no_parser_of_xml() -> None:
    names = "{'lxml', 'random', 'subprocess', 'threading'}"
    loaded = f"import sys, %s; print(*sorted({names} & sys.modules.keys()))"
    found = [
        subprocess.run(
            [sys.executable, "-c", loaded % module], capture_output=True, check=True, text=True
        ).stdout.split()
        for module in ("sbxd.launcher.__main__", "subprocess")
    ]
    assert found == [[], ["subprocess", "threading"]], "the second is the control"
