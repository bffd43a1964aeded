"""The host's clock is set, by years, while environments live: nothing ends early or late by it."""

from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.audit.events import DestroyReason, EnvironmentDestroyed
from sbxd.port.leases import LeaseStanding
from sbxd.settings import LeaseSettings
from tests.lifecycle import world as worlds
from tests.lifecycle.test_leases import AuthorityDouble
from tests.lifecycle.world import DEFAULT, WORKER, open_world, spec

INTERVAL = 60
SETTINGS = msgspec.structs.replace(DEFAULT, leases=LeaseSettings(interval_seconds=INTERVAL))
LIFETIME_SECONDS = DEFAULT.limits.environment_lifetime_seconds


@pytest.mark.parametrize("years", [10, -10], ids=["forward", "back"])
async def test_an_environment_expires_when_its_time_has_passed_and_not_when_the_clock_says_so(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    async with open_world(tmp_path, settings=SETTINGS) as world:
        handle = await world.environments.provision(WORKER, spec())
        monkeypatch.setattr(worlds, "NOW", worlds.NOW + timedelta(days=365 * years))
        later = await world.environments.provision(WORKER, spec(run="later"))
        assert later.expires_at - later.created_at == handle.expires_at - handle.created_at
        await trio.sleep(LIFETIME_SECONDS - 1)
        assert (await world.run(handle)).exit_code == 0
        await trio.sleep(2)
        assert [each.reason for each in world.sink.of(EnvironmentDestroyed)] == [
            DestroyReason.EXPIRED
        ] * 2


@pytest.mark.parametrize("years", [10, -10], ids=["forward", "back"])
async def test_two_intervals_of_a_lease_are_two_whatever_the_clock_says(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    authority = AuthorityDouble(otherwise=LeaseStanding.UNKNOWN)
    async with open_world(tmp_path, settings=SETTINGS, authorities=[authority]) as world:
        handle = await world.environments.provision(WORKER, spec())
        assert (await world.environments.reap()).unknown == 1
        monkeypatch.setattr(worlds, "NOW", worlds.NOW + timedelta(days=365 * years))
        assert (await world.environments.reap()).stale == ()
        await trio.sleep(INTERVAL)
        assert (await world.environments.reap()).stale == (handle.environment_id,)


async def test_an_orphan_has_its_grace_whatever_the_clock_says(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tmp_path, settings=SETTINGS) as world:
        await world.environments.provision(WORKER, spec())
        world.environments.release_owner(WORKER.connection_id)
        monkeypatch.setattr(worlds, "NOW", worlds.NOW + timedelta(days=3650))
        await trio.sleep(SETTINGS.service.orphan_grace_seconds - 1)
        assert world.mechanism.existing
        await trio.sleep(2)
        assert not world.mechanism.existing
