"""One command as the port promises it: judged, run, audited, with its consequences drawn.

Invariants: nothing is started that was refused; a command that was started is audited as started
and as finished (or as having no known end) whatever happens to its caller; an environment in
which something was not proven is ended before the call comes back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from sbxd.audit.argv import describe_argv
from sbxd.audit.events import (
    AuditEvent,
    CommandFinished,
    CommandStarted,
    CommandUnfinished,
    DestroyReason,
)
from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.lifecycle import errors
from sbxd.lifecycle.bridge import Turn
from sbxd.lifecycle.budgets import Budgets
from sbxd.lifecycle.environments import BridgeWorker, OutputSink
from sbxd.lifecycle.execution import Execution, Terms, TreeSurvived
from sbxd.lifecycle.finalize import BudgetSpent, within_shield
from sbxd.lifecycle.network import Egress, EnvironmentNetwork, NetworkUse
from sbxd.lifecycle.supervisor import Supervisor
from sbxd.mechanism.protocol import (
    CommandNotStarted,
    CommandSpec,
    MechanismError,
    SandboxLost,
    WorkspaceChanged,
)
from sbxd.policy.bridge import BridgeCaps, no_bridge, turn_is_over
from sbxd.policy.child_environment import Network, build, encode
from sbxd.policy.command import validate_command
from sbxd.policy.containment import resolve
from sbxd.policy.fork_refusals import refusals_window_seconds
from sbxd.policy.network import has_both_yeses
from sbxd.policy.timeouts import EffectiveTimeout, effective_timeout
from sbxd.port.command import ExecutionCommand, ExecutionResult, KillReason
from sbxd.port.environment import BridgeEndpoint
from sbxd.port.errors import (
    EscapeCode,
    ExecutionRejected,
    RejectedCode,
    SandboxEscapeSuspected,
    UnavailableCode,
)
from sbxd.settings import Settings

_CHANGED = "the workspace is not the volume that the environment was prepared with"


@dataclass(frozen=True)
class CommandRules:
    """What the composition root gives to every command."""

    settings: Settings
    budgets: Budgets
    audit: AuditSink
    egress: Egress
    on_command: Callable[[], None] = lambda: None  # begun or over; never blocks
    bridge: BridgeCaps = field(default_factory=BridgeCaps)


async def execute(
    supervisor: Supervisor,
    command: ExecutionCommand,
    rules: CommandRules,
    *,
    cancelled: trio.Event,
    on_output: OutputSink | None,
    overrun: Callable[[], None],
    bridge: BridgeWorker | None,
) -> ExecutionResult:
    """`Environments.execute` for an environment that the caller may use.

    overrun: ends the environment if it is over a budget.
    """
    endpoint = None if bridge is None else _turn_of(supervisor)
    specification, timeout = _judge(supervisor, command, rules.settings, endpoint)
    if supervisor.execution is not None:
        raise ExecutionRejected(
            RejectedCode.ENVIRONMENT_BUSY,
            "a command runs in this environment: one at a time",
            field="environment_id",
        )
    limits = rules.settings.limits
    execution = Execution(
        supervisor.sandbox,
        Terms(
            effective_timeout_seconds=timeout.seconds,
            maximum_output_bytes=command.maximum_output_bytes,
            pids_refusals_max=limits.pids_refusals_max,
            pids_refusals_window_seconds=refusals_window_seconds(rules.settings),
            files_changed_max=limits.files_changed_max,
        ),
        budgets=rules.budgets,
        grant=supervisor.account.grant_returned,
        on_output=on_output,
        network=_network_of(supervisor, command, rules.egress, overrun),
        number=supervisor.commands_run + 1,
    )
    number = supervisor.begin_command(execution, specification.argv)
    rules.on_command()
    recorder = _Recorder(supervisor, execution, number, rules)
    try:
        if bridge is not None and endpoint is not None:
            recorder.turn = _begin_turn(supervisor, execution, recorder, endpoint, bridge)
        elif supervisor.bridge_door is not None:
            supervisor.end_turn()  # opened for a command that could not be started
        return await _run(execution, specification, recorder, command, timeout, cancelled)
    except MechanismError as problem:
        raise errors.setup_failed(problem) from None
    finally:
        if recorder.turn is not None and execution.started:
            supervisor.end_turn()
        _draw_consequences(supervisor, execution)
        supervisor.finish_command(recorder.result)
        rules.on_command()


async def _run(
    execution: Execution,
    specification: CommandSpec,
    recorder: "_Recorder",
    command: ExecutionCommand,
    timeout: EffectiveTimeout,
    cancelled: trio.Event,
) -> ExecutionResult:
    try:
        try:
            result = await execution.run(
                specification,
                cancelled=cancelled,
                on_started=partial(recorder.record_start, specification, command, timeout),
            )
        finally:
            await recorder.record_end()
    except CommandNotStarted as problem:
        raise errors.not_started(problem, command.argv) from None
    except TreeSurvived:
        escape = await recorder.supervisor.wait_tree_dead()
        if escape is None:
            raise errors.lost() from None
        raise SandboxEscapeSuspected(escape.code, escape.detail) from None
    except WorkspaceChanged:
        recorder.supervisor.suspect_escape(EscapeCode.WORKSPACE_IDENTITY_CHANGED, _CHANGED)
        raise SandboxEscapeSuspected(EscapeCode.WORKSPACE_IDENTITY_CHANGED, _CHANGED) from None
    except MechanismError as problem:
        recorder.supervisor.request_end(DestroyReason.ENVIRONMENT_LOST)
        raise errors.setup_failed(problem) from None
    if recorder.is_unaudited:
        raise errors.audit_unavailable()
    return result


def _turn_of(supervisor: Supervisor) -> BridgeEndpoint:
    """The bridge of a command that is to have it. Raises ExecutionRejected(BRIDGE_REFUSED)."""
    endpoint = supervisor.specification.bridge
    if endpoint is None:
        raise no_bridge()
    if supervisor.turn_is_over:
        raise turn_is_over()
    return endpoint


def _begin_turn(
    supervisor: Supervisor,
    execution: Execution,
    recorder: "_Recorder",
    endpoint: BridgeEndpoint,
    worker: BridgeWorker,
) -> Turn:
    """Listen before the command is started. Raises MechanismError."""
    turn = Turn(
        supervisor.open_bridge(waiting_max=recorder.rules.bridge.waiting_max),
        endpoint,
        worker,
        account=supervisor.account,
        emit=recorder.record_of_bridge,
        over_budget=partial(execution.end, KillReason.OUTPUT_LIMIT),
        identity=supervisor.identity(),
        command_number=recorder.number,
        caps=recorder.rules.bridge,
    )
    execution.accompany(turn)
    return turn


def _judge(
    supervisor: Supervisor,
    command: ExecutionCommand,
    settings: Settings,
    endpoint: BridgeEndpoint | None,
) -> tuple[CommandSpec, EffectiveTimeout]:
    """What to start and for how long. Raises ExecutionRejected."""
    assert supervisor.tenant is not None
    specification = supervisor.tenant.specification
    line = validate_command(command)
    timeout = effective_timeout(
        hard_cap_seconds=settings.limits.command_hard_cap_seconds,
        wall_clock_seconds=specification.limits.wall_clock_seconds,
        command_timeout_seconds=command.timeout_seconds,
    )
    environment = build(
        specification.environment,
        settings.process_environment.operator_names,
        working_directory=resolve(line.working_directory),
        bridge=endpoint,
        network=Network.PROXY if has_both_yeses(specification.egress, command) else Network.NONE,
    )
    return (
        CommandSpec(
            argv=line.argv,
            environment=encode(environment),
            working_directory=line.working_directory,
            stdin=command.stdin or b"",
        ),
        timeout,
    )


def _network_of(
    supervisor: Supervisor, command: ExecutionCommand, egress: Egress, overrun: Callable[[], None]
) -> EnvironmentNetwork | None:
    """The network of a command with both yeses. Raises ExecutionUnavailable when its environment
    has none to give."""
    if not has_both_yeses(supervisor.specification.egress, command):
        return None
    if supervisor.network is not None:
        return supervisor.network
    listener = supervisor.sandbox.proxy_listener
    if listener is None:
        raise errors.lost()

    def charge() -> None:
        try:
            supervisor.account.charge_operation()
        finally:
            overrun()

    use = NetworkUse(
        **supervisor.identity(),
        owner_uid=supervisor.tenancy.owner_uid,
        policy=supervisor.specification.egress,
        listener=listener,
        charge=charge,
    )
    try:
        supervisor.network = egress.of_environment(use)
    except MechanismError as problem:
        supervisor.request_end(DestroyReason.ENVIRONMENT_LOST)
        raise errors.setup_failed(problem) from None
    return supervisor.network


def _draw_consequences(supervisor: Supervisor, execution: Execution) -> None:
    """End the environment when something about the command was not proven."""
    if isinstance(execution.failure, TreeSurvived):
        supervisor.doubt_tree()
    elif execution.failure is not None:
        supervisor.request_end(DestroyReason.ENVIRONMENT_LOST)


class _Recorder:
    """Records a command's start and end; what it could not record makes the call fail."""

    def __init__(
        self, supervisor: Supervisor, execution: Execution, number: int, rules: CommandRules
    ) -> None:
        self.supervisor = supervisor
        self.is_unaudited = False
        self.result: ExecutionResult | None = None
        self.turn: Turn | None = None
        self.number = number
        self.rules = rules
        self._execution = execution

    async def record_start(
        self, specification: CommandSpec, command: ExecutionCommand, timeout: EffectiveTimeout
    ) -> None:
        described = describe_argv(specification.argv)
        event = CommandStarted(
            **self.supervisor.identity(),
            command_number=self.number,
            program=described.program,
            program_bytes=described.program_bytes,
            argv_count=described.argv_count,
            argv_sha256=described.argv_sha256,
            stdin_bytes=len(specification.stdin),
            network_enabled=command.network_enabled,
            effective_timeout_ms=round(timeout.seconds * 1000),
            timeout_bound=timeout.bound,
        )
        await self._emit(event)
        if self.is_unaudited:
            self._execution.end(KillReason.CANCELLED)

    async def record_of_bridge(self, event: AuditEvent) -> bool:
        """What happens on the bridge; the command ends when it cannot be recorded."""
        await self._emit(event)
        if self.is_unaudited:
            self._execution.end(KillReason.CANCELLED)
        return not self.is_unaudited

    async def record_end(self) -> None:
        """Shielded and bounded, so that a command whose caller is gone is audited as well."""
        if not self._execution.started:
            return
        if self.turn is not None:
            await self._emit(self.turn.closing_event())
        await self._emit(self._end_event())

    def _end_event(self) -> AuditEvent:
        execution = self._execution
        try:
            self.result = result = execution.result()
        except (SandboxLost, TreeSurvived):
            return CommandUnfinished(
                **self.supervisor.identity(),
                command_number=self.number,
                code=UnavailableCode.ENVIRONMENT_LOST,
            )
        return CommandFinished(
            **self.supervisor.identity(),
            command_number=self.number,
            exit_code=result.exit_code,
            signal=result.signal,
            killed_by=result.killed_by,
            duration_ms=result.duration_ms,
            stdout_bytes=execution.stdout.size_bytes,
            stdout_sha256=execution.stdout.sha256,
            stdout_truncated=result.stdout_truncated,
            stderr_bytes=execution.stderr.size_bytes,
            stderr_sha256=execution.stderr.sha256,
            stderr_truncated=result.stderr_truncated,
            files_changed=len(result.files_changed),
            files_changed_truncated=result.files_changed_truncated,
            evidence=result.evidence,
            usage=result.usage,
            unenforced_limits=result.unenforced_limits,
        )

    async def _emit(self, event: AuditEvent) -> None:
        try:
            await within_shield(
                self.rules.budgets.audit_seconds, partial(self.rules.audit.emit, event)
            )
        except (AuditUnavailable, BudgetSpent):
            self.is_unaudited = True
