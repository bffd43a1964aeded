"""What the Sentry tells of refused forks: a trace session of runsc with the fewest points.

Before it starts the Sentry, runsc connects to a socket in its own small root and hands the
connection on; the Sentry then sends one message for each fork, vfork or clone that is over. The
connection's other end is for the daemon (`sbxd.mechanism.refused_forks`, which knows the form).

Invariants: the points are those of the calls that make processes and threads, at their end, without
any optional field, so that nothing of a command but these calls is told; a point that this runsc
does not have fails the boot; the Sentry waits for no reader (`retries` 0); it connects before any
program of the guest runs, once.

Source: decision 0113.
"""

import json
import os
import platform
import select
import socket
from typing import Final

from sbxd.launcher.kernel import hostpaths

# By their names in runsc's small root.
SOCKET: Final = "trace"
DOCUMENT: Final = "trace.json"
# fork, vfork, clone and clone3, by the number that a machine has for them.
_CALLS: Final = {"x86_64": (56, 57, 58, 435), "aarch64": (220, 435)}
# The first message each way is a version: field 1, a varint, of a protocol buffer.
_VERSION: Final = b"\x08\x01"
_HELLO_BYTES_MAX: Final = 1024


def document(machine: str) -> bytes:
    """What runsc reads as --pod-init-config. Raises KeyError for a machine without numbers."""
    session = {
        "name": "Default",
        "points": [{"name": f"syscall/sysno/{call}/exit"} for call in _CALLS[machine]],
        "sinks": [{"name": "remote", "config": {"endpoint": f"/{SOCKET}", "retries": 0}}],
    }
    return json.dumps({"trace_session": session}).encode()


def furnish(root: int, owner: int) -> socket.socket:
    """Lay document and socket into runsc's root; the caller closes the socket, which listens."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    file = os.open(DOCUMENT, flags, 0o644, dir_fd=root)
    try:
        os.fchmod(file, 0o644)
        os.write(file, document(platform.machine()))
    finally:
        os.close(file)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(hostpaths.below_descriptor(root, SOCKET))
        os.chown(SOCKET, owner, owner, dir_fd=root)
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket, pidfd: int, seconds: float) -> socket.socket | None:
    """Runsc's connection, greeted; None when it ended, or said nothing in this time.

    The caller closes it. Raises OSError.
    """
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    if listener.fileno() not in dict(poll.poll(seconds * 1000)):
        return None
    connection, _ = listener.accept()
    try:
        connection.settimeout(seconds)
        connection.recv(_HELLO_BYTES_MAX)
        connection.send(_VERSION)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection
