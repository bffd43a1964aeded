"""The worker's side of its tier's lease authority: says what it holds, and says it again.

    registrar = LeaseRegistrar("/run/worker/leases.sock")
    async with anyio.create_task_group() as tasks:
        await tasks.start(registrar.run)
        environments = LeasedEnvironments(remote, registrar)

Runs under asyncio and trio. `run` keeps one connection to the authority and, whenever it had to be
made anew, registers everything that is held before anything else is asked: an authority that was
restarted, and forgot all, is told within seconds.

Invariants: a lease is registered, and granted, before its environment is provisioned; an
environment whose lease is refused is destroyed and never handed to the caller. A reply that was
lost is asked for again under the same nonce. Deliberately absent: judging leases (the authority's)
and ending environments of others (the daemon's).
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream, TaskStatus

from sbxd.client import unix
from sbxd.policy.leases import run_key
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec, ExecutionEnvironment
from sbxd.port.errors import ExecutionUnavailable, StaleLease, UnavailableCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.leases import LeaseNonce, LeaseRefusalCode, RunKey
from sbxd.wire import leases as w
from sbxd.wire.connection import Pause
from sbxd.wire.errors import ProtocolError
from sbxd.wire.legality import Sender
from sbxd.wire.messages import Message

ANSWER_SECONDS = 5.0
UNDO_SECONDS = 5.0
PAUSE_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
RECEIVE_BYTES = 16 * 1024


@dataclass(eq=False)
class Lease:
    """One lease that this worker holds. `stale` is set when the authority says that it is."""

    nonce: LeaseNonce
    run: RunKey
    lease_epoch: int
    environment_id: EnvironmentId | None = None
    stale: anyio.Event = field(default_factory=anyio.Event)


class _LinkLost(Exception):
    """The connection ended before the answer."""


class LeaseRegistrar:
    """Holds this worker's leases at one authority. `run` is its task."""

    def __init__(
        self,
        path: str,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        pause_seconds: Sequence[float] = PAUSE_SECONDS,
        new_nonce: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        """pause_seconds: between attempts to connect; the last one is repeated."""
        self._path = path
        self._answer_seconds = answer_seconds
        self._pauses = tuple(pause_seconds)
        self._new_nonce = new_nonce
        self._leases: dict[LeaseNonce, Lease] = {}
        self._link: _Link | None = None
        self._linked = anyio.Event()
        self._turn = anyio.Lock()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the connection until cancelled: then the authority sees it end."""
        task_status.started()
        failures = 0
        while True:
            try:
                stream = await unix.connect(self._path)
            except OSError:
                pass
            else:
                async with stream:
                    if await self._serve(_Link(stream)):
                        failures = 0
            await anyio.sleep(self._pauses[min(failures, len(self._pauses) - 1)])
            failures += 1

    async def register(self, tenant_id: TenantId, run_id: RunId, lease_epoch: int) -> Lease:
        """Take a lease. Raises StaleLease when a higher epoch of the run has been named;
        ExecutionUnavailable(UNREACHABLE, CAPACITY).

        Cancellation: the authority may hold a lease that nothing is bound to, which ends with
        this worker's connection.
        """
        lease = Lease(LeaseNonce(self._new_nonce()), run_key(tenant_id, run_id), lease_epoch)
        await self._ask(_registration(lease))
        self._leases[lease.nonce] = lease
        return lease

    async def bind(self, lease: Lease, environment_id: EnvironmentId) -> None:
        """Name the environment that a lease is for. When the authority cannot be reached it is
        told as soon as it can be. Raises StaleLease."""
        lease.environment_id = environment_id
        try:
            await self._ask(w.Bind(nonce=lease.nonce, environment_id=environment_id))
        except ExecutionUnavailable:
            return

    async def release(self, lease: Lease) -> None:
        """Give a lease up. Idempotent; an authority that cannot be reached learns it by what is
        not registered again."""
        if self._leases.pop(lease.nonce, None) is None:
            return
        try:
            await self._ask(w.Release(nonce=lease.nonce))
        except (ExecutionUnavailable, StaleLease):
            return

    async def fence(self, tenant_id: TenantId, run_id: RunId, lease_epoch: int) -> None:
        """As a supervisor: whoever holds the run under a lower epoch holds it no longer. Raises
        StaleLease, ExecutionUnavailable."""
        await self._ask(w.Fence(run=run_key(tenant_id, run_id), lease_epoch=lease_epoch))

    async def _ask(self, request: Message) -> None:
        with anyio.move_on_after(self._answer_seconds):
            async with self._turn:
                while True:
                    await self._linked.wait()
                    link = self._link
                    if link is None:
                        continue
                    try:
                        reply = await link.ask(request)
                    except _LinkLost:
                        await anyio.lowlevel.checkpoint()
                        continue
                    return _judge(reply)
        raise _unreachable()

    async def _serve(self, link: "_Link") -> bool:
        """Greet, register what is held, then read until the connection ends. Returns whether it
        was of use."""
        served = False
        try:
            with anyio.fail_after(self._answer_seconds):
                await link.greet()
                for lease in list(self._leases.values()):
                    await self._renew(link, lease)
            self._link = link
            self._linked.set()
            served = True
            await link.read()
        except (OSError, TimeoutError, _LinkLost, ProtocolError, anyio.BrokenResourceError):
            pass
        finally:
            link.end()
            if self._link is link:
                self._link = None
                self._linked = anyio.Event()
        return served

    async def _renew(self, link: "_Link", lease: Lease) -> None:
        try:
            _judge(await link.exchange(_registration(lease)))
            if lease.environment_id is not None:
                _judge(
                    await link.exchange(
                        w.Bind(nonce=lease.nonce, environment_id=lease.environment_id)
                    )
                )
        except StaleLease:
            lease.stale.set()
            self._leases.pop(lease.nonce, None)
        except ExecutionUnavailable:
            return  # it has no room: this lease is tried again with the next connection


class _Link:
    """One connection to the authority."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._wire = w.LeaseConnection(Sender.CLIENT)
        self._arrived = anyio.Event()
        self._reply: Message | None = None
        self._scope = anyio.CancelScope()

    async def greet(self) -> None:
        """Raises _LinkLost when the authority does not welcome a holder."""
        reply = await self.exchange(
            w.LeaseHello(protocol_version=w.LEASE_PROTOCOL_VERSION, role=w.LeaseRole.HOLDER)
        )
        if not isinstance(reply, w.LeaseWelcome):
            raise _LinkLost

    async def exchange(self, message: Message) -> Message:
        """Send and receive, while nobody reads."""
        await self._stream.send(self._wire.send(message))
        return await self._receive()

    async def read(self) -> None:
        """Read until the connection ends or is given up. Returns only then."""
        with self._scope:
            while True:
                self._reply = await self._receive()
                self._arrived.set()

    async def ask(self, request: Message) -> Message:
        """Send, and wait for what `read` gets. Raises _LinkLost.

        Cancellation: the connection is given up, since the answer would come unasked.
        """
        self._arrived, self._reply = anyio.Event(), None
        answered = False
        try:
            if self._scope.cancel_called:
                raise _LinkLost
            await self._stream.send(self._wire.send(request))
            await self._arrived.wait()
            reply = self._taken()
            answered = True
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, ProtocolError):
            raise _LinkLost from None
        finally:
            if not answered:
                self._scope.cancel()
        return reply

    def _taken(self) -> Message:
        if self._reply is None:
            raise _LinkLost
        return self._reply

    def end(self) -> None:
        """Nothing will arrive any more."""
        self._scope.cancel()
        self._reply = None
        self._arrived.set()

    async def _receive(self) -> Message:
        while True:
            event = self._wire.next_event()
            if isinstance(event, w.LeaseFarewell) or event is Pause.CLOSED:
                raise _LinkLost
            if isinstance(event, Message):
                return event
            try:
                self._wire.receive_data(await self._stream.receive(RECEIVE_BYTES))
            except anyio.EndOfStream:
                self._wire.receive_data(b"")


