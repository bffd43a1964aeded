"""The first process of an environment that is confined like a command is the launcher's own.

It is parked, released and confined by the very steps that every command takes, in a leaf of its
own, and then becomes a program that does nothing but wait, from a sealed memfd: so it needs
nothing of the image, and it is still there when it is looked at. Only what is seen from outside
counts (`sbxd.launcher.verify`); a step that was skipped, or that did not take, is a refusal.
It is killed and its leaf removed before the daemon gets the channel, and its number is never used
again. No command waits for any of this: it is part of the preparation of a slot.

Invariant: init's frames are read to the last one about it, so the daemon's first is the daemon's.
"""

import errno
import os
import platform
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from sbxd.jail import frames
from sbxd.launcher.kernel import cgroup, hostpaths, static_program
from sbxd.launcher.requests import CANARY_STEPS, LEAF_DESCRIPTORS, CgroupLimits
from sbxd.launcher.steps import StepFailed

SECONDS: Final = 15.0
_DIRECTORY: Final = LEAF_DESCRIPTORS.index("leaf_directory")
# poll(NULL, 0, -1), then exit_group: never a loop, should the filter refuse the call.
_CODE: Final[static_program.Code] = {
    "x86_64": (62, bytes.fromhex("31ff31f6baffffffffb8070000000f0531ffb8e70000000f05")),
    # ppoll(NULL, 0, NULL, NULL, 0)
    "aarch64": (
        183,
        struct.pack(
            "<10I",
            0xD2800000, 0xD2800001, 0xD2800002, 0xD2800003, 0xD2800004,  # x0 to x4: 0
            0xD2800928, 0xD4000001,  # x8: 73, svc
            0xD2800000, 0xD2800BC8, 0xD4000001,  # x0: 0, x8: 94, svc
        ),
    ),
}  # fmt: skip


def image(machine: str) -> bytes:
    """A program of some 150 bytes that waits for ever. Raises KeyError."""
    return static_program.image(machine, _CODE)


def program() -> int:
    """The program in a sealed memfd; the caller owns the descriptor."""
    return static_program.sealed("sbx-canary", image(platform.machine()))


@contextmanager
def running(
    channel: socket.socket, box: int, limits: CgroupLimits, owner: int
) -> Iterator[tuple[int, str]]:
    """The canary's pid and the name of its leaf, for the length of the block; then it is gone.

    Raises OSError; StepFailed, named after the step of the jail that failed; ValueError for a
    frame that is none.
    """
    deadline = time.monotonic() + SECONDS
    name = f"exec-{frames.CANARY:d}"
    with ExitStack() as held:
        leaf = cgroup.make_leaf(box, frames.CANARY, limits, owner)
        for descriptor in leaf:
            held.callback(os.close, descriptor)
        directory = leaf[_DIRECTORY]
        socket.send_fds(channel, [frames.encode(frames.Park(frames.CANARY))], [directory])
        _expect(channel, frames.Parked(frames.CANARY), deadline)
        null = os.open(hostpaths.NULL_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        held.callback(os.close, null)
        code = program()
        held.callback(os.close, code)
        run = frames.Run(frames.CANARY, b".", (b"canary",), (), b"/")
        socket.send_fds(channel, [frames.encode(run)], [null, null, null, code])
        _expect(channel, frames.Started(frames.CANARY), deadline)
        (pid,) = [int(word) for word in cgroup.read(directory, "cgroup.procs").split()]
        yield pid, name
        cgroup.kill(directory)
        _expect(channel, frames.Exited(frames.CANARY, 9), deadline)
        if not cgroup.wait_empty(directory, deadline):
            raise TimeoutError(errno.ETIMEDOUT, "the canary's leaf does not become empty")
    cgroup.remove_leaf(box, frames.CANARY)


def _expect(channel: socket.socket, wanted: frames.Frame, deadline: float) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    if not poll.poll(max(int((deadline - time.monotonic()) * 1000), 0)):
        raise TimeoutError(errno.ETIMEDOUT, "init says nothing of the canary")
    raw = channel.recv(frames.FRAME_BYTES_MAX)
    if not raw:
        raise OSError(errno.EPIPE, "init ended under the canary")
    found = frames.decode(raw)
    if isinstance(found, frames.RunFailed):
        raise StepFailed(CANARY_STEPS + found.step, found.errno, "a command cannot be confined")
    if found != wanted:
        raise OSError(errno.EPROTO, f"of the canary init says {type(found).__name__}")
