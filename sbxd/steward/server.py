"""The steward: answers one request after another about the workspace, until its channel ends.

It runs as root of a sandbox's user namespace with the sandbox's ids, four capabilities there, an
empty root with the volume in it, no network and a filter of its own, and never inside the guest's
pid namespace. Everything that the workload could shape is data here; everything that leaves is
capped by `frames`.

Invariants: stdlib only; one thread; no request makes it allocate by what the tree holds except
the tree's own records; a frame outside the grammar ends it (there is nobody to answer).
"""

import os
import select
import stat

from sbxd.steward import frames
from sbxd.steward.digest import Budget, Digester
from sbxd.steward.files import (
    Refusal,
    open_directory,
    open_regular,
    refusal,
    stamp,
    usage,
    volume_bytes,
)
from sbxd.steward.frames import Data, End, Entry, FrameError, Kind, Opened, Status
from sbxd.steward.history import Found, History
from sbxd.steward.listing import Names
from sbxd.steward.nodes import mode_of, size_of
from sbxd.steward.origins import Origins
from sbxd.steward.tree import Bounds, Clock, Walker, kernel_clock, record_of
from sbxd.steward.writing import OWNER, Writer

WORKSPACE = "/workspace"
_FLUSH_BYTES = 64 * 1024


class ChannelEnded(Exception):
    """The daemon's end is closed."""


class Stopped(Exception):
    """The daemon wants no more of the present answer."""


