"""The daemon as an operator sees it: what was counted and what is read, joined. The only place
where metrics and the lifecycle meet.

Invariants: an answer is put together from one reading; a question changes nothing and costs the
running work nothing but its own milliseconds. Another part's numbers come in by one entry of
`sources` (`Source`), whose families have names of their own.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from sbxd.lifecycle.environments import Description, Environments
from sbxd.metrics import alerts, readings
from sbxd.metrics.derived import DerivedMetrics, Happening
from sbxd.metrics.exposition import render
from sbxd.metrics.families import Family
from sbxd.metrics.loop_lag import LoopLag
from sbxd.metrics.readings import Backlog, Reading, Store
from sbxd.metrics.recent import RECENT_SECONDS
from sbxd.settings import Settings
from sbxd.wire.descriptions import PostureItem
from sbxd.wire.observing import (
    AuthorityInfo,
    DenialInfo,
    EnvironmentMeter,
    MetricsForm,
    PoolInfo,
    StatusIs,
)

# A file system that does not answer holds up one question, and one thread.
STORE_SECONDS = 2.0
DENIALS_SHOWN = 32
QUARANTINED_SHOWN = 64

Source = Callable[[], Sequence[Family]]


@dataclass(frozen=True)
class About:
    """What does not change while the daemon runs. started_at: seconds since 1970."""

    version: str
    mechanism: str
    started_at: float


class DaemonObserver:
    """Implements sbxd.service.observing.Observer. `run` is its task.

    sources: families of other parts, asked at every question for the metrics. backlog: of the
    audit's sink, where it keeps one.
    """

    def __init__(
        self,
        settings: Settings,
        derived: DerivedMetrics,
        environments: Environments,
        about: About,
        *,
        sources: Sequence[Source] = (),
        backlog: Callable[[], Backlog] = Backlog,
    ) -> None:
        self._settings = settings
        self._derived = derived
        self._environments = environments
        self._about = about
        self._sources = sources
        self._backlog = backlog
        self._lag = LoopLag()
        self._began_at = trio.current_time()
        self._store_limiter = trio.CapacityLimiter(1)
        derived.authority_unreachable.declare(*((name,) for name in settings.leases.authorities))

    async def run(self) -> None:
        """Measure the event loop, until cancelled."""
        await self._lag.run()

    async def metrics(self, form: MetricsForm) -> str:
        """As `Observer`."""
        reading = await self._read(await self._environments.describe())
        families = (
            *readings.families(reading),
            *self._derived.families(),
            *self._lag.families(),
            *(family for source in self._sources for family in source()),
        )
        return render(families, form)

    async def meters(self) -> Sequence[EnvironmentMeter]:
        """As `Observer`."""
        return await self._environments.meters(self._derived.denials_of)

    def clock_ms(self) -> int:
        """As `Observer`."""
        return round(trio.current_time() * 1000)

    def pool(self) -> PoolInfo:
        """As `Observer`."""
        pool, recent = self._environments.census().pool, self._derived.recent()
        return PoolInfo(
            ready=len(pool.ages_seconds),
            building=pool.building,
            target=pool.target,
            ages_ms=tuple(round(each * 1000) for each in pool.ages_seconds),
            memory_bytes=pool.memory_bytes,
            hits=round(self._derived.pool_hits.total),
            misses=round(self._derived.pool_misses.total),
            recent_hits=recent.get((Happening.POOL_HIT, ""), 0),
            recent_misses=recent.get((Happening.POOL_MISS, ""), 0),
        )

    async def status(self, request_id: int) -> StatusIs:
        """As `Observer`."""
        description = await self._environments.describe()
        reading, derived = await self._read(description), self._derived
        recent, denials = derived.recent(), derived.recent_denials()
        return StatusIs(
            request_id=request_id,
            version=reading.version,
            mechanism=reading.mechanism,
            deployment_mode=reading.deployment_mode,
            auth_mode=self._settings.auth_mode.value,
            uptime_ms=round((trio.current_time() - self._began_at) * 1000),
            states=dict(reading.census.states),
            environments_max=reading.environments_max,
            waiting=reading.census.waiting,
            pool=self.pool(),
            provision_p50_ms=_milliseconds(derived.provision.quantile(0.5)),
            provision_p99_ms=_milliseconds(derived.provision.quantile(0.99)),
            quarantined=reading.quarantined[:QUARANTINED_SHOWN],
            erasing_volumes=reading.erasing_volumes,
            erasing_bytes=reading.erasing_bytes,
            quarantined_truncated=len(reading.quarantined) > QUARANTINED_SHOWN,
            denials_truncated=len(denials) > DENIALS_SHOWN,
            authorities=tuple(
                AuthorityInfo(
                    name=name,
                    missed=round(derived.authority_unreachable.value(name)),
                    recently_missed=recent.get((Happening.AUTHORITY_MISSED, name), 0),
                )
                for name in self._settings.leases.authorities
            ),
            denials=tuple(
                DenialInfo(tenant=tenant, violation=violation.value, count=count)
                for (tenant, violation), count in list(denials.items())[:DENIALS_SHOWN]
            ),
            recent_seconds=round(RECENT_SECONDS),
            tunnels=reading.tunnels_open,
            lag_worst_ms=round(self._lag.worst_seconds * 1000),
            recorded=round(derived.records.total),
            unrecorded=round(derived.unrecorded.total),
            waiting_records=reading.backlog.waiting,
            journal_refusals=round(derived.journal_failures.total),
            store_free_bytes=None if reading.store is None else reading.store.free_bytes,
            store_size_bytes=None if reading.store is None else reading.store.size_bytes,
            deviations=_deviations(description),
            alerts=alerts.standing(
                reading,
                recent,
                denials,
                lag_worst_seconds=self._lag.worst_seconds,
            ),
        )

    async def _read(self, description: Description) -> Reading:
        return Reading(
            version=self._about.version,
            mechanism=self._about.mechanism,
            deployment_mode=self._settings.deployment_mode.value,
            started_at=self._about.started_at,
            census=self._environments.census(),
            quarantined=description.quarantined,
            erasing_volumes=description.erasing.volumes,
            erasing_bytes=description.erasing.bytes_used,
            environments_max=self._settings.limits.environments_max,
            tunnels_open=self._derived.tunnels_open,
            store=await self._read_store(),
            unenforced=len(_deviations(description)),
            backlog=self._backlog(),
        )

    async def _read_store(self) -> Store | None:
        with trio.move_on_after(STORE_SECONDS):
            try:
                status = await trio.to_thread.run_sync(
                    os.statvfs,
                    self._settings.state_directory,
                    limiter=self._store_limiter,
                    abandon_on_cancel=True,
                )
            except OSError:
                return None
            return Store(
                free_bytes=status.f_bavail * status.f_frsize,
                size_bytes=status.f_blocks * status.f_frsize,
                free_inodes=status.f_favail,
                size_inodes=status.f_files,
            )
        return None


def _deviations(description: Description) -> tuple[PostureItem, ...]:
    return tuple(each for each in description.posture if each.state in ("degraded", "missing"))


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None or math.isinf(seconds) else round(seconds * 1000)


def about(version: str, mechanism: str) -> About:
    """Of a daemon that starts now."""
    return About(version=version, mechanism=mechanism, started_at=time.time())
