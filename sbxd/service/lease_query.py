"""Asks one worker tier's lease authority about environments: the only call of the daemon towards
the worker tier. Ids go out, standings come back.

Invariants: whoever answers must run under a uid that the authority speaks for, or be root, as the
kernel reports it: another process in the socket's place can end nobody's environments. A question
is bounded in time as a whole; an answer that is late, partial or illegal is no answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from sbxd.closing import Closers
from sbxd.lifecycle.leases import AuthorityUnanswered, LeaseAuthority
from sbxd.port.ids import EnvironmentId
from sbxd.port.leases import LeaseStanding
from sbxd.service.peer import read_peer_credentials
from sbxd.service.unix import UnixStream, connect
from sbxd.settings import Settings
from sbxd.wire import leases as w
from sbxd.wire.connection import Pause
from sbxd.wire.errors import ProtocolError
from sbxd.wire.legality import Sender
from sbxd.wire.messages import Message

ANSWER_SECONDS = 5.0
RECEIVE_BYTES = 16 * 1024


@dataclass(frozen=True)
class RemoteLeaseAuthority:
    """Implements `sbxd.lifecycle.leases.LeaseAuthority` over a Unix socket; a connection each
    time."""

    name: str
    owner_uids: frozenset[int]
    socket_path: str
    answer_seconds: float = ANSWER_SECONDS
    closers: Closers = field(default_factory=Closers)

    async def ask(self, environment_ids: Sequence[EnvironmentId]) -> Sequence[LeaseStanding]:
        """As the protocol."""
        try:
            with trio.fail_after(self.answer_seconds):
                return await self._ask(environment_ids)
        except trio.TooSlowError:
            raise AuthorityUnanswered("no answer in time") from None
        except ProtocolError as problem:
            raise AuthorityUnanswered(f"the protocol was broken: {problem.detail}") from None
        except OSError as problem:
            raise AuthorityUnanswered(problem.strerror or type(problem).__name__) from None
        except trio.BrokenResourceError:
            raise AuthorityUnanswered("the connection broke") from None

    async def _ask(self, environment_ids: Sequence[EnvironmentId]) -> list[LeaseStanding]:
        async with await connect(self.socket_path, self.closers) as stream:
            peer = read_peer_credentials(stream.end)
            if peer.uid != 0 and peer.uid not in self.owner_uids:
                raise AuthorityUnanswered(f"uid {peer.uid} listens there, which is none of its own")
            exchange = _Exchange(stream)
            hello = w.LeaseHello(protocol_version=w.LEASE_PROTOCOL_VERSION, role=w.LeaseRole.ASKER)
            if not isinstance(await exchange.ask(hello), w.LeaseWelcome):
                raise AuthorityUnanswered("the daemon was not welcome")
            standings: list[LeaseStanding] = []
            for start in range(0, len(environment_ids), w.QUERY_IDS_MAX):
                some = tuple(environment_ids[start : start + w.QUERY_IDS_MAX])
                reply = await exchange.ask(w.Query(environment_ids=some))
                if not isinstance(reply, w.Standings):
                    raise AuthorityUnanswered("it said farewell")
                standings += reply.standings
            return standings


def lease_authorities(settings: Settings) -> list[LeaseAuthority]:
    """Those that are configured, in the order of their names."""
    closers = Closers()
    return [
        RemoteLeaseAuthority(name, frozenset(each.owner_uids), each.socket, closers=closers)
        for name, each in sorted(settings.leases.authorities.items())
    ]


class _Exchange:
    """Question and answer, in turn."""

    def __init__(self, stream: UnixStream) -> None:
        self._stream = stream
        self._wire = w.LeaseConnection(Sender.CLIENT)

    async def ask(self, message: Message) -> Message:
        await self._stream.send_all(self._wire.send(message))
        while True:
            event = self._wire.next_event()
            if event is Pause.CLOSED:
                raise AuthorityUnanswered("it closed the connection")
            if isinstance(event, Message):
                return event
            self._wire.receive_data(await self._stream.receive_some(RECEIVE_BYTES))
