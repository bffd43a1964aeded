"""Slots that are prepared before anyone asks, for the default image and the default limits.

Invariants: a slot is handed out once; taking one never waits; one is built at a time, and while
requests are being served building waits for a pause, though never for longer than
`PATIENCE_SECONDS`: on a small host the reserve must not slow down the request that it exists for.
After a failure the next attempt waits, twice as long each time.
"""

from collections.abc import Awaitable, Callable

import trio

from sbxd.audit.events import DestroyReason
from sbxd.lifecycle.machine import State
from sbxd.lifecycle.supervisor import Supervisor
from sbxd.mechanism.protocol import SlotProfile
from sbxd.port.network import NetworkShape

PATIENCE_SECONDS = 0.1
RETRY_SECONDS_MIN = 1.0
RETRY_SECONDS_MAX = 60.0
_COUNTING = frozenset({State.READY, State.ASSIGNING})


def fits(profile: SlotProfile, wanted: SlotProfile) -> bool:
    """Whether a slot of `profile` can become an environment of `wanted`: the volume and the image
    are built in; the other limits are set at the hand-out, below the ceilings that the slot's scope
    was made with; and a proxy's port can be given up then, but not be had later."""
    return (
        profile.image_digest == wanted.image_digest
        and profile.limits.workspace_bytes == wanted.limits.workspace_bytes
        and profile.limits.inodes_max == wanted.limits.inodes_max
        and wanted.limits.cpu_millicores <= profile.limits.cpu_millicores
        and wanted.limits.memory_bytes <= profile.limits.memory_bytes
        and wanted.limits.pids_max <= profile.limits.pids_max
        and wanted.network in (profile.network, NetworkShape.NONE)
    )


class Reserve:
    """Keeps `target` slots ready.

    profile: what is to be prepared now; None when there is no default image. `wake` after it
    changed: slots of another profile are ended. build: starts a new supervisor for the profile,
    its intent journaled; None when the journal does not take it. is_busy: whether a request is
    being served.
    """

    def __init__(
        self,
        profile: Callable[[], SlotProfile | None],
        slots_max: int,
        *,
        build: Callable[[SlotProfile], Awaitable[Supervisor | None]],
        is_busy: Callable[[], bool],
    ) -> None:
        self._profile = profile
        self._build = build
        self._is_busy = is_busy
        self._slots: list[Supervisor] = []  # oldest first
        self._changed = trio.Event()
        self._idle = trio.Event()
        self._slots_max = slots_max

    @property
    def target(self) -> int:
        """How many slots there should be now."""
        return 0 if self._profile() is None else self._slots_max

    @property
    def ready(self) -> int:
        return sum(1 for slot in self._slots if slot.state is State.READY)

    def find(self, wanted: SlotProfile) -> Supervisor | None:
        """The oldest ready slot that fits; None when there is none.

        The caller takes it (`Event.TAKEN`, legal once) before its next checkpoint; until it is
        assigned or ended it counts, so that one that is returned finds its place free.
        """
        return next(
            (
                slot
                for slot in self._slots
                if slot.state is State.READY and fits(slot.profile, wanted)
            ),
            None,
        )

    def wake(self) -> None:
        """A slot is missing, or may be."""
        self._changed.set()

    def pause_over(self) -> None:
        """No request is being served."""
        self._idle.set()

    async def run(self) -> None:
        """Keep the reserve full, until cancelled."""
        retry_seconds = RETRY_SECONDS_MIN
        while True:
            self._changed = trio.Event()
            profile = self._profile()
            self._end_slots_unlike(profile)
            self._slots = [slot for slot in self._slots if slot.state in _COUNTING]
            if profile is None or len(self._slots) >= self.target:
                await self._changed.wait()
                continue
            await self._wait_pause()
            profile = self._profile()
            if profile is None or self.target == 0:
                continue
            slot = await self._build(profile)
            if slot is not None:
                await slot.prepared.wait()
            if slot is not None and slot.state is State.READY:
                self._slots.append(slot)
                retry_seconds = RETRY_SECONDS_MIN
                continue
            await trio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, RETRY_SECONDS_MAX)

    async def _wait_pause(self) -> None:
        if self._is_busy():
            self._idle = trio.Event()
            with trio.move_on_after(PATIENCE_SECONDS):
                await self._idle.wait()

    def _end_slots_unlike(self, profile: SlotProfile | None) -> None:
        for slot in self._slots:
            if slot.state is State.READY and (profile is None or not fits(slot.profile, profile)):
                slot.request_end(DestroyReason.SUPERSEDED)

    def discard(self) -> None:
        """End every slot and build none any more."""
        self._slots_max = 0
        for slot in self._slots:
            if slot.state is State.READY:
                slot.request_end(DestroyReason.SERVICE_SHUTDOWN)
