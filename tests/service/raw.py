"""One end of a connection, driven message by message, for tests of the other end."""

from collections.abc import Sequence

import msgspec
import trio

from sbxd.wire import messages as m
from sbxd.wire.connection import ClientConnection, Pause, ServerConnection
from sbxd.wire.framing import encode_frame
from sbxd.wire.legality import Role

HELLO = m.Hello(protocol_version=m.PROTOCOL_VERSION, client="raw")
WELCOME = m.Welcome(protocol_version=m.PROTOCOL_VERSION, server="raw", mechanism="raw")


class RawEnd:
    """Sends and receives whole messages over a trio stream."""

    def __init__(
        self, stream: trio.abc.Stream, connection: ClientConnection | ServerConnection
    ) -> None:
        self.stream = stream
        self.connection = connection

    async def send(self, message: m.Message) -> None:
        await self.stream.send_all(self.connection.send(message))

    async def send_illegal(self, *messages: m.Message) -> None:
        """Frames that our own table would refuse."""
        frames = (
            encode_frame(msgspec.msgpack.encode(message), frame_bytes_max=2**31)
            for message in messages
        )
        await self.stream.send_all(b"".join(frames))

    async def receive(self) -> m.Message | None:
        """The next message; None at the end of the stream."""
        while True:
            event = self.connection.next_event()
            if event is Pause.CLOSED:
                return None
            if not isinstance(event, Pause):
                return event
            try:
                data = bytes(await self.stream.receive_some(65536))
            except trio.BrokenResourceError:
                data = b""
            self.connection.receive_data(data)
            if not data and self.connection.next_event() is Pause.CLOSED:
                return None

    async def receive_all(self) -> Sequence[m.Message]:
        """Everything until the end of the stream."""
        received = []
        while (message := await self.receive()) is not None:
            received.append(message)
        return received


def raw_client(stream: trio.abc.Stream, role: Role = Role.WORKER) -> RawEnd:
    """A client that has not greeted."""
    return RawEnd(stream, ClientConnection(role=role))


async def greeted_client(
    stream: trio.abc.Stream, role: Role = Role.WORKER, *, credential: bytes | None = None
) -> RawEnd:
    """A client that the daemon has welcomed."""
    raw = raw_client(stream, role)
    await raw.send(msgspec.structs.replace(HELLO, credential=credential))
    assert isinstance(await raw.receive(), m.Welcome)
    return raw


async def greeted_server(stream: trio.abc.Stream) -> RawEnd:
    """A daemon's end that has welcomed a client."""
    raw = RawEnd(stream, ServerConnection(role=Role.WORKER))
    assert isinstance(await raw.receive(), m.Hello)
    await raw.send(WELCOME)
    return raw


class Stuck(trio.abc.Stream):
    """A stream whose peer sends and, after `taken` bytes, never reads."""

    def __init__(self, incoming: trio.abc.ReceiveStream, taken: int) -> None:
        self._incoming = incoming
        self.left = taken
        self.closed = trio.Event()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._incoming.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if len(data) > self.left:
            await trio.sleep_forever()
        self.left -= len(data)
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.closed.set()
        await trio.lowlevel.checkpoint()
