"""One connection of a sandbox to its proxy, from accept to its end.

Invariants: the task of a connection closes both its sockets; its place among the waiting ones is
given back once, when it becomes a tunnel or ends; every way that ends without a tunnel goes through
`_refuse`, so that all are charged, paced and recorded alike; a client that went away before it
asked for anything was no attempt.
"""

import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from sbxd.egress import answers
from sbxd.egress.answers import Refusal
from sbxd.egress.connect import (
    HEAD_BYTES_MAX,
    ConnectParser,
    Event,
    Malformed,
    MethodNotAllowed,
    Request,
    TooLarge,
)
from sbxd.egress.decisions import (
    Decision,
    Outcome,
    ProxyReason,
    Reason,
    RecordUnavailable,
    TunnelClosed,
    TunnelEnd,
)
from sbxd.egress.denials import Denials
from sbxd.egress.recording import Recording
from sbxd.egress.relay import Flow, Relay
from sbxd.egress.sni import Hello, HelloReader
from sbxd.egress.sockets import PeerMismatch, receive, reset, send_all, without_delay
from sbxd.policy.addresses import OwnNetwork
from sbxd.policy.egress import Allowed, EgressRefusal, Refused, evaluate, refused_at_dial
from sbxd.policy.routes import HostNetworkUnknown, OnHostNetwork
from sbxd.port.egress import EgressPolicy
from sbxd.port.errors import BudgetExhausted
from sbxd.settings import EgressSettings

# For a denial beyond the rate, before its answer.
DENIAL_PAUSE_SECONDS = 1.0
# After an answer the client may finish what it was sending, or its system would drop the answer.
LINGER_SECONDS = 1.0
LINGER_BYTES_MAX = 64 * 1024

_HEAD_READ_BYTES = 8192
# What every rule allowed and the network did not give.
_FAILURES: frozenset[Reason] = frozenset(
    {
        EgressRefusal.RESOLUTION_FAILED,
        EgressRefusal.RESOLUTION_TIMED_OUT,
        EgressRefusal.NO_ADDRESS,
        EgressRefusal.HOST_NETWORK_UNKNOWN,
        ProxyReason.DIAL_FAILED,
        ProxyReason.DIAL_TOO_LATE,
        ProxyReason.PEER_MISMATCH,
    }
)
_USE_CONNECT = "Use the proxy with CONNECT host:port (HTTPS does by itself)."
_LATER = "Try again later."


@dataclass(frozen=True)
class Terms:
    """What all connections of a proxy have in common. `sbxd.egress.proxy` says what each is."""

    settings: EgressSettings
    policy: EgressPolicy
    resolve: Callable[[str], Awaitable[Sequence[str]]]
    host_network: OwnNetwork
    dial: Callable[[str, int], Awaitable[socket.socket]]
    relay: Relay
    recording: Recording
    denials: Denials
    charge: Callable[[], None]
    tunnels: trio.CapacityLimiter


class _NotReached(Exception):
    """No address could be connected to."""

    def __init__(self, reason: ProxyReason, detail: str, address: str | None) -> None:
        super().__init__(detail)
        self.address = address  # the last one that was dialled
        self.reason = reason
        self.detail = detail


