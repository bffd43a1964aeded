"""The reaper's pass over leases: what it ends, what it leaves, and when nobody answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from sbxd.audit.events import DestroyReason, EnvironmentDestroyed
from sbxd.audit.lease_events import LeaseAuthorityMissed, StaleLeaseEnded
from sbxd.lifecycle.leases import AuthorityUnanswered, rule
from sbxd.port.command import KillReason
from sbxd.port.errors import StaleLease
from sbxd.port.ids import EnvironmentId
from sbxd.port.leases import LeaseStanding
from sbxd.settings import LeaseSettings
from tests.lifecycle.double import Behaviour
from tests.lifecycle.world import (
    DEFAULT,
    OTHER_WORKER,
    WORKER,
    World,
    command,
    open_world,
    spec,
)

INTERVAL = 60
SETTINGS = msgspec.structs.replace(DEFAULT, leases=LeaseSettings(interval_seconds=INTERVAL))


@dataclass
class AuthorityDouble:
    """Says `otherwise` of whatever `says` does not name; None: it does not answer."""

    name: str = "tier"
    owner_uids: frozenset[int] = frozenset({WORKER.uid})
    says: dict[EnvironmentId, LeaseStanding] = field(default_factory=dict)
    otherwise: LeaseStanding | None = LeaseStanding.CURRENT
    asked: list[tuple[EnvironmentId, ...]] = field(default_factory=list)

    async def ask(self, environment_ids: Sequence[EnvironmentId]) -> Sequence[LeaseStanding]:
        await trio.lowlevel.checkpoint()
        self.asked.append(tuple(environment_ids))
        if self.otherwise is None:
            raise AuthorityUnanswered("told not to")
        otherwise = self.otherwise
        return [self.says.get(each, otherwise) for each in environment_ids]


def reasons(world: World) -> list[DestroyReason]:
    return [event.reason for event in world.sink.of(EnvironmentDestroyed)]


async def test_a_stale_lease_ends_its_environment_and_no_other(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    authority = AuthorityDouble()
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        stale = await world.environments.provision(WORKER, spec(run="stale"))
        kept = await world.environments.provision(WORKER, spec(run="kept"))
        authority.says[stale.environment_id] = LeaseStanding.STALE
        report = await world.environments.reap()
        assert report.stale == (stale.environment_id,)
        assert (report.asked, report.unknown, report.unanswered) == (2, 0, ())
        with pytest.raises(StaleLease):
            await world.run(stale)
        assert (await world.run(kept)).exit_code == 0
        await trio.sleep(1)
        assert reasons(world) == [DestroyReason.STALE_LEASE]
        (event,) = world.sink.of(StaleLeaseEnded)
        assert event.environment_id == stale.environment_id
        assert set(world.mechanism.existing) == {kept.environment_id}


async def test_the_command_of_a_fenced_worker_is_ended_with_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    authority = AuthorityDouble()
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        handle = await world.environments.provision(WORKER, spec())
        results = []

        async def work() -> None:
            results.append(await world.run(handle, Behaviour(seconds=None)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            await trio.sleep(5)
            authority.says[handle.environment_id] = LeaseStanding.STALE
            await world.environments.reap()
        assert [each.killed_by for each in results] == [KillReason.CANCELLED]


async def test_unknown_is_stale_at_the_second_pass_an_interval_later_and_not_sooner(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    authority = AuthorityDouble(otherwise=LeaseStanding.UNKNOWN)
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        handle = await world.environments.provision(WORKER, spec())
        for _ in range(5):  # an impatient operator
            report = await world.environments.reap()
            assert (report.stale, report.unknown) == ((), 1)
            await trio.sleep(1)
        await trio.sleep(INTERVAL - 6)
        assert (await world.environments.reap()).stale == (handle.environment_id,)


async def test_one_word_of_the_authority_in_between_makes_unknown_begin_anew(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    authority = AuthorityDouble(otherwise=LeaseStanding.UNKNOWN)
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        handle = await world.environments.provision(WORKER, spec())
        for standing in (
            LeaseStanding.UNKNOWN,
            LeaseStanding.CURRENT,
            LeaseStanding.UNKNOWN,
        ):
            authority.otherwise = standing
            assert (await world.environments.reap()).stale == ()
            await trio.sleep(INTERVAL)
        assert (await world.environments.reap()).stale == (handle.environment_id,)


async def test_an_authority_that_does_not_answer_ends_nothing_and_is_audited(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    authority = AuthorityDouble(otherwise=None)
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        handle = await world.environments.provision(WORKER, spec())
        for _ in range(10):
            report = await world.environments.reap()
            assert (report.stale, report.unanswered) == ((), ("tier",))
            await trio.sleep(INTERVAL)
        assert len(world.sink.of(LeaseAuthorityMissed)) == 10
        # Neither the connection nor the expiry needs it.
        world.environments.release_owner(WORKER.connection_id)
        await trio.sleep(SETTINGS.service.orphan_grace_seconds + 1)
        assert reasons(world) == [DestroyReason.PEER_GONE]
        second = await world.environments.provision(WORKER, spec(epoch=2))
        await trio.sleep(SETTINGS.limits.environment_lifetime_seconds + 1)
        assert reasons(world)[1:] == [DestroyReason.EXPIRED]
        assert {handle.environment_id, second.environment_id}.isdisjoint(world.mechanism.existing)


async def test_a_missed_answer_between_two_unknowns_neither_counts_nor_forgives(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    authority = AuthorityDouble(otherwise=LeaseStanding.UNKNOWN)
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        handle = await world.environments.provision(WORKER, spec())
        assert (await world.environments.reap()).unknown == 1
        authority.otherwise = None
        await trio.sleep(INTERVAL)
        assert (await world.environments.reap()).stale == ()
        authority.otherwise = LeaseStanding.UNKNOWN
        assert (await world.environments.reap()).stale == (handle.environment_id,)


async def test_an_authority_is_asked_about_its_own_tier_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    authority = AuthorityDouble(otherwise=LeaseStanding.STALE)
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        theirs = await world.environments.provision(OTHER_WORKER, spec())
        assert (await world.environments.reap()).asked == 0
        assert authority.asked == []
        own = await world.environments.provision(WORKER, spec())
        assert (await world.environments.reap()).stale == (own.environment_id,)
        assert authority.asked == [(own.environment_id,)]
        assert (await world.run(theirs, peer=OTHER_WORKER)).exit_code == 0


async def test_two_tiers_are_asked_each_and_one_that_is_down_hides_not_the_other(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    down = AuthorityDouble(name="down", otherwise=None)
    other = AuthorityDouble(
        name="other", owner_uids=frozenset({OTHER_WORKER.uid}), otherwise=LeaseStanding.STALE
    )
    async with open_world(tmp_path, settings=SETTINGS, authorities=[down, other]) as world:
        await world.environments.provision(WORKER, spec())
        theirs = await world.environments.provision(OTHER_WORKER, spec())
        report = await world.environments.reap()
        assert report.unanswered == ("down",)
        assert report.stale == (theirs.environment_id,)


async def test_an_audit_log_that_takes_nothing_keeps_nothing_alive(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    authority = AuthorityDouble(otherwise=LeaseStanding.STALE)
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        await world.environments.provision(WORKER, spec())
        world.sink.fail()
        await world.environments.reap()
        await trio.sleep(5)
        assert not world.mechanism.existing
        world.sink.recover()
        await trio.sleep(5)
        assert reasons(world) == [DestroyReason.STALE_LEASE]


async def test_an_environment_that_ends_while_the_authority_is_asked_keeps_its_reason(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    authority = AuthorityDouble(otherwise=LeaseStanding.STALE)
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        handle = await world.environments.provision(WORKER, spec())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.environments.destroy, WORKER, handle)
            await world.environments.reap()
        await trio.sleep(1)
        assert reasons(world) == [DestroyReason.REQUESTED]
        assert (await world.environments.reap()).asked == 0


async def test_a_command_holds_no_stale_environment_open(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """No live sandbox has an epoch older than its run's current one, whatever it is doing."""
    authority = AuthorityDouble()
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        old = await world.environments.provision(WORKER, spec(epoch=1))
        async with trio.open_nursery() as nursery:

            async def stubborn() -> None:
                world.mechanism.script.behaviours.append(Behaviour(seconds=None))
                await world.environments.execute(
                    WORKER, old, command(), cancelled=trio.Event(), on_output=None
                )

            nursery.start_soon(stubborn)
            await trio.sleep(1)
            new = await world.environments.provision(WORKER, spec(epoch=2))
        assert set(world.mechanism.existing) == {new.environment_id}


STANDINGS = st.dictionaries(
    st.integers(0, 5).map(lambda n: EnvironmentId(f"{n:032x}")), st.sampled_from(LeaseStanding)
)


@given(st.lists(st.tuples(STANDINGS, st.floats(0, 100)), max_size=12))
def test_nothing_is_ended_that_was_current_within_the_interval(
    passes: list[tuple[dict[EnvironmentId, LeaseStanding], float]],
) -> None:
    now = 0.0
    unknown_since: dict[EnvironmentId, float] = {}
    last_known: dict[EnvironmentId, float] = {}
    for standings, pause in passes:
        now += pause
        ruling = rule(standings, unknown_since, now, interval_seconds=INTERVAL)
        assert ruling.stale.keys() | ruling.unknown_since.keys() <= standings.keys()
        for each, standing in standings.items():
            if standing is LeaseStanding.STALE:
                assert each in ruling.stale
            elif standing is LeaseStanding.CURRENT:
                assert each not in ruling.stale
                last_known[each] = now
            elif each in ruling.stale:
                assert now - last_known.get(each, 0.0) >= INTERVAL * 0.9 - 1e-6
        unknown_since = {
            **{k: v for k, v in unknown_since.items() if k not in standings},
            **ruling.unknown_since,
        }
