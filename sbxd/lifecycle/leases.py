"""One pass of the reaper over leases: ask the worker tiers' authorities, end what is stale.

A systemd timer drives it (`sbxctl reap`, every `leases.interval_seconds`); an operator may besides.

Invariants: an authority speaks for the environments of its own uids alone; it is told ids and tells
standings, nothing else. STALE ends at once; UNKNOWN only when the next pass, an interval later,
hears the same, because an environment is provisioned a moment before its lease is bound and an
authority that restarted has yet to hear of it. One that does not answer makes nothing stale, and
is audited. Time is trio's clock, so that a clock that is set changes nothing.

Deliberately absent: expiry and connections, which need no authority (`sbxd.lifecycle.reaper`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from sbxd.audit.lease_events import LeaseAuthorityMissed, StaleLeaseEnded
from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.lifecycle.environments import ReapReport
from sbxd.lifecycle.supervisor import Supervisor
from sbxd.port.ids import EnvironmentId
from sbxd.port.leases import LeaseStanding

# Two passes count as an interval apart although a timer fires a little early.
EARLY = 0.1


class AuthorityUnanswered(Exception):
    """The authority gave no whole answer. The text names why, without a path."""


class LeaseAuthority(Protocol):
    """One worker tier's."""

    @property
    def name(self) -> str:
        """As configured; for the audit."""
        ...

    @property
    def owner_uids(self) -> frozenset[int]:
        """Whose environments it speaks for."""
        ...

    async def ask(self, environment_ids: Sequence[EnvironmentId]) -> Sequence[LeaseStanding]:
        """One standing for each id, in their order. Bounded. Raises AuthorityUnanswered."""
        ...


@dataclass(frozen=True)
class Ruling:
    """stale: what is to be ended, with the standing that says so. unknown_since: for the next
    pass."""

    stale: Mapping[EnvironmentId, LeaseStanding]
    unknown_since: Mapping[EnvironmentId, float]


def rule(
    standings: Mapping[EnvironmentId, LeaseStanding],
    unknown_since: Mapping[EnvironmentId, float],
    now: float,
    *,
    interval_seconds: float,
) -> Ruling:
    """Decide about what was answered. Pure.

    unknown_since: when each environment was first said to be UNKNOWN, without another word since.
    """
    stale: dict[EnvironmentId, LeaseStanding] = {}
    still: dict[EnvironmentId, float] = {}
    for environment_id, standing in standings.items():
        match standing:
            case LeaseStanding.CURRENT:
                continue
            case LeaseStanding.STALE:
                stale[environment_id] = standing
            case LeaseStanding.UNKNOWN:
                since = unknown_since.get(environment_id, now)
                if now - since >= interval_seconds * (1 - EARLY):
                    stale[environment_id] = standing
                else:
                    still[environment_id] = since
    return Ruling(stale=stale, unknown_since=still)


@dataclass
class LeaseReaper:
    """Passes, one at a time. handed_out: the environments that have a handle. end: ends one for
    STALE_LEASE, so that its handle is told so from now on."""

    authorities: Collection[LeaseAuthority]
    handed_out: Callable[[], Collection[Supervisor]]
    end: Callable[[Supervisor], None]
    audit: AuditSink
    interval_seconds: float
    _unknown_since: dict[EnvironmentId, float] = field(default_factory=dict)
    _turn: trio.Lock = field(default_factory=trio.Lock)

    async def reap(self) -> ReapReport:
        """One pass. Cancellation: what was found stale until then is ended, the rest is the next
        pass's."""
        async with self._turn:
            live = {each.environment_id for each in self.handed_out()}
            for gone in self._unknown_since.keys() - live:
                del self._unknown_since[gone]
            asked = unknown = 0
            stale: list[EnvironmentId] = []
            unanswered: list[str] = []
            for authority in self.authorities:
                subjects = {
                    each.environment_id: each
                    for each in self.handed_out()
                    if each.tenancy.owner_uid in authority.owner_uids and not each.is_ending
                }
                if not subjects:
                    continue
                asked += len(subjects)
                try:
                    standings = await authority.ask(tuple(subjects))
                except AuthorityUnanswered as problem:
                    unanswered.append(authority.name)
                    await self._miss(authority, len(subjects), str(problem))
                    continue
                ruling = rule(
                    dict(zip(subjects, standings, strict=True)),
                    self._unknown_since,
                    trio.current_time(),
                    interval_seconds=self.interval_seconds,
                )
                for environment_id in subjects:
                    self._unknown_since.pop(environment_id, None)
                self._unknown_since.update(ruling.unknown_since)
                unknown += len(ruling.unknown_since)
                stale += await self._end_all(authority, subjects, ruling)
            return ReapReport(
                asked=asked, stale=tuple(stale), unknown=unknown, unanswered=tuple(unanswered)
            )

    async def _end_all(
        self,
        authority: LeaseAuthority,
        subjects: Mapping[EnvironmentId, Supervisor],
        ruling: Ruling,
    ) -> list[EnvironmentId]:
        # What was ended meanwhile for another reason keeps that reason.
        ended = [each for each in ruling.stale if not subjects[each].is_ending]
        for environment_id in ended:
            self.end(subjects[environment_id])
        for environment_id in ended:
            await self._record(
                StaleLeaseEnded(
                    **subjects[environment_id].identity(),
                    standing=ruling.stale[environment_id],
                    authority=authority.name,
                )
            )
        return ended

    async def _miss(self, authority: LeaseAuthority, environments: int, detail: str) -> None:
        await self._record(
            LeaseAuthorityMissed(authority=authority.name, environments=environments, detail=detail)
        )

    async def _record(self, event: StaleLeaseEnded | LeaseAuthorityMissed) -> None:
        """An audit log that takes nothing keeps nothing alive: the destruction, with its reason,
        is recorded by the environment's supervisor, however long that takes."""
        try:
            await self.audit.emit(event)
        except AuditUnavailable:
            return
