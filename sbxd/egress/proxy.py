"""The egress proxy of one environment: CONNECT, judged by the policy, and a tunnel.

Theory: what S1 lists as a sequence is one here. The head is read; the attempt is charged; a place
for a tunnel is taken; `evaluate` judges name, port, rule and every address of one resolution; one
of those addresses is dialled and nothing is looked up again; the decision is recorded; only then
does the sandbox get its 200. Each connection is one task that owns both sockets.

Invariants: it listens exactly for the length of `open()`, which ends every connection before it
returns, also when it is cancelled; no byte reaches a server before its decision is recorded; what
cannot be recorded is refused; at most `connections_waiting_max` connections without a tunnel and
`tunnels_max` with one, more wait in the kernel's queue; a connection that is not finished properly
is reset, never ended as if it were.

Deliberately absent: where the listener comes from; an administration of any kind; every HTTP
method but CONNECT; what the environment's end does with a spent budget (the caller's, who knows
that `charge` raised).
"""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from sbxd.egress.connections import Connection, Terms
from sbxd.egress.decisions import Recorder, RecordUnavailable
from sbxd.egress.denials import Denials
from sbxd.egress.listening import Door
from sbxd.egress.recording import Recording
from sbxd.egress.relay import Relay
from sbxd.egress.resolver import Resolver
from sbxd.policy.addresses import OwnNetwork
from sbxd.port.egress import EgressPolicy
from sbxd.settings import EgressSettings

COUNTED_EVERY_SECONDS = 1.0

Dial = Callable[[str, int], Awaitable[socket.socket]]


@dataclass(frozen=True)
class ProxyParts:
    """What the proxies of a daemon share.

    settings: the caps; its policy is not used. host_network: asked anew for each connection.
    dial: connects to a literal address and to no other, and asks for the host's network again
    (`sbxd.egress.dialling`); raises OSError.
    """

    settings: EgressSettings
    resolver: Resolver
    relay: Relay
    host_network: OwnNetwork
    dial: Dial


class Proxy:
    """The proxy of one environment, made within trio. `open` may be entered again after it was
    left, and not before."""

    def __init__(
        self,
        parts: ProxyParts,
        policy: EgressPolicy,
        door: Door,
        *,
        record: Recorder,
        charge: Callable[[], None],
        tenant: Hashable = None,
    ) -> None:
        """
        Args:
            policy: what was admitted for this environment.
            door: where its clients come from; owned from now on.
            record: keeps one record, or raises RecordUnavailable.
            charge: called once for each attempt; may raise BudgetExhausted.
            tenant: with whose other environments it shares the resolver's threads.
        """
        self._parts = parts
        self._door = door
        self._recording = Recording(record)
        self._denials = Denials(rate=parts.settings.denials_per_second, now=trio.current_time())
        self._waiting = trio.Semaphore(parts.settings.connections_waiting_max)
        self._terms = Terms(
            settings=parts.settings,
            policy=policy,
            resolve=parts.resolver.share(tenant).resolve,
            host_network=parts.host_network,
            dial=parts.dial,
            relay=parts.relay,
            recording=self._recording,
            denials=self._denials,
            charge=charge,
            tunnels=trio.CapacityLimiter(parts.settings.tunnels_max),
        )
        self._connections = 0

    @property
    def unrecorded(self) -> int:
        """Records (a tunnel's end, a number of denials) that could not be kept so far. `open` and
        `aclose` try them again."""
        return len(self._recording.held)

    @property
    def tunnels(self) -> int:
        """How many places for a tunnel are taken."""
        return self._terms.tunnels.borrowed_tokens

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listen within the block; at its end no connection is left and nothing listens.

        Raises:
            RecordUnavailable: earlier records cannot be kept: it does not listen.
            ListenerUnusable: it cannot listen.

        Cancellation: as the end of the block. What is under way is reset; what it recorded is
        kept or, at most RECORD_SECONDS for each of them later, held.
        """
        await self._recording.settle()
        self._door.begin()
        serving = trio.open_nursery()
        nursery = await serving.__aenter__()
        failure: BaseException | None = None
        try:
            nursery.start_soon(self._accept, nursery)
            nursery.start_soon(self._record_counts)
            yield
        except trio.Cancelled as cancelled:
            failure = cancelled
            raise
        finally:
            # Nobody comes in while those who are there are shown out.
            self._door.end()
            nursery.cancel_scope.cancel()
            try:
                await serving.__aexit__(
                    type(failure) if failure else None,
                    failure,
                    failure.__traceback__ if failure else None,
                )
            finally:
                await self._keep_counts()

    async def aclose(self) -> None:
        """Give the door up. After `open` has been left; safe to call again."""
        self._door.close()
        try:
            await self._recording.settle()
        except RecordUnavailable:
            return

    async def _accept(self, nursery: trio.Nursery) -> None:
        while True:
            await self._waiting.acquire()
            try:
                client = await self._door.accept()
            except BaseException:
                self._waiting.release()
                raise
            self._connections += 1
            connection = Connection(self._terms, client, self._connections, self._waiting.release)
            nursery.start_soon(connection.serve)

    async def _record_counts(self) -> None:
        while True:
            await trio.sleep(COUNTED_EVERY_SECONDS)
            await self._keep_counts()

    async def _keep_counts(self) -> None:
        counted = self._denials.counted()
        if counted is not None:
            await self._recording.keep_or_hold(counted)
