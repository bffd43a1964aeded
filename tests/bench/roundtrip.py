"""What the protocol itself costs: a Ping and its Pong, and the smallest admin request."""

import socket
import time

from sbxd.port.errors import PortError
from sbxd.wire import messages as m
from sbxd.wire.connection import ClientConnection, Pause
from sbxd.wire.legality import Role
from tests.bench.daemon import ADMIN_SOCKET, WORKER_SOCKET, Daemon, credential
from tests.bench.rounds import Outcome
from tests.bench.samples import Mark, OperationFailed
from tests.bench.spawn import elapsed_ms

RECEIVE_BYTES = 65_536
ANSWER_SECONDS = 10.0


class _RawClient:
    """A blocking client without an event loop, so that nearly all of the time is the daemon's."""

    def __init__(self, path: str, role: Role) -> None:
        self._connection = ClientConnection(role=role)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_SECONDS)
        self._socket.connect(path)
        hello = m.Hello(
            protocol_version=m.PROTOCOL_VERSION, client="bench", credential=credential()
        )
        self.ask(hello, m.Welcome)

    def ask(self, message: m.ClientMessage, expected: type[m.Message]) -> None:
        self._socket.sendall(self._connection.send(message))
        while True:
            event = self._connection.next_event()
            if isinstance(event, expected):
                return
            if event is Pause.NEED_DATA:
                self._connection.receive_data(self._socket.recv(RECEIVE_BYTES))
            elif isinstance(event, m.Ping):
                self._socket.sendall(self._connection.send(m.Pong(token=event.token)))
            else:
                raise OperationFailed(f"expected {expected.__name__}, got {event!r}")

    def close(self) -> None:
        self._socket.close()


def pings(count: int) -> Outcome:
    """Ping to Pong on the worker socket, one after the other."""
    outcome = Outcome("ping, raw client", "")
    try:
        client = _RawClient(WORKER_SOCKET, Role.WORKER)
        try:
            for token in range(count):
                begun_ns = time.perf_counter_ns()
                client.ask(m.Ping(token=token), m.Pong)
                outcome.add({Mark.REPLY: elapsed_ms(begun_ns)})
        finally:
            client.close()
    except (OSError, OperationFailed) as error:
        outcome.reasons.append(f"ping: {error}")
    return outcome


async def lists(daemon: Daemon, count: int) -> Outcome:
    """The list of environments (there are none) through the project's client, on trio."""
    outcome = Outcome(f"list, {ADMIN_SOCKET.rpartition('/')[2]}", "")
    try:
        for _ in range(count):
            begun_ns = time.perf_counter_ns()
            await daemon.admin.list()
            outcome.add({Mark.REPLY: elapsed_ms(begun_ns)})
    except PortError as error:
        outcome.reasons.append(f"list: {error}")
    return outcome
