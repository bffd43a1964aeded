"""Run what tenants begin with, once, in a sandbox that nobody has yet and nobody waits for.

The guest's kernel then holds what it knows of the image's programs, libraries and locale: their
names, sizes and open files, which would else be asked of the gofer one by one while a tenant waits.
The programs are the image's own and are confined like every command; they write nothing, and are
proven gone before the slot is ready. One that an image does not have, that fails or that does not
end in time is none the worse for the slot: it is killed, and the tenant's command starts colder.
"""

import errno
import os
import socket
from typing import Final

from sbxd.jail import frames
from sbxd.launcher.kernel import hostpaths

PROGRAMS: Final = (
    (b"sh", b"-c", b"echo"),
    (b"echo", b"warm"),
    (b"python3", b"-I", b"-c", b"pass"),
)
ENVIRONMENT: Final = (b"HOME=/workspace", b"LANG=C.UTF-8")
SECONDS: Final = 5.0
QUIET_SECONDS: Final = 5.0


def warm_up(channel: socket.socket, search_path: bytes) -> None:
    """Run them one after the other. Raises OSError when process 1 does not answer as it should;
    ValueError for a frame that is none."""
    null = os.open(hostpaths.NULL_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        for argv in PROGRAMS:
            run = frames.Run(frames.CANARY, b".", argv, ENVIRONMENT, search_path)
            socket.send_fds(channel, [frames.encode(run)], [null, null, null])
            _await_end(channel)
    finally:
        os.close(null)
        channel.settimeout(None)


def _await_end(channel: socket.socket) -> None:
    channel.settimeout(SECONDS)
    wanted = [frames.Started, frames.Exited, frames.Quiet]
    while wanted:
        try:
            found = frames.decode(channel.recv(frames.FRAME_BYTES_MAX))
        except TimeoutError:
            channel.settimeout(QUIET_SECONDS)
            channel.send(frames.encode(frames.Kill(frames.CANARY)))
            found = frames.decode(channel.recv(frames.FRAME_BYTES_MAX))
        if isinstance(found, frames.RunFailed) and wanted[0] is frames.Started:
            return
        if not isinstance(found, wanted.pop(0)):
            raise OSError(errno.EPROTO, f"of a warm-up init says {type(found).__name__}")
