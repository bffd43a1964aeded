"""How long each step of an ending may take, and the clock for times that people read.

Invariant: every wait of the lifecycle that a hostile command or a sick host could prolong has a
bound here. Deadlines use trio's clock; `WallClock` serves created_at, expires_at and the audit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sbxd.settings import LimitSettings

# Before the second attempt to destroy, and before each later one.
FIRST_PAUSE_SECONDS = 1.0
PAUSE_SECONDS = 5.0

WallClock = Callable[[], datetime]  # aware, UTC


@dataclass(frozen=True)
class Budgets:
    """Seconds.

    start_seconds: workspace snapshot and start of one command. quiet_seconds: from the kill to
    the proof that the tree is dead; beyond it the environment is quarantined. drain_seconds:
    reading what is left in the pipes when nobody takes it live, and in the bridge.
    delivery_seconds: the same of the pipes when a sink takes it. changes_seconds: comparing the
    workspace; settle_seconds: the same when the environment ends. release_seconds: giving a leaf
    back, and ending a command's network. destroy_seconds: one attempt to destroy.
    destroy_retry_seconds: between attempts; their
    number is one more than of pauses, and after the last the environment is quarantined.
    audit_seconds: the last event of a cancelled call.
    audit_retry_seconds: between attempts to record an end. shutdown_seconds: all environments.
    quarantine_seconds: one pass over what is quarantined.
    """

    start_seconds: float = 30.0
    quiet_seconds: float = 5.0
    drain_seconds: float = 2.0
    delivery_seconds: float = 30.0
    changes_seconds: float = 60.0
    settle_seconds: float = 5.0
    release_seconds: float = 5.0
    destroy_seconds: float = 30.0
    destroy_retry_seconds: tuple[float, ...] = (FIRST_PAUSE_SECONDS, PAUSE_SECONDS)
    audit_seconds: float = 5.0
    audit_retry_seconds: float = 1.0
    shutdown_seconds: float = 20.0
    quarantine_seconds: float = 10.0


def budgets_of(limits: LimitSettings) -> Budgets:
    """The budgets with the operator's word on how often a destruction may fail."""
    later = (PAUSE_SECONDS,) * (limits.destroy_failures_max - 2)
    pauses = (FIRST_PAUSE_SECONDS, *later) if limits.destroy_failures_max > 1 else ()
    return Budgets(destroy_retry_seconds=pauses)