class LeasedEnvironments:
    """The ExecutionEnvironment port, with a lease around every environment."""

    def __init__(self, environments: ExecutionEnvironment, registrar: LeaseRegistrar) -> None:
        self._environments = environments
        self._registrar = registrar
        self._leases: dict[EnvironmentId, Lease] = {}

    async def provision(self, specification: EnvironmentSpec) -> EnvironmentHandle:
        """As the port, under a lease. Raises StaleLease also when the authority refuses.

        Cancellation: nothing is left behind, and the lease is given up.
        """
        lease = await self._registrar.register(
            specification.tenant_id, specification.run_id, specification.lease_epoch
        )
        handle = None
        try:
            handle = await self._environments.provision(specification)
            await self._registrar.bind(lease, handle.environment_id)
        except BaseException:
            with anyio.move_on_after(UNDO_SECONDS, shield=True):
                try:
                    if handle is not None:
                        await self._environments.destroy(handle)
                finally:
                    await self._registrar.release(lease)
            raise
        self._leases[handle.environment_id] = lease
        return handle

    async def execute(
        self, environment: EnvironmentHandle, command: ExecutionCommand
    ) -> ExecutionResult:
        """As the port."""
        return await self._environments.execute(environment, command)

    async def destroy(self, environment: EnvironmentHandle) -> None:
        """As the port; the lease is given up once nothing is left."""
        await self._environments.destroy(environment)
        lease = self._leases.pop(environment.environment_id, None)
        if lease is not None:
            await self._registrar.release(lease)

    def lease_of(self, environment: EnvironmentHandle) -> Lease | None:
        """The lease of an environment that was provisioned here and not destroyed."""
        return self._leases.get(environment.environment_id)


def _registration(lease: Lease) -> w.Register:
    return w.Register(nonce=lease.nonce, run=lease.run, lease_epoch=lease.lease_epoch)


def _judge(reply: Message) -> None:
    """Raises StaleLease or ExecutionUnavailable for a refusal."""
    if not isinstance(reply, w.Refused):
        return
    if reply.code is LeaseRefusalCode.CAPACITY:
        raise ExecutionUnavailable(
            UnavailableCode.CAPACITY, "the lease authority holds as many leases as it may"
        )
    raise StaleLease(f"the lease authority does not grant this lease: {reply.code}")


def _unreachable() -> ExecutionUnavailable:
    return ExecutionUnavailable(
        UnavailableCode.UNREACHABLE, "the lease authority of this tier does not answer"
    )
