"""What the warm pool of prepared slots has done and holds, as data: for metrics and operators.

The pool is the reserve (`sbxd.lifecycle.reserve`), which answers `Reserve.status()` with a
`PoolStatus`. All counts are since the daemon started. Seconds are of the daemon's steady clock.
"""

from msgspec import Struct

from sbxd.port.network import NetworkShape

# The upper bounds of `PoolStatus.age_counts`; the last of those has none.
AGE_BOUNDS_SECONDS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0)


class PoolKey(Struct, frozen=True, kw_only=True):
    """What is built into a slot, so that it has to match what is asked for.

    The size of the volume belongs to it where a volume keeps the size that it was made with; where
    it is a quota, it is bound at the hand-out, up to this one. Limits, environment variables,
    tenant and run are bound at the hand-out always; but the memory limit belongs to it where /tmp
    and /dev/shm keep the size that follows from it (gVisor), and is None elsewhere.
    """

    mechanism: str
    image_digest: str
    network: NetworkShape
    workspace_bytes: int
    inodes_max: int
    memory_bytes: int | None = None


class PoolKeyStatus(Struct, frozen=True, kw_only=True):
    """One kind of slots. oldest_ready_seconds is None when none is ready.

    wanted: how many there are to be, from the demand and the operator's bounds. building: being
    prepared now. arrivals_per_second, refill_seconds: what `wanted` is calculated from.
    """

    key: PoolKey
    wanted: int
    ready: int
    building: int
    hits: int
    misses: int
    arrivals_per_second: float
    refill_seconds: float
    oldest_ready_seconds: float | None


class PoolStatus(Struct, frozen=True, kw_only=True):
    """The whole pool.

    hits, misses: requests that found a slot, and that did not and were built for. age_counts: the
    hits by the age of the slot at its hand-out: at most AGE_BOUNDS_SECONDS[i] (and more than the
    bound before), the last beyond all. age_seconds_sum: of all hits. built, failed: preparations of
    the pool's own. discarded: slots that were ended without a tenant, for age, for a change of
    what is wanted, for a request whose volume had no room beside theirs, or at the shutdown.
    slots_min, slots_max: the operator's bounds.
    """

    slots_min: int
    slots_max: int
    wanted: int
    ready: int
    building: int
    hits: int
    misses: int
    age_counts: tuple[int, ...]
    age_seconds_sum: float
    built: int
    failed: int
    discarded: int
    keys: tuple[PoolKeyStatus, ...]
