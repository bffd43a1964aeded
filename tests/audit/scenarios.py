"""What has to happen for each type of event to be recorded by the installed daemon: real
environments, real commands, real faults. `SCENARIOS` says which scenario records which types.
"""

import io
import os
import secrets
import shutil
import signal
import subprocess
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from sbxctl.audit_record import AuditRecord
from sbxd.audit import bridge_events as bridge
from sbxd.audit import confinement
from sbxd.audit import counted_events as counted
from sbxd.audit import egress_events as egress
from sbxd.audit import events as e
from sbxd.audit import lease_events as leases
from sbxd.audit import stream_events as stream
from sbxd.audit.counting import RECORDED_MAX
from sbxd.audit.losses import EnvironmentLost
from sbxd.client.remote import connect
from sbxd.port.environment import EnvironmentSpec
from sbxd.port.errors import PortError, WorkspaceEscape
from sbxd.port.ids import EnvironmentId, TenantId
from sbxd.port.limits import MIB, EnvironmentBudgets
from sbxd.wire.repair import ClearingWord
from tests.audit.live_records import position, since
from tests.kernel.test_launcher_verify import FAULTY, program_without
from tests.lab.internet import internet
from tests.pacing import next_look
from tests.redteam import test_bridge, test_egress_abuse, test_no_orphans
from tests.redteam.configuration import current, holding
from tests.redteam.egress import allowlist, configured, networked
from tests.redteam.faults import DAEMON, LAUNCHER, SMALL, main_pid
from tests.redteam.inventory import residents
from tests.redteam.live import (
    WORKER_SOCKET,
    Live,
    admin,
    default_image,
    live,
    specification,
    wait_process_on_the_host,
)

STATE = Path("/var/lib/sbxd")
DROP_INS = Path("/run/systemd/system")
JOURNAL_UNITS = (
    "systemd-journald.socket", "systemd-journald-dev-log.socket", "systemd-journald-audit.socket",
    "systemd-journald.service",
)  # fmt: skip
WITHIN_SECONDS = 60.0


def systemctl(*words: str) -> None:
    subprocess.run(["systemctl", *words], check=True, capture_output=True, timeout=120)


def restart_forgiven(*units: str) -> None:
    """Restart them, whether or not they come up, without the pause that grows with each failure."""
    subprocess.run(["systemctl", "reset-failed", *units], check=False, timeout=120)
    subprocess.run(["systemctl", "restart", *units], check=False, capture_output=True, timeout=120)


def forgive() -> None:
    subprocess.run(["systemctl", "reset-failed", DAEMON, LAUNCHER], check=False, timeout=120)


async def restored() -> None:
    """Until the daemon answers again."""
    with trio.fail_after(WITHIN_SECONDS):
        while True:
            forgive()
            with suppress(PortError):
                async with admin() as client:
                    await client.describe()
                    return
            await next_look()


async def seen(
    kind: type[e.AuditEvent], after: int, environment_id: EnvironmentId | None = None
) -> None:
    """Until an event of this type is recorded, of this environment or of any."""

    def is_wanted(record: AuditRecord) -> bool:
        of = record.fields.get("environment_id")
        return record.event == kind.__name__ and environment_id in (None, of)

    with trio.fail_after(WITHIN_SECONDS):
        while not any(map(is_wanted, since(after))):
            await next_look()


@contextmanager
def immutable(*paths: Path) -> Iterator[None]:
    """Root itself cannot change these, as on a disk that has become read-only."""
    names = [str(each) for each in paths]
    subprocess.run(["chattr", "+i", *names], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *names], check=False)


def cold(image: str) -> EnvironmentSpec:
    """What no slot of the reserve was prepared for."""
    return specification(
        image, msgspec.structs.replace(SMALL, workspace_bytes=17 * MIB, inodes_max=501)
    )


async def attempt(wanted: EnvironmentSpec) -> None:
    """Ask for an environment that is not to be had."""
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        with suppress(PortError):
            await remote.destroy(await remote.provision(wanted))


# --- the scenarios ------------------------------------------------------------------------------


async def a_command_and_a_link_out_of_the_workspace() -> None:
    async with live(SMALL) as one:
        await one.run("ln", "-s", "/etc/hostname", "out")
        with suppress(WorkspaceEscape):
            await one.workspace.read("out")
        await one.workspace.listdir(".")


async def a_request_for_nothing() -> None:
    async with admin() as client:
        with suppress(PortError):
            await client.inspect(EnvironmentId(secrets.token_hex(16)))


async def a_peer_that_speaks_another_protocol() -> None:
    async with await trio.open_unix_socket(WORKER_SOCKET) as peer:
        # One that has too many connections is closed before it has said anything.
        with suppress(trio.BrokenResourceError), trio.fail_after(WITHIN_SECONDS):
            await peer.send_all(b"\xff" * 64)
            while await peer.receive_some(4096):
                pass


