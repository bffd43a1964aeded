"""The composition root: the only place where the daemon's parts meet.

Order of the start: configuration judged (every refusal at once), audit, launcher, journal,
reconciliation of what an earlier run left, images, environments, doors, READY. Nothing accepts a
connection before what is left of earlier environments is destroyed or quarantined.

Order of the end: no new connection, a grace for commands that run, every environment ended with
SERVICE_SHUTDOWN, answers delivered, all bounded. When the launcher is gone nothing can be built or
proven: callers are told ENVIRONMENT_LOST and the daemon exits 1, so that the service manager starts
both anew and the next start reconciles. Deliberately absent: going on without the launcher.
"""

import logging
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path

import trio

from sbxd import config
from sbxd.audit.events import (
    DestroyReason,
    LimitUnenforced,
    ServiceStarted,
    ServiceStopped,
    StopReason,
)
from sbxd.audit.recorder import Recorder
from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.auditing import open_audit
from sbxd.config import CredentialState, StartupRefusal, startup_refusals
from sbxd.daemon_images import (
    FakeUsers,
    Known,
    NothingToUnpack,
    RegistryUsers,
    image_store,
    open_images,
)
from sbxd.doors import DoorUnavailable, open_doors
from sbxd.egress.host_network import HostNetworkUnreadable
from sbxd.fake.engine import FakeEngine
from sbxd.fake.script import Outcome, Script
from sbxd.fake.service import FakeEnvironments
from sbxd.host import HostRefused, accepted_missing, of_this_host, refused
from sbxd.lifecycle.budgets import budgets_of
from sbxd.lifecycle.commands import CommandRules
from sbxd.lifecycle.environments import Environments
from sbxd.lifecycle.journal import (
    Journal,
    JournalStore,
    JournalUnreadable,
    JournalUnwritable,
    OneThread,
)
from sbxd.lifecycle.leases import LeaseReaper
from sbxd.lifecycle.local import LocalEnvironments
from sbxd.lifecycle.provision import Provisioner
from sbxd.lifecycle.reconcile import Reconciler
from sbxd.lifecycle.registry import Clock, Registry, back_stop_seconds
from sbxd.lifecycle.supervisor import Parts
from sbxd.mechanism.protocol import Mechanism, MechanismError
from sbxd.mechanisms import open_mechanism
from sbxd.metrics import pool
from sbxd.metrics.derived import DerivedMetrics
from sbxd.metrics.readings import Backlog
from sbxd.metrics.sink import CountedSink
from sbxd.notify import Notifier
from sbxd.observing import DaemonObserver, Source, about
from sbxd.port.ids import EnvironmentId
from sbxd.proxies import Proxies, open_proxies
from sbxd.service.dispatch import Dispatch
from sbxd.service.images import ImageStore
from sbxd.service.lease_query import lease_authorities
from sbxd.service.listener import Service
from sbxd.service.session import SessionContext
from sbxd.settings import SandboxMechanism, Settings

FAREWELL_SECONDS = 5.0
LAUNCHER_SECONDS = 20.0


class ExitStatus(IntEnum):
    """0: stopped as asked. 1: could not go on. 2: refused to start with this configuration."""

    STOPPED = 0
    FAILED = 1
    REFUSED = 2


@dataclass(frozen=True)
class Given:
    """What the service manager gave to this process.

    passed: listening sockets by name. credential: the service credential. watchdog_seconds: the
    interval within which it wants a sign of life.
    """

    passed: dict[str, int]
    credential: bytes | None
    watchdog_seconds: float | None
    notifier: Notifier


class CannotStart(Exception):
    """Something that the daemon needs is not there. The text says what, and what to do."""


_UNABLE = (
    CannotStart,
    DoorUnavailable,
    AuditUnavailable,
    JournalUnreadable,
    JournalUnwritable,
    MechanismError,
    HostNetworkUnreadable,
    OSError,
)


async def run(settings: Settings, given: Given, log: logging.Logger) -> ExitStatus:
    """Judge the configuration, start, serve until told to stop or unable to go on."""
    settings = of_this_host(settings)
    refusals = startup_refusals(
        settings,
        credential=CredentialState.PRESENT if given.credential else CredentialState.ABSENT,
        available_mechanisms=config.BUILT_MECHANISMS,
    )
    _say(refusals, log)
    status = ExitStatus.REFUSED if refusals else ExitStatus.FAILED
    try:
        async with open_audit(settings) as recorder:
            derived = DerivedMetrics(settings.sandbox.value, time.monotonic)
            audit = CountedSink(recorder, derived, partial(_backlog, recorder))
            if refusals:
                await audit.emit(refused(refusals))
                return status
            serve = _serve_fake if settings.sandbox is SandboxMechanism.FAKE else _serve_launched
            try:
                async with audit.counting():
                    status = await serve(settings, given, audit, log)
            except* HostRefused as group:
                status = ExitStatus.REFUSED
                for problem in _leaves(group):
                    assert isinstance(problem, HostRefused)
                    _say(problem.refusals, log)
                    await audit.emit(refused(problem.refusals))
    except* _UNABLE as group:
        for problem in _leaves(group):
            log.error("unable to go on: %s", problem)
    return status


