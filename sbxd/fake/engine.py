"""The rules of the execution contract over dictionaries: what both fakes share.

Executes nothing. Admission, path rules, environment building and timeouts are the real ones of
`sbxd.policy`. Times come from the running event loop (asyncio or trio, so a mock clock governs
them) and from the wall clock that is passed in. Deliberately absent: who may call (the daemon's
adapter), sockets, processes.
"""

import secrets
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

import anyio
import msgspec

from sbxd.fake.bridge import BridgePeer, talk
from sbxd.fake.files import FakeWorkspace, Snapshot
from sbxd.fake.script import Invocation, Outcome, Script
from sbxd.policy import child_environment
from sbxd.policy.admission import admit
from sbxd.policy.bridge import no_bridge, turn_is_over
from sbxd.policy.budgets import Account, Budget, effective_budgets, overrun
from sbxd.policy.capacity import Held, Room, retry_after_seconds
from sbxd.policy.command import no_such_program, validate_command
from sbxd.policy.containment import relative_bytes, resolve
from sbxd.policy.timeouts import effective_timeout
from sbxd.port.command import (
    Evidence,
    ExecutionCommand,
    ExecutionResult,
    KillReason,
    Usage,
    fitting_changes,
)
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import (
    EscapeCode,
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    SandboxEscapeSuspected,
    StaleLease,
    UnavailableCode,
    WorkspaceError,
)
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.settings import AuthMode, DeploymentMode, SandboxMechanism, Settings
from sbxd.wire.messages import OutputStream

OUTPUT_PIECE_BYTES = 64 * 1024
OVER_BUDGET_KEPT = 4096

FAKE_SETTINGS = Settings(
    deployment_mode=DeploymentMode.DEVELOPMENT,
    auth_mode=AuthMode.DEV,
    sandbox=SandboxMechanism.FAKE,
)

OutputSink = Callable[[OutputStream, bytes], Awaitable[None]]
WallClock = Callable[[], datetime]


class Stop(StrEnum):
    """Why a running command is ended from outside."""

    CANCELLED = "CANCELLED"
    DESTROYED = "DESTROYED"


@dataclass
class Record:
    """One live fake environment."""

    handle: EnvironmentHandle
    specification: EnvironmentSpec
    workspace: FakeWorkspace
    account: Account
    owner_uid: int
    connection_id: int
    running: tuple[str, ...] | None = None
    commands_run: int = 0
    cancelled_result: ExecutionResult | None = None
    stop: Stop | None = None
    stopped: anyio.Event = field(default_factory=anyio.Event)
    talking: anyio.CancelScope | None = None
    turn_is_over: bool = False

    def end_command(self, stop: Stop) -> None:
        """End the running command. The first reason wins."""
        if self.stop is None:
            self.stop = stop
            self.stopped.set()
            if self.talking is not None:
                self.talking.cancel()


class AnyDigest:
    """An image store that holds every image."""

    def __contains__(self, digest: object) -> bool:
        return True


def utc_now() -> datetime:
    return datetime.now(UTC)


