"""The proxies of a daemon as the lifecycle's network: the only place where the two meet.

Invariants: one proxy per environment that has used the network, so that its caps, its share of the
resolver and its rate of denials are the environment's and not a command's; every record of a proxy
becomes one audit event of the command that it is of; the counters see what was recorded and
nothing else. A proxy listens within one task of the nursery here, so that its end never depends
on who asked for its beginning.

Deliberately absent: decisions (`sbxd.egress`), and when a command has the network
(`sbxd.lifecycle`, `sbxd.policy.network`).
"""

import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypedDict

import trio

from sbxd.audit.egress_events import (
    EgressAllowed,
    EgressFailed,
    EgressRefusalsCounted,
    EgressRefused,
    EgressTunnelClosed,
)
from sbxd.audit.events import AuditEvent
from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.egress.check import check
from sbxd.egress.decisions import (
    Decision,
    DenialsCounted,
    EgressCounts,
    Outcome,
    Record,
    RecordUnavailable,
    TunnelClosed,
)
from sbxd.egress.dialling import Dialler
from sbxd.egress.host_network import HostNetworkWatch, Read
from sbxd.egress.listening import ListenerUnusable, Listening
from sbxd.egress.proxy import Proxy, ProxyParts
from sbxd.egress.relay import Relay
from sbxd.egress.resolver import Resolver
from sbxd.lifecycle.network import EnvironmentNetwork, NetworkUse
from sbxd.mechanism.protocol import MechanismError
from sbxd.policy.egress import Allowed, Refused
from sbxd.policy.routes import Answers, Ask, Flow, HostNetworkUnknown, LiveHostNetwork
from sbxd.port.egress import EgressMode
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.service.egress import EgressState
from sbxd.settings import EgressSettings
from sbxd.wire.descriptions import PostureItem

# Between two attempts to record what the audit did not take.
RETRY_SECONDS = 1.0
PREFIXES_SHOWN = 12


class Origin(TypedDict):
    """Whose connections these are."""

    environment_id: EnvironmentId
    tenant_id: TenantId
    run_id: RunId
    lease_epoch: int
    command_number: int


class Proxies:
    """Implements sbxd.lifecycle.network.Egress and sbxd.service.egress.OperatorEgress. Made by
    `open_proxies`."""

    def __init__(
        self,
        parts: ProxyParts,
        host_network: HostNetworkWatch,
        audit: AuditSink,
        nursery: trio.Nursery,
    ) -> None:
        self._parts = parts
        self._host_network = host_network
        self._audit = audit
        self._nursery = nursery
        self._resolver = parts.resolver.share()
        self.counts = EgressCounts()

    def of_environment(self, use: NetworkUse) -> EnvironmentNetwork:
        """The network of one environment. Raises MechanismError."""
        return EnvironmentProxy(self._parts, use, self._audit, self.counts, self._nursery)

    async def check(self, host: str, port: int) -> Allowed | Refused:
        """As `sbxd.service.egress.OperatorEgress`."""
        return await check(self._parts, self._resolver.resolve, host, port)

    def state(self) -> EgressState:
        """As `sbxd.service.egress.OperatorEgress`."""
        return EgressState(
            host_network=tuple(str(each) for each in self._host_network.current.prefixes),
            allowed=self.counts.allowed,
            refused={str(reason): count for reason, count in self.counts.refusals.items()},
        )

    def posture(self) -> tuple[PostureItem, ...]:
        """Whether there is a boundary to cross, and what of it is refused as the host's own."""
        settings = self._parts.settings
        if settings.mode is EgressMode.DENY:
            detail = "mode deny: no sandbox has a proxy"
            return (PostureItem(name="egress", state="ok", detail=detail, fix=""),)
        prefixes = [str(prefix) for prefix in self._host_network.current.prefixes]
        shown = ", ".join(prefixes[:PREFIXES_SHOWN])
        more = len(prefixes) - PREFIXES_SHOWN
        return (
            PostureItem(
                name="egress",
                state="ok",
                detail=f"mode allowlist, destinations listed: {len(settings.destinations)}",
                fix="",
            ),
            PostureItem(
                name="egress.host_network",
                state="ok",
                detail=f"never dialled: {shown}" + (f" and {more} more" if more > 0 else ""),
                fix="",
            ),
        )


