"""What the port promises of environments and leases, as a state machine over any implementation.

The model knows, for each handle, whether it is live, over, or superseded by a higher epoch, and for
each run the highest epoch. Every rule says beforehand what the implementation may answer.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from sbxd.port.command import ExecutionCommand
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec, ExecutionEnvironment
from sbxd.port.errors import (
    EscapeCode,
    PortError,
    RejectedCode,
    StaleLease,
)
from sbxd.port.ids import EnvironmentId, RunId, TenantId

COMMAND = ExecutionCommand(
    argv=("true",),
    working_directory=".",
    timeout_seconds=30,
    stdin=None,
    maximum_output_bytes=1000,
)
LIVE_MAX = 3


class Subject(Protocol):
    """An implementation under test."""

    @property
    def environments(self) -> ExecutionEnvironment:
        """The port."""
        ...

    def specification(self, tenant: str, run: str, epoch: int) -> EnvironmentSpec:
        """Under names that nobody used before this subject."""
        ...

    async def listed(self) -> Collection[EnvironmentId] | None:
        """The ids of this subject's live environments; None when it cannot be asked."""
        ...


class Fate(StrEnum):
    LIVE = "LIVE"
    OVER = "OVER"
    SUPERSEDED = "SUPERSEDED"


SERVED = "SERVED"
# What a use of the right handle may be answered. Of a superseded one an implementation may say
# that it is stale for as long as it remembers.
ANSWERS: Mapping[Fate, frozenset[str]] = {
    Fate.LIVE: frozenset({SERVED}),
    Fate.OVER: frozenset({RejectedCode.ENVIRONMENT_GONE.value}),
    Fate.SUPERSEDED: frozenset(
        {RejectedCode.ENVIRONMENT_GONE.value, RejectedCode.STALE_LEASE.value}
    ),
}


@dataclass
class Known:
    handle: EnvironmentHandle
    run: tuple[str, str]
    fate: Fate = Fate.LIVE


class Leases(RuleBasedStateMachine):
    """Subclass it and define `open`."""

    def open(self) -> AbstractAsyncContextManager[Subject]:
        """A fresh subject."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self._portal_manager = start_blocking_portal("trio")
        self._portal: BlockingPortal = self._portal_manager.__enter__()
        self._opened: AbstractContextManager[Subject] = self._portal.wrap_async_context_manager(
            self.open()
        )
        self.subject = self._opened.__enter__()
        self.known: list[Known] = []
        self.highest: dict[tuple[str, str], int] = {}

    def teardown(self) -> None:
        try:
            for each in self.known:
                if each.fate is Fate.LIVE:
                    self._portal.call(self.subject.environments.destroy, each.handle)
        finally:
            self._opened.__exit__(None, None, None)
            self._portal_manager.__exit__(None, None, None)

    def live(self) -> list[Known]:
        return [each for each in self.known if each.fate is Fate.LIVE]

    def _pick(self, number: int) -> Known:
        return self.known[number % len(self.known)]

    @precondition(lambda self: len(self.live()) < LIVE_MAX)
    @rule(tenant=st.sampled_from("ab"), run=st.sampled_from("xy"), epoch=st.integers(0, 3))
    def provision(self, tenant: str, run: str, epoch: int) -> None:
        key = (tenant, run)
        specification = self.subject.specification(tenant, run, epoch)
        try:
            handle = self._portal.call(self.subject.environments.provision, specification)
        except StaleLease:
            assert epoch < self.highest.get(key, 0)
            return
        assert epoch >= self.highest.get(key, 0)
        assert handle.environment_id not in {each.handle.environment_id for each in self.known}
        assert (handle.run_id, handle.lease_epoch) == (specification.run_id, epoch)
        for each in self.live():
            if each.run == key and each.handle.lease_epoch < epoch:
                each.fate = Fate.SUPERSEDED
        self.highest[key] = epoch
        self.known.append(Known(handle, key))

    def _use(self, handle: EnvironmentHandle) -> str:
        """What becomes of a command under this handle: SERVED, or the code of the refusal."""
        try:
            result = self._portal.call(self.subject.environments.execute, handle, COMMAND)
        except PortError as error:
            return error.code.value
        return SERVED if (result.exit_code, result.killed_by) == (0, None) else "FAILED"

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0, 99))
    def execute(self, number: int) -> None:
        one = self._pick(number)
        assert self._use(one.handle) in ANSWERS[one.fate]

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0, 99))
    def destroy(self, number: int) -> None:
        one = self._pick(number)
        self._portal.call(self.subject.environments.destroy, one.handle)
        if one.fate is Fate.LIVE:
            one.fate = Fate.OVER

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0, 99), delta=st.sampled_from([-1, 1]))
    def use_under_another_epoch(self, number: int, delta: int) -> None:
        one = self._pick(number)
        other = max(one.handle.lease_epoch + delta, 0)
        if other != one.handle.lease_epoch:
            self._refused(msgspec.structs.replace(one.handle, lease_epoch=other), one.fate)

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0, 99))
    def use_under_another_run(self, number: int) -> None:
        one = self._pick(number)
        self._refused(msgspec.structs.replace(one.handle, run_id=RunId("of-nobody")), one.fate)

    def _refused(self, handle: EnvironmentHandle, fate: Fate) -> None:
        stale = RejectedCode.STALE_LEASE.value
        allowed = {stale} if fate is Fate.LIVE else ANSWERS[fate] | {stale}
        assert self._use(handle) in allowed

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0, 99))
    def use_under_another_tenant(self, number: int) -> None:
        one = self._pick(number)
        forged = msgspec.structs.replace(one.handle, tenant_id=TenantId("of-nobody"))
        answer = self._use(forged)
        if one.fate is Fate.LIVE:
            assert answer == EscapeCode.TENANT_MISMATCH
            one.fate = Fate.OVER
        else:
            # Of what is over a stranger learns nothing but that; while it is being destroyed it is
            # an alarm still.
            assert answer in (RejectedCode.ENVIRONMENT_GONE, EscapeCode.TENANT_MISMATCH)

    @rule()
    def compare(self) -> None:
        """What is live is what the model says, and under no outdated epoch."""
        listed = self._portal.call(self.subject.listed)
        if listed is None:
            return
        assert set(listed) == {each.handle.environment_id for each in self.live()}
        for each in self.live():
            assert each.handle.lease_epoch == self.highest[each.run]