class FakeEngine:
    """All fake environments of one process."""

    def __init__(
        self,
        script: Script,
        *,
        settings: Settings = FAKE_SETTINGS,
        known_digests: Container[str] | None = None,
        wall_clock: WallClock = utc_now,
    ) -> None:
        """known_digests: what admission accepts as an image; None for every digest."""
        self._script = script
        self._settings = settings
        self._known_digests: Container[str] = (
            AnyDigest() if known_digests is None else known_digests
        )
        self._wall_clock = wall_clock
        self._records: dict[EnvironmentId, Record] = {}
        self._over_budget: dict[EnvironmentId, tuple[TenantId, Budget]] = {}
        self._epochs: dict[tuple[int, TenantId, RunId], int] = {}

    def records(self) -> tuple[Record, ...]:
        """Live environments, oldest first."""
        for record in tuple(self._records.values()):
            if self._wall_clock() >= record.handle.expires_at and record.running is None:
                self.expire(record)
        return tuple(self._records.values())

    def get(self, environment_id: EnvironmentId) -> Record | None:
        """A live environment by its id."""
        return next((r for r in self.records() if r.handle.environment_id == environment_id), None)

    def find(self, handle: EnvironmentHandle) -> Record:
        """The environment that a handle names.

        Raises: ExecutionRejected(ENVIRONMENT_GONE), StaleLease, BudgetExhausted, and
        SandboxEscapeSuspected(TENANT_MISMATCH) after destroying the environment.
        """
        record = self.get(handle.environment_id)
        if record is None:
            self.refuse_over_budget(handle)
            raise gone()
        if record.handle.tenant_id != handle.tenant_id:
            self.remove(record)
            raise SandboxEscapeSuspected(
                EscapeCode.TENANT_MISMATCH, "the handle's tenant is not the environment's"
            )
        if (record.handle.run_id, record.handle.lease_epoch) != (
            handle.run_id,
            handle.lease_epoch,
        ):
            raise StaleLease("the handle's run or lease epoch is not the environment's")
        return record

    def refuse_over_budget(self, handle: EnvironmentHandle) -> None:
        """Raises BudgetExhausted for a handle whose environment overran a budget."""
        tenant_id, budget = self._over_budget.get(handle.environment_id, (None, None))
        if budget is not None and tenant_id == handle.tenant_id:
            raise overrun(budget)

    def attempt(self, record: Record) -> None:
        """Charge one operation, also one that is then denied. Raises BudgetExhausted."""
        try:
            record.account.charge_operation()
        finally:
            self.enforce_budgets(record)

    def enforce_budgets(self, record: Record) -> None:
        """End an environment that overran a budget; its handle is told so from now on."""
        if record.account.exhausted is not None:
            handle = record.handle
            self._over_budget[handle.environment_id] = (handle.tenant_id, record.account.exhausted)
            while len(self._over_budget) > OVER_BUDGET_KEPT:
                del self._over_budget[next(iter(self._over_budget))]
            self.remove(record)

    def expire(self, record: Record) -> None:
        """Its time is up."""
        lifetime_seconds = self._settings.limits.environment_lifetime_seconds
        if record.account.budgets.wall_seconds_max < lifetime_seconds:
            record.account.time_is_up()
        self.enforce_budgets(record)
        self.remove(record)

    def read(self, record: Record, path: bytes) -> bytes:
        """The content of one file. Raises WorkspaceError, BudgetExhausted."""
        content = record.workspace.read(path)
        try:
            if record.account.grant_returned(len(content)) < len(content):
                record.account.check()
        finally:
            self.enforce_budgets(record)
        return content

    def write(self, record: Record, path: bytes, content: bytes) -> None:
        """Put one file in place, as the worker's. Raises WorkspaceError."""
        record.account.meter_written(len(content))
        record.workspace.write(path, content, WorkspaceProvenance.TOOL_WRITTEN)

    def provision(
        self, specification: EnvironmentSpec, *, owner_uid: int = 0, connection_id: int = 0
    ) -> EnvironmentHandle:
        """Admit and make an environment; environments of older leases of the run are destroyed.

        Raises: ExecutionRejected, StaleLease, ExecutionUnavailable(CAPACITY).
        """
        try:
            specification = msgspec.convert(msgspec.to_builtins(specification), EnvironmentSpec)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise ExecutionRejected(RejectedCode.PROTOCOL, str(error)) from None
        admit(specification, self._settings, self._known_digests)
        run = (owner_uid, specification.tenant_id, specification.run_id)
        if specification.lease_epoch < self._epochs.get(run, 0):
            raise StaleLease("a higher lease epoch of this run was seen")
        for record in self.records():
            theirs = (record.owner_uid, record.handle.tenant_id, record.handle.run_id)
            if theirs == run and record.handle.lease_epoch < specification.lease_epoch:
                self.remove(record)
        self._require_room(Held(owner_uid, specification.limits.memory_bytes))
        self._epochs[run] = specification.lease_epoch
        created_at = self._wall_clock()
        budgets = effective_budgets(specification.budgets, self._settings.limits.budgets)
        lifetime_seconds = min(
            self._settings.limits.environment_lifetime_seconds, budgets.wall_seconds_max
        )
        handle = EnvironmentHandle(
            environment_id=EnvironmentId(secrets.token_hex(16)),
            tenant_id=specification.tenant_id,
            run_id=specification.run_id,
            lease_epoch=specification.lease_epoch,
            created_at=created_at,
            expires_at=created_at + timedelta(seconds=lifetime_seconds),
        )
        self._records[handle.environment_id] = Record(
            handle=handle,
            specification=specification,
            workspace=FakeWorkspace(
                bytes_max=specification.limits.workspace_bytes,
                inodes_max=specification.limits.inodes_max,
            ),
            account=Account(budgets),
            owner_uid=owner_uid,
            connection_id=connection_id,
        )
        return handle

    def _require_room(self, wanted: Held) -> None:
        records = self.records()
        held = [Held(each.owner_uid, each.specification.limits.memory_bytes) for each in records]
        room = Room(self._settings, held)
        if not room.has(wanted):
            now = self._wall_clock()
            ends = [(each.handle.expires_at - now).total_seconds() for each in records]
            raise ExecutionUnavailable(
                UnavailableCode.CAPACITY,
                room.describe(wanted),
                retry_after_seconds=retry_after_seconds(min(ends, default=0.0)),
            )

    def remove(self, record: Record) -> None:
        """Destroy an environment, and end the command that runs in it. Idempotent."""
        self._records.pop(record.handle.environment_id, None)
        record.end_command(Stop.DESTROYED)

    async def execute(
        self,
        record: Record,
        command: ExecutionCommand,
        *,
        on_output: OutputSink | None = None,
        bridge: BridgePeer | None = None,
    ) -> ExecutionResult:
        """Play the script's answer to a command.

        on_output: takes the output besides the result. bridge: the worker's end of the turn.

        Raises: ExecutionRejected(INVALID_COMMAND, ENVIRONMENT_BUSY, COMMAND_NOT_FOUND,
        WORKING_DIRECTORY_NOT_FOUND, BRIDGE_REFUSED).

        Cancellation: the environment is free for the next command; `cancelled_result` of the
        record holds what the command's result was by then.
        """
        line = validate_command(command)
        if bridge is not None and record.specification.bridge is None:
            raise no_bridge()
        if bridge is not None and record.turn_is_over:
            raise turn_is_over()
        if record.running is not None:
            raise ExecutionRejected(
                RejectedCode.ENVIRONMENT_BUSY, "a command runs in this environment already"
            )
        directory = relative_bytes(command.working_directory)
        if not record.workspace.is_directory(directory):
            raise ExecutionRejected(
                RejectedCode.WORKING_DIRECTORY_NOT_FOUND,
                "no such directory in the workspace",
                field="working_directory",
            )
        argv = tuple(argument.decode("utf-8", "surrogateescape") for argument in line.argv)
        absolute = resolve(command.working_directory)
        outcome = self._script.answer(
            Invocation(
                argv=argv,
                stdin=command.stdin or b"",
                environment=child_environment.build(
                    record.specification.environment,
                    self._settings.process_environment.operator_names,
                    working_directory=absolute,
                    bridge=None if bridge is None else record.specification.bridge,
                ),
                working_directory=str(absolute),
                files=record.workspace.files(),
            )
        )
        if outcome is None:
            raise ExecutionRejected(
                RejectedCode.COMMAND_NOT_FOUND, no_such_program(argv), field="argv[0]"
            )
        record.running = argv
        record.cancelled_result = None
        record.stop, record.stopped = None, anyio.Event()
        try:
            return await self._play(record, command, outcome, on_output, bridge)
        finally:
            record.running = None
            record.turn_is_over = record.turn_is_over or bridge is not None
            record.commands_run += 1
            self.enforce_budgets(record)

    async def _play(
        self,
        record: Record,
        command: ExecutionCommand,
        outcome: Outcome,
        on_output: OutputSink | None,
        bridge: BridgePeer | None,
    ) -> ExecutionResult:
        started = anyio.current_time()
        before = record.workspace.snapshot()
        maximum = command.maximum_output_bytes
        stdout, stderr, truncated = b"", b"", (False, False)
        timeout = effective_timeout(
            hard_cap_seconds=self._settings.limits.command_hard_cap_seconds,
            wall_clock_seconds=record.specification.limits.wall_clock_seconds,
            command_timeout_seconds=command.timeout_seconds,
        ).seconds

        def result(killed_by: KillReason | None) -> ExecutionResult:
            return self._result(
                record,
                outcome,
                killed_by=killed_by,
                before=before,
                output=(stdout, stderr),
                truncated=truncated,
                duration_ms=round((anyio.current_time() - started) * 1000),
                effective_timeout_ms=round(timeout * 1000),
            )

        lifetime = (record.handle.expires_at - self._wall_clock()).total_seconds()
        record.cancelled_result = result(KillReason.CANCELLED)
        outcome, killed_by = await _talk(record, outcome, bridge, timeout, lifetime)
        stdout, stderr = outcome.stdout[:maximum], outcome.stderr[:maximum]
        stdout = stdout[: record.account.grant_returned(len(stdout))]
        stderr = stderr[: record.account.grant_returned(len(stderr))]
        truncated = (len(outcome.stdout) > len(stdout), len(outcome.stderr) > len(stderr))
        if on_output is not None:
            await _deliver(on_output, OutputStream.STDOUT, stdout)
            await _deliver(on_output, OutputStream.STDERR, stderr)
        if killed_by is not None:
            record.cancelled_result = result(killed_by)
        elif any(truncated):
            killed_by = KillReason.OUTPUT_LIMIT
        elif not _apply(record.workspace, outcome):
            killed_by = KillReason.DISK
        else:
            killed_by = KillReason.CANCELLED
            try:
                killed_by = await _sleep(record, outcome, timeout, lifetime) or outcome.killed_by
            finally:
                record.cancelled_result = result(killed_by)
        if killed_by is KillReason.EXPIRED:
            self.expire(record)
        return result(killed_by)

    def _result(
        self,
        record: Record,
        outcome: Outcome,
        *,
        killed_by: KillReason | None,
        before: Snapshot,
        output: tuple[bytes, bytes],
        truncated: tuple[bool, bool],
        duration_ms: int,
        effective_timeout_ms: int,
    ) -> ExecutionResult:
        own_end = killed_by is None
        exit_code = outcome.exit_code if outcome.signal is None else 128 + outcome.signal
        changes = record.workspace.changes_since(before)
        listed, left_out = fitting_changes(changes, self._settings.limits.files_changed_max)
        return ExecutionResult(
            exit_code=exit_code if own_end else None,
            stdout=output[0],
            stderr=output[1],
            stdout_truncated=truncated[0],
            stderr_truncated=truncated[1],
            timed_out=killed_by is KillReason.TIMEOUT,
            killed_by=killed_by,
            files_changed=listed,
            duration_ms=duration_ms,
            signal=outcome.signal if own_end else None,
            files_changed_truncated=left_out,
            evidence=Evidence(
                oom_kill=int(killed_by is KillReason.MEMORY),
                effective_timeout_ms=effective_timeout_ms,
                workspace_bytes_left=record.workspace.bytes_left,
                workspace_inodes_left=record.workspace.inodes_left,
            ),
            usage=Usage(
                workspace_bytes=record.workspace.bytes_used,
                workspace_inodes=record.workspace.inodes_used,
                workspace_bytes_peak=record.workspace.bytes_used,
            ),
        )