def _leaves(group: BaseExceptionGroup) -> Iterator[BaseException]:
    for problem in group.exceptions:
        if isinstance(problem, BaseExceptionGroup):
            yield from _leaves(problem)
        else:
            yield problem


def _backlog(recorder: Recorder) -> Backlog:
    counts = recorder.counts
    return Backlog(spooled=counts.spooled, waiting=counts.waiting)


def _say(refusals: Sequence[StartupRefusal], log: logging.Logger) -> None:
    for refusal in refusals:
        log.error("refusing to start: %s", refusal)


# --- the mechanisms ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Assembled:
    """A lifecycle and an image store that are ready for the doors.

    end: ends every environment for this reason and returns how many there were. lost: returns
    when the mechanism is gone. pool: what the reserve says of itself, for the metrics.
    """

    environments: Environments
    egress: Proxies
    images: ImageStore
    mechanism_name: str
    boot_id: str
    end: Callable[[StopReason], Awaitable[int]]
    lost: Callable[[], Awaitable[None]]
    pool: tuple[Source, ...] = ()


async def _serve_launched(
    settings: Settings, given: Given, audit: CountedSink, log: logging.Logger
) -> ExitStatus:
    try:
        async with (
            open_mechanism(settings, log) as mechanism,
            open_proxies(settings.egress, audit) as egress,
            _assemble(settings, mechanism, egress, audit, log) as assembled,
        ):
            return await _serve(settings, given, assembled, audit, log)
    except OSError as problem:
        raise CannotStart(
            f"the launcher does not answer at launcher_socket ({problem.strerror}): is "
            "sbxd-launcher.socket started?"
        ) from None


@asynccontextmanager
async def _assemble(
    settings: Settings,
    mechanism: Mechanism,
    egress: Proxies,
    audit: AuditSink,
    log: logging.Logger,
) -> AsyncIterator[Assembled]:
    budgets = budgets_of(settings.limits)
    boot_id = await read_boot_id(mechanism)
    one_thread = OneThread()
    directory = Path(settings.state_directory) / "journal"
    store = await one_thread(partial(JournalStore, directory, boot_id, time.time))
    journal = Journal(store, one_thread)
    try:
        reconciler = Reconciler(mechanism, journal, audit, budgets)
        report = await reconciler.run(frozenset)
        if report.destroyed or report.quarantined:
            log.info(
                "of an earlier run: %d removed, %d quarantined",
                len(report.destroyed),
                len(report.quarantined),
            )
        parts = Parts(
            mechanism=mechanism,
            journal=journal,
            audit=audit,
            budgets=budgets,
            back_stop_seconds=back_stop_seconds(settings),
        )
        clock = Clock(wall=_utc_now, new_id=_new_environment_id)
        registry = Registry(parts, settings, clock, lambda: images.known_in_order())
        images = image_store(settings, mechanism, RegistryUsers(registry))
        await open_images(settings, images, audit, log)
        lease_reaper = LeaseReaper(
            authorities=lease_authorities(settings),
            handed_out=registry.handed_out,
            end=registry.end_stale,
            audit=audit,
            interval_seconds=settings.leases.interval_seconds,
        )
        environments = LocalEnvironments(
            registry,
            Provisioner(registry, parts, settings, clock),
            CommandRules(settings, budgets, audit, egress, on_command=registry.shares.wake),
            mechanism,
            reconciler,
            lease_reaper,
            images.known,
        )

        async def end(reason: StopReason) -> int:
            if reason is StopReason.LAUNCHER_LOST:
                return await registry.abandon(within_seconds=FAREWELL_SECONDS)
            return await registry.shut_down(DestroyReason.SERVICE_SHUTDOWN)

        async with trio.open_nursery() as nursery:
            await nursery.start(registry.run)
            name, lost = mechanism.name, mechanism.wait_lost
            kept = (lambda: pool.families(registry.reserve.status()),)
            yield Assembled(environments, egress, images, name, boot_id, end, lost, kept)
            nursery.cancel_scope.cancel()
    finally:
        store.close()


async def read_boot_id(mechanism: Mechanism) -> str:
    """The launcher's first answer. A launcher that cannot start leaves its socket open, so
    whoever connects would wait for ever. Raises CannotStart."""
    with trio.move_on_after(LAUNCHER_SECONDS):
        return (await mechanism.inventory()).boot_id
    raise CannotStart(
        f"the launcher has not answered for {LAUNCHER_SECONDS:.0f} s: see "
        "`journalctl -u sbxd-launcher`"
    )


