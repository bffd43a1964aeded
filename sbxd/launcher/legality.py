"""What the launcher does in which state of an environment or of an image. Data only.

The daemon is not trusted with order: a verb whose row below has no entry is answered by Failed
with step "legality" and nothing is touched. An environment that the launcher has not made (or has
forgotten, because it was restarted) is ABSENT; destroying it is legal, since destruction goes by
what the kernel holds and not by these books.

    ABSENT --prepare--> PREPARING --prepared--> READY --assign--> ASSIGNED
    READY, ASSIGNED, PREPARING, FAILED, ABSENT --destroy--> DESTROYING --destroyed--> ABSENT
    PREPARING --prepare_failed--> DESTROYING;  DESTROYING --destroy_failed--> FAILED
"""

from collections.abc import Mapping
from enum import StrEnum

from sbxd.launcher.requests import CgroupLimits, VolumeSize


class State(StrEnum):
    """Of one environment."""

    ABSENT = "ABSENT"
    PREPARING = "PREPARING"
    READY = "READY"
    ASSIGNED = "ASSIGNED"
    DESTROYING = "DESTROYING"
    FAILED = "FAILED"


class Trigger(StrEnum):
    """A verb of the daemon, or the end of a piece of work."""

    PREPARE = "prepare"
    LEAF = "leaf"
    BOOT = "boot"
    DROP_LEAF = "drop_leaf"
    ASSIGN = "assign"
    DESTROY = "destroy"
    PREPARED = "prepared"
    PREPARE_FAILED = "prepare_failed"
    DESTROYED = "destroyed"
    DESTROY_FAILED = "destroy_failed"


LEGAL: Mapping[State, Mapping[Trigger, State]] = {
    State.ABSENT: {
        Trigger.PREPARE: State.PREPARING,
        Trigger.DESTROY: State.DESTROYING,
    },
    State.PREPARING: {
        Trigger.PREPARED: State.READY,
        Trigger.PREPARE_FAILED: State.DESTROYING,
        Trigger.DESTROY: State.DESTROYING,
    },
    State.READY: {
        Trigger.ASSIGN: State.ASSIGNED,
        Trigger.DESTROY: State.DESTROYING,
    },
    State.ASSIGNED: {
        Trigger.LEAF: State.ASSIGNED,
        Trigger.BOOT: State.ASSIGNED,
        Trigger.DROP_LEAF: State.ASSIGNED,
        Trigger.DESTROY: State.DESTROYING,
    },
    State.DESTROYING: {
        Trigger.DESTROY: State.DESTROYING,  # the second asker waits for the same end
        Trigger.DESTROYED: State.ABSENT,
        Trigger.DESTROY_FAILED: State.FAILED,
    },
    State.FAILED: {
        Trigger.DESTROY: State.DESTROYING,
    },
}


class ImageState(StrEnum):
    """Of one image. SETTLED: no work on it is under way (it may be unpacked or not)."""

    SETTLED = "SETTLED"
    UNPACKING = "UNPACKING"
    DROPPING = "DROPPING"


class ImageTrigger(StrEnum):
    """A verb of the daemon about an image, or the end of it."""

    UNPACK = "image_unpack"
    DROP = "image_drop"
    USE = "use"  # Prepare of an environment with this image
    ENDED = "ended"


IMAGE_LEGAL: Mapping[ImageState, Mapping[ImageTrigger, ImageState]] = {
    ImageState.SETTLED: {
        ImageTrigger.UNPACK: ImageState.UNPACKING,
        ImageTrigger.DROP: ImageState.DROPPING,
        ImageTrigger.USE: ImageState.SETTLED,
    },
    ImageState.UNPACKING: {
        ImageTrigger.UNPACK: ImageState.UNPACKING,  # the second asker waits for the same end
        ImageTrigger.ENDED: ImageState.SETTLED,
    },
    ImageState.DROPPING: {ImageTrigger.ENDED: ImageState.SETTLED},
}


class Illegal(Exception):
    """The verb is not legal now. Nothing was done."""


def transition(state: State, trigger: Trigger) -> State:
    """The state after this trigger. Raises Illegal for a pair that the table does not have."""
    try:
        return LEGAL[state][trigger]
    except KeyError:
        raise Illegal(f"{trigger} in state {state}") from None


def image_transition(state: ImageState, trigger: ImageTrigger) -> ImageState:
    """The image's state after this trigger. Raises Illegal as `transition` does."""
    try:
        return IMAGE_LEGAL[state][trigger]
    except KeyError:
        raise Illegal(f"{trigger} of an image in state {state}") from None


def require_within(slot: CgroupLimits, wanted: CgroupLimits) -> None:
    """A slot is never handed out larger than it was built: its scope's ceilings cannot follow.

    Raises Illegal naming the field.
    """
    for field in ("cpu_millicores", "memory_bytes", "pids_max"):
        if getattr(wanted, field) > getattr(slot, field):
            raise Illegal(f"{field} is above the slot's")


def require_volume_within(slot: VolumeSize, wanted: VolumeSize) -> None:
    """As `require_within`, for the volume."""
    for field in ("workspace_bytes", "inodes_max"):
        if getattr(wanted, field) > getattr(slot, field):
            raise Illegal(f"{field} is above the slot's")


def require_next_leaf(last: int, wanted: int) -> None:
    """Leaves are used once and in order. Raises Illegal."""
    if wanted != last + 1:
        raise Illegal(f"leaf {wanted} after leaf {last}")


def require_known_leaf(last: int, wanted: int) -> None:
    """Only a leaf that was made can be dropped. Raises Illegal."""
    if wanted > last:
        raise Illegal(f"leaf {wanted} was never made")
