"""One run's hold on one environment: made when it is first needed, gone on every way out.

    async with RunScope(environment, specification, workspace_of, deadline=deadline) as scope:
        result = await scope.execute(command)

Runs under asyncio and trio. A worker makes one scope for each claim on a run. Where its tier has a
lease authority, the environment that is handed in is the one that registers
(`ExecutionEnvironment` wrapped by the registrar), so that no environment is made without a lease.

Invariants: a scope that ran nothing and wrote nothing has provisioned nothing; at most one
environment lives at a time; less of the run's budget than the floor, and no call is made; a halt
(budget, lease, suspected escape) is not got around by provisioning again. Deliberately absent:
retries, and judging leases.
"""

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar, final

import anyio
import msgspec

from sbxd.client.bridge import BridgeHoldExceeded
from sbxd.client.remote import RemoteExecutionEnvironment, RunDeadline
from sbxd.client.workspace import RemoteWorkspace
from sbxd.policy.timeouts import effective_timeout
from sbxd.port.command import ExecutionCommand, ExecutionResult, KillReason
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec, ExecutionEnvironment
from sbxd.port.errors import (
    BudgetExhausted,
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
    SandboxEscapeSuspected,
    StaleLease,
    UnavailableCode,
)
from sbxd.port.workspace import StreamingWorkspace

APPROVAL_HOLD_SECONDS = 300.0
DESTROY_SECONDS = 10.0

WorkspaceOf = Callable[[EnvironmentHandle], StreamingWorkspace]
ResultT = TypeVar("ResultT")

_LOG = logging.getLogger("sbxd.client")
# The last two: it ends with its owner's connection.
_GONE = frozenset(
    {
        RejectedCode.ENVIRONMENT_GONE,
        UnavailableCode.ENVIRONMENT_LOST,
        UnavailableCode.SHUTTING_DOWN,
        UnavailableCode.UNREACHABLE,
    }
)


class ScopeEnded(Exception):
    """The block has ended, or the run was suspended in it: nothing more is done here."""


class HoldExceeded(Exception):
    """The approval did not come within the hold: the environment is destroyed and the run is to
    be suspended. What resumes it begins with an empty workspace."""


def remote_workspaces(environment: RemoteExecutionEnvironment) -> WorkspaceOf:
    """The workspaces of environments behind a daemon's socket."""
    return lambda handle: RemoteWorkspace(environment.channel, handle)


