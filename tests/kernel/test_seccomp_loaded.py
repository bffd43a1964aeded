"""The workload's filter as the running kernel applies it (needs no privilege)."""

import ctypes
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from sbxd.jail import syscalls
from sbxd.launcher.kernel.seccomp import ProfileName, compile_profile, profile_text

LIBC = ctypes.CDLL(None, use_errno=True)
AF_ALG = 38


def outcome(attempt: Callable[[], object], profile: ProfileName | None) -> str:
    """What the attempt meets in a child: `done` or the errno's name."""
    program = compile_profile(profile_text(profile)).bpf if profile else b""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if program:
                syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
                syscalls.seccomp_set_mode_filter(program)
            attempt()
            os.write(there, b"done")
        except OSError as problem:
            os.write(there, errno.errorcode[problem.errno or 0].encode())
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer


def raw(*arguments: int) -> Callable[[], object]:
    def attempt() -> None:
        if LIBC.syscall(*(ctypes.c_long(value) for value in arguments)) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    return attempt


def thread() -> None:
    worker = threading.Thread(target=int)
    worker.start()
    worker.join()


def test_the_interfaces_may_be_asked_for() -> None:
    assert outcome(socket.if_nameindex, ProfileName.WORKLOAD) == "done"


@pytest.mark.parametrize(
    ("attempt", "refusal"),
    [
        (lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16), "EAFNOSUPPORT"),
        (lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM), "EPROTONOSUPPORT"),
        (lambda: os.setgroups([]), "EPERM"),
        (lambda: syscalls.unshare(syscalls.CLONE_NEWUSER), "EPERM"),
        (raw(135, 0x40000), "EPERM"),  # personality(ADDR_NO_RANDOMIZE)
        (raw(323, 0), "ENOSYS"),  # userfaultfd
    ],
)
def test_a_call_that_the_filter_refuses_works_without_it(
    attempt: Callable[[], object], refusal: str
) -> None:
    assert outcome(attempt, ProfileName.WORKLOAD) == refusal
    control = outcome(attempt, None)
    assert control == "done" or (refusal == "ENOSYS" and control in ("EPERM", "ENOSYS"))


@pytest.mark.parametrize("number", [425, 435, 600, 430, 457])
def test_unknown_and_refused_calls_say_that_they_do_not_exist(number: int) -> None:
    assert outcome(raw(number, 0, 0), ProfileName.WORKLOAD) == "ENOSYS"


@pytest.mark.parametrize(
    "attempt",
    [
        thread,
        lambda: socket.socketpair(),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        lambda: os.close(os.memfd_create("x")),
        lambda: subprocess.run([sys.executable, "-c", ""], check=True),
        os.sync,
    ],
)
def test_what_programs_need_works(attempt: Callable[[], object]) -> None:
    assert outcome(attempt, ProfileName.WORKLOAD) == "done"


def test_an_x32_call_kills() -> None:
    program = compile_profile(profile_text(ProfileName.WORKLOAD)).bpf
    pid = os.fork()
    if pid == 0:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.seccomp_set_mode_filter(program)
        LIBC.syscall(ctypes.c_long(39 | 0x4000_0000))  # getpid
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -31  # SIGSYS