class _RefusedAtDial(Exception):
    """An address turned out to be on the host's network when it was dialled."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.detail)
        self.refused = refused


class Connection:
    """One accepted socket. `serve` is called once."""

    def __init__(
        self, terms: Terms, client: socket.socket, number: int, give_place: Callable[[], None]
    ) -> None:
        self._terms = terms
        self._client = client
        self._number = number
        self._give_place = give_place
        self._waits = True
        self._asked_at = 0.0
        self._is_finished = False  # ended as it should: closed, not reset

    async def serve(self) -> None:
        """Serve it to its end.

        Cancellation: both sockets are reset, and the end of a tunnel is recorded.
        """
        try:
            without_delay(self._client)
            parser = ConnectParser()
            event = await self._read_head(parser)
            self._asked_at = trio.current_time()
            if event is None:
                return
            refusal = self._charge()
            if refusal is None and isinstance(event, Request):
                await self._request(event, parser)
                return
            await self._refuse(refusal or _head_refusal(event))
        except OSError:
            # The client's connection broke; there is nobody to tell.
            return
        finally:
            if self._is_finished:
                self._client.close()
            else:
                reset(self._client)
            self._leave()

    async def _read_head(self, parser: ConnectParser) -> Event | Refusal | None:
        """What was asked for; None when the client went away before it asked for anything."""
        with trio.move_on_after(self._terms.settings.head_seconds):
            while True:
                data = await receive(self._client, _HEAD_READ_BYTES)
                event = parser.receive(data) if data else parser.end()
                if event is not None or not data:
                    return event
        return Refusal(
            reason=ProxyReason.HEAD_TOO_LATE,
            detail=f"no whole request within {self._terms.settings.head_seconds} s",
            remedy="Send the request at once.",
        )

    def _charge(self) -> Refusal | None:
        try:
            self._terms.charge()
        except BudgetExhausted:
            return Refusal(
                reason=ProxyReason.BUDGET_EXHAUSTED,
                detail="the environment has used up its budget of operations",
                remedy="Stop: this environment has ended.",
            )
        return None

    # --- a request -------------------------------------------------------------------------------

    async def _request(self, request: Request, parser: ConnectParser) -> None:
        tunnels = self._terms.tunnels
        try:
            tunnels.acquire_on_behalf_of_nowait(self)
        except trio.WouldBlock:
            await self._refuse(
                Refusal(
                    reason=ProxyReason.TOO_MANY_TUNNELS,
                    detail=f"{tunnels.total_tokens:g} tunnels are open or being opened",
                    remedy="Close connections that are not needed, then try again.",
                    host=request.host,
                    port=request.port,
                )
            )
            return
        try:
            await self._judge(request, parser)
        finally:
            tunnels.release_on_behalf_of(self)

    async def _judge(self, request: Request, parser: ConnectParser) -> None:
        terms = self._terms
        judged = await evaluate(
            terms.policy, request.host, request.port, terms.resolve, terms.host_network
        )
        if isinstance(judged, Refused):
            await self._refuse(answers.refusal_of(judged), address=judged.address)
            return
        try:
            address, server = await self._reach(judged)
        except _RefusedAtDial as late:
            await self._refuse(answers.refusal_of(late.refused), address=late.refused.address)
            return
        except _NotReached as problem:
            await self._refuse(
                Refusal(
                    reason=problem.reason,
                    detail=problem.detail,
                    remedy=_LATER,
                    host=judged.host,
                    port=judged.port,
                    rule=judged.rule,
                ),
                address=problem.address,
                addresses=judged.addresses,
            )
            return
        end: TunnelEnd | None = None
        try:
            is_recorded = await self._keep_allowed(judged, address)
            if is_recorded:
                end = await self._tunnel(judged, address, server, parser)
        finally:
            if end is TunnelEnd.FINISHED:
                server.close()
            else:
                reset(server)
        if not is_recorded:
            await self._answer(answers.unrecorded(judged.host, judged.port))

    async def _reach(self, allowed: Allowed) -> tuple[str, socket.socket]:
        """A connection to one of the judged addresses, in order.

        Raises: _NotReached; _RefusedAtDial: one that is refused refuses all.
        """
        deadline = trio.current_time() + self._terms.settings.dial_seconds
        reason, detail = ProxyReason.DIAL_FAILED, "no address"
        left = len(allowed.addresses)
        for address in allowed.addresses:
            # Each of those that are left has its share of the time that is left.
            share = (deadline - trio.current_time()) / left
            left -= 1
            try:
                with trio.fail_after(max(share, 0)):
                    return address, await self._terms.dial(address, allowed.port)
            except trio.TooSlowError:
                reason, detail = ProxyReason.DIAL_TOO_LATE, "the server does not answer"
            except (OnHostNetwork, HostNetworkUnknown) as late:
                raise _RefusedAtDial(refused_at_dial(allowed, address, late)) from None
            except PeerMismatch as problem:
                raise _NotReached(
                    ProxyReason.PEER_MISMATCH, str(problem.strerror), address
                ) from None
            except OSError as problem:
                reason = ProxyReason.DIAL_FAILED
                detail = f"the server is not reached: {problem.strerror}"
        raise _NotReached(reason, detail, allowed.addresses[-1] if allowed.addresses else None)

    async def _keep_allowed(self, allowed: Allowed, address: str) -> bool:
        """Whether the decision is recorded."""
        try:
            await self._terms.recording.keep(
                Decision(
                    connection=self._number,
                    outcome=Outcome.ALLOWED,
                    host=allowed.host,
                    port=allowed.port,
                    address=address,
                    reason=None,
                    rule=allowed.rule,
                    decided_us=self._elapsed_us(),
                )
            )
        except RecordUnavailable:
            return False
        return True

    # --- a tunnel --------------------------------------------------------------------------------

    async def _tunnel(
        self, allowed: Allowed, address: str, server: socket.socket, parser: ConnectParser
    ) -> TunnelEnd:
        opened_at, flow, end = trio.current_time(), Flow(), TunnelEnd.STOPPED
        self._leave()
        try:
            end = await self._through(allowed, address, server, parser, flow)
        except OSError:
            end = TunnelEnd.CLIENT_FAILED
        finally:
            self._is_finished = end is TunnelEnd.FINISHED
            await self._terms.recording.keep_or_hold(
                TunnelClosed(
                    connection=self._number,
                    host=allowed.host,
                    port=allowed.port,
                    address=address,
                    up_bytes=flow.up_bytes,
                    down_bytes=flow.down_bytes,
                    duration_ms=round((trio.current_time() - opened_at) * 1000),
                    end=end,
                )
            )
        return end

    async def _through(
        self,
        allowed: Allowed,
        address: str,
        server: socket.socket,
        parser: ConnectParser,
        flow: Flow,
    ) -> TunnelEnd:
        """Raises OSError: the client's connection broke before anything was passed on."""
        await send_all(self._client, answers.ESTABLISHED)
        early = parser.early
        if self._terms.settings.require_matching_sni:
            reason, early = await self._hello(early, allowed.host)
            if reason is not None:
                await self._deny(
                    Refusal(
                        reason=reason,
                        detail="the tunnel does not begin with TLS for the requested host",
                        remedy="Use HTTPS to the host of the CONNECT request.",
                        host=allowed.host,
                        port=allowed.port,
                        rule=allowed.rule,
                    ),
                    address=address,
                )
                return TunnelEnd.SNI_REFUSED
        return await self._terms.relay.run(
            self._client,
            server,
            flow,
            early=early,
            idle_seconds=self._terms.settings.idle_seconds,
        )

    async def _hello(self, early: bytes, host: str) -> tuple[ProxyReason | None, bytes]:
        """What is wrong with the tunnel's first bytes, and all that were read of them."""
        reader = HelloReader()
        found = reader.receive(early)
        with trio.move_on_after(self._terms.settings.head_seconds):
            while found is None:
                data = await receive(self._client, _HEAD_READ_BYTES)
                if not data:
                    break
                found = reader.receive(data)
        if not isinstance(found, Hello):
            return ProxyReason.SNI_ABSENT, reader.held
        if found.server_name != host:
            return ProxyReason.SNI_MISMATCH, reader.held
        return None, reader.held

    # --- no tunnel -------------------------------------------------------------------------------

    async def _refuse(
        self, refusal: Refusal, *, address: str | None = None, addresses: Sequence[str] = ()
    ) -> None:
        await self._deny(refusal, address=address, addresses=addresses)
        await self._answer(answers.answer(refusal))

    async def _deny(
        self, refusal: Refusal, *, address: str | None = None, addresses: Sequence[str] = ()
    ) -> None:
        """Record a denial, or count it and wait."""
        denials = self._terms.denials
        if not denials.take(trio.current_time()):
            denials.count(refusal.reason)
            await trio.sleep(DENIAL_PAUSE_SECONDS)
            return
        decision = Decision(
            connection=self._number,
            outcome=Outcome.FAILED if refusal.reason in _FAILURES else Outcome.REFUSED,
            host=refusal.host,
            port=refusal.port,
            address=address,
            reason=refusal.reason,
            rule=refusal.rule,
            decided_us=self._elapsed_us(),
            addresses=tuple(addresses),
        )
        try:
            await self._terms.recording.keep(decision)
        except RecordUnavailable:
            denials.count(refusal.reason)

    async def _answer(self, data: bytes) -> None:
        """Send an answer and end the connection so that it is read. Raises OSError."""
        self._client.send(data)  # fits the buffer of a socket that nothing was sent on
        self._client.shutdown(socket.SHUT_WR)
        self._is_finished = True
        left = LINGER_BYTES_MAX
        with trio.move_on_after(LINGER_SECONDS):
            while left > 0:
                data = await receive(self._client, _HEAD_READ_BYTES)
                if not data:
                    return
                left -= len(data)

    def _leave(self) -> None:
        """Give back the place among the waiting ones, once."""
        if self._waits:
            self._waits = False
            self._give_place()

    def _elapsed_us(self) -> int:
        return round((trio.current_time() - self._asked_at) * 1_000_000)


def _head_refusal(event: Event | Refusal) -> Refusal:
    match event:
        case Malformed():
            return Refusal(reason=ProxyReason.MALFORMED, detail=event.detail, remedy=_USE_CONNECT)
        case MethodNotAllowed():
            return Refusal(
                reason=ProxyReason.METHOD_NOT_ALLOWED,
                detail="CONNECT is the only method: there is no plain HTTP through this proxy",
                remedy="Use HTTPS, or CONNECT host:port.",
            )
        case TooLarge():
            return Refusal(
                reason=ProxyReason.HEAD_TOO_LARGE,
                detail=f"the head of the request is larger than {HEAD_BYTES_MAX} bytes",
                remedy="Send fewer header fields to the proxy.",
            )
        case Refusal():
            return event
        case Request():
            raise AssertionError("a request is judged")