@final
class RunScope:
    """An async context manager. Its methods are called within the block, by any task of it."""

    def __init__(
        self,
        environments: ExecutionEnvironment,
        specification: EnvironmentSpec,
        workspace_of: WorkspaceOf,
        *,
        deadline: RunDeadline | None = None,
        hold_seconds: float = APPROVAL_HOLD_SECONDS,
        destroy_seconds: float = DESTROY_SECONDS,
    ) -> None:
        """deadline: the run's; None where it has none. hold_seconds: the longest that `hold` keeps
        the environment, at most 300. destroy_seconds: how long leaving the block may wait for the
        daemon, also when it is cancelled."""
        if not 0 < hold_seconds <= APPROVAL_HOLD_SECONDS:
            raise ValueError(f"hold_seconds is above 0 and at most {APPROVAL_HOLD_SECONDS:.0f}")
        self._environments = environments
        self._specification = specification
        self._workspace_of = workspace_of
        self._deadline = deadline
        self._hold_seconds = hold_seconds
        self._destroy_seconds = destroy_seconds
        self._provisioning = anyio.Lock()
        self._handle: EnvironmentHandle | None = None
        self._asked_at = 0.0
        self._halt: PortError | None = None
        self._entered = False

    async def __aenter__(self) -> "RunScope":
        self._entered = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered = False
        await self._discard()

    @property
    def specification(self) -> EnvironmentSpec:
        return self._specification

    @property
    def handle(self) -> EnvironmentHandle | None:
        """The environment that lives now; None before the first call and after its end."""
        return self._handle

    async def execute(self, command: ExecutionCommand) -> ExecutionResult:
        """Run one command, in an environment that is made when there is none.

        The run's deadline lowers `timeout_seconds`; it is looked at before the environment is
        made and again after.

        Raises: RunBudgetTooLow with no call made; ScopeEnded; HoldExceeded, with the environment
        destroyed and the scope ended, when a bridge's handler held a call for longer than its
        `approval_hold_seconds` (S1: released and suspended); the errors of the port. After one
        that says that the environment is gone the next call makes another, with an empty
        workspace; after BudgetExhausted, StaleLease and SandboxEscapeSuspected every call raises
        it again.

        Cancellation: as the port's `execute`; the environment lives until the block ends.
        """
        self._fold(command)
        handle = await self.environment()
        try:
            result = await self._environments.execute(handle, self._fold(command))
        except PortError as error:
            await self._judge(error)
            raise
        except BridgeHoldExceeded as error:
            await self.suspend()
            raise HoldExceeded(f"a call over the bridge: {error}") from error
        if result.killed_by is KillReason.EXPIRED:
            await self._discard()
        return result

    async def workspace(self) -> StreamingWorkspace:
        """The files of the environment, which is made when there is none."""
        return self._workspace_of(await self.environment())

    def existing_workspace(self) -> StreamingWorkspace | None:
        """The files of the environment that lives now; None when nothing was provisioned, and so
        nothing can be there."""
        self._check()
        return None if self._handle is None else self._workspace_of(self._handle)

    async def environment(self) -> EnvironmentHandle:
        """The handle of the environment, provisioned when there is none.

        Cancellation: nothing is left behind (as the port).
        """
        self._check()
        async with self._provisioning:
            self._check()
            if self._handle is None:
                asked_at = anyio.current_time()
                try:
                    self._handle = await self._environments.provision(self._specification)
                except PortError as error:
                    await self._judge(error)
                    raise
                self._asked_at = asked_at
                if not self._entered:
                    await self._discard()
                    self._check()
            return self._handle

    async def forget_if_gone(self, error: PortError) -> None:
        """Tell the scope what a workspace of it raised."""
        await self._judge(error)

    async def hold(self, approval: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Wait for an approval with the environment kept, for `hold_seconds` at most.

        The environment's own lifetime runs on meanwhile and ends the hold too. It is counted from
        the request for it, by a clock that nobody sets: `created_at` and `expires_at` are read for
        their difference alone.

        Raises: HoldExceeded, with the environment destroyed and the scope ended; whatever
        `approval` raises, with the environment kept.
        """
        self._check()
        left = self._hold_seconds
        if self._handle is not None:
            lifetime = (self._handle.expires_at - self._handle.created_at).total_seconds()
            left = min(left, self._asked_at + lifetime - anyio.current_time())
        with anyio.move_on_after(max(0.0, left)):
            return await approval()
        await self.suspend()
        raise HoldExceeded(f"no approval within {max(0.0, left):.0f} s")

    async def suspend(self) -> None:
        """The run pauses: destroy the environment and its workspace now; the scope ends."""
        self._entered = False
        await self._discard()

    def _check(self) -> None:
        if not self._entered:
            raise ScopeEnded("the run's hold on its environment has ended")
        if self._halt is not None:
            raise self._halt

    def _fold(self, command: ExecutionCommand) -> ExecutionCommand:
        self._check()
        if self._deadline is None:
            return command
        effective = effective_timeout(
            hard_cap_seconds=command.timeout_seconds,
            wall_clock_seconds=self._specification.limits.wall_clock_seconds,
            command_timeout_seconds=command.timeout_seconds,
            remaining_run_budget_seconds=self._deadline.remaining_seconds(),
            run_floor_seconds=self._deadline.floor_seconds,
        )
        return msgspec.structs.replace(command, timeout_seconds=max(1, int(effective.seconds)))

    async def _judge(self, error: PortError) -> None:
        if isinstance(error, BudgetExhausted | StaleLease | SandboxEscapeSuspected):
            self._halt = error
            await self._discard()
        elif isinstance(error, ExecutionRejected | ExecutionUnavailable) and error.code in _GONE:
            await self._discard()

    async def _discard(self) -> None:
        """Destroy what there is: shielded and bounded. A daemon that cannot be told destroys it
        by itself, since its owner's connection is gone or its time runs out."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with anyio.move_on_after(self._destroy_seconds, shield=True) as scope:
            try:
                await self._environments.destroy(handle)
            except PortError as error:
                _LOG.warning("an environment was not destroyed at the end of its run: %s", error)
        if scope.cancelled_caught:
            _LOG.warning("an environment was not seen destroyed within its time")
