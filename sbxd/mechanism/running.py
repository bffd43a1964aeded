"""One command that runs in a leaf: its streams, its end, its evidence."""

import errno
import os
from collections.abc import Callable

import trio

from sbxd.mechanism.init_client import InitClient
from sbxd.mechanism.leaf import Leaf
from sbxd.mechanism.protocol import CommandExit, Counters, MechanismError

CHUNK_BYTES = 64 * 1024
# Programs reopen their streams by path (/dev/stdout), with the workload's own rights.
_PIPE_MODE = 0o666


class Streams:
    """The three pipes of one command. `theirs` goes to init and is closed here after that."""

    def __init__(self) -> None:
        ours: list[int] = []
        theirs: list[int] = []
        try:
            for mine_is_writer in (True, False, False):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                mine, other = (writer, reader) if mine_is_writer else (reader, writer)
                ours.append(mine)
                theirs.append(other)
                os.fchmod(other, _PIPE_MODE)
                os.set_blocking(mine, False)
        except OSError as problem:
            for descriptor in (*ours, *theirs):
                os.close(descriptor)
            raise MechanismError("pipe", problem.errno or 0) from None
        self.theirs = tuple(theirs)
        self._stdin: int | None = ours[0]
        self._outputs: dict[str, int] = {"stdout": ours[1], "stderr": ours[2]}

    async def receive(self, stream: str) -> bytes:
        """Next bytes of an output; b"" at end of file or once it is closed here."""
        await trio.lowlevel.checkpoint()
        while stream in self._outputs:
            descriptor = self._outputs[stream]
            try:
                return os.read(descriptor, CHUNK_BYTES)
            except BlockingIOError:
                try:
                    await trio.lowlevel.wait_readable(descriptor)
                except trio.ClosedResourceError:
                    break
        return b""

    async def feed(self, data: bytes) -> None:
        """Write all of `data` to the standard input and close it; stops early, silently, when
        nobody reads."""
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        try:
            while view and self._stdin is not None:
                try:
                    view = view[os.write(self._stdin, view) :]
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._stdin)
        except (BrokenPipeError, trio.ClosedResourceError):
            return
        finally:
            self.close_stdin()

    def close_stdin(self) -> None:
        """The command reads end of file after what was written. Idempotent."""
        descriptor, self._stdin = self._stdin, None
        if descriptor is not None:
            _close(descriptor)

    def close_theirs(self) -> None:
        """Close the ends that init has by now. Idempotent."""
        theirs, self.theirs = self.theirs, ()
        for descriptor in theirs:
            os.close(descriptor)

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.close_theirs()
        self.close_stdin()
        outputs, self._outputs = self._outputs, {}
        for descriptor in outputs.values():
            _close(descriptor)


def _close(descriptor: int) -> None:
    trio.lowlevel.notify_closing(descriptor)
    os.close(descriptor)


class NamespacesCommand:
    """Implements sbxd.mechanism.protocol.RunningCommand."""

    def __init__(
        self,
        leaf: Leaf,
        streams: Streams,
        init: InitClient,
        stdin: bytes,
        give_back: Callable[[Leaf], None],
    ) -> None:
        self._leaf = leaf
        self._streams = streams
        self._init = init
        self._stdin = stdin
        self._give_back = give_back
        self._watch = leaf.watch()
        self._closed = False

    async def receive_output(self, stream: str) -> bytes:
        """Next bytes of "stdout" or "stderr"; b"" at end of file."""
        return await self._streams.receive(stream)

    async def send_stdin(self) -> None:
        """Feed the command's standard input and close it."""
        await self._streams.feed(self._stdin)

    async def wait_exit(self) -> CommandExit:
        """Until the main process ended. Raises SandboxLost."""
        return await self._init.wait_exit(self._leaf.number)

    async def wait_event(self) -> Counters:
        """Until the leaf's counters may have changed; they are read before this returns."""
        try:
            await self._watch.wait()
        except trio.ClosedResourceError:
            raise MechanismError("wait_event", errno.EBADF) from None
        return self.counters()

    def counters(self) -> Counters:
        """Read the counters now."""
        return self._leaf.counters()

    def kill(self) -> None:
        """Kill every process of the command's leaf."""
        self._leaf.kill()

    async def wait_empty(self) -> None:
        """Until the leaf has no process."""
        await self._leaf.wait_empty()

    async def aclose(self) -> None:
        """Release the streams and give the leaf back."""
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        self._init.forget(self._leaf.number)
        self._give_back(self._leaf)
        self._streams.close()
        await trio.lowlevel.checkpoint()
