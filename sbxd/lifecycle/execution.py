"""One command, from its start to a tree that is proven dead.

Theory: several watchers (the main process's exit, the leaf's kernel counters, the volume, the
deadline, the output caps, a cancel, the end of the environment) race to one `Verdict`; the first
wins. Whatever it is, the leaf is then killed whole and proven empty, what network it had is ended,
its pipes are read to their end,
its counters are read again, and the workspace is compared. Only then is anything reported.

Invariants: at most `maximum_output_bytes` of each stream are kept or passed on, never one more,
and none that is not granted; no wait is unbounded; a result is never made up: an end that was not
observed is ENVIRONMENT_LOST. A second execution needs a second object.

Deliberately absent: who may execute, and the audit (`sbxd.lifecycle.supervisor`).
"""

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from sbxd.lifecycle.budgets import Budgets
from sbxd.lifecycle.disk import DiskWatch
from sbxd.lifecycle.environments import OutputSink
from sbxd.lifecycle.finalize import BudgetSpent, within, within_shield
from sbxd.lifecycle.network import EnvironmentNetwork
from sbxd.lifecycle.verdict import End, ForkRefusals, Lost, Verdict, settle
from sbxd.mechanism.protocol import (
    Changes,
    CommandExit,
    CommandSpec,
    Counters,
    MechanismError,
    RunningCommand,
    Sandbox,
    SandboxLost,
)
from sbxd.port.command import Evidence, ExecutionResult, KillReason, Usage
from sbxd.wire.messages import OutputStream

# At most this often are the counters read while the kernel reports changes.
EVENT_PACE_SECONDS = 0.01
Grant = Callable[[int], int]  # of so many bytes, how many may be kept or passed on
NO_CHANGES = Changes(entries=(), truncated=False, workspace_bytes=0, workspace_inodes=0)
NOT_COMPARED = Changes(entries=(), truncated=True, workspace_bytes=0, workspace_inodes=0)


class TreeSurvived(Exception):
    """The kill was sent, and processes were left when its budget was spent."""


class Companion(Protocol):
    """What runs beside a command. Ends by cancellation."""

    async def run(self) -> None: ...

    async def wait_delivered(self) -> None:
        """Until what the command said to it before its end is delivered."""
        ...


@dataclass(frozen=True)
class Terms:
    """What bounds one command. Times in seconds."""

    effective_timeout_seconds: float
    maximum_output_bytes: int
    pids_refusals_max: int
    pids_refusals_window_seconds: float
    files_changed_max: int


class Capture:
    """One stream: counts and digests what is within the cap, keeps it when nobody takes it."""

    def __init__(
        self, stream: OutputStream, *, maximum_bytes: int, grant: Grant, sink: OutputSink | None
    ) -> None:
        self.stream = stream
        self.size_bytes = 0
        self.exceeded = False  # the command wrote beyond the cap
        self.incomplete = True  # not read and delivered to its end
        self._maximum_bytes = maximum_bytes
        self._grant = grant
        self._sink = sink
        self._digest = hashlib.sha256()
        self._kept = bytearray()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    @property
    def kept(self) -> bytes:
        return bytes(self._kept)

    @property
    def truncated(self) -> bool:
        return self.exceeded or self.incomplete

    async def take(self, data: bytes) -> None:
        """Account for the next bytes of the stream and pass on what the cap allows."""
        room = self._maximum_bytes - self.size_bytes
        granted = self._grant(min(len(data), room))
        if len(data) > granted:
            self.exceeded = True
            data = data[:granted]
        if not data:
            return
        if self._sink is not None:
            await self._sink(self.stream, data)
        else:
            self._kept += data
        self.size_bytes += len(data)
        self._digest.update(data)


