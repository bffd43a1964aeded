"""The warm pool: slots that are prepared before anyone asks, sized by what was asked for lately.

A kind of slots is what has to be built in (`PoolKey`); everything else is bound at the hand-out.
The default image with the default volume is a kind that always has its `slots_min`; others have
slots once they are asked for, within `slots_max` for all kinds together. How many: the pure
`sbxd.policy.pool`.

Invariants: a slot is handed out once; taking one never waits; one is built at a time, and while
a slot is left, building waits until no request has been served for `PAUSE_SECONDS`, though never
longer than `PATIENCE_SECONDS`, and with slots to spare `PATIENCE_FILLED_SECONDS`: on a small host
the pool must not slow down the request that it exists for, nor the one that follows a hand-out.
After a failure the next attempt waits, twice as long each time. Slots give way to a request whose
volume has no room beside theirs, but not again and again to a party whose requests have no room
without them either. At most `KINDS_MAX` kinds are remembered, those asked for least are forgotten.
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import trio

from sbxd.audit.events import DestroyReason
from sbxd.lifecycle.machine import State
from sbxd.lifecycle.pool import AGE_BOUNDS_SECONDS, PoolKey, PoolKeyStatus, PoolStatus
from sbxd.lifecycle.supervisor import Supervisor
from sbxd.mechanism.protocol import SlotProfile, VolumeBinding
from sbxd.policy import pool
from sbxd.policy.pool import Demand
from sbxd.port.ids import TenantId
from sbxd.port.network import NetworkShape
from sbxd.settings import LimitSettings, SandboxMechanism

PAUSE_SECONDS = 0.02
PATIENCE_SECONDS = 0.1
PATIENCE_FILLED_SECONDS = 0.5
RETRY_SECONDS_MIN = 1.0
RETRY_SECONDS_MAX = 60.0
REVIEW_SECONDS = 15.0  # while there is more than the least, which fades
KINDS_MAX = 16
FUTILE_SECONDS = 60.0
FUTILE_MAX = 256  # parties that are remembered for that long
RECENT_MAX = 1024
_COUNTING = frozenset({State.READY, State.ASSIGNING})

# Who asks: an owner's uid and one of its tenants.
Party = tuple[int, TenantId]


def fits(
    profile: SlotProfile,
    wanted: SlotProfile,
    volume: VolumeBinding = VolumeBinding.AT_BUILD,
    *,
    memory_is_built_in: bool = False,
) -> bool:
    """Whether a slot of `profile` can become an environment of `wanted`: the image is built in,
    and the volume where its size is bound at the building; the other limits are set at the
    hand-out, below the ceilings that the slot's scope was made with; and a proxy's port can be
    given up then, but not be had later. memory_is_built_in: what follows from the memory limit
    cannot be set then."""
    has, needs = profile.limits, wanted.limits
    if volume is VolumeBinding.AT_HAND_OUT:
        holds = needs.workspace_bytes <= has.workspace_bytes and needs.inodes_max <= has.inodes_max
    else:
        holds = (needs.workspace_bytes, needs.inodes_max) == (has.workspace_bytes, has.inodes_max)
    ceilings = profile.ceilings or has
    return (
        holds
        and (not memory_is_built_in or needs.memory_bytes == has.memory_bytes)
        and profile.image_digest == wanted.image_digest
        and needs.cpu_millicores <= ceilings.cpu_millicores
        and needs.memory_bytes <= ceilings.memory_bytes
        and needs.pids_max <= ceilings.pids_max
        and wanted.network in (profile.network, NetworkShape.NONE)
    )


@dataclass(frozen=True)
class Bounds:
    """How many slots there are to be ready, at least (of the default kind) and at most (of all).
    Nothing is kept with a least of 0."""

    least: int
    most: int


@dataclass
class _Kind:
    """What is remembered of one kind."""

    profile: SlotProfile
    demand: Demand
    hits: int = 0
    misses: int = 0
    arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))
    emptied: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))


@dataclass
class _Counts:
    ages: list[int] = field(default_factory=lambda: [0] * (len(AGE_BOUNDS_SECONDS) + 1))
    age_seconds_sum: float = 0.0
    misses: int = 0
    built: int = 0
    failed: int = 0
    discarded: int = 0


class Reserve:
    """Keeps slots ready.

    profile: what is to be prepared in any case; None when there is no default image. `wake` after
    it changed: slots that nobody can want any more are ended. limits: the defaults and ceilings
    that every slot is built with. is_known: whether this image is
    there. build: starts a new supervisor for the profile, its intent journaled; None when the
    journal does not take it. is_busy: whether a request is being served.
    """

    def __init__(
        self,
        profile: Callable[[], SlotProfile | None],
        bounds: Bounds,
        *,
        mechanism: str,
        limits: LimitSettings,
        is_known: Callable[[str], bool],
        build: Callable[[SlotProfile], Awaitable[Supervisor | None]],
        is_busy: Callable[[], bool],
    ) -> None:
        self._profile = profile
        self._bounds = bounds
        self._mechanism = mechanism
        self._memory_is_built_in = mechanism == SandboxMechanism.GVISOR
        self._limits = limits
        self._is_known = is_known
        self._build = build
        self._is_busy = is_busy
        self._slots: list[Supervisor] = []  # oldest first
        self._building: PoolKey | None = None
        self._build_over = trio.Event()
        self._holds = 0
        self._futile_until: dict[Party, float] = {}
        self._kinds: dict[PoolKey, _Kind] = {}
        self._volume = VolumeBinding.AT_BUILD  # until a slot shows that it is otherwise here
        self._counts = _Counts()
        self._changed = trio.Event()
        self._idle = trio.Event()

    # --- what there is ------------------------------------------------------------------------

    @property
    def target(self) -> int:
        """How many slots there should be now."""
        return sum(self._given().values())

    @property
    def ready(self) -> int:
        return sum(1 for slot in self._slots if slot.state is State.READY)

    def status(self) -> PoolStatus:
        """What the pool has done and holds now."""
        given, now = self._given(), trio.current_time()
        kinds = tuple(
            self._status_of(key, kind, given.get(key, 0), now) for key, kind in self._kinds.items()
        )
        counts = self._counts
        return PoolStatus(
            slots_min=self._bounds.least,
            slots_max=self._bounds.most,
            wanted=sum(given.values()),
            ready=self.ready,
            building=0 if self._building is None else 1,
            hits=sum(counts.ages),
            misses=counts.misses,
            age_counts=tuple(counts.ages),
            age_seconds_sum=counts.age_seconds_sum,
            built=counts.built,
            failed=counts.failed,
            discarded=counts.discarded,
            keys=kinds,
        )

    def _status_of(self, key: PoolKey, kind: _Kind, wanted: int, now: float) -> PoolKeyStatus:
        demand = pool.as_of(kind.demand, now)
        ready = [slot for slot in self._of_kind(key) if slot.state is State.READY]
        return PoolKeyStatus(
            key=key,
            wanted=wanted,
            ready=len(ready),
            building=1 if self._building == key else 0,
            hits=kind.hits,
            misses=kind.misses,
            arrivals_per_second=demand.arrivals_per_second,
            refill_seconds=demand.refill_seconds,
            oldest_ready_seconds=now - ready[0].created_at if ready else None,
        )

    # --- hand-outs ----------------------------------------------------------------------------

    def find(self, wanted: SlotProfile) -> Supervisor | None:
        """The oldest ready slot that fits, one with just this network before others; None when
        there is none.

        The caller takes it (`Event.TAKEN`, legal once) before its next checkpoint; until it is
        assigned or ended it counts, so that what replaces it does not slow its hand-out.
        """
        fitting = [
            slot
            for slot in self._slots
            if slot.state is State.READY
            and self._fits(slot.profile, wanted, slot.sandbox.volume_binding)
        ]
        return min(fitting, key=lambda slot: slot.profile.network != wanted.network, default=None)

    def handed_out(self, slot: Supervisor) -> None:
        """A request has got this slot for good."""
        now = trio.current_time()
        age = max(now - slot.created_at, 0.0)
        place = sum(1 for bound in AGE_BOUNDS_SECONDS if age > bound)
        self._counts.ages[place] += 1
        self._counts.age_seconds_sum += age
        kind = self._kind(slot.profile)
        kind.hits += 1
        kind.emptied.append(now)
        self._note_arrival(kind, now)

    def missed(self, wanted: SlotProfile) -> None:
        """A request has found no slot, and one is built for it."""
        kind = self._kind(self._slot_for(wanted))
        kind.misses += 1
        self._counts.misses += 1
        self._note_arrival(kind, trio.current_time())

    def _note_arrival(self, kind: _Kind, now: float) -> None:
        kind.arrivals.append(now)
        window = now - kind.demand.refill_seconds
        missing = sum(1 for each in kind.arrivals if each >= window)
        kind.demand = pool.after_arrival(kind.demand, now, missing)
        self._changed.set()

    # --- giving way ---------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """No slot is begun meanwhile."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._changed.set()

    async def give_way(self, wanted: SlotProfile, party: Party) -> bool:
        """For a request whose volume has no room: once what is being built is there, leave a slot
        that fits it, or else end the oldest ones that hold as many bytes, and wait until they are
        gone. Whether anything has changed for it. To be called with the pool `held`.

        Cancellation: what has been asked to end ends all the same.
        """
        if self._building is not None:
            await self._build_over.wait()
        if self.find(wanted) is not None:
            return True
        if self._is_futile(party):
            return False
        ended: list[Supervisor] = []
        for slot in self._slots:
            freed = sum(each.profile.limits.workspace_bytes for each in ended)
            if freed < wanted.limits.workspace_bytes and slot.state is State.READY:
                slot.request_end(DestroyReason.SUPERSEDED)
                ended.append(slot)
        for slot in ended:
            await slot.last_attempt_over.wait()
        return bool(ended)

    def gave_way_in_vain(self, party: Party) -> None:
        """Its request has no room even so: no slot is ended for it in the next FUTILE_SECONDS."""
        if len(self._futile_until) >= FUTILE_MAX:
            del self._futile_until[next(iter(self._futile_until))]
        self._futile_until[party] = trio.current_time() + FUTILE_SECONDS

    def _is_futile(self, party: Party) -> bool:
        now = trio.current_time()
        self._futile_until = {who: at for who, at in self._futile_until.items() if at > now}
        return party in self._futile_until

    # --- kinds --------------------------------------------------------------------------------

    def _key(self, profile: SlotProfile) -> PoolKey:
        return PoolKey(
            mechanism=self._mechanism,
            image_digest=profile.image_digest,
            network=profile.network,
            workspace_bytes=profile.limits.workspace_bytes,
            inodes_max=profile.limits.inodes_max,
            memory_bytes=profile.limits.memory_bytes if self._memory_is_built_in else None,
        )

    def _fits(self, profile: SlotProfile, wanted: SlotProfile, volume: VolumeBinding) -> bool:
        return fits(profile, wanted, volume, memory_is_built_in=self._memory_is_built_in)

    def _slot_for(self, wanted: SlotProfile) -> SlotProfile:
        """The slot that a request like this would have found."""
        default = self._profile()
        if default is not None and self._fits(default, wanted, self._volume):
            return default
        limits = msgspec.structs.replace(
            self._limits.defaults,
            workspace_bytes=wanted.limits.workspace_bytes,
            inodes_max=wanted.limits.inodes_max,
        )
        if self._memory_is_built_in:
            limits = msgspec.structs.replace(limits, memory_bytes=wanted.limits.memory_bytes)
        return SlotProfile(
            wanted.image_digest, limits, wanted.network, ceilings=self._limits.ceilings
        )

    def _kind(self, profile: SlotProfile) -> _Kind:
        key = self._key(profile)
        if key not in self._kinds:
            if len(self._kinds) >= KINDS_MAX:
                self._forget_one()
            self._kinds[key] = _Kind(profile, Demand(at=trio.current_time()))
        return self._kinds[key]

    def _forget_one(self) -> None:
        """Of the kinds that are not the default one, that which was asked for least lately."""
        default = self._profile()
        kept = None if default is None else self._key(default)
        now = trio.current_time()
        rates = {
            key: pool.as_of(kind.demand, now).arrivals_per_second
            for key, kind in self._kinds.items()
            if key != kept
        }
        del self._kinds[min(rates, key=rates.__getitem__)]

    def _given(self) -> dict[PoolKey, int]:
        """How many slots of each kind there should be now."""
        least, most = self._bounds.least, self._bounds.most
        default = self._profile()
        promised: dict[PoolKey, int] = {}
        if default is not None:
            self._kind(default)
            promised = {self._key(default): least}
        if least == 0:
            return {}
        now = trio.current_time()
        wanted = {
            key: pool.slots_wanted(kind.demand, now, least=promised.get(key, 0), most=most)
            for key, kind in self._kinds.items()
            if self._is_known(key.image_digest)
        }
        return pool.share_out(wanted, promised, most)

    # --- keeping it ---------------------------------------------------------------------------

    def wake(self) -> None:
        """A slot is missing, or may be."""
        self._changed.set()

    def pause_over(self) -> None:
        """No request is being served."""
        self._idle.set()

    async def run(self) -> None:
        """Keep the pool filled, until cancelled."""
        retry_seconds = RETRY_SECONDS_MIN
        while True:
            self._changed = trio.Event()
            given = self._given()
            self._end_surplus(given)
            if self._next_to_build(given) is None:
                await self._wait_change(given)
                continue
            await self._wait_pause(given)
            key = self._next_to_build(self._given())
            if key is None:
                continue
            self._build_over = trio.Event()
            try:
                is_built = await self._build_one(key)
            finally:
                self._build_over.set()
            if is_built:
                retry_seconds = RETRY_SECONDS_MIN
                continue
            await trio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, RETRY_SECONDS_MAX)

    def _next_to_build(self, given: dict[PoolKey, int]) -> PoolKey | None:
        return pool.next_to_build(given, self._have()) if self._holds == 0 else None

    async def _build_one(self, key: PoolKey) -> bool:
        """Whether there is one more now."""
        began = trio.current_time()
        kind = self._kinds[key]
        self._building = key
        try:
            slot = await self._build(kind.profile)
            if slot is not None:
                await slot.prepared.wait()
        finally:
            self._building = None
        if slot is None or slot.state is not State.READY:
            self._counts.failed += 1
            return False
        self._slots.append(slot)
        self._counts.built += 1
        self._volume = slot.sandbox.volume_binding
        emptied = kind.emptied.popleft() if kind.emptied else began
        kind.demand = pool.after_refill(kind.demand, trio.current_time() - emptied)
        return True

    async def _wait_change(self, given: dict[PoolKey, int]) -> None:
        """Until there may be something to do: demand fades, where there is more than the least."""
        fades = sum(given.values()) > self._bounds.least
        with trio.move_on_after(REVIEW_SECONDS if fades else float("inf")):
            await self._changed.wait()

    async def _wait_pause(self, given: dict[PoolKey, int]) -> None:
        ready = self.ready
        if ready == 0:  # the next request would have to build
            return
        filled = 2 * ready >= sum(given.values())
        with trio.move_on_after(PATIENCE_FILLED_SECONDS if filled else PATIENCE_SECONDS):
            is_paused = False
            while not is_paused:
                while self._is_busy():
                    self._idle = trio.Event()
                    await self._idle.wait()
                # Whoever was given a sandbox is about to use it.
                await trio.sleep(PAUSE_SECONDS)
                is_paused = not self._is_busy()

    def _of_kind(self, key: PoolKey) -> list[Supervisor]:
        return [slot for slot in self._slots if self._key(slot.profile) == key]

    def _have(self) -> Counter[PoolKey]:
        gone = [slot for slot in self._slots if slot.state not in _COUNTING]
        self._counts.discarded += sum(1 for slot in gone if slot.tenant is None)
        self._slots = [slot for slot in self._slots if slot.state in _COUNTING]
        return Counter(self._key(slot.profile) for slot in self._slots)

    def _end_surplus(self, given: dict[PoolKey, int]) -> None:
        """The oldest go, of each kind that has more than it is given."""
        for key in self._have():
            ready = [slot for slot in self._of_kind(key) if slot.state is State.READY]
            for slot in ready[: max(len(ready) - given.get(key, 0), 0)]:
                slot.request_end(DestroyReason.SUPERSEDED)

    def discard(self) -> None:
        """End every slot and build none any more."""
        self._bounds = Bounds(least=0, most=0)
        for slot in self._slots:
            if slot.state is State.READY:
                slot.request_end(DestroyReason.SERVICE_SHUTDOWN)
