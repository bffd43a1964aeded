"""What is read at the time of a question instead of counted: the places, the pool, the store, the
process itself. Pure but for the process's own use of the host.

Invariant: a family whose number is not known now is left out, never 0: a rule on it is then
without data instead of content.
"""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sbxd.lifecycle.environments import Census
from sbxd.metrics.families import Family, Kind, Sample, Unit, gauge

_STATES = ("ASSIGNING", "LIVE", "RUNNING", "DESTROYING", "QUARANTINED")


@dataclass(frozen=True)
class Store:
    """The file system of images and workspaces, in bytes and inodes."""

    free_bytes: int
    size_bytes: int
    free_inodes: int
    size_inodes: int


@dataclass(frozen=True)
class Backlog:
    """Records of the audit that had to wait for the journal since the start, and those that wait
    now. A sink that keeps none has none."""

    spooled: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class Reading:
    """Everything that was read for one answer. quarantined: names, of earlier runs too. erasing_:
    of what is proven dead. store: None where it cannot be read. started_at: seconds since 1970."""

    version: str
    mechanism: str
    deployment_mode: str
    started_at: float
    census: Census
    quarantined: tuple[str, ...]
    erasing_volumes: int
    erasing_bytes: int
    environments_max: int
    tunnels_open: int
    store: Store | None
    unenforced: int
    backlog: Backlog = Backlog()


def families(reading: Reading) -> Sequence[Family]:
    """As families."""
    census, pool = reading.census, reading.census.pool
    states = {**dict.fromkeys(_STATES, 0), **census.states}
    mechanism = reading.mechanism
    oldest = max(pool.ages_seconds, default=0.0)
    return (
        gauge("sbxd_up", "1 when the daemon answered.", (1, ())),
        gauge(
            "sbxd_build_info",
            "1, with what is running.",
            (1, (reading.version, mechanism, reading.deployment_mode)),
            labels=("version", "mechanism", "deployment_mode"),
        ),
        gauge(
            "sbxd_start_time_seconds",
            "When the daemon started, in seconds since 1970.",
            (reading.started_at, ()),
            unit=Unit.SECONDS,
        ),
        gauge(
            "sbxd_environments",
            "Environments that a tenant has.",
            *((count, (mechanism, state)) for state, count in states.items()),
            labels=("mechanism", "state"),
        ),
        gauge(
            "sbxd_environments_max",
            "How many there may be.",
            (reading.environments_max, ()),
        ),
        gauge("sbxd_provision_waiting", "Requests that wait for a place.", (census.waiting, ())),
        gauge(
            "sbxd_quarantined_environments",
            "What could not be proven stopped and was not released yet.",
            (len(reading.quarantined), ()),
        ),
        gauge(
            "sbxd_erasing_volumes",
            "Workspaces of environments proven dead that are not erased yet.",
            (reading.erasing_volumes, ()),
        ),
        gauge(
            "sbxd_erasing_bytes",
            "Bytes of disk that they use.",
            (reading.erasing_bytes, ()),
            unit=Unit.BYTES,
        ),
        gauge(
            "sbxd_pool_slots",
            "Prepared slots, ready and being built.",
            (len(pool.ages_seconds), ("ready",)),
            (pool.building, ("building",)),
            labels=("state",),
        ),
        gauge("sbxd_pool_target", "How many slots are to be ready.", (pool.target, ())),
        gauge(
            "sbxd_pool_oldest_slot_seconds",
            "Age of the oldest slot that is ready.",
            (oldest, ()),
            unit=Unit.SECONDS,
        ),
        gauge(
            "sbxd_pool_idle_memory_bytes",
            "Memory that the slots that are ready hold; no sample where it is not counted.",
            *(() if pool.memory_bytes is None else ((pool.memory_bytes, ()),)),
            unit=Unit.BYTES,
        ),
        gauge("sbxd_proxy_tunnels", "Tunnels that are open.", (reading.tunnels_open, ())),
        gauge(
            "sbxd_host_deviations",
            "Things that this host does not enforce as they should be (sbxctl doctor).",
            (reading.unenforced, ()),
        ),
        gauge(
            "sbxd_audit_waiting",
            "Records of the audit that wait for the journal.",
            (reading.backlog.waiting, ()),
        ),
        Family(
            name="sbxd_audit_spooled",
            kind=Kind.COUNTER,
            help="Records of the audit that had to wait for the journal.",
            samples=(Sample(value=reading.backlog.spooled),),
        ),
        *_store(reading.store),
        *_process(),
    )


def _store(store: Store | None) -> tuple[Family, ...]:
    if store is None:
        return ()
    return (
        gauge(
            "sbxd_store_free_bytes",
            "Free bytes of the file system of images and workspaces.",
            (store.free_bytes, ()),
            unit=Unit.BYTES,
        ),
        gauge(
            "sbxd_store_size_bytes",
            "Size of the file system of images and workspaces.",
            (store.size_bytes, ()),
            unit=Unit.BYTES,
        ),
        gauge(
            "sbxd_store_free_inodes",
            "Free inodes of the file system of images and workspaces.",
            (store.free_inodes, ()),
        ),
        gauge(
            "sbxd_store_size_inodes",
            "Inodes of the file system of images and workspaces.",
            (store.size_inodes, ()),
        ),
    )


def _process() -> tuple[Family, ...]:
    return (
        Family(
            name="sbxd_process_cpu_seconds",
            kind=Kind.COUNTER,
            help="What the daemon itself has used of the processors.",
            unit=Unit.SECONDS,
            samples=(Sample(value=time.process_time()),),
        ),
        gauge(
            "sbxd_process_resident_peak_bytes",
            "The most memory that the daemon itself has held.",
            (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, ()),
            unit=Unit.BYTES,
        ),
    )