async def _serve_fake(
    settings: Settings, given: Given, audit: CountedSink, log: logging.Logger
) -> ExitStatus:
    """Every command succeeds at once and does nothing: for trying the protocol out."""
    async with open_proxies(settings.egress, audit) as egress, trio.open_nursery() as nursery:
        images = image_store(settings, NothingToUnpack(), FakeUsers(lambda: environments))
        script = Script(otherwise=Outcome())
        engine = FakeEngine(script, settings=settings, known_digests=Known(images.known))
        environments = FakeEnvironments(
            engine, nursery, grace_seconds=settings.service.orphan_grace_seconds
        )
        await open_images(settings, images, audit, log)

        async def end(reason: StopReason) -> int:
            await trio.lowlevel.checkpoint()
            return len(engine.records())

        assembled = Assembled(environments, egress, images, "fake", "none", end, trio.sleep_forever)
        status = await _serve(settings, given, assembled, audit, log)
        nursery.cancel_scope.cancel()
        return status


# --- serving ----------------------------------------------------------------------------------


async def _serve(
    settings: Settings,
    given: Given,
    assembled: Assembled,
    audit: CountedSink,
    log: logging.Logger,
) -> ExitStatus:
    version = package_version("sbxd")
    observed = about(version, assembled.mechanism_name)
    observer = DaemonObserver(
        settings,
        audit.derived,
        assembled.environments,
        observed,
        sources=assembled.pool,
        backlog=audit.backlog,
    )
    context = SessionContext(
        settings=settings,
        dispatch=Dispatch(
            environments=assembled.environments,
            images=assembled.images,
            egress=assembled.egress,
            observer=observer,
            settings=settings,
            audit=audit,
            log=log,
            version=version,
        ),
        environments=assembled.environments,
        credential=given.credential,
        log=log,
        shutdown=trio.Event(),
        server_name=f"sbxd/{version}",
        mechanism=assembled.mechanism_name,
        count=audit.count,
        is_beyond=audit.is_beyond,
    )
    service = Service(context, audit, log)
    doors = open_doors(given.passed, Path(settings.runtime_directory))
    served = trio.Event()

    async def serve_doors(task_status: trio.TaskStatus[None]) -> None:
        await service.serve(doors, task_status=task_status)
        served.set()

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_doors)
            await _announce(settings, assembled, version, audit)
            nursery.start_soon(_watchdog, given)
            nursery.start_soon(observer.run)
            given.notifier.tell("READY=1", "STATUS=serving")
            log.info("serving: sandbox = %s, version %s", assembled.mechanism_name, version)
            reason = await _wait_reason(signals, assembled)
            given.notifier.tell("STOPPING=1", f"STATUS=stopping: {reason.value}")
            log.info("stopping: %s", reason.value)
            service.shut_down()
            ended = await assembled.end(reason)
            with trio.move_on_after(FAREWELL_SECONDS):
                await served.wait()
            nursery.cancel_scope.cancel()
    if not await audit.settle():
        log.error("ignoring: what was counted of refusals and uses could not all be recorded")
    try:
        await audit.emit(ServiceStopped(reason=reason, environments_ended=ended))
    except AuditUnavailable as problem:
        log.error("ignoring: the stop could not be recorded: %s", problem)
    return ExitStatus.STOPPED if reason is StopReason.SIGNALLED else ExitStatus.FAILED


async def _announce(
    settings: Settings, assembled: Assembled, version: str, audit: AuditSink
) -> None:
    """Record what is being served, and what this host does not enforce."""
    posture = (await assembled.environments.describe()).posture
    await audit.emit(
        ServiceStarted(
            version=version,
            mechanism=assembled.mechanism_name,
            deployment_mode=settings.deployment_mode.value,
            auth_mode=settings.auth_mode.value,
            boot_id=assembled.boot_id,
            posture=tuple(f"{item.name}={item.state}" for item in posture),
        )
    )
    states = {item.name.removeprefix("cgroup."): item.state for item in posture}
    for limit in settings.limits.allow_unenforced_limits:
        if states.get(limit, "ok") != "ok":
            await audit.emit(LimitUnenforced(limit=limit))
    for accepted in accepted_missing(settings, posture):
        await audit.emit(accepted)


async def _wait_reason(signals: AsyncIterator[int], assembled: Assembled) -> StopReason:
    """Until there is a reason to stop. The first stands."""
    reasons: list[StopReason] = []
    async with trio.open_nursery() as nursery:

        async def wait_signal() -> None:
            async for _number in signals:
                break
            reasons.append(StopReason.SIGNALLED)
            nursery.cancel_scope.cancel()

        async def wait_lost() -> None:
            await assembled.lost()
            reasons.append(StopReason.LAUNCHER_LOST)
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait_signal)
        nursery.start_soon(wait_lost)
    return reasons[0]


async def _watchdog(given: Given) -> None:
    """Show the service manager that the event loop turns, three times per interval."""
    if given.watchdog_seconds is None:
        return
    while True:
        given.notifier.tell("WATCHDOG=1")
        await trio.sleep(given.watchdog_seconds / 3)


def _utc_now() -> datetime:
    return datetime.now(UTC)


def _new_environment_id() -> EnvironmentId:
    return EnvironmentId(secrets.token_hex(16))
