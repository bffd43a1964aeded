"""Whom the launcher enters, kills and tells of, when a process number is given to another process.

The number is really given anew here: clone3 takes a wanted one (`set_tid`).
"""

import ctypes
import os
import select
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest

from sbxd.jail import mounts, syscalls
from sbxd.jail.steward_alone import Intermediate
from sbxd.launcher.filters import Filters
from sbxd.launcher.helpers import Helper, Outcome
from sbxd.launcher.kernel import mount_copies
from sbxd.launcher.loop import Launcher
from sbxd.launcher.notify import Notifier
from sbxd.launcher.pool import Job, Lane, Result

as_root = pytest.mark.needs("root")
SECONDS = 30
CLONE3 = 435
NUMBERS_BYTES = 88  # of struct clone_args, with cgroup


def stand_in(name: str, ready: int) -> NoReturn:
    """As a steward as far as it is entered: a root of its own with nothing but a volume."""
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        mounts.make_private()
        root, volume = (mounts.tmpfs(1 << 20, 0o755, 0) for _ in range(2))
        os.mkdir(name, dir_fd=volume)
        os.mkdir("workspace", dir_fd=root)
        mounts.put_on_root(root)
        mounts.attach(volume, root, "workspace")
        mounts.pivot_into(root)
        os.write(ready, b"1")
        signal.pause()
    finally:
        os._exit(1)


class Process:
    """A child that stands in for a steward; its number may be asked for."""

    def __init__(self, name: str, number: int = 0) -> None:
        here, there = os.pipe()
        self.pid = clone_with_number(number) if number else os.fork()
        if self.pid == 0:
            stand_in(name, there)
        os.close(there)
        self.pidfd = os.pidfd_open(self.pid)
        assert os.read(here, 1) == b"1"
        os.close(here)

    def end(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)


def clone_with_number(number: int) -> int:
    """fork, with this number for the child. It must be free."""
    wanted = ctypes.c_int(number)
    arguments = struct.pack(
        "=11Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(wanted), 1, 0
    )
    assert len(arguments) == NUMBERS_BYTES
    libc = ctypes.CDLL(None, use_errno=True)
    pid: int = libc.syscall(
        ctypes.c_long(CLONE3), ctypes.c_char_p(arguments), ctypes.c_long(len(arguments))
    )
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone3 with a number")
    return pid


def content(mount: int) -> list[str]:
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount)
    try:
        return os.listdir(directory)
    finally:
        os.close(directory)
        os.close(mount)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[int]:
    """The directory of a box, in which the test says who is in the steward's leaf."""
    (tmp_path / "steward").mkdir()
    directory = os.open(tmp_path, os.O_DIRECTORY)
    yield directory
    os.close(directory)


def say_who(path: Path, text: str) -> None:
    (path / "steward" / "cgroup.procs").write_text(text)


# --- the steward whose mount namespace is entered -------------------------------------------------


@as_root
def test_who_got_the_number_of_a_steward_is_not_entered(tmp_path: Path, box: int) -> None:
    with ExitStack() as held:
        steward = Process("of the steward")
        say_who(tmp_path, f"{steward.pid}\n")
        pidfd = mount_copies.steward_of(box)
        held.callback(os.close, pidfd)
        assert content(mount_copies.copy_of_stewards(pidfd)) == ["of the steward"], "the control"
        steward.end()
        other = Process("of another", steward.pid)
        held.callback(other.end)
        assert other.pid == steward.pid
        assert content(mount_copies.copy_of_stewards(other.pidfd)) == ["of another"]
        with pytest.raises(ProcessLookupError):
            mount_copies.copy_of_stewards(pidfd)


@as_root
def test_a_number_that_changes_hands_while_it_is_opened_is_refused(
    tmp_path: Path, box: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leaf names the steward, which ends; then the number is opened, as another's."""
    say_who(tmp_path, f"{os.getpid()}\n")
    os.close(mount_copies.steward_of(box))
    opened: list[int] = []
    plain = os.pidfd_open

    def late(pid: int) -> int:
        say_who(tmp_path, "")
        opened.append(plain(pid))
        return opened[-1]

    monkeypatch.setattr(os, "pidfd_open", late)
    with pytest.raises(ProcessLookupError):
        mount_copies.steward_of(box)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


@pytest.mark.parametrize("text", ["", "1\n2\n"])
def test_a_leaf_without_one_process_has_no_steward(tmp_path: Path, box: int, text: str) -> None:
    say_who(tmp_path, text)
    with pytest.raises(ProcessLookupError):
        mount_copies.steward_of(box)


# --- what is killed by its number -----------------------------------------------------------------


def test_a_helper_is_killed_only_while_its_number_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its death is seen by SIGCHLD before its channel is looked at."""
    results: list[Result] = []
    was_ours: list[bool] = []
    plain = Helper.kill

    def kill(helper: Helper) -> None:
        try:
            os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            was_ours.append(True)
            plain(helper)
        except ChildProcessError:
            was_ours.append(False)

    def die() -> Outcome:
        os._exit(3)

    monkeypatch.setattr(Helper, "kill", kill)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        launcher = Launcher(
            listener,
            Filters(b"", b"", b""),
            allowed_uids=frozenset(),
            notifier=Notifier(None),
            watchdog_seconds=None,
            width=1,
        )
        job = Job(Lane.BUILD, 1, 60.0, die, results.append)
        launcher._pool.submit(job)
        assert job.helper is not None
        ended = os.waitid(os.P_PID, job.helper.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        launcher._reap()
        for channel in launcher._pool.channels():  # the next turn of the loop
            launcher._pool.readable(channel)
    assert results == [None]
    assert was_ours == [True]
    with pytest.raises(ChildProcessError):
        os.waitpid(job.helper.pid, os.WNOHANG)


def test_a_steward_that_is_reaped_already_is_not_killed_again() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    made = object.__new__(Intermediate)
    made.pidfd = os.pidfd_open(pid)
    made.end_steward()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    made.end_steward()
    poll = select.poll()
    poll.register(made.pidfd, select.POLLIN)
    assert poll.poll(SECONDS * 1000)
    os.close(made.pidfd)
