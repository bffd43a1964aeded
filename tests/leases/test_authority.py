"""Workers, supervisor, daemon and authority over a real socket, under both event loops."""

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import trio

from sbxd.client.authority import Admitted, LeaseAuthority
from sbxd.client.leases import LeasedEnvironments, LeaseRegistrar
from sbxd.lifecycle.leases import AuthorityUnanswered
from sbxd.port.errors import ExecutionUnavailable, StaleLease
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.leases import LeaseStanding
from sbxd.service.lease_query import RemoteLeaseAuthority
from sbxd.service.peer import PeerCredentials
from sbxd.wire import leases as w
from tests.leases.ports import PortDouble, specification

TENANT, RUN = TenantId("tenant"), RunId("run")
A, B = EnvironmentId("a" * 32), EnvironmentId("b" * 32)
UID = os.getuid()
EVERYONE = Admitted(holder_uids=frozenset({UID}), asker_uids=frozenset({UID}))


def run(backend: str, main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(20):
            await main()

    anyio.run(bounded, backend=backend)


@asynccontextmanager
async def served(
    path: Path, admitted: Admitted = EVERYONE, grace_seconds: float = 1000.0
) -> AsyncIterator[LeaseAuthority]:
    authority = LeaseAuthority(admitted, grace_seconds=grace_seconds)
    async with anyio.create_task_group() as tasks:
        await tasks.start(authority.serve, str(path))
        yield authority
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def worker(path: Path, answer_seconds: float = 5.0) -> AsyncIterator[LeaseRegistrar]:
    registrar = LeaseRegistrar(str(path), answer_seconds=answer_seconds, pause_seconds=(0.01,))
    async with anyio.create_task_group() as tasks:
        await tasks.start(registrar.run)
        yield registrar
        tasks.cancel_scope.cancel()


async def standing_becomes(
    authority: LeaseAuthority, environment_id: EnvironmentId, wanted: LeaseStanding
) -> None:
    while authority.book.standing(environment_id, anyio.current_time()) is not wanted:
        await anyio.lowlevel.checkpoint()


def test_a_lease_is_current_from_its_binding_to_its_release(backend: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path / "s") as authority, worker(tmp_path / "s") as registrar:
            lease = await registrar.register(TENANT, RUN, 1)
            assert authority.book.standing(A, 0) is LeaseStanding.UNKNOWN
            await registrar.bind(lease, A)
            assert authority.book.standing(A, 0) is LeaseStanding.CURRENT
            await registrar.release(lease)
            assert authority.book.standing(A, 0) is LeaseStanding.STALE
            await registrar.release(lease)

    run(backend, main)


def test_the_second_worker_of_a_tier_takes_the_run_and_the_first_is_told(
    backend: str, tmp_path: Path
) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with served(path) as authority, worker(path) as first, worker(path) as second:
            lease = await first.register(TENANT, RUN, 1)
            await first.bind(lease, A)
            await second.register(TENANT, RUN, 2)
            assert authority.book.standing(A, 0) is LeaseStanding.STALE
            with pytest.raises(StaleLease):
                await first.register(TENANT, RUN, 1)

    run(backend, main)


def test_a_supervisor_fences_without_a_lease_of_its_own(backend: str, tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with served(path) as authority, worker(path) as fenced, worker(path) as supervisor:
            lease = await fenced.register(TENANT, RUN, 1)
            await fenced.bind(lease, A)
            await supervisor.fence(TENANT, RUN, 2)
            assert authority.book.standing(A, 0) is LeaseStanding.STALE
            with pytest.raises(StaleLease):
                await supervisor.fence(TENANT, RUN, 1)

    run(backend, main)


def test_a_worker_that_is_gone_loses_its_leases(backend: str, tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with served(path, grace_seconds=0.0) as authority:
            async with worker(path) as registrar:
                await registrar.bind(await registrar.register(TENANT, RUN, 1), A)
                assert authority.book.standing(A, 0) is LeaseStanding.CURRENT
            await standing_becomes(authority, A, LeaseStanding.STALE)

    run(backend, main)


def test_an_authority_that_was_restarted_is_told_everything_again(
    backend: str, tmp_path: Path
) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with worker(path) as registrar:
            async with served(path):
                lease = await registrar.register(TENANT, RUN, 1)
                await registrar.bind(lease, A)
                fenced = await registrar.register(TENANT, RunId("fenced"), 1)
                await registrar.bind(fenced, B)
            async with served(path) as again:
                assert again.book.standing(A, 0) is LeaseStanding.UNKNOWN
                await standing_becomes(again, A, LeaseStanding.CURRENT)
                await standing_becomes(again, B, LeaseStanding.CURRENT)
                assert not fenced.stale.is_set()
            # Meanwhile one of the runs goes to another worker.
            async with served(path) as third:
                third.book.fence(fenced.run, 2)
                await fenced.stale.wait()
                await standing_becomes(third, A, LeaseStanding.CURRENT)
                assert not lease.stale.is_set()

    run(backend, main)


def test_without_an_authority_nothing_is_registered_and_a_binding_waits_for_it(
    backend: str, tmp_path: Path
) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with worker(path, answer_seconds=0.2) as registrar:
            with pytest.raises(ExecutionUnavailable):
                await registrar.register(TENANT, RUN, 1)
            async with served(path):
                while True:
                    try:
                        lease = await registrar.register(TENANT, RUN, 1)
                        break
                    except ExecutionUnavailable:  # the machine is slow
                        continue
            await registrar.bind(lease, A)
            async with served(path) as authority:
                await standing_becomes(authority, A, LeaseStanding.CURRENT)

    run(backend, main)


def test_a_cancelled_question_does_not_mix_up_the_answers(backend: str, tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with served(path) as authority, worker(path) as registrar:
            lease = await registrar.register(TENANT, RUN, 1)
            await registrar.bind(lease, A)
            for _ in range(20):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await registrar.fence(TENANT, RunId("other"), 3)
                with anyio.move_on_after(0):
                    await registrar.fence(TENANT, RunId("other"), 3)
            await registrar.fence(TENANT, RunId("other"), 4)
            with pytest.raises(StaleLease):
                await registrar.fence(TENANT, RunId("other"), 3)
            await standing_becomes(authority, A, LeaseStanding.CURRENT)

    run(backend, main)


def test_an_environment_is_registered_before_and_bound_after_it_is_provisioned(
    backend: str, tmp_path: Path
) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with served(path) as authority, worker(path) as registrar:
            seen = []
            port = PortDouble(on_provision=lambda: seen.append(authority.book.held))
            leased = LeasedEnvironments(port, registrar)
            handle = await leased.provision(specification(epoch=1))
            assert seen == [1]
            standing = authority.book.standing(handle.environment_id, 0)
            assert standing is LeaseStanding.CURRENT
            await leased.destroy(handle)
            assert authority.book.held == 0

    run(backend, main)


def test_an_environment_whose_lease_is_fenced_meanwhile_is_destroyed_and_not_handed_out(
    backend: str, tmp_path: Path
) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with served(path) as authority, worker(path) as registrar:
            port = PortDouble()
            leased = LeasedEnvironments(port, registrar)
            lease = await registrar.register(TENANT, RUN, 1)
            port.on_provision = lambda: authority.book.fence(lease.run, 2)
            with pytest.raises(StaleLease):
                await leased.provision(specification(epoch=1))
            assert port.live == set()
            assert authority.book.held == 1  # the one of this test

    run(backend, main)


def test_a_provision_that_fails_or_is_cancelled_gives_the_lease_up(
    backend: str, tmp_path: Path
) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with served(path) as authority, worker(path) as registrar:
            port = PortDouble(fails=True)
            leased = LeasedEnvironments(port, registrar)
            with pytest.raises(ExecutionUnavailable):
                await leased.provision(specification(epoch=1))
            assert authority.book.held == 0
            port.fails, port.hangs = False, True
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leased.provision, specification(epoch=1))
                while not port.live:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            assert authority.book.held == 0

    run(backend, main)


# --- the daemon's side -------------------------------------------------------------------------


def remote(path: Path, answer_seconds: float = 5.0) -> RemoteLeaseAuthority:
    return RemoteLeaseAuthority("tier", frozenset({UID}), str(path), answer_seconds)


async def test_the_daemon_asks_about_more_than_one_frame_holds(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with served(path), worker(path) as registrar:
        await registrar.bind(await registrar.register(TENANT, RUN, 1), A)
        ids = [EnvironmentId(f"{n:032x}") for n in range(2500)]
        standings = await remote(path).ask([*ids, A])
    assert len(standings) == 2501
    assert standings[-1] is LeaseStanding.CURRENT
    assert set(standings[:-1]) == {LeaseStanding.UNKNOWN}


async def test_nobody_listening_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(AuthorityUnanswered):
        await remote(tmp_path / "s").ask([A])


@pytest.mark.parametrize("uid", [UID, 12345])
async def test_one_who_listens_under_another_uid_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    path = tmp_path / "s"
    peer = PeerCredentials(pid=1, uid=uid, gid=uid, groups=frozenset())
    monkeypatch.setattr("sbxd.service.lease_query.read_peer_credentials", lambda _: peer)
    async with served(path):
        if uid == UID:
            assert await remote(path).ask([A]) == [LeaseStanding.UNKNOWN]
        else:
            with pytest.raises(AuthorityUnanswered, match="12345"):
                await remote(path).ask([A])


async def test_the_daemon_is_not_answered_by_an_authority_that_does_not_admit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    refuse = w.LeaseFarewell(code=w.LeaseFarewellCode.NOT_AUTHORIZED)
    monkeypatch.setattr(LeaseAuthority, "judge_hello", lambda *_: refuse)
    async with served(path):
        with pytest.raises(AuthorityUnanswered, match="not welcome"):
            await remote(path).ask([A])


async def test_an_authority_that_says_nothing_is_given_up_in_time(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "s"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    with pytest.raises(AuthorityUnanswered, match="in time"):
        await remote(path).ask([A])
    assert trio.current_time() == pytest.approx(5.0, abs=0.5)
    listener.close()


@pytest.mark.parametrize("role", w.LeaseRole)
def test_root_and_the_configured_are_admitted_and_nobody_else(role: w.LeaseRole) -> None:
    admitted = Admitted(holder_uids=frozenset({1}), asker_uids=frozenset({2}))
    own = 1 if role is w.LeaseRole.HOLDER else 2
    assert admitted.allows(0, role)
    assert admitted.allows(own, role)
    assert not admitted.allows(3 - own, role)
    assert not admitted.allows(3, role)


def test_a_second_authority_does_not_take_the_socket_of_the_first(
    backend: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with served(tmp_path / "s"):
            with pytest.raises(ExecutionUnavailable, match="another authority"):
                await LeaseAuthority(EVERYONE).serve(str(tmp_path / "s"))
        (tmp_path / "file").write_text("")
        with pytest.raises(ExecutionUnavailable, match="taken"):
            await LeaseAuthority(EVERYONE).serve(str(tmp_path / "file"))

    run(backend, main)