class EnvironmentProxy:
    """Implements sbxd.lifecycle.network.EnvironmentNetwork."""

    def __init__(
        self,
        parts: ProxyParts,
        use: NetworkUse,
        audit: AuditSink,
        counts: EgressCounts,
        nursery: trio.Nursery,
    ) -> None:
        self._use = use
        self._audit = audit
        self._counts = counts
        self._nursery = nursery
        self._command_number = 0
        self._serving: _Serving | None = None
        door = _listening(use.listener) if isinstance(use.listener, int) else use.listener
        self._proxy = Proxy(
            parts,
            use.policy,
            door,
            record=self._record,
            charge=use.charge,
            tenant=(use.owner_uid, use.tenant_id),
        )

    async def begin(self, command_number: int) -> None:
        """Accept connections of this command from now on. Raises MechanismError."""
        serving = self._serving = _Serving()
        try:
            await self._nursery.start(self._serve, serving, command_number)
        except ListenerUnusable as problem:
            raise MechanismError("proxy_listen", 0, str(problem)) from None
        except RecordUnavailable:
            raise MechanismError("proxy_record", 0, "the audit takes no record") from None

    async def _serve(
        self,
        serving: "_Serving",
        command_number: int,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            async with self._proxy.open():
                # Not sooner: what is left of an earlier command is recorded as that one's.
                self._command_number = command_number
                task_status.started()
                await serving.is_to_end.wait()
        finally:
            serving.has_ended.set()

    async def end(self) -> None:
        """Refuse connections again, and close every tunnel."""
        if self._serving is not None:
            self._serving.is_to_end.set()
            await self._serving.has_ended.wait()

    async def close(self) -> None:
        """`end`, and give the socket up."""
        await self.end()
        await self._proxy.aclose()

    async def settle(self) -> None:
        """Until everything is recorded."""
        while self._proxy.unrecorded:
            await trio.sleep(RETRY_SECONDS)
            await self._proxy.aclose()

    async def _record(self, record: Record) -> None:
        origin = Origin(
            environment_id=self._use.environment_id,
            tenant_id=self._use.tenant_id,
            run_id=self._use.run_id,
            lease_epoch=self._use.lease_epoch,
            command_number=self._command_number,
        )
        try:
            await self._audit.emit(event_of(record, origin))
        except AuditUnavailable as problem:
            raise RecordUnavailable(str(problem)) from None
        self._counts.observe(record)


def _listening(descriptor: int) -> Listening:
    """A copy of the sandbox's socket. Raises MechanismError for one that cannot serve."""
    try:
        listener = socket.socket(fileno=os.dup(descriptor))
    except OSError as problem:
        raise MechanismError("proxy_listener", problem.errno or 0) from None
    try:
        return Listening(listener)
    except ListenerUnusable as problem:
        listener.close()
        raise MechanismError("proxy_listener", 0, str(problem)) from None


class _Serving:
    """One time of listening."""

    def __init__(self) -> None:
        self.is_to_end = trio.Event()
        self.has_ended = trio.Event()


@asynccontextmanager
async def open_proxies(settings: EgressSettings, audit: AuditSink) -> AsyncIterator[Proxies]:
    """The proxies for the length of the block; none serves when it is left.

    Raises HostNetworkUnreadable where destinations are configured and the host's own network, which
    they must not lead to, cannot be read.
    """
    is_open = settings.mode is EgressMode.ALLOWLIST
    ask, read = _kernel() if is_open else (_nobody_asks, frozenset)
    watched = HostNetworkWatch(read)
    host_network = LiveHostNetwork(ask, lambda: watched.current)
    parts = ProxyParts(
        settings=settings,
        resolver=Resolver(seconds=settings.resolve_seconds),
        relay=Relay(),
        host_network=host_network,
        dial=Dialler(host_network).dial,
    )
    if is_open:
        watched.refresh()
    async with trio.open_nursery() as nursery:
        if is_open:
            nursery.start_soon(watched.watch)
        yield Proxies(parts, watched, audit, nursery)
        nursery.cancel_scope.cancel()


def _kernel() -> tuple[Ask, Read]:
    """The adapter to route netlink. Imported here since mode deny, the default, has no use for it
    and it takes memory."""
    from sbxd.egress import netlink

    return netlink.ask_kernel, netlink.read_prefixes


def _nobody_asks(flow: Flow) -> Answers:
    raise HostNetworkUnknown(errno.EPERM, "mode deny: no route is asked for")


def event_of(record: Record, origin: Origin) -> AuditEvent:
    """The event of one record."""
    match record:
        case Decision(outcome=Outcome.ALLOWED):
            assert record.host is not None
            assert record.port is not None
            assert record.address is not None
            return EgressAllowed(
                **origin,
                connection=record.connection,
                host=record.host,
                port=record.port,
                address=record.address,
                rule=record.rule,
                decided_us=record.decided_us,
            )
        case Decision():
            assert record.reason is not None
            if record.outcome is Outcome.FAILED:
                return EgressFailed(
                    **origin,
                    connection=record.connection,
                    host=record.host,
                    port=record.port,
                    address=record.address,
                    reason=record.reason,
                    rule=record.rule,
                    decided_us=record.decided_us,
                    addresses=record.addresses,
                )
            return EgressRefused(
                **origin,
                connection=record.connection,
                host=record.host,
                port=record.port,
                address=record.address,
                reason=record.reason,
                rule=record.rule,
                decided_us=record.decided_us,
            )
        case TunnelClosed():
            return EgressTunnelClosed(
                **origin,
                connection=record.connection,
                host=record.host,
                port=record.port,
                address=record.address,
                up_bytes=record.up_bytes,
                down_bytes=record.down_bytes,
                duration_ms=record.duration_ms,
                end=record.end.value,
            )
        case DenialsCounted():
            return EgressRefusalsCounted(
                **origin,
                total=record.total,
                counts=tuple(f"{reason}={count}" for reason, count in record.counts),
            )