class Execution:
    """Runs one command in one sandbox. `end` may be called at any time, also before `run`."""

    def __init__(
        self,
        sandbox: Sandbox,
        terms: Terms,
        *,
        budgets: Budgets,
        grant: Grant,
        on_output: OutputSink | None,
        network: EnvironmentNetwork | None = None,
        number: int = 1,
    ) -> None:
        self._sandbox = sandbox
        self._network = network
        self._number = number
        self._terms = terms
        self._budgets = budgets
        self._delivery_seconds = (
            budgets.drain_seconds if on_output is None else budgets.delivery_seconds
        )
        self._verdict = Verdict()
        self._decided = trio.Event()
        self._captures = tuple(
            Capture(stream, maximum_bytes=terms.maximum_output_bytes, grant=grant, sink=on_output)
            for stream in (OutputStream.STDOUT, OutputStream.STDERR)
        )
        self._counters = Counters()
        self._disk: DiskWatch | None = None
        self._changes = NOT_COMPARED
        self._compared = False
        self._failure: SandboxLost | TreeSurvived | None = None
        self._started_at: float | None = None
        self._ended_at = 0.0
        self._environment_ends = False
        # The leaf could not be given back, or the network not ended: the environment is not to be
        # used again.
        self._is_stuck = False
        self._companion: Companion | None = None
        self._running: RunningCommand | None = None
        self.started = False  # a program was started
        # Set when the tree is dead and the workspace is compared (or will never be).
        self.settled = trio.Event()

    @property
    def failure(self) -> SandboxLost | TreeSurvived | None:
        """What makes the environment unusable from now on, if anything."""
        if self._failure is None and isinstance(self._verdict.end, Lost):
            return SandboxLost("await the end of the command", 0)
        if self._failure is None and self._is_stuck:
            return SandboxLost("release the leaf and the network", 0)
        return self._failure

    @property
    def stdout(self) -> Capture:
        return self._captures[0]

    @property
    def stderr(self) -> Capture:
        return self._captures[1]

    def cpu_ms(self) -> int | None:
        """What the command has used of the processors until now; None where nobody counts it."""
        with suppress(MechanismError):
            counters = self._counters if self._running is None else self._running.counters()
            return None if counters.cpu_usage_us is None else counters.cpu_usage_us // 1000
        return None

    def end(self, reason: End) -> None:
        """End the command with this reason unless it has an end already. Never blocks."""
        if self._verdict.decide(reason):
            self._ended_at = trio.current_time()
            self._decided.set()

    def accompany(self, companion: Companion) -> None:
        """Run this beside the command, from its start until it is over; it is then cancelled."""
        self._companion = companion

    def end_with_environment(self, reason: End) -> None:
        """As `end`; and the comparison of the workspace is no longer worth a failure."""
        self._environment_ends = True
        self.end(reason)

    async def run(
        self,
        command: CommandSpec,
        *,
        cancelled: trio.Event,
        on_started: Callable[[], Awaitable[None]],
    ) -> ExecutionResult:
        """Start the command and see it to its end. Not started when it has an end already.

        on_started: awaited, shielded, once the program runs; it bounds itself, and may `end` the
        command but not raise.

        Raises: CommandNotStarted; SandboxLost (no known end); MechanismError (it could not be
        started, or its start was not observed); TreeSurvived.

        Cancellation: the tree is killed with CANCELLED and proven dead before it takes effect;
        `result` then still tells what was seen, or raises.
        """
        try:
            if cancelled.is_set():
                self.end(KillReason.CANCELLED)
            if self._verdict.end is not None:
                self._never_ran()
                return self.result()
            first = self._sandbox.volume()
            self._disk = None if first is None else DiskWatch(first)
            if self._network is not None:
                await self._network.begin(self._number)
            try:
                # Not cancellable: a start that was interrupted halfway might have left a process.
                running = await within_shield(
                    self._budgets.start_seconds, partial(self._sandbox.start, command)
                )
            except BudgetSpent:
                raise MechanismError("start the command", 0, "not observed in time") from None
            self.started = True
            self._running = running
            self._started_at = trio.current_time()
            try:
                with suppress(BudgetSpent):
                    await within_shield(self._budgets.audit_seconds, on_started)
                await self._run_to_end(running, cancelled)
            finally:
                self._running = None
                await self._release(running)
        finally:
            await self._end_network()
            self.settled.set()
        return self.result()

    def result(self) -> ExecutionResult:
        """What is known of a command that has ended.

        Raises: TreeSurvived; SandboxLost for one whose end is not known.
        """
        if self._failure is not None:
            raise self._failure
        end = self._verdict.end
        if end is None or isinstance(end, Lost) or self._started_at is None:
            raise SandboxLost("await the end of the command", 0)
        end = settle(
            end,
            self._counters,
            output_exceeded=any(each.exceeded for each in self._captures),
            volume_exhausted=self._disk is not None and self._disk.was_exhausted,
        )
        own = end if isinstance(end, CommandExit) else None
        killed_by = end if isinstance(end, KillReason) else None
        exit_code = None
        if own is not None:
            exit_code = own.exit_code if own.signal is None else 128 + own.signal
        return ExecutionResult(
            exit_code=exit_code,
            signal=None if own is None else own.signal,
            stdout=self.stdout.kept,
            stderr=self.stderr.kept,
            stdout_truncated=self.stdout.truncated,
            stderr_truncated=self.stderr.truncated,
            timed_out=killed_by is KillReason.TIMEOUT,
            killed_by=killed_by,
            files_changed=self._changes.entries,
            files_changed_truncated=self._changes.truncated,
            duration_ms=round((self._ended_at - self._started_at) * 1000),
            evidence=self._evidence(),
            usage=self._usage(),
            unenforced_limits=self._sandbox.unenforced_limits,
        )

    def _evidence(self) -> Evidence:
        counters, disk = self._counters, self._disk
        return Evidence(
            oom_kill=counters.oom_kill or 0,
            oom_group_kill=counters.oom_group_kill or 0,
            pids_max_events=counters.pids_max_events or 0,
            effective_timeout_ms=round(self._terms.effective_timeout_seconds * 1000),
            workspace_bytes_left=None if disk is None else disk.bytes_left_min,
            workspace_inodes_left=None if disk is None else disk.inodes_left_min,
        )

    def _usage(self) -> Usage:
        counters, compared = self._counters, self._compared
        cpu_us = counters.cpu_usage_us
        return Usage(
            cpu_ms=None if cpu_us is None else cpu_us // 1000,
            memory_peak_bytes=counters.memory_peak_bytes,
            pids_peak=counters.pids_peak,
            workspace_bytes=self._changes.workspace_bytes if compared else None,
            workspace_inodes=self._changes.workspace_inodes if compared else None,
            workspace_bytes_peak=None if self._disk is None else self._disk.bytes_peak,
            disk_written_bytes=counters.disk_written_bytes,
        )

    def _never_ran(self) -> None:
        self._started_at = self._ended_at
        self._changes = NO_CHANGES
        for capture in self._captures:
            capture.incomplete = False

    async def _run_to_end(self, running: RunningCommand, cancelled: trio.Event) -> None:
        drained = _Countdown(len(self._captures))
        async with trio.open_nursery() as pumps:
            for capture in self._captures:
                pumps.start_soon(self._pump, running, capture, drained)
            if self._companion is not None:
                pumps.start_soon(self._companion.run)
            watchers = trio.CancelScope()
            pumps.start_soon(self._watch, running, cancelled, watchers)
            try:
                await self._wait_decided()
            finally:
                watchers.cancel()  # they end while the tree does
                # Decided already, unless this task was cancelled.
                self.end(KillReason.CANCELLED)
                await self._prove_dead(running)
                await self._end_network()
            if self._failure is None:
                await self._compare()
            self.settled.set()
            if self._failure is None:
                with trio.move_on_after(self._delivery_seconds):
                    await drained.reached.wait()
                if self._companion is not None:
                    with trio.move_on_after(self._budgets.drain_seconds):
                        await self._companion.wait_delivered()
            pumps.cancel_scope.cancel()

    async def _wait_decided(self) -> None:
        """Until there is a verdict, at the latest by the deadline."""
        assert self._started_at is not None
        with trio.move_on_at(self._started_at + self._terms.effective_timeout_seconds):
            await self._decided.wait()
        self.end(KillReason.TIMEOUT)

    async def _watch(
        self, running: RunningCommand, cancelled: trio.Event, scope: trio.CancelScope
    ) -> None:
        """Whatever may decide on the end, until the scope is cancelled."""
        with scope:
            async with trio.open_nursery() as watchers:
                watchers.start_soon(self._watch_counters, running)
                watchers.start_soon(self._watch_volume)
                watchers.start_soon(self._wait_cancel, cancelled)
                watchers.start_soon(self._feed, running)
                await self._wait_exit(running)

    async def _pump(self, running: RunningCommand, capture: Capture, drained: "_Countdown") -> None:
        while not capture.exceeded:
            try:
                data = await running.receive_output(capture.stream.value)
            except MechanismError:
                self.end(Lost())
                break
            if not data:
                capture.incomplete = False
                break
            await capture.take(data)
        if capture.exceeded:
            capture.incomplete = False
            self.end(KillReason.OUTPUT_LIMIT)
        drained.one_less()

    async def _wait_exit(self, running: RunningCommand) -> None:
        try:
            self.end(await running.wait_exit())
        except MechanismError:
            self.end(Lost())

    async def _watch_counters(self, running: RunningCommand) -> None:
        refusals = ForkRefusals(
            refusals_max=self._terms.pids_refusals_max,
            window_seconds=self._terms.pids_refusals_window_seconds,
        )
        while True:
            try:
                counters = await running.wait_event()
            except MechanismError:
                self.end(Lost())
                return
            if counters.oom_kill:
                self.end(KillReason.MEMORY)
            seen = counters.pids_max_events
            if seen is not None and refusals.exceeded(trio.current_time(), seen):
                self.end(KillReason.PIDS)
            await trio.sleep(EVENT_PACE_SECONDS)

    async def _watch_volume(self) -> None:
        disk = self._disk
        if disk is None:
            return
        try:
            while (reading := self._sandbox.volume()) is not None:
                disk.note(reading)
                if disk.is_over:
                    self.end(KillReason.DISK)
                await trio.sleep(disk.pause_seconds(reading))
        except MechanismError:
            self.end(Lost())

    async def _wait_cancel(self, cancelled: trio.Event) -> None:
        await cancelled.wait()
        self.end(KillReason.CANCELLED)

    async def _feed(self, running: RunningCommand) -> None:
        try:
            await running.send_stdin()
        except MechanismError:
            self.end(Lost())

    async def _prove_dead(self, running: RunningCommand) -> None:
        """Kill the leaf and wait until it is empty, also when the caller is gone."""
        try:
            running.kill()
            await within_shield(self._budgets.quiet_seconds, running.wait_empty)
            self._counters = running.counters()
            last = self._sandbox.volume()
            if self._disk is not None and last is not None:
                self._disk.note(last)
        except MechanismError:
            # The leaf cannot be asked: its environment's destruction will be the proof.
            self._failure = SandboxLost("prove the command's tree dead", 0)
        except BudgetSpent:
            if not isinstance(self._verdict.end, Lost):
                self._failure = TreeSurvived("the leaf was not empty in time after the kill")

    async def _end_network(self) -> None:
        """No connection of the command is left when this returns. Idempotent."""
        if self._network is not None:
            try:
                await within_shield(self._budgets.release_seconds, self._network.end)
            except BudgetSpent:
                self._is_stuck = True

    async def _compare(self) -> None:
        if isinstance(self._verdict.end, Lost):
            return
        try:
            self._changes = await within(
                self._budgets.changes_seconds,
                partial(self._sandbox.changes, self._terms.files_changed_max),
            )
            self._compared = True
        except (MechanismError, BudgetSpent):
            if not self._environment_ends:
                self._failure = SandboxLost("compare the workspace", 0)

    async def _release(self, running: RunningCommand) -> None:
        """Give the leaf back; one that cannot be given back goes with its environment."""
        try:
            await within_shield(self._budgets.release_seconds, running.aclose)
        except (BudgetSpent, MechanismError):
            self._is_stuck = True


class _Countdown:
    """An event that happens after `count` calls of one_less."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.reached = trio.Event()

    def one_less(self) -> None:
        self._count -= 1
        if self._count == 0:
            self.reached.set()
