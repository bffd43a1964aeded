"""An environment's construction as text: what runs, in which order, with the plan's values.

Invariant: the lines come from the lists that run, so the text cannot differ from the code; a
golden file makes every change of order visible in a review.
"""

from collections.abc import Callable, Sequence
from typing import Final

from sbxd.jail import build, construct, identity, steward_process, workload
from sbxd.jail.plan import JailPlan
from sbxd.jail.steps import claim


def _claims(steps: Sequence[Callable[..., None]]) -> tuple[tuple[str, str], ...]:
    return tuple(claim(step) for step in steps)


LISTS: Final[tuple[tuple[str, tuple[tuple[str, str], ...]], ...]] = (
    ("the helper (host root)", _claims(construct.LAUNCH_STEPS)),
    ("the intermediate (host root, in the box's cgroup)", _claims(construct.INTERMEDIATE_STEPS)),
    ("init (process 1)", _claims(build.INIT_STEPS)),
    ("the steward", _claims(steward_process.STEWARD_STEPS)),
    ("a command, in the interpreter", _claims(workload.PARK_STEPS)),
    ("a command, in guest/command.h", workload.COMMAND_STEPS),
)


def describe(plan: JailPlan) -> list[str]:
    """The plan's values, then each process with its numbered steps."""
    lines = ["plan", *(f"    {line}" for line in _values(plan))]
    for title, steps in LISTS:
        lines.append(title)
        for number, (name, text) in enumerate(steps, 1):
            lines.append(f"    {number:2d}. {name}: {text}")
    return lines


def _values(plan: JailPlan) -> list[str]:
    return [
        f"environment {plan.environment_id}, host name {plan.hostname}",
        *(f"id map {line}" for line in plan.ids.map_lines().splitlines()),
        f"tmp {plan.tmp_bytes} bytes, shm {plan.shm_bytes} bytes",
        *(f"limit {name} {soft} {hard}" for name, (soft, hard) in sorted(plan.rlimits.items())),
        f"AppArmor profile of a command {plan.apparmor_label or 'none'}",
        f"Landlock version {plan.landlock_version or 'none'}",
        f"kept by init {_names(build.KEPT)}",
        f"kept by the steward {_names(steward_process.KEPT)}",
        "kept by a command nothing",
    ]


def _names(mask: int) -> str:
    return " ".join(item.name for item in identity.Capability if mask >> item & 1)
