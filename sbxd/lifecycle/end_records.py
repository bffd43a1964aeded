"""What the audit is told of an environment's end before its destruction: why it ended.

Pure. Invariants: an environment that ends as ENVIRONMENT_LOST has one EnvironmentLost, whoever
noticed first; of a slot that no tenant got, only a failed preparation is told.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from sbxd.audit.confinement import ConfinementMismatched
from sbxd.audit.events import (
    AuditEvent,
    BudgetWasExhausted,
    DestroyReason,
    EnvironmentExpired,
    SandboxEscapeWasSuspected,
    SlotPreparationFailed,
)
from sbxd.audit.losses import EnvironmentLost, LostPart
from sbxd.mechanism.protocol import ConfinementMismatch, MechanismError
from sbxd.policy.budgets import Budget
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import EscapeCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId


class Identity(TypedDict):
    """The fields of an EnvironmentEvent."""

    environment_id: EnvironmentId
    tenant_id: TenantId
    run_id: RunId
    lease_epoch: int


@dataclass(frozen=True)
class Escape:
    """Which invariant was violated."""

    code: EscapeCode
    detail: str

    def event(self, identity: Identity) -> AuditEvent:
        return SandboxEscapeWasSuspected(**identity, code=self.code, detail=self.detail)


def preparation_failed(environment_id: EnvironmentId, problem: MechanismError) -> AuditEvent:
    """Of a slot that could not be built."""
    if isinstance(problem, ConfinementMismatch):
        return ConfinementMismatched(
            environment_id=environment_id,
            step=problem.step,
            errno=problem.errno,
            detail=problem.detail,
        )
    return SlotPreparationFailed(
        environment_id=environment_id, step=problem.step, errno=problem.errno
    )


def reasons(
    identity: Identity,
    handle: EnvironmentHandle,
    *,
    reason: DestroyReason | None,
    escape: Escape | None,
    budget: Budget | None,
    lost_part: LostPart | None,
) -> Iterator[AuditEvent]:
    """What the reason of the end adds to the record of an environment that a tenant had.

    lost_part: None when no process of the environment itself was seen to be gone.
    """
    if escape is not None:
        yield escape.event(identity)
    if budget is not None:
        yield BudgetWasExhausted(**identity, budget=budget)
    if reason is DestroyReason.EXPIRED:
        yield EnvironmentExpired(**identity, expires_at=handle.expires_at)
    if lost_part is None and reason is DestroyReason.ENVIRONMENT_LOST:
        lost_part = LostPart.COMMAND
    if lost_part is not None:
        yield EnvironmentLost(**identity, part=lost_part)
