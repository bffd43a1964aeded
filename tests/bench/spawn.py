"""Runs one command and times it as its caller sees it: to its first byte, and to its end.

posix_spawn is vfork: its cost does not grow with this process. Blocking, on purpose: nothing of
this process may stand between the kernel and the clock.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence

from tests.bench.samples import Mark, Marks, OperationFailed

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def found(name: str) -> str:
    """The path of a command. Raises OperationFailed when this machine has none of that name."""
    path = shutil.which(name, path=ENVIRONMENT["PATH"])
    if path is None:
        raise OperationFailed(f"{name} is not installed")
    return path


def elapsed_ms(begun_ns: int) -> float:
    return (time.perf_counter_ns() - begun_ns) / 1e6


def time_to_exit(argv: Sequence[str]) -> Marks:
    """Run a command that must succeed; its output goes nowhere."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
    ]
    begun_ns = time.perf_counter_ns()
    pid = os.posix_spawn(argv[0], list(argv), ENVIRONMENT, file_actions=actions)
    _, status = os.waitpid(pid, 0)
    took = elapsed_ms(begun_ns)
    _check(argv, status)
    return {Mark.REPLY: took}


def time_to_output(argv: Sequence[str]) -> Marks:
    """Run a command that must succeed and print something."""
    read_fd, write_fd = os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, write_fd, 1),
        (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
    ]
    begun_ns = time.perf_counter_ns()
    try:
        pid = os.posix_spawn(argv[0], list(argv), ENVIRONMENT, file_actions=actions)
    finally:
        os.close(write_fd)
    try:
        printed = os.read(read_fd, 4096)
        first_byte = elapsed_ms(begun_ns)
        while os.read(read_fd, 4096):
            pass
    finally:
        os.close(read_fd)
        _, status = os.waitpid(pid, 0)
    took = elapsed_ms(begun_ns)
    _check(argv, status)
    if not printed:
        raise OperationFailed(f"{os.path.basename(argv[0])} printed nothing")
    return {Mark.FIRST_BYTE: first_byte, Mark.REPLY: took}


def must(argv: Sequence[str]) -> str:
    """Run a command off the clock; its output. Raises OperationFailed with what it said."""
    finished = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        said = (finished.stderr or finished.stdout).strip()[-300:]
        raise OperationFailed(f"{os.path.basename(argv[0])}: exit {finished.returncode}: {said}")
    return finished.stdout


def _check(argv: Sequence[str], status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        raise OperationFailed(f"{os.path.basename(argv[0])}: exit {code}")
