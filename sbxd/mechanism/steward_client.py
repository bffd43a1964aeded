"""The daemon's side of one steward: requests over its channel, one at a time.

Invariants: whatever the steward sends, this side holds at most one frame and one capped answer; an
answer outside the grammar or above what was asked for makes the client *broken*, and every later
call raises SandboxLost. A cancelled call never loses the place in the stream: what is left of its
request and its answer is dealt with by the next call, before its own.

Deliberately absent: timeouts (the caller's) and any path check beyond what frames demand.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import NoReturn

import trio

from sbxd.mechanism.protocol import Changes, ListPage, MechanismError, SandboxLost
from sbxd.port.command import ChangeKind, FileChange, change_bytes, changes_bytes_max
from sbxd.port.errors import WorkspaceCode, WorkspaceError, WorkspaceEscape
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.steward import frames
from sbxd.steward.frames import Data, End, Entry, FrameError, Kind, Opened, Origin, Status

CHANGES_HASH_BYTES_MAX = 2**63 - 1  # the steward's own bound is the volume's size
_RECEIVE_BYTES = 256 * 1024
_NUMBER_MAX = 2**63 - 1
_LISTED_BYTES_MAX = 1536  # of an entry that is one name, four bytes for each of its characters

_CODES = {
    Status.NOT_FOUND: WorkspaceCode.NOT_FOUND,
    Status.NOT_A_FILE: WorkspaceCode.NOT_A_FILE,
    Status.NOT_A_DIRECTORY: WorkspaceCode.NOT_A_DIRECTORY,
    Status.IS_A_DIRECTORY: WorkspaceCode.IS_A_DIRECTORY,
    Status.HARD_LINKED: WorkspaceCode.HARD_LINKED,
    Status.TOO_LARGE: WorkspaceCode.TOO_LARGE,
    Status.NO_SPACE: WorkspaceCode.NO_SPACE,
    Status.CHANGED_DURING_READ: WorkspaceCode.CHANGED_DURING_READ,
    Status.REFUSED: WorkspaceCode.REFUSED,
    Status.ABORTED: WorkspaceCode.REFUSED,
}
_TEXTS = {
    WorkspaceCode.NOT_FOUND: "there is no such file",
    WorkspaceCode.NOT_A_FILE: "not a regular file",
    WorkspaceCode.NOT_A_DIRECTORY: "not a directory",
    WorkspaceCode.IS_A_DIRECTORY: "a directory",
    WorkspaceCode.HARD_LINKED: "the file has a second name: it is neither read nor replaced; "
    "make a copy",
    WorkspaceCode.TOO_LARGE: "the file is larger than the maximum",
    WorkspaceCode.NO_SPACE: "the workspace is full",
    WorkspaceCode.CHANGED_DURING_READ: "the file changed while it was read",
    WorkspaceCode.REFUSED: "the file system refuses it",
}
_CHANGES = {
    Kind.CREATED: ChangeKind.CREATED,
    Kind.MODIFIED: ChangeKind.MODIFIED,
    Kind.DELETED: ChangeKind.DELETED,
}
_PROVENANCES = {
    Origin.UNKNOWN: WorkspaceProvenance.UNKNOWN,
    Origin.TOOL_WRITTEN: WorkspaceProvenance.TOOL_WRITTEN,
    Origin.SANDBOX_WRITTEN: WorkspaceProvenance.SANDBOX_WRITTEN,
}


@contextmanager
def _of_the_whole(step: str) -> Iterator[None]:
    """A refusal of what names no path is a failure of the mechanism."""
    try:
        yield
    except (WorkspaceError, WorkspaceEscape) as problem:
        raise MechanismError(f"steward.{step}", 0, str(problem)) from None


class _Reading:
    """The pieces of one file. Not a generator, since those must be closed when they are dropped."""

    def __init__(
        self,
        client: "StewardClient",
        path: bytes,
        maximum_bytes: int,
        first: Opened,
        pieces: list[bytes],
    ) -> None:
        self._client = client
        self._path = path
        self._maximum_bytes = maximum_bytes
        self._first = first
        self._pieces = pieces[::-1]
        self._offset = 0

    def __aiter__(self) -> "_Reading":
        return self

    async def __anext__(self) -> bytes:
        if not self._pieces:
            if self._offset >= self._first.size:
                raise StopAsyncIteration
            _, pieces = await self._client.ask_piece(
                self._path, self._maximum_bytes, self._offset, self._first.stamp
            )
            self._pieces = pieces[::-1]
        else:
            await trio.lowlevel.checkpoint()
        piece = self._pieces.pop()
        self._offset += len(piece)
        return piece


class StewardClient:
    """One steward. All methods may be awaited concurrently; they take turns.

    The stream stays the caller's, who closes it; closing it ends the steward. Every method raises
    SandboxLost once the steward is gone or has broken the protocol. Those that take a path raise
    WorkspaceError and WorkspaceEscape; the others MechanismError when the tree cannot be read.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        *,
        on_lost: Callable[[], None] = lambda: None,
        hash_bytes_max: int = CHANGES_HASH_BYTES_MAX,
    ) -> None:
        """on_lost: called before the first SandboxLost is raised.

        hash_bytes_max: how many bytes one comparison may read for digests, besides the steward's
        own bound, the volume's size; what does not fit is reported without."""
        self._socket = stream.socket
        self._on_lost = on_lost
        self._hash_bytes_max = hash_bytes_max
        self._turn = trio.Lock()
        self._unsent = b""
        self._received = bytearray()
        self._owed: frames.Request | None = None
        self._stopping = False
        self._abandoned: set[int] = set()
        self._broken = False

    async def snapshot(self) -> tuple[int, int]:
        """Remember the workspace as it is: a command is about to start. Device and inode of the
        root that the steward walks."""
        with _of_the_whole("snapshot"):
            end = await self._ask(frames.Snapshot())
        return end.first, end.second

    async def changes(self, maximum: int, bytes_max: int | None = None) -> Changes:
        """What changed since the snapshot, the first `maximum` entries by path that fit
        bytes_max of memory (None: `changes_bytes_max(maximum)`).

        Cancellation: the snapshot stays what it was.
        """
        request = frames.Changes(min(maximum, frames.ENTRIES_MAX), self._hash_bytes_max)
        with _of_the_whole("changes"):
            entries, end, fits = await self._ask_entries(
                request,
                request.maximum,
                changes_bytes_max(maximum) if bytes_max is None else bytes_max,
            )
        return Changes(entries, end.truncated or not fits, end.first, end.second)

    async def usage(self) -> tuple[int, int]:
        """Bytes and inodes in use on the volume."""
        with _of_the_whole("usage"):
            end = await self._ask(frames.Usage())
        return end.first, end.second

    async def provenance(self, path: bytes) -> WorkspaceProvenance:
        """Who put the file there; UNKNOWN where there is none."""
        end = await self._ask(frames.Provenance(path))
        try:
            return _PROVENANCES[Origin(end.first)]
        except ValueError:
            self._break("an unknown provenance")

    async def list_page(
        self, path: bytes, *, after: bytes, maximum: int, hash_bytes_max: int
    ) -> ListPage:
        """As the protocol. Nothing is held between two pages."""
        request = frames.List(maximum, hash_bytes_max, after, path)
        entries, end, fits = await self._ask_entries(request, maximum, maximum * _LISTED_BYTES_MAX)
        if not fits:
            self._break("a page that is too large")
        last = after
        for entry in entries:
            name = entry.path.encode("utf-8", "surrogateescape")
            if name <= last or b"/" in name:
                self._break("names out of order")
            last = name
        if end.truncated and not entries:
            self._break("a page of nothing before others")
        return ListPage(entries, end.truncated, bool(end.second), end.first)

    async def read(self, path: bytes, maximum_bytes: int) -> AsyncIterator[bytes]:
        """The bytes of one regular file, in pieces of at most 256 KiB.

        Raises now or while it is iterated: WorkspaceError (TOO_LARGE above maximum_bytes,
        CHANGED_DURING_READ when it did not hold still). Nothing is held between two pieces, so
        that an iterator may be dropped at any point.
        """
        first, pieces = await self.ask_piece(path, maximum_bytes, 0, frames.NO_STAMP)
        return _Reading(self, path, maximum_bytes, first, pieces)

    async def write(self, path: bytes, size_bytes: int, data: AsyncIterator[bytes]) -> None:
        """Create or replace one file, atomically, from exactly size_bytes.

        Raises WorkspaceError: REFUSED also when `data` is not of that size.

        Cancellation: the workspace is as before; what was collected goes with the next call.
        """
        ticket = (await self._ask(frames.Begin(size_bytes, path))).first
        try:
            async for chunk in data:
                for start in range(0, len(chunk), frames.DATA_BYTES_MAX):
                    piece = chunk[start : start + frames.DATA_BYTES_MAX]
                    await self._ask(frames.Piece(ticket, piece))
            await self._ask(frames.Commit(ticket))
        except BaseException:
            self._abandoned.add(ticket)
            raise

    # --- one request and its answer -----------------------------------------------------------

    async def _ask(self, request: frames.Request) -> End:
        """A request that is answered by its END alone."""
        async with self._turn:
            await self._open(request)
            return self._check(await self._receive())

    async def _ask_entries(
        self, request: frames.Request, maximum: int, bytes_max: int
    ) -> tuple[tuple[FileChange, ...], End, bool]:
        """The entries from the first on that are held in bytes_max, and whether that is all."""
        async with self._turn:
            await self._open(request)
            entries: list[FileChange] = []
            for number in count():
                reply = await self._receive()
                if not isinstance(reply, Entry):
                    return tuple(entries), self._check(reply), len(entries) == number
                if number == maximum:
                    self._break("more entries than were asked for")
                change = self._change(reply)
                bytes_max -= change_bytes(change)
                if bytes_max >= 0:
                    entries.append(change)
            raise AssertionError("unreachable")

    async def ask_piece(
        self, path: bytes, maximum_bytes: int, offset: int, stamp: bytes
    ) -> tuple[Opened, list[bytes]]:
        """Some of the file from `offset` on, in one exchange: what `read` is made of. `stamp` is
        that of the first exchange."""
        async with self._turn:
            length = frames.READ_BYTES_MAX
            await self._open(frames.Read(maximum_bytes, offset, length, stamp, path))
            opened = await self._receive()
            if not isinstance(opened, Opened):
                self._check(opened)
                self._break("no OPENED before the END")
            pieces: list[bytes] = []
            left = min(length, opened.size - offset)
            while True:
                reply = await self._receive()
                if not isinstance(reply, Data):
                    self._check(reply)
                    break
                left -= len(reply.data)
                if left < 0:
                    self._break("more data than were asked for")
                pieces.append(reply.data)
            if left > 0 or opened.size > maximum_bytes:
                self._break("less data than were announced")
            return opened, pieces

    async def _open(self, request: frames.Request) -> None:
        """Finish what earlier calls left, then send this request."""
        try:
            raw = frames.encode(request)
        except FrameError as problem:
            raise WorkspaceEscape(str(problem)) from None
        if self._broken:
            raise SandboxLost("steward", 0, "the steward is gone")
        await self._settle()
        while self._abandoned:
            ticket = min(self._abandoned)
            self._owed = frames.Abandon(ticket)
            self._unsent = frames.encode(self._owed)
            await self._settle()
            self._abandoned.discard(ticket)
        self._owed = request
        self._unsent = raw
        await self._flush()

    async def _settle(self) -> None:
        """Send the rest of the last request and drop the rest of its answer."""
        if self._owed is None:
            return
        if not self._stopping:
            self._unsent += frames.encode(frames.Stop())
            self._stopping = True
        await self._flush()
        request = self._owed
        while True:
            reply = await self._receive()
            if isinstance(reply, End):
                break
        if isinstance(request, frames.Begin) and reply.status is Status.OK:
            self._abandoned.add(reply.first)

    async def _flush(self) -> None:
        with suppress(OSError):  # at once where there is room: no turn of the loop is lost
            self._unsent = self._unsent[os.write(self._socket.fileno(), self._unsent) :]
        while self._unsent:
            try:
                sent = await self._socket.send(self._unsent)
            except (OSError, trio.ClosedResourceError):
                self._break("its channel is closed")
            self._unsent = self._unsent[sent:]

    async def _receive(self) -> frames.Reply:
        """The next frame of the answer; nothing is owed once it is the END."""
        try:
            head = frames.LENGTH.size
            await self._fill(head)
            length = frames.body_length(bytes(self._received[:head]))
            await self._fill(head + length)
            reply = frames.decode_reply(bytes(self._received[head : head + length]))
        except FrameError as problem:
            self._break(str(problem))
        del self._received[: head + length]
        if isinstance(reply, End):
            self._owed = None
            self._stopping = False
            if self._received:
                self._break("words after the END")
        return reply

    async def _fill(self, size: int) -> None:
        while len(self._received) < size:
            try:
                data = await self._socket.recv(_RECEIVE_BYTES)
            except (OSError, trio.ClosedResourceError):
                self._break("its channel is closed")
            if not data:
                self._break("its channel ended")
            self._received += data

    # --- what an answer means -----------------------------------------------------------------

    def _check(self, reply: frames.Reply) -> End:
        """The END of a request that went well. Raises what it says otherwise."""
        if not isinstance(reply, End):
            self._break("an answer to another question")
        if reply.status is Status.OK:
            if max(reply.first, reply.second) > _NUMBER_MAX:
                self._break("a number out of range")
            return reply
        if reply.status is Status.ESCAPE:
            raise WorkspaceEscape("the path leads through a link or out of the workspace")
        code = _CODES[reply.status]
        raise WorkspaceError(code, _TEXTS[code])

    def _change(self, entry: Entry) -> FileChange:
        if entry.size > _NUMBER_MAX:
            self._break("a number out of range")
        try:
            return FileChange(
                path=entry.path.decode("utf-8", "surrogateescape"),
                change=_CHANGES[entry.kind],
                size_bytes=entry.size,
                sha256=None if entry.digest is None else entry.digest.hex(),
            )
        except ValueError as problem:
            self._break(str(problem))

    def _break(self, detail: str) -> NoReturn:
        if not self._broken:
            self._broken = True
            self._on_lost()
        raise SandboxLost("steward", 0, f"the steward is lost: {detail}")