def gone() -> ExecutionRejected:
    """What is said of an environment that is gone, never was, or is another peer's."""
    return ExecutionRejected(RejectedCode.ENVIRONMENT_GONE, "no such environment")


async def _deliver(sink: OutputSink, stream: OutputStream, data: bytes) -> None:
    for start in range(0, len(data), OUTPUT_PIECE_BYTES):
        await sink(stream, data[start : start + OUTPUT_PIECE_BYTES])


async def _talk(
    record: Record, outcome: Outcome, bridge: BridgePeer | None, timeout: float, lifetime: float
) -> tuple[Outcome, KillReason | None]:
    """Say what the outcome has for the bridge: it with the replies, and what ended it early."""
    if not outcome.bridge:
        return outcome, None
    if bridge is None:
        refused = b"the bridge refuses the connection\n"
        return msgspec.structs.replace(outcome, stderr=refused, exit_code=1), None
    with anyio.move_on_after(max(0.0, min(timeout, lifetime))) as record.talking:
        spoken = await talk(outcome.bridge, bridge, record.account)
        record.talking = None
        stdout = outcome.stdout + b"".join(spoken.replies)
        killed_by = KillReason.OUTPUT_LIMIT if spoken.over_budget else None
        return msgspec.structs.replace(outcome, stdout=stdout), killed_by
    record.talking = None
    if record.stop is not None:
        return outcome, KillReason.CANCELLED
    return outcome, KillReason.TIMEOUT if timeout <= lifetime else KillReason.EXPIRED


def _apply(workspace: FakeWorkspace, outcome: Outcome) -> bool:
    """Change the files; False when the volume is full."""
    try:
        for path, content in outcome.writes.items():
            workspace.write(relative_bytes(path), content, WorkspaceProvenance.SANDBOX_WRITTEN)
    except WorkspaceError:
        return False
    for path in outcome.deletes:
        workspace.delete(relative_bytes(path))
    return True


async def _sleep(
    record: Record, outcome: Outcome, timeout: float, lifetime: float
) -> KillReason | None:
    """Sleep as the outcome says, until the first of: its end, a stop, a deadline."""
    with anyio.move_on_after(max(0.0, min(outcome.sleep_seconds, timeout, lifetime))):
        await record.stopped.wait()
    if record.stop is not None:
        return KillReason.CANCELLED
    if outcome.sleep_seconds <= min(timeout, lifetime):
        return None
    return KillReason.TIMEOUT if timeout <= lifetime else KillReason.EXPIRED