async def peers_are_refused_without_end() -> None:
    """More than are recorded one by one; a daemon that stops leaves no count behind."""
    for _ in range(RECORDED_MAX + 10):
        await a_peer_that_speaks_another_protocol()
    restart_forgiven(DAEMON)
    await restored()


async def a_budget_is_spent() -> None:
    budgets = EnvironmentBudgets(operations_max=1, returned_bytes_max=MIB, wall_seconds_max=600)
    async with live(SMALL, budgets=budgets) as one:
        with suppress(PortError):
            for _ in range(2):
                await one.run("true")


async def an_environment_lives_too_long() -> None:
    budgets = EnvironmentBudgets(operations_max=9, returned_bytes_max=MIB, wall_seconds_max=3)
    async with live(SMALL, budgets=budgets) as one:
        with suppress(PortError):
            await one.run("sleep", "60")


async def the_init_of_an_environment_is_killed_under_a_command() -> None:
    """Everything in it dies with it, and nobody is left to tell how."""
    async with live(SMALL) as one, trio.open_nursery() as nursery:

        async def work() -> None:
            with suppress(PortError):
                await one.run("sleep", "4003")

        nursery.start_soon(work)
        await wait_process_on_the_host("4003")
        (init,) = [
            each
            for each in residents()
            if (each.environment_id, each.place) == (one.handle.environment_id, "box/init")
        ]
        os.kill(init.pid, signal.SIGKILL)


async def the_daemon_and_its_launcher_are_killed() -> None:
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        await remote.provision(specification(await default_image(), SMALL))
        for pid in (main_pid(LAUNCHER), main_pid(DAEMON)):
            os.kill(pid, signal.SIGKILL)
    await restored()


async def the_daemon_is_stopped_and_started_with_aliases() -> None:
    unknown = "sha256:" + "0" * 64
    aliases = f'[images.aliases]\nhere = "{await default_image()}"\nnowhere = "{unknown}"\n'
    with configured(aliases):
        await restored()
    await restored()


async def the_daemon_is_started_with_a_wrong_configuration() -> None:
    own = current()
    try:
        with holding(own.replace('"namespaces"', '"microvm"')):
            restart_forgiven(DAEMON)
    finally:
        restart_forgiven(DAEMON)
    await restored()


async def a_handle_names_another_tenant() -> None:
    async with live(SMALL) as one:
        other = msgspec.structs.replace(one.handle, tenant_id=TenantId("other"))
        with suppress(PortError):
            await Live(one.remote, other).run("true")


async def an_environment_cannot_be_destroyed() -> None:
    async with admin() as client:
        name = await quarantined()
        await client.clear_quarantine(name, ClearingWord.ONLY_WITH_PROOF)


async def what_was_quarantined_can_be_destroyed() -> None:
    name = await quarantined()
    async with admin() as client:
        assert name in (await client.reap()).released


async def quarantined() -> EnvironmentId:
    """An environment that could not be destroyed, and can be by now."""
    before = position().sequence
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        handle = await remote.provision(specification(await default_image(), SMALL))
        kept = list((STATE / "volumes").glob(f"{handle.environment_id}*"))
        with immutable(STATE / "volumes", *(each for each in kept if each.is_file())):
            with suppress(PortError):
                await remote.destroy(handle)
            # A slot that comes to its end meanwhile is quarantined as well.
            await seen(e.EnvironmentQuarantined, before, handle.environment_id)
    return handle.environment_id


async def a_slot_cannot_be_prepared() -> None:
    with immutable(STATE / "volumes"):
        await attempt(cold(await default_image()))


async def a_command_is_not_confined_as_asked() -> None:
    drop_in = DROP_INS / f"{LAUNCHER}.d" / "scenario.conf"
    place = STATE.parent / "sbxd-scenario-launcher"
    place.mkdir()
    program = place / "launcher.py"
    drop_in.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(FAULTY)
    step = "confine_system_calls"
    run = f"/opt/sbxd/bin/python {program} {step} {program_without(place, step)}"
    drop_in.write_text(f"[Service]\nExecStart=\nExecStart={run}\n")
    image = await default_image()
    before = position().sequence
    try:
        systemctl("daemon-reload")
        systemctl("restart", LAUNCHER)
        await restored()
        await attempt(cold(image))
        # The reply does not wait for it, and the daemon ends with its launcher.
        await seen(confinement.ConfinementMismatched, before)
    finally:
        drop_in.unlink()
        shutil.rmtree(place)
        systemctl("daemon-reload")
        systemctl("restart", LAUNCHER)
    await restored()


async def a_lease_is_not_held() -> None:
    await test_no_orphans.test_a_worker_that_is_fenced_loses_its_environment_and_is_told()


async def a_lease_authority_is_away() -> None:
    async with live(SMALL), admin() as client:
        await client.reap()


