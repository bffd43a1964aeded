"""Who may have an environment, under which lease, and whose it is."""

import errno
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.audit.confinement import ConfinementMismatched
from sbxd.audit.events import (
    DestroyReason,
    EnvironmentDestroyed,
    EnvironmentProvisioned,
    Priority,
    SandboxEscapeWasSuspected,
    SlotOrigin,
    SlotPreparationFailed,
)
from sbxd.lifecycle.environments import Peer, PeerRole
from sbxd.lifecycle.journal import JournalState, Tenancy
from sbxd.mechanism.protocol import ConfinementMismatch, MechanismError
from sbxd.port.command import KillReason
from sbxd.port.errors import (
    EscapeCode,
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    SandboxEscapeSuspected,
    StaleLease,
    UnavailableCode,
)
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.settings import LimitSettings, Settings
from tests.lifecycle.double import Behaviour, Script
from tests.lifecycle.world import (
    ADMIN,
    DEFAULT,
    LIMITS,
    OTHER_WORKER,
    WITH_RESERVE,
    WORKER,
    open_world,
    spec,
)

# --- provision --------------------------------------------------------------------------------


async def test_provision_assigns_the_limits_and_tells_when_it_ends(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(prepare_seconds=0.25)) as world:
        handle = await world.environments.provision(WORKER, spec())
        assert (handle.expires_at - handle.created_at).total_seconds() == 14_400
        assert world.mechanism.sandboxes[0].assigned == [LIMITS]
        assert world.store.states() == {handle.environment_id: JournalState.LIVE}
        (event,) = world.sink.of(EnvironmentProvisioned)
        assert (event.origin, event.duration_ms, event.owner_uid) == (SlotOrigin.COLD, 250, 1000)
        (info,) = await world.environments.list()
        assert (info.handle, info.state, info.owner_uid) == (handle, "LIVE", 1000)
        assert await world.environments.inspect(handle.environment_id) == info


async def test_the_intent_is_in_the_journal_before_anything_is_built(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    seen: list[dict[str, JournalState]] = []
    script = Script()
    async with open_world(tmp_path, script=script) as world:

        def look(name: str) -> None:
            if name == "prepare":
                seen.append({str(key): value for key, value in world.store.states().items()})

        script.on_call = look
        handle = await world.environments.provision(WORKER, spec())
        assert seen == [{handle.environment_id: JournalState.PREPARING}]


async def test_a_start_that_takes_longer_than_its_budget_is_unavailable_and_leaves_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(prepare_seconds=31)) as world:
        began = trio.current_time()
        with pytest.raises(ExecutionUnavailable) as late:
            await world.environments.provision(WORKER, spec())
        assert late.value.code is UnavailableCode.START_BUDGET_EXCEEDED
        assert "building the environment took 30.0 s and was not over" in late.value.detail
        assert trio.current_time() - began == 30
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()


async def test_a_preparation_that_fails_is_unavailable_and_leaves_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(fail_at=1)) as world:
        with pytest.raises(ExecutionUnavailable) as failed:
            await world.environments.provision(WORKER, spec())
        assert failed.value.code is UnavailableCode.SETUP_FAILED
        assert failed.value.detail == "double prepare: EIO"
        await wait_all_tasks_blocked()
        assert len(world.sink.of(SlotPreparationFailed)) == 1
        assert world.consistent_and_empty()


