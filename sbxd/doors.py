"""The listening sockets: those that systemd passed, or, without it, our own in the runtime folder.

Invariant: a path that another live process listens on is never taken over; what a dead one left
is replaced. Our own worker socket is for our group, our own admin socket for our uid alone.
"""

import errno
import socket
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from sbxd import rights
from sbxd.audit.events import Door
from sbxd.closing import Closers
from sbxd.service.listener import DoorListener
from sbxd.service.unix import UnixListener

BACKLOG = 128
_MODES = {Door.WORKER: 0o660, Door.ADMIN: 0o600}


class DoorUnavailable(Exception):
    """A listening socket cannot be had. The text says which and why."""


def open_doors(passed: Mapping[str, int], runtime_directory: Path) -> list[DoorListener]:
    """Both doors. Takes over the passed descriptors that are named after a door.

    passed: descriptors of listening Unix stream sockets by name ("worker", "admin").
    runtime_directory: where `<door>.sock` is made for a door that was not passed.
    """
    with ExitStack() as undo:
        sockets: list[tuple[Door, socket.socket]] = []
        for door in Door:
            if door.value in passed:
                listening = _passed(door, passed[door.value])
            else:
                listening = _bound(door, runtime_directory / f"{door.value}.sock")
            undo.callback(listening.close)
            sockets.append((door, listening))
        undo.pop_all()
    return [
        # What workers have made slow to close keeps no operator out: each door has its own closers.
        DoorListener(door=door, listener=UnixListener(listening, Closers()))
        for door, listening in sockets
    ]


def _passed(door: Door, descriptor: int) -> socket.socket:
    try:
        listening = socket.socket(fileno=descriptor)
    except OSError as problem:
        raise DoorUnavailable(f"the {door} socket that was passed: {problem.strerror}") from None
    # The service manager passes it inheritable, and no child of ours is to have it.
    listening.set_inheritable(False)
    if (
        listening.family != socket.AF_UNIX
        or listening.type != socket.SOCK_STREAM
        or not listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ):
        listening.close()
        raise DoorUnavailable(f"the {door} socket that was passed is no listening Unix stream")
    rights.refuse(listening)  # who is connected already is looked into instead
    listening.setblocking(False)
    return listening


def _bound(door: Door, path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        rights.refuse(listening)
        _remove_stale(door, path)
        # Nobody can connect before the mode is right: it does not listen yet.
        listening.bind(str(path))
        path.chmod(_MODES[door])
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as problem:
        listening.close()
        raise DoorUnavailable(
            f"the {door} socket cannot be made in runtime_directory: {problem.strerror}"
        ) from None
    except DoorUnavailable:
        listening.close()
        raise
    return listening


def _remove_stale(door: Door, path: Path) -> None:
    """Remove a socket on which nobody listens. Raises DoorUnavailable for whatever else."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if is_socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
            probe.setblocking(False)
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)
                return
    raise DoorUnavailable(f"the {door} socket's place in runtime_directory is taken")
