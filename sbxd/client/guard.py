"""The worker's outbound guard: dial for a tenant only what the policy and the addresses permit.

    guard = Guard(policy)
    stream = await guard.connect("mcp.example.com", 443)

The second of the two callers of `sbxd.policy.egress.evaluate` (the sandbox proxy is the first).
Invariants: an address is dialled only if it was judged in the same call; the kernel is asked for
its route when it is judged, right before it is dialled and once it is connected, and what the
kernel does not say is a refusal; the peer of a new connection is compared with what was dialled; a
name is looked up once. Deliberately absent: TLS
(wrap the stream, with the name), a cache of decisions, proxies of the process environment.
`guard_httpx` builds httpx transports on this.
"""

import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import anyio
from anyio.abc import SocketAttribute, SocketStream
from msgspec import structs

from sbxd.client.resolver import Resolver, SystemResolver
from sbxd.client.routes import ask_kernel
from sbxd.policy.addresses import HostNetwork, parse_address
from sbxd.policy.destinations import policy_problems
from sbxd.policy.egress import Allowed, HostRule, Refused, evaluate, refused_at_dial
from sbxd.policy.routes import Ask, Flow, HostNetworkUnknown, LiveHostNetwork, OnHostNetwork
from sbxd.port.egress import EgressPolicy

CONNECT_SECONDS = 10.0
NOTHING_MORE = HostNetwork()

Decision = Allowed | Refused
Result = TypeVar("Result")


class EgressDenied(Exception):
    """The destination is refused, and nothing was dialled. `refused` says why, and what to do."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(f"{refused.reason}: {refused.detail}. {refused.remedy}")
        self.refused = refused


class PeerDiffers(OSError):
    """The connection's peer is not the address that was dialled. It was closed."""


class Guard:
    """Judges and dials. Shared by any number of tasks of one event loop, or of threads."""

    def __init__(
        self,
        policy: EgressPolicy | HostRule,
        host_network: HostNetwork = NOTHING_MORE,
        *,
        ask: Ask = ask_kernel,
        resolver: Resolver | None = None,
        connect_seconds: float = CONNECT_SECONDS,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> None:
        """
        Args:
            policy: the operator's, or a rule of `sbxd.policy.public_https`.
            host_network: what is refused besides this machine's own addresses and neighbours,
                which the kernel is asked for: a NAT64 prefix of your network, for one.
            ask: where the kernel is asked. Another one is for a machine without route netlink.
            resolver: SystemResolver when None.
            connect_seconds: for all attempts of one `connect`, without the lookup.
            on_decision: called with every decision, before anything is dialled; for the log.

        Raises:
            ValueError: the policy has a destination outside the grammar; names each by position.
        """
        if isinstance(policy, EgressPolicy) and (problems := policy_problems(policy)):
            raise ValueError(
                "; ".join(f"destinations[{p.position}].{p.part}: {p.detail}" for p in problems)
            )
        self._policy = policy
        self._host_network = LiveHostNetwork(ask, lambda: host_network)
        self._resolver: Resolver = resolver or SystemResolver()
        self.connect_seconds = connect_seconds
        self._on_decision = on_decision

    async def check(self, host: str, port: int) -> Allowed:
        """Judge a destination; dial only the addresses of the result, and soon.

        Raises: EgressDenied.

        Cancellation: nothing is left behind but a lookup that ends by itself.
        """
        return self._decided(
            await evaluate(self._policy, host, port, self._resolver.resolve, self._host_network)
        )

    def check_blocking(self, host: str, port: int) -> Allowed:
        """As `check`, for a thread that may block."""

        async def resolve(name: str) -> Sequence[str]:
            return self._resolver.resolve_blocking(name)

        return self._decided(
            _without_loop(evaluate(self._policy, host, port, resolve, self._host_network))
        )

    async def connect(self, host: str, port: int) -> SocketStream:
        """Judge a destination and connect to the first of its addresses that answers.

        Raises: EgressDenied; TimeoutError; another OSError when no address answers.

        Cancellation: the connection is closed.
        """
        allowed = await self.check(host, port)
        failure: OSError | None = None
        with anyio.fail_after(self.connect_seconds):
            for address in allowed.addresses:
                try:
                    self.require(allowed, address)
                    stream = await anyio.connect_tcp(address, port)
                except OSError as error:
                    failure = error
                    continue
                try:
                    attributes = stream.extra_attributes
                    require_peer(host, attributes[SocketAttribute.remote_address]()[0], address)
                    self.require(allowed, address, attributes[SocketAttribute.local_address]())
                except BaseException:
                    await anyio.aclose_forcefully(stream)
                    raise
                return stream
        raise _none_answers(allowed, failure)

    def connect_blocking(self, host: str, port: int) -> socket.socket:
        """As `connect`, for a thread that may block; the socket blocks without a time limit."""
        allowed = self.check_blocking(host, port)
        end = time.monotonic() + self.connect_seconds
        failure: OSError | None = None
        for address in allowed.addresses:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{host}: no address answered in time")
            try:
                self.require(allowed, address)
                connection = socket.create_connection((address, port), timeout=left)
            except OSError as error:
                failure = error
                continue
            try:
                require_peer(host, connection.getpeername()[0], address)
                self.require(allowed, address, connection.getsockname())
            except BaseException:
                connection.close()
                raise
            connection.settimeout(None)
            return connection
        raise _none_answers(allowed, failure)

    def require(
        self, allowed: Allowed, address: str, source: Sequence[str | int] | None = None
    ) -> None:
        """Ask the kernel for the route of an address that is to be dialled, or that was.

        Args:
            source: address and port of the local end of the connection, once there is one.

        Raises: EgressDenied; OSError where there is no route.
        """
        flow = Flow(destination=parse_address(address), port=allowed.port)
        if source is not None:
            flow = structs.replace(
                flow, source=parse_address(str(source[0])), source_port=int(source[1])
            )
        try:
            self._host_network.require(flow)
        except (OnHostNetwork, HostNetworkUnknown) as late:
            self._decided(refused_at_dial(allowed, address, late))

    def _decided(self, decision: Decision) -> Allowed:
        if self._on_decision is not None:
            self._on_decision(decision)
        if isinstance(decision, Refused):
            raise EgressDenied(decision)
        return decision


def require_peer(host: str, peer: str, dialled: str) -> None:
    """Raises PeerDiffers unless a connection's peer is the address that was dialled."""
    if not same_address(peer, dialled):
        raise PeerDiffers(f"the peer of {host} is not the address that was dialled")


def same_address(peer: str, dialled: str) -> bool:
    """Whether a socket's peer is the address that was dialled (both numeric)."""
    return parse_address(peer) == parse_address(dialled)


def _none_answers(allowed: Allowed, failure: OSError | None) -> OSError:
    cause = failure and (failure.strerror or type(failure).__name__)
    return ConnectionError(f"{allowed.host}:{allowed.port}: no address answers ({cause})")


def _without_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that awaits nothing that waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine that should not wait does")
