"""A bridge's two ends in memory: programs that connect, and a worker that takes what is passed on.

A `DoubleProgram` is the program's end of one connection; `DoubleDoor` the mechanism's; and
`DoubleWorker` what the service would be. Streams here never hold anybody back; what must is the
worker's `gate`.
"""

import struct
from collections import deque

import trio
from trio.testing import MemoryReceiveStream, MemorySendStream, memory_stream_one_way_pair

from sbxd.mechanism.protocol import BridgeStreamBroken, MechanismError
from sbxd.wire.messages import BridgeEnd


class DoubleStream:
    """The daemon's end of one connection."""

    def __init__(self, sending: MemorySendStream, receiving: MemoryReceiveStream) -> None:
        self._sending, self._receiving = sending, receiving
        self.closed = False

    async def receive(self) -> bytes:
        try:
            return bytes(await self._receiving.receive_some(65536))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def send(self, data: bytes) -> None:
        try:
            await self._sending.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise BridgeStreamBroken from None

    def end(self) -> None:
        self._sending.close()

    def close(self) -> None:
        self.closed = True
        self._sending.close()
        self._receiving.close()


class DoubleProgram:
    """A program's end of one connection."""

    def __init__(self) -> None:
        self._sending, theirs = memory_stream_one_way_pair()
        ours, self._receiving = memory_stream_one_way_pair()
        self.daemon_end = DoubleStream(ours, theirs)
        self._received = bytearray()

    async def send_raw(self, data: bytes) -> None:
        await self._sending.send_all(data)

    async def send(self, body: bytes) -> None:
        await self.send_raw(struct.pack(">I", len(body)) + body)

    async def receive(self) -> bytes | None:
        """The next frame; None at the end."""
        while True:
            if len(self._received) >= 4:
                (length,) = struct.unpack_from(">I", self._received)
                if len(self._received) >= 4 + length:
                    frame = bytes(self._received[4 : 4 + length])
                    del self._received[: 4 + length]
                    return frame
            piece = await self._receiving.receive_some(65536)
            if not piece:
                return None
            self._received += piece

    def half_close(self) -> None:
        self._sending.close()

    def close(self) -> None:
        self._sending.close()
        self._receiving.close()


class DoubleDoor:
    """Where programs connect."""

    def __init__(self, waiting_max: int = 8) -> None:
        self.waiting_max = waiting_max
        self.is_closed = False
        self._send: trio.MemorySendChannel[DoubleStream]
        self._send, self._arrivals = trio.open_memory_channel[DoubleStream](100)

    def connect(self) -> DoubleProgram:
        """A new connection. Raises ConnectionRefusedError once the door is closed."""
        if self.is_closed:
            raise ConnectionRefusedError
        program = DoubleProgram()
        self._send.send_nowait(program.daemon_end)
        return program

    async def accept(self) -> DoubleStream:
        try:
            return await self._arrivals.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise MechanismError("accept", 9) from None

    def close(self) -> None:
        self.is_closed = True
        self._arrivals.close()


class DoubleWorker:
    """The worker's end: keeps what it is told. `gate` unset: it takes no frame."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.frames: list[bytes] = []
        self.gate = trio.Event()
        self.gate.set()
        self._replies: deque[bytes | None] = deque()
        self._changed = trio.Condition()

    async def opened(self) -> None:
        await self._tell("opened")

    async def send(self, data: bytes) -> None:
        await self.gate.wait()
        async with self._changed:
            self.frames.append(data)
            self._changed.notify_all()

    async def receive(self) -> bytes | None:
        async with self._changed:
            while not self._replies:
                await self._changed.wait()
            return self._replies.popleft()

    async def closed(self, reason: BridgeEnd) -> None:
        await self._tell(f"closed {reason}")

    async def reply(self, data: bytes | None) -> None:
        """One more frame for the program; None for the end."""
        async with self._changed:
            self._replies.append(data)
            self._changed.notify_all()

    async def wait_frames(self, count: int) -> None:
        async with self._changed:
            while len(self.frames) < count:
                await self._changed.wait()

    async def wait_told(self, text: str) -> None:
        async with self._changed:
            while text not in self.told:
                await self._changed.wait()

    async def _tell(self, text: str) -> None:
        async with self._changed:
            self.told.append(text)
            self._changed.notify_all()