async def the_creation_journal_cannot_be_written() -> None:
    image = await default_image()
    with immutable(*(STATE / "journal").glob("journal.sqlite*")):
        await attempt(cold(image))
    systemctl("restart", DAEMON)
    await restored()


async def an_image_comes_and_goes() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(f"scenario-{secrets.token_hex(4)}")
        entry.type = tarfile.DIRTYPE
        entry.mode = 0o755
        tar.addfile(entry)
    raw = buffer.getvalue()

    async def pieces() -> AsyncIterator[bytes]:
        yield raw

    async with admin() as client:
        image = await client.image_import(pieces(), len(raw), label="scenario")
        await client.image_remove(image.digest)


async def a_bridge_is_used_twice() -> None:
    await test_bridge.test_a_second_use_of_the_token_is_refused_while_and_after_the_first()


async def connections_are_asked_for() -> None:
    with internet() as built, configured(allowlist()):
        async with networked() as one:
            files, other = "files.lab-allowed.com", "other.lab-public.com"
            await one.statuses(f"{files}:443", "nowhere.lab-allowed.com:443", f"{other}:443")
        await test_egress_abuse.test_data_in_refused_names_is_slow_counted_exactly_and_charged(
            built
        )
    await restored()


async def the_journal_is_away() -> None:
    async with live(SMALL) as one:
        before = position().sequence
        with journal_away(), suppress(PortError):
            await one.run("true")
    await seen(stream.AuditRecovered, before)


@contextmanager
def journal_away() -> Iterator[None]:
    """Nobody listens on the journal's sockets."""
    systemctl("stop", *JOURNAL_UNITS)
    try:
        yield
    finally:
        systemctl("start", *JOURNAL_UNITS)


# --- which records what -------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """records: types of which it records at least one each."""

    run: Callable[[], Awaitable[None]]
    records: tuple[type[e.AuditEvent], ...]

    @property
    def name(self) -> str:
        return getattr(self.run, "__name__", "")


SCENARIOS = (
    Scenario(
        a_command_and_a_link_out_of_the_workspace,
        (
            e.EnvironmentProvisioned,
            e.CommandStarted,
            e.CommandFinished,
            e.PathDenied,
            counted.WorkspaceUsed,
            counted.WorkspaceUsesCounted,
            e.EnvironmentDestroyed,
        ),
    ),
    Scenario(a_request_for_nothing, (e.RequestRejected,)),
    Scenario(a_peer_that_speaks_another_protocol, (e.PeerRefused,)),
    Scenario(peers_are_refused_without_end, (counted.RefusalsCounted,)),
    Scenario(a_budget_is_spent, (e.BudgetWasExhausted,)),
    Scenario(an_environment_lives_too_long, (e.EnvironmentExpired,)),
    Scenario(
        the_init_of_an_environment_is_killed_under_a_command,
        (EnvironmentLost, e.CommandUnfinished, e.RequestUnserved),
    ),
    Scenario(the_daemon_and_its_launcher_are_killed, (stream.AuditOpened, e.OrphanDestroyed)),
    Scenario(
        the_daemon_is_stopped_and_started_with_aliases,
        (
            e.ServiceStopped,
            e.ServiceStarted,
            e.LimitUnenforced,
            e.ImageAliasResolved,
            e.ImageAliasUnresolved,
        ),
    ),
    Scenario(the_daemon_is_started_with_a_wrong_configuration, (e.StartupRefused,)),
    Scenario(a_handle_names_another_tenant, (e.SandboxEscapeWasSuspected,)),
    Scenario(
        an_environment_cannot_be_destroyed,
        (e.EnvironmentDestroyFailed, e.EnvironmentQuarantined, leases.QuarantineCleared),
    ),
    Scenario(what_was_quarantined_can_be_destroyed, (leases.QuarantineReleased,)),
    Scenario(a_slot_cannot_be_prepared, (e.SlotPreparationFailed,)),
    Scenario(a_command_is_not_confined_as_asked, (confinement.ConfinementMismatched,)),
    Scenario(a_lease_is_not_held, (leases.StaleLeaseEnded,)),
    Scenario(a_lease_authority_is_away, (leases.LeaseAuthorityMissed,)),
    Scenario(the_creation_journal_cannot_be_written, (leases.JournalWriteFailed,)),
    Scenario(an_image_comes_and_goes, (e.ImageImported, e.ImageRemoved)),
    Scenario(
        a_bridge_is_used_twice,
        (bridge.BridgeOpened, bridge.BridgeRefused, bridge.BridgeClosed),
    ),
    Scenario(
        connections_are_asked_for,
        (
            egress.EgressAllowed,
            egress.EgressTunnelClosed,
            egress.EgressRefused,
            egress.EgressFailed,
            egress.EgressRefusalsCounted,
        ),
    ),
    Scenario(the_journal_is_away, (stream.AuditRecovered,)),
)
