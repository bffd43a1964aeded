"""Who is at the other end, and whether that peer may speak at all.

Invariants: the kernel's word on the peer (SO_PEERCRED, SO_PEERGROUPS) is that of the moment of
`connect`, and is judged before a byte is read; the pid is for the log and authorises nothing. The
credential is compared in constant time. Every refusal sounds the same to the peer; the reason is
for the audit.
"""

import errno
import hmac
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

from sbxd.audit.events import Door, PeerRefusal
from sbxd.settings import AuthMode, DeploymentMode, Settings
from sbxd.wire.messages import PROTOCOL_VERSION, Goodbye, GoodbyeCode, Hello

_UCRED = struct.Struct("=iII")
_SO_PEERGROUPS = 59  # socket(7), Linux 4.13; not in Python's socket module
GROUPS_MAX = 256  # getsockopt of Python reads at most 1024 bytes

NOT_AUTHORIZED = Goodbye(
    code=GoodbyeCode.NOT_AUTHORIZED, reason="this peer is not authorized to use this service"
)
VERSION = Goodbye(
    code=GoodbyeCode.VERSION, reason=f"this service speaks protocol version {PROTOCOL_VERSION}"
)


@dataclass(frozen=True)
class PeerCredentials:
    """What the kernel says of a peer. groups: its primary and supplementary groups."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]


class PeerSocket(Protocol):
    """The part of a connected Unix socket that knows its peer."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


def read_peer_credentials(sock: PeerSocket) -> PeerCredentials:
    """Ask the kernel. Raises OSError for what is no connected Unix socket."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * GROUPS_MAX)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        raw = b""  # more groups than can be read: none but the primary one counts
    groups = struct.unpack(f"={len(raw) // 4}I", raw)
    return PeerCredentials(pid=pid, uid=uid, gid=gid, groups=frozenset({gid, *groups}))


def judge_peer(door: Door, peer: PeerCredentials, settings: Settings) -> PeerRefusal | None:
    """Judge by the kernel's word alone, before any frame.

    Root passes. The admin socket admits whom its file mode let connect. The worker socket admits
    the configured uids and gids; with none configured, in development, whom its file mode let
    connect, and in production nobody but root.
    """
    if peer.uid == 0 or door is Door.ADMIN:
        return None
    allowed = settings.service
    if not allowed.worker_uids and not allowed.worker_gids:
        if settings.deployment_mode is DeploymentMode.DEVELOPMENT:
            return None
        return PeerRefusal.UID_NOT_CONFIGURED
    if peer.uid in allowed.worker_uids or not peer.groups.isdisjoint(allowed.worker_gids):
        return None
    return PeerRefusal.UID_NOT_CONFIGURED


def judge_hello(
    door: Door, hello: Hello, settings: Settings, credential: bytes | None
) -> tuple[PeerRefusal, Goodbye] | None:
    """Judge the greeting: the service credential (worker socket, auth_mode token), then the
    version.

    credential: the service's own; None refuses everyone where one is demanded.
    """
    if door is Door.WORKER and settings.auth_mode is AuthMode.TOKEN:
        if hello.credential is None:
            return PeerRefusal.CREDENTIAL_MISSING, NOT_AUTHORIZED
        same = hmac.compare_digest(hello.credential, credential or b"")
        if not credential or not same:
            return PeerRefusal.CREDENTIAL_WRONG, NOT_AUTHORIZED
    if hello.protocol_version != PROTOCOL_VERSION:
        return PeerRefusal.VERSION_UNSUPPORTED, VERSION
    return None
