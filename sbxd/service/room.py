"""The memory that the daemon gives to its peers: how much is held for a connection and for a uid.

Theory. A connection is charged once, when it is greeted, for its buffers; a request when it
arrives, for the most that it can make the daemon hold at one moment (`cost_of`): itself, what is
uploaded to it, what its handler has produced and the peer has not taken. What finds no room is
refused before anything is done for it. So nobody waits for room while holding some, and one uid
cannot take what another needs.

Invariant: what is held for a connection or a uid is at most what it was charged, and that at most
its bound. Deliberately absent: frames, waiting.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, assert_never

from sbxd.audit.events import Door
from sbxd.port.command import changes_bytes_max
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.service.outgoing import OUTGOING_BYTES_MAX
from sbxd.wire import messages as m
from sbxd.wire.egress import EgressCheck, EgressShow
from sbxd.wire.observing import MetersQuery, MetricsQuery, StatusQuery

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB

CONNECTION_BYTES_MAX = 256 * _MIB
UID_BYTES_MAX = 512 * _MIB
RECEIVE_BYTES = 64 * _KIB
# A frame that arrives with the piece that completes it, what is queued with the frame beyond.
BUFFERS_BYTES = m.FRAME_BYTES_MAX + RECEIVE_BYTES + OUTGOING_BYTES_MAX + m.FRAME_BYTES_MAX
RETRY_SECONDS = 1.0

_DECODED = 8  # what a frame's values take in memory, to its bytes
_TASK_BYTES = 32 * _KIB
_SMALL_REPLY_BYTES = 64 * _KIB
_LARGE_REPLY_BYTES = 3 * m.FRAME_BYTES_MAX
_OUTPUT_BYTES = 4 * 64 * _KIB  # of two streams a piece each, and its message
_ENTRIES_BYTES = 512 * _KIB  # one frame of entries and what it is made of
_LIST_PAGE_BYTES = 2 * _MIB
_PIECES_BYTES = m.INITIAL_CREDIT_BYTES + 3 * m.CHUNK_BYTES_MAX
_BRIDGE_BYTES = m.BRIDGE_CREDIT_BYTES + 2 * m.BRIDGE_FRAME_BYTES_MAX


class Room:
    """So many bytes, of those of `parent` where there is one."""

    def __init__(self, bytes_max: int, parent: "Room | None" = None) -> None:
        self._bytes_max = bytes_max
        self._parent = parent
        self.held_bytes = 0

    def take(self, size: int) -> bool:
        """Hold `size` bytes more, here and in the parents; False, and nothing, without room."""
        if self.held_bytes + size > self._bytes_max:
            return False
        if self._parent is not None and not self._parent.take(size):
            return False
        self.held_bytes += size
        return True

    def give(self, size: int) -> None:
        """Hold `size` bytes less."""
        self.held_bytes -= size
        if self._parent is not None:
            self._parent.give(size)


class Rooms:
    """The rooms of a daemon, by door and uid: an operator's uid at a worker's door is another."""

    def __init__(
        self,
        *,
        connection_bytes_max: int = CONNECTION_BYTES_MAX,
        uid_bytes_max: int = UID_BYTES_MAX,
    ) -> None:
        self._connection_bytes_max = connection_bytes_max
        self._uid_bytes_max = uid_bytes_max
        self._of_uid: dict[tuple[Door, int], Room] = {}

    def held_bytes(self, door: Door, uid: int) -> int:
        """What is charged to a uid now."""
        room = self._of_uid.get((door, uid))
        return 0 if room is None else room.held_bytes

    @contextmanager
    def of_connection(self, door: Door, uid: int) -> Iterator[Room | None]:
        """The room of one connection while the block runs; None where its uid has none left for
        its buffers. What is taken of it is given back before the block ends."""
        of_uid = self._of_uid.setdefault((door, uid), Room(self._uid_bytes_max))
        room = Room(self._connection_bytes_max, of_uid)
        try:
            if not room.take(BUFFERS_BYTES):
                yield None
                return
            try:
                yield room
            finally:
                room.give(BUFFERS_BYTES)
        finally:
            if not of_uid.held_bytes:
                self._of_uid.pop((door, uid), None)


def no_room() -> ExecutionUnavailable:
    """What a request is refused with that finds no room."""
    return ExecutionUnavailable(
        UnavailableCode.CAPACITY,
        "too much is held for this client: read the replies, ask for less at once, or write to "
        "the workspace what is stdin now",
        retry_after_seconds=RETRY_SECONDS,
    )


def cost_of(request: m.AnyRequest, frame_bytes: int, *, files_changed_max: int) -> int:
    """The most bytes that the daemon holds for a request at one moment.

    Args:
        frame_bytes: of the frame that it arrived in.
        files_changed_max: entries, as `limits.files_changed_max`.
    """
    held = _TASK_BYTES + _DECODED * frame_bytes
    match request:
        case m.Execute():
            # All of stdin is gathered piece by piece, and then joined.
            held += 2 * request.stdin_bytes + min(request.stdin_bytes, m.INITIAL_CREDIT_BYTES)
            held += _OUTPUT_BYTES + changes_bytes_max(files_changed_max) + _ENTRIES_BYTES
            return held + _BRIDGE_BYTES * request.bridge
        case m.WorkspaceRead():
            return held + _PIECES_BYTES
        case m.WorkspaceWrite():
            return held + min(request.size_bytes, m.INITIAL_CREDIT_BYTES) + 3 * m.CHUNK_BYTES_MAX
        case m.WorkspaceList():
            return held + _LIST_PAGE_BYTES + _ENTRIES_BYTES
        case m.ImageImport():
            return held + m.INITIAL_CREDIT_BYTES + 4 * m.CHUNK_BYTES_MAX
        case (
            m.Provision()
            | m.Destroy()
            | m.WorkspaceProvenanceQuery()
            | m.NetworkGrantQuery()
            | m.ImageRemove()
            | m.QuarantineClear()
            | EgressCheck()
        ):
            return held + _SMALL_REPLY_BYTES
        case (
            m.AdminDescribe()
            | m.AdminList()
            | m.AdminInspect()
            | m.ImageList()
            | m.Reconcile()
            | m.Reap()
            | m.QuarantineList()
            | EgressShow()
            | MetricsQuery()
            | StatusQuery()
            | MetersQuery()
        ):
            return held + _LARGE_REPLY_BYTES
        case _:
            assert_never(request)
