"""Where the time of one provision went, for the caller whose start budget is spent.

Invariant: the stages' durations add up to the whole; the one that is not over is told as such.
"""

from enum import StrEnum

import trio


class Stage(StrEnum):
    """As a caller is told of it."""

    ROOM = "waiting for a place"
    JOURNAL = "recording it in the journal"
    BUILD = "building the environment"
    LIMITS = "setting its limits"
    AUDIT = "recording it in the audit log"


# A stage that took less than this share of the whole is not what was slow.
_TOLD_SHARE = 0.05


class Stages:
    """The stages of one provision, in trio's clock. It begins in ROOM."""

    def __init__(self) -> None:
        self._entered: list[tuple[Stage, float]] = [(Stage.ROOM, trio.current_time())]

    def enter(self, stage: Stage) -> None:
        """The stage before it is over."""
        self._entered.append((stage, trio.current_time()))

    def describe(self) -> str:
        """What was slow, longest first; the stage that it was in last is always named."""
        now = trio.current_time()
        ends = [began for _, began in self._entered[1:]] + [now]
        spent: dict[Stage, float] = {}
        for (stage, began), ended in zip(self._entered, ends, strict=True):
            spent[stage] = spent.get(stage, 0.0) + ended - began
        last = self._entered[-1][0]
        least = _TOLD_SHARE * sum(spent.values())
        slow = sorted(
            (stage for stage in spent if stage is last or spent[stage] > least),
            key=lambda stage: -spent[stage],
        )
        return ", ".join(
            f"{stage} took {spent[stage]:.1f} s" + (" and was not over" if stage is last else "")
            for stage in slow
        )