async def test_a_layer_that_did_not_take_has_a_code_and_an_alert_of_its_own(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    detail = "command: the workload's seccomp filter is not on"

    def unconfined(name: str) -> None:
        if name == "prepare":
            raise ConfinementMismatch("verify", errno.EPERM, detail)

    async with open_world(tmp_path, script=Script(on_call=unconfined)) as world:
        with pytest.raises(ExecutionUnavailable) as failed:
            await world.environments.provision(WORKER, spec())
        assert failed.value.code is UnavailableCode.CONFINEMENT_MISMATCH
        assert "seccomp" not in failed.value.detail, "a worker learns no detail of the confinement"
        await wait_all_tasks_blocked()
        (alert,) = world.sink.of(ConfinementMismatched)
        assert (alert.step, alert.detail) == ("verify", detail)
        assert alert.PRIORITY is Priority.ALERT
        assert not world.sink.of(SlotPreparationFailed)
        assert world.consistent_and_empty()


@pytest.mark.parametrize(
    ("step", "number", "remedy"),
    [
        ("legality", 0, "journalctl -u sbxd-launcher"),
        ("volume", errno.ENOSPC, "no room for a workspace"),
        ("apparmor", errno.ENOENT, "sbxctl doctor"),
    ],
)
async def test_a_step_that_an_operator_can_repair_says_how(
    step: str, number: int, remedy: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    def fail(name: str) -> None:
        if name == "prepare":
            raise MechanismError(step, number, "a detail that stays here")

    async with open_world(tmp_path, script=Script(on_call=fail)) as world:
        with pytest.raises(ExecutionUnavailable) as failed:
            await world.environments.provision(WORKER, spec())
    assert failed.value.code is UnavailableCode.SETUP_FAILED
    assert failed.value.detail.startswith(f"{step}: ")
    assert remedy in failed.value.detail
    assert "stays here" not in failed.value.detail


@pytest.mark.parametrize("script", [Script(fail_at=1), Script(prepare_seconds=31)])
async def test_what_a_preparation_leaves_behind_is_removed_by_its_id(
    script: Script, tmp_path: Path, autojump_clock: MockClock
) -> None:
    script.leaves_residue = True
    async with open_world(tmp_path, script=script) as world:
        with pytest.raises(ExecutionUnavailable):
            await world.environments.provision(WORKER, spec())
        assert world.mechanism.existing
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()


async def test_admission_refuses_before_anything_is_touched(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    greedy = msgspec.structs.replace(LIMITS, pids_max=1_000_000)
    async with open_world(tmp_path) as world:
        with pytest.raises(ExecutionRejected) as refused:
            await world.environments.provision(WORKER, spec(limits=greedy))
        assert refused.value.code is RejectedCode.LIMIT_ABOVE_CEILING
        assert world.mechanism.calls == []
        assert world.store.states() == {}


async def test_a_limit_that_the_host_cannot_enforce_is_refused_unless_it_is_listed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    listed = msgspec.structs.replace(
        DEFAULT, limits=LimitSettings(defaults=LIMITS, allow_unenforced_limits=("memory",))
    )
    script = Script(unenforced=("memory",))
    async with open_world(tmp_path / "a", script=script) as world:
        with pytest.raises(ExecutionRejected) as refused:
            await world.environments.provision(WORKER, spec())
        assert refused.value.code is RejectedCode.LIMIT_NOT_ENFORCEABLE
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()
    async with open_world(tmp_path / "b", script=script, settings=listed) as world:
        handle = await world.environments.provision(WORKER, spec())
        assert (await world.run(handle)).unenforced_limits == ("memory",)


async def test_capacity_is_per_peer_and_in_all(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_world(tmp_path) as world:
        provision = world.environments.provision
        for number in range(6):
            await provision(WORKER, spec(run=f"run{number}"))
        with pytest.raises(ExecutionUnavailable) as mine:
            await provision(WORKER, spec(run="one more"))
        assert mine.value.code is UnavailableCode.CAPACITY
        for number in range(2):
            await provision(OTHER_WORKER, spec(run=f"run{number}"))
        with pytest.raises(ExecutionUnavailable) as everyones:
            await provision(OTHER_WORKER, spec(run="one more"))
        assert everyones.value.code is UnavailableCode.CAPACITY


async def test_a_place_that_is_being_vacated_is_waited_for(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_seconds=2)) as world:
        handles = [
            await world.environments.provision(WORKER, spec(run=f"run{number}"))
            for number in range(6)
        ]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.environments.destroy, WORKER, handles[0])
            nursery.start_soon(world.environments.destroy, WORKER, handles[1])
            await wait_all_tasks_blocked()
            began = trio.current_time()
            for number in range(2):
                nursery.start_soon(world.environments.provision, WORKER, spec(run=f"new{number}"))
        assert trio.current_time() - began == 2
        assert len(await world.environments.list()) == 6


async def test_an_audit_log_that_takes_nothing_refuses_new_environments(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        world.sink.fail()
        with pytest.raises(ExecutionUnavailable) as refused:
            await world.environments.provision(WORKER, spec())
        assert refused.value.code is UnavailableCode.AUDIT_UNAVAILABLE
        await trio.sleep(10)
        assert not world.mechanism.existing
        assert world.registry.owned()  # it keeps its place until its end is recorded
        world.sink.recover()
        await trio.sleep(2)
        assert world.consistent_and_empty()
        (event,) = world.sink.of(EnvironmentDestroyed)
        assert event.reason is DestroyReason.PROVISION_FAILED


# --- leases -----------------------------------------------------------------------------------


async def test_a_new_epoch_of_a_run_ends_its_lower_ones_and_nothing_else(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        provision = world.environments.provision
        old = await provision(WORKER, spec(epoch=1))
        twin = await provision(WORKER, spec(epoch=1))
        other_run = await provision(WORKER, spec(run="other", epoch=1))
        other_tenant = await provision(WORKER, spec(tenant="other", epoch=1))
        other_uid = await provision(OTHER_WORKER, spec(epoch=1))
        new = await provision(WORKER, spec(epoch=2))
        await wait_all_tasks_blocked()
        live = {info.handle.environment_id for info in await world.environments.list()}
        assert live == {each.environment_id for each in (other_run, other_tenant, other_uid, new)}
        for stale in (old, twin):
            with pytest.raises(StaleLease):
                await world.run(stale)
        reasons = [event.reason for event in world.sink.of(EnvironmentDestroyed)]
        assert reasons == [DestroyReason.SUPERSEDED] * 2


@pytest.mark.parametrize("settings", [DEFAULT, WITH_RESERVE])
async def test_a_run_may_have_several_environments_and_they_are_dead_before_the_next_epoch_lives(
    settings: Settings, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=settings) as world:
        await trio.sleep(1)
        for _twin in range(2):
            await world.environments.provision(WORKER, spec(epoch=1))
            await trio.sleep(1)
        old = [each for each in world.mechanism.sandboxes if each.assigned]
        assert [each.killed for each in old] == [False, False]
        await world.environments.provision(WORKER, spec(epoch=2))
        # Nothing was awaited since the handle was there.
        assert [each.killed for each in old] == [True, True]


async def test_an_epoch_that_is_overtaken_while_it_is_handed_out_gets_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A higher epoch that is not at hand (this daemon has not seen it) is found by the claim."""
    async with open_world(tmp_path, settings=WITH_RESERVE) as world:
        await trio.sleep(1)
        higher = Tenancy(WORKER.uid, TenantId("tenant"), RunId("run"), 7)
        world.store.intend(EnvironmentId("e" * 32), higher)
        world.store.note(EnvironmentId("e" * 32), JournalState.GONE)
        taken = world.mechanism.sandboxes[0]
        with pytest.raises(StaleLease, match="6 is below 7"):
            await world.environments.provision(WORKER, spec(epoch=6))
        assert taken.killed, "limits were bound for it, so nobody else gets it"
        await trio.sleep(1)
        (ended,) = world.sink.of(EnvironmentDestroyed)
        assert (ended.environment_id, ended.reason) == (
            taken.environment_id,
            DestroyReason.STALE_LEASE,
        )
        prepared = len(world.mechanism.sandboxes)
        for _attempt in range(3):  # from now on it is known without taking a slot
            with pytest.raises(StaleLease, match="6 is below 7"):
                await world.environments.provision(WORKER, spec(epoch=6))
        await trio.sleep(1)
        assert len(world.mechanism.sandboxes) == prepared
        # The control: the epoch that was seen may go on.
        await world.environments.provision(WORKER, spec(epoch=7))


async def test_an_idle_environment_is_killed_in_the_same_step_in_which_its_end_is_asked(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        supervisor = world.registry.find(WORKER, handle)
        supervisor.request_end(DestroyReason.STALE_LEASE)
        assert world.mechanism.sandboxes[0].killed


async def test_a_new_epoch_ends_the_command_that_the_old_one_runs(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        old = await world.environments.provision(WORKER, spec(epoch=1))
        results = []

        async def run() -> None:
            results.append(await world.run(old, Behaviour(seconds=None)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            await world.environments.provision(WORKER, spec(epoch=2))
        assert results[0].killed_by is KillReason.CANCELLED


async def test_an_epoch_lower_than_one_seen_is_stale_also_when_nothing_of_the_run_is_left(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec(epoch=5))
        await world.environments.destroy(WORKER, handle)
        calls = len(world.mechanism.calls)
        with pytest.raises(StaleLease):
            await world.environments.provision(WORKER, spec(epoch=4))
        assert len(world.mechanism.calls) == calls
        await world.environments.provision(WORKER, spec(epoch=5))


async def test_an_epoch_that_is_overtaken_while_it_is_built_is_stale(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(prepare_seconds=5)) as world:
        async with trio.open_nursery() as nursery:

            async def overtaken() -> None:
                with pytest.raises(StaleLease):
                    await world.environments.provision(WORKER, spec(epoch=1))

            nursery.start_soon(overtaken)
            await wait_all_tasks_blocked()
            await world.environments.provision(WORKER, spec(epoch=2))
        (info,) = await world.environments.list()
        assert info.handle.lease_epoch == 2
        assert len(world.mechanism.existing) == 1


# --- ownership --------------------------------------------------------------------------------


@pytest.mark.case("API-09")
async def test_a_foreign_peer_is_told_the_same_as_for_an_id_that_never_was(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        never = msgspec.structs.replace(handle, environment_id="f" * 32)
        mismatched = msgspec.structs.replace(handle, tenant_id=TenantId("another"))
        told = []
        for presented in (handle, mismatched, never):
            with pytest.raises(ExecutionRejected) as refused:
                await world.run(presented, peer=OTHER_WORKER)
            told.append((refused.value.code, refused.value.detail, refused.value.field))
            await world.environments.destroy(OTHER_WORKER, presented)
        assert len(set(told)) == 1
        assert told[0][0] is RejectedCode.ENVIRONMENT_GONE
        assert (await world.run(handle)).exit_code == 0


async def test_another_connection_of_the_same_uid_may_use_an_environment(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    sibling = Peer(uid=WORKER.uid, connection_id=77, role=PeerRole.WORKER)
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        assert (await world.run(handle, peer=sibling)).exit_code == 0
        assert (await world.run(handle, peer=ADMIN)).exit_code == 0


@pytest.mark.case("API-09")
async def test_a_handle_of_another_tenant_is_an_escape_and_ends_the_environment(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        foreign = msgspec.structs.replace(handle, tenant_id=TenantId("another"))
        with pytest.raises(SandboxEscapeSuspected) as suspected:
            await world.run(foreign)
        assert suspected.value.code is EscapeCode.TENANT_MISMATCH
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()
        (event,) = world.sink.of(SandboxEscapeWasSuspected)
        assert (event.code, event.tenant_id) == (EscapeCode.TENANT_MISMATCH, "tenant")


async def test_a_wrong_run_or_epoch_is_stale_and_harms_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        for presented in (
            msgspec.structs.replace(handle, run_id=RunId("another")),
            msgspec.structs.replace(handle, lease_epoch=2),
        ):
            with pytest.raises(StaleLease):
                await world.run(presented)
        assert (await world.run(handle)).exit_code == 0