class Channel:
    """Frames over a blocking stream descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._unsent = bytearray()

    def receive(self) -> frames.Request:
        """The next request. Raises ChannelEnded, FrameError."""
        length = frames.body_length(self._exactly(frames.LENGTH.size))
        return frames.decode_request(self._exactly(length))

    def send(self, reply: frames.Reply) -> None:
        """Send, at the latest with the END. Raises ChannelEnded."""
        self._unsent += frames.encode(reply)
        if isinstance(reply, End) or len(self._unsent) >= _FLUSH_BYTES:
            self._flush()

    def check_stop(self) -> None:
        """Raises Stopped when the daemon has sent STOP meanwhile, FrameError for anything else."""
        if self._poll.poll(0):
            if not isinstance(self.receive(), frames.Stop):
                raise FrameError("a request while another is under way")
            raise Stopped

    def _flush(self) -> None:
        view = memoryview(bytes(self._unsent))
        self._unsent.clear()
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except (BrokenPipeError, ConnectionResetError):
                raise ChannelEnded from None

    def _exactly(self, size: int) -> bytes:
        pieces = []
        while size:
            try:
                piece = os.read(self._descriptor, size)
            except ConnectionResetError:
                raise ChannelEnded from None
            if not piece:
                raise ChannelEnded
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


class Steward:
    """One workspace and what is known of it."""

    def __init__(
        self,
        channel: Channel,
        root_fd: int,
        clock: Clock,
        owner: int,
        bounds: Bounds | None = None,
    ) -> None:
        self._channel = channel
        self._root_fd = root_fd
        self._clock = clock
        self._writer = Writer(root_fd, owner)
        self._digester = Digester(root_fd)
        self._names = Names(self._writer.hidden, channel.check_stop)
        walker = Walker(root_fd, clock, self._writer.hidden, bounds)
        self._history = History(walker, self._digester, clock, _wait)
        before = self._history.root
        self._origins = Origins(root_fd, self._digester, clock, before, self._history)

    def answer(self, request: frames.Request) -> None:
        """Answer one request. Raises ChannelEnded, FrameError."""
        if isinstance(request, frames.Stop):
            return  # what it was to stop has ended by itself
        try:
            end = self._answer(request)
        except Refusal as problem:
            end = End(problem.status)
        except Stopped:
            end = End(Status.ABORTED)
        except OSError as problem:
            end = End(refusal(problem).status)
        self._channel.send(end)

    def _answer(self, request: frames.Request) -> End:
        match request:
            case frames.Snapshot():
                self._names.forget()
                self._history.snapshot()
                root = os.fstat(self._root_fd)
                return End(Status.OK, first=root.st_dev, second=root.st_ino)
            case frames.Changes():
                return self._changes(request)
            case frames.Read():
                return self._read(request)
            case frames.Begin():
                return End(Status.OK, first=self._writer.begin(request.path, request.size))
            case frames.Piece():
                self._writer.piece(request.ticket, request.data)
                return End(Status.OK)
            case frames.Commit():
                return self._commit(request.ticket)
            case frames.Abandon():
                self._writer.abandon(request.ticket)
                return End(Status.OK)
            case frames.List():
                return self._list(request)
            case frames.Provenance():
                origin = self._origins.origin(request.path, self._channel.check_stop)
                return End(Status.OK, first=origin)
            case frames.Usage():
                used, inodes = usage(self._root_fd)
                return End(Status.OK, first=used, second=inodes)
            case frames.Stop():
                return End(Status.OK)

    def _changes(self, request: frames.Changes) -> End:
        self._names.forget()
        budget = Budget(min(request.hash_bytes, volume_bytes(self._root_fd)))
        found, truncated = self._history.changes(request.maximum, budget, self._channel.check_stop)
        self._send_entries(found)
        used, inodes = usage(self._root_fd)
        return End(Status.OK, truncated, used, inodes)

    def _send_entries(self, found: list[Found]) -> None:
        for item in found:
            change = item.change
            size = size_of(change.record)
            self._channel.send(Entry(change.kind, size, item.digest, change.path))

    def _read(self, request: frames.Read) -> End:
        descriptor, status = open_regular(self._root_fd, request.path)
        try:
            seen = stamp(status)
            if status.st_nlink > 1:
                return End(Status.HARD_LINKED)
            if request.stamp not in (frames.NO_STAMP, seen):
                return End(Status.CHANGED_DURING_READ)
            if status.st_size > request.maximum_bytes:
                return End(Status.TOO_LARGE)
            self._channel.send(Opened(status.st_size, seen))
            offset = request.offset
            left = min(request.length, max(status.st_size - offset, 0))
            while left:
                data = os.pread(descriptor, min(left, frames.DATA_BYTES_MAX), offset)
                if not data:
                    return End(Status.CHANGED_DURING_READ)
                self._channel.send(Data(data))
                offset += len(data)
                left -= len(data)
            if stamp(last := os.fstat(descriptor)) != seen or last.st_nlink > 1:
                return End(Status.CHANGED_DURING_READ)
            return End(Status.OK)
        finally:
            os.close(descriptor)

    def _commit(self, ticket: int) -> End:
        written = self._writer.commit(ticket)
        for path, status in written.made:
            self._history.enter(path, record_of(status, self._clock), None)
        record = record_of(written.status, self._clock)
        self._history.enter(written.path, record, written.digest)
        self._origins.enter(written.path, written.status, written.digest)
        return End(Status.OK)

    def _list(self, request: frames.List) -> End:
        prefix = b"" if request.path == b"." else request.path + b"/"
        name_bytes_max = frames.PATH_BYTES_MAX - len(prefix)
        budget = Budget(request.hash_bytes)
        directory = open_directory(self._root_fd, request.path)
        after, sent, more, omitted = request.after, 0, True, 0
        try:
            while more and not sent:  # a page that vanished is no end
                names, more, omitted = self._names.page(
                    directory, after, request.maximum, name_bytes_max
                )
                for after in names:
                    sent += self._send_entry(directory, prefix, after, budget)
        finally:
            os.close(directory)
        return End(Status.OK, more, request.hash_bytes - budget.left, omitted)

    def _send_entry(self, directory: int, prefix: bytes, name: bytes, budget: Budget) -> bool:
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        record = record_of(status, self._clock)
        path, mode = prefix + name, mode_of(record)
        digest = self._digester.of(path, mode, budget, self._channel.check_stop)
        self._channel.send(Entry(Kind.CREATED, size_of(record), digest, name))
        return True


def _wait(nanoseconds: int) -> None:
    select.poll().poll(nanoseconds / 1e6 + 1)


def serve(
    channel_fd: int,
    workspace_fd: int,
    clock: Clock | None = None,
    owner: int = OWNER,
    bounds: Bounds | None = None,
) -> int:
    """Answer until the channel ends: 0, or 1 when it carried something that is no request.

    workspace_fd is a directory; -1 opens /workspace. Neither descriptor is closed. owner is the
    uid and gid of what is written; bounds, what one walk may use. Raises OSError when the
    workspace cannot be read at all.
    """
    if workspace_fd < 0:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        workspace_fd = os.open(WORKSPACE, flags)
    assert stat.S_ISDIR(os.fstat(workspace_fd).st_mode)
    channel = Channel(channel_fd)
    steward = Steward(channel, workspace_fd, clock or kernel_clock(), owner, bounds)
    try:
        while True:
            steward.answer(channel.receive())
    except ChannelEnded:
        return 0
    except FrameError:
        return 1
