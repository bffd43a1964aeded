"""The ExecutionEnvironment port over the daemon's Unix socket.

    async with connect("/run/sbxd/worker.sock", client_name="worker-7") as environment:
        handle = await environment.provision(specification)
        result = await environment.execute(handle, command)
        await environment.destroy(handle)

Runs under asyncio and trio. One connection carries many concurrent requests. It is not made anew
when it is lost: every call then raises ExecutionUnavailable(UNREACHABLE), or ServiceShuttingDown
when the daemon said so, and after the daemon's grace period the environments of a lost connection
are destroyed. `connect` waits for a daemon that is being restarted: the service manager holds the
socket and queues. So whoever is told ServiceShuttingDown leaves the block and enters it again.

Deliberately absent: retries of requests, subprocesses, anything that starts a sandbox here.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import anyio
from anyio.abc import ByteStream, TaskGroup

from sbxd.client import unix
from sbxd.client.bridge import APPROVAL_HOLD_SECONDS, BridgeHandler, ServedBridge
from sbxd.client.channel import Call, Channel, chunks_of
from sbxd.client.replies import error_of, execution_result, file_changes
from sbxd.policy.command import validate_command
from sbxd.policy.timeouts import RUN_FLOOR_SECONDS, effective_timeout
from sbxd.port.command import ExecutionCommand, ExecutionResult, FileChange
from sbxd.port.egress import EgressPolicy
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import ExecutionUnavailable, ServiceShuttingDown, UnavailableCode
from sbxd.wire import messages as m
from sbxd.wire.connection import ClientConnection
from sbxd.wire.legality import ALL_TERMINAL, Role

CANCEL_WAIT_SECONDS = 2
# A restart takes the grace of running commands, the end of everything, and a start.
CONNECT_SECONDS = 60.0
# Of connections that a daemon took in its last moments and gave up before their greeting.
GREETINGS_MAX = 3
# How long a connection outlives the cancellation of the block that uses it, at most.
LINGER_SECONDS = 30

OutputHook = Callable[[m.OutputStream, bytes], Awaitable[None]]
CancelledHook = Callable[[ExecutionResult], None]


@dataclass(frozen=True)
class RunDeadline:
    """When the run of a caller ends, by a clock of the caller's.

    at: in the seconds of `clock`. floor_seconds: with less than this left no command is sent.
    """

    clock: Callable[[], float]
    at: float
    floor_seconds: float = RUN_FLOOR_SECONDS

    def remaining_seconds(self) -> float:
        return self.at - self.clock()


@dataclass(frozen=True)
class Hooks:
    """What a caller wants to be told besides results.

    on_output: awaited with each piece of output while a command runs; being slow holds the
    command back through its pipes. on_cancelled: called, synchronously, with the result of a
    command whose `execute` was cancelled, before the cancellation goes on. bridge: answers the
    frames that programs send over the environment's bridge (`sbxd.client.bridge`); with it every
    `execute` is with the bridge, and is refused where the specification has none.
    approval_hold_seconds: the longest that one answer may take.
    """

    on_output: OutputHook | None = None
    on_cancelled: CancelledHook | None = None
    bridge: BridgeHandler | None = None
    approval_hold_seconds: float = APPROVAL_HOLD_SECONDS


@dataclass(frozen=True)
class RemoteExecutionEnvironment:
    """Implements `sbxd.port.environment.ExecutionEnvironment` over a channel.

    Made by `connect`. `with_run_deadline` and `with_hooks` give a view of the same connection.
    """

    channel: Channel
    run_deadline: RunDeadline | None = None
    hooks: Hooks = Hooks()

    def with_run_deadline(self, run_deadline: RunDeadline | None) -> "RemoteExecutionEnvironment":
        """The same connection, for a run that ends then."""
        return replace(self, run_deadline=run_deadline)

    def with_hooks(self, hooks: Hooks) -> "RemoteExecutionEnvironment":
        """The same connection, with other hooks."""
        return replace(self, hooks=hooks)

    @property
    def mechanism(self) -> str:
        """What the daemon runs sandboxes with, as its greeting says."""
        return "" if self.channel.welcome is None else self.channel.welcome.mechanism

    async def provision(self, specification: EnvironmentSpec) -> EnvironmentHandle:
        """As the port. Cancellation: the daemon is told; an environment that was made all the
        same is destroyed."""
        call = await self.channel.start(
            lambda request_id: m.Provision(request_id=request_id, specification=specification)
        )
        finished = False
        try:
            reply = await call.receive()
            finished = True
        finally:
            if not finished:
                await self._give_up_provision(call)
        if isinstance(reply, m.Provisioned):
            return reply.handle
        raise _failure(reply)

    async def execute(
        self, environment: EnvironmentHandle, command: ExecutionCommand
    ) -> ExecutionResult:
        """As the port. The run's deadline lowers `timeout_seconds`.

        Raises: RunBudgetTooLow without a call, besides the errors of the port; what the handler
        of the bridge raises, and BridgeHoldExceeded, once the command has been cancelled.

        Cancellation: the daemon is told, its result is awaited for at most 2 s under a shield and
        given to `on_cancelled`; then the cancellation goes on.
        """
        line = validate_command(command)
        stdin = command.stdin or b""
        wire_command = m.WireCommand(
            argv=line.argv,
            working_directory=line.working_directory,
            timeout_seconds=self._timeout_seconds(command),
            maximum_output_bytes=command.maximum_output_bytes,
            network_enabled=command.network_enabled,
        )
        call = await self.channel.start(
            lambda request_id: m.Execute(
                request_id=request_id,
                handle=environment,
                command=wire_command,
                stdin_bytes=len(stdin),
                bridge=self.hooks.bridge is not None,
            )
        )
        gathered = _Gathered(self.hooks.on_output)
        try:
            await call.upload(chunks_of(stdin))
            if self.hooks.bridge is None:
                await gathered.collect(call)
            else:
                gathered.bridge = bridge = ServedBridge(
                    call,
                    self.hooks.bridge,
                    approval_hold_seconds=self.hooks.approval_hold_seconds,
                )
                await bridge.beside(partial(gathered.collect, call))
        finally:
            if gathered.reply is None:
                await self._give_up_execute(call, gathered)
        return gathered.result()

    async def network_grant(self) -> EgressPolicy:
        """What `network_enabled` grants: the destinations that the operator configured, for an
        approval prompt to show, and for `EnvironmentSpec.egress`. `deny` when there are none."""
        call = await self.channel.start(
            lambda request_id: m.NetworkGrantQuery(request_id=request_id)
        )
        try:
            reply = await call.receive()
        finally:
            self.channel.abandon(call, then=_ignore)
        if isinstance(reply, m.NetworkGrantIs):
            return reply.policy
        raise _failure(reply)

    async def destroy(self, environment: EnvironmentHandle) -> None:
        """As the port. Cancellation: the daemon destroys it all the same."""
        call = await self.channel.start(
            lambda request_id: m.Destroy(request_id=request_id, handle=environment)
        )
        try:
            reply = await call.receive()
        finally:
            self.channel.abandon(call, then=_ignore)
        error = error_of(reply)
        if error is not None:
            raise error

    def _timeout_seconds(self, command: ExecutionCommand) -> int:
        if self.run_deadline is None:
            return command.timeout_seconds
        effective = effective_timeout(
            hard_cap_seconds=command.timeout_seconds,
            wall_clock_seconds=command.timeout_seconds,
            command_timeout_seconds=command.timeout_seconds,
            remaining_run_budget_seconds=self.run_deadline.remaining_seconds(),
            run_floor_seconds=self.run_deadline.floor_seconds,
        )
        return max(1, int(effective.seconds))

    async def _give_up_execute(self, call: Call, gathered: "_Gathered") -> None:
        call.cancel()
        gathered.on_output = gathered.bridge = None
        try:
            with anyio.move_on_after(CANCEL_WAIT_SECONDS, shield=True):
                await gathered.collect(call)
        except ExecutionUnavailable:
            return  # the connection is lost, and the daemon cancels what it carried
        if gathered.reply is None:
            self.channel.abandon(call, then=_ignore)
        elif self.hooks.on_cancelled is not None and isinstance(gathered.reply, m.Executed):
            self.hooks.on_cancelled(gathered.result())

    async def _give_up_provision(self, call: Call) -> None:
        call.cancel()
        reply = None
        try:
            with anyio.move_on_after(CANCEL_WAIT_SECONDS, shield=True):
                reply = await call.receive()
                if isinstance(reply, m.Provisioned):
                    await self.destroy(reply.handle)
        except ExecutionUnavailable:
            return  # the connection is lost, and the daemon destroys what nobody holds
        if reply is None:
            self.channel.abandon(call, then=self._destroy_late)

    def _destroy_late(self, reply: m.Message) -> None:
        if isinstance(reply, m.Provisioned):
            handle = reply.handle
            call = self.channel.start_nowait(
                lambda request_id: m.Destroy(request_id=request_id, handle=handle)
            )
            self.channel.abandon(call, then=_ignore)


class _Gathered:
    """What has arrived of one command: survives a cancelled wait, so nothing is lost."""

    def __init__(self, on_output: OutputHook | None) -> None:
        self.on_output = on_output
        self.bridge: ServedBridge | None = None
        self.reply: m.Message | None = None
        self._streams: dict[m.OutputStream, list[bytes]] = {s: [] for s in m.OutputStream}
        self._changes: list[FileChange] = []

    async def collect(self, call: Call) -> None:
        while self.reply is None:
            message = await call.receive()
            if isinstance(message, m.Output):
                self._streams[message.stream].append(message.data)
                if self.on_output is not None:
                    await self.on_output(message.stream, message.data)
            elif isinstance(message, m.Entries):
                self._changes += file_changes(message.entries)
            elif isinstance(message, m.BridgeOpened | m.BridgeFrame | m.BridgeClosed):
                if self.bridge is not None:
                    self.bridge.take(message)
            elif type(message) in ALL_TERMINAL:
                self.reply = message

    def result(self) -> ExecutionResult:
        if not isinstance(self.reply, m.Executed):
            raise _failure(self.reply)
        return execution_result(
            self.reply,
            stdout=b"".join(self._streams[m.OutputStream.STDOUT]),
            stderr=b"".join(self._streams[m.OutputStream.STDERR]),
            files_changed=self._changes,
        )


class _Session:
    """Holds the channel's task while the caller's block runs.

    A context manager of its own, and not `async with` on the task group, so that the caller's
    exceptions leave the block as they are and not in an ExceptionGroup.
    """

    def __init__(
        self, stream: ByteStream, role: Role, hello: m.Hello, connect_seconds: float
    ) -> None:
        self._stream = stream
        self._hello = hello
        self._connect_seconds = connect_seconds
        self._channel = Channel(stream, ClientConnection(role=role))
        self._group: TaskGroup = anyio.create_task_group()
        self._running = anyio.CancelScope(deadline=math.inf, shield=True)

    async def __aenter__(self) -> Channel:
        entered = False
        try:
            with anyio.move_on_after(self._connect_seconds) as scope:
                await self._channel.greet(self._hello)
            if scope.cancelled_caught:
                raise ExecutionUnavailable(
                    UnavailableCode.UNREACHABLE, "the daemon did not answer the greeting in time"
                )
            await self._group.__aenter__()
            entered = True
        finally:
            if not entered:
                await anyio.aclose_forcefully(self._stream)
        self._group.start_soon(self._run)
        self._group.start_soon(self._bound)
        return self._channel

    async def _run(self) -> None:
        """Shielded: a block that is cancelled has its connection while it cleans up (a destroy, a
        cancelled command's result). `_bound` limits that."""
        with self._running:
            await self._channel.run()

    async def _bound(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self._running.deadline = anyio.current_time() + LINGER_SECONDS

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._running.cancel()
        self._group.cancel_scope.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            await anyio.aclose_forcefully(self._stream)


@asynccontextmanager
async def channel_over(
    stream: ByteStream,
    *,
    role: Role,
    client_name: str,
    credential: bytes | None = None,
    connect_seconds: float = CONNECT_SECONDS,
) -> AsyncIterator[Channel]:
    """Greet over a connected stream, and keep the channel running while the block runs.

    The stream is closed when the block ends, or when the greeting fails.

    Raises: ExecutionUnavailable(UNREACHABLE, CAPACITY), ServiceShuttingDown;
    ExecutionRejected(NOT_AUTHORIZED).
    """
    hello = m.Hello(protocol_version=m.PROTOCOL_VERSION, client=client_name, credential=credential)
    async with _Session(stream, role, hello, connect_seconds) as channel:
        yield channel


@asynccontextmanager
async def open_channel(
    path: str, *, role: Role, client_name: str, credential: bytes | None, connect_seconds: float
) -> AsyncIterator[Channel]:
    """Connect to a Unix socket; then as `channel_over`. A daemon that takes the connection and is
    stopped before the greeting has been asked nothing: then the next one is waited for."""
    ends_at = anyio.current_time() + connect_seconds

    async def greeted() -> Channel:
        return await connection.enter_async_context(
            channel_over(
                await _connected(path),
                role=role,
                client_name=client_name,
                credential=credential,
                connect_seconds=ends_at - anyio.current_time(),
            )
        )

    async with AsyncExitStack() as connection:
        for _ in range(GREETINGS_MAX - 1):
            with suppress(ServiceShuttingDown):
                channel = await greeted()
                break
        else:
            channel = await greeted()
        yield channel


async def _connected(path: str) -> ByteStream:
    try:
        return await unix.connect(path)
    except OSError as error:
        raise ExecutionUnavailable(
            UnavailableCode.UNREACHABLE,
            f"cannot connect to the daemon's socket: {error.strerror or type(error).__name__}",
        ) from None


@asynccontextmanager
async def connect(
    path: str,
    *,
    credential: bytes | None = None,
    client_name: str = "sbxd.client",
    run_deadline: RunDeadline | None = None,
    hooks: Hooks | None = None,
    connect_seconds: float = CONNECT_SECONDS,
) -> AsyncIterator[RemoteExecutionEnvironment]:
    """Connect to a daemon's worker socket.

    Args:
        path: of the socket. credential: the service credential where auth_mode is token.
        client_name: at most 128 characters, for the daemon's log.
        run_deadline, hooks: see RunDeadline and Hooks.
        connect_seconds: how long a daemon may take to greet; one that is being restarted is waited
        for as long.

    Raises: ExecutionUnavailable(UNREACHABLE, CAPACITY), ServiceShuttingDown;
    ExecutionRejected(NOT_AUTHORIZED).

    Cancellation: the connection is closed; the daemon cancels what runs on it.
    """
    async with open_channel(
        path,
        role=Role.WORKER,
        client_name=client_name,
        credential=credential,
        connect_seconds=connect_seconds,
    ) as channel:
        yield RemoteExecutionEnvironment(channel, run_deadline, hooks or Hooks())


def _failure(reply: m.Message | None) -> Exception:
    error = None if reply is None else error_of(reply)
    if error is not None:
        return error
    return ExecutionUnavailable(
        UnavailableCode.UNREACHABLE, f"unexpected reply {type(reply).__name__}"
    )


def _ignore(reply: m.Message) -> None:
    """The terminal reply of a call that nobody waits for."""
