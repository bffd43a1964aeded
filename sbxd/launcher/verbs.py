"""What the launcher does at each request, and when the work for it ends.

Invariant: every request gets exactly one reply, through the `reply` that the owner gives; the
owner drops it when the client is gone. No environment leaves the books before it is proven gone
or has failed to go.
"""

import errno
import os
import select
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import msgspec

from sbxd.launcher import destroy, erase, fast, prepare, rest, sentry
from sbxd.launcher.books import Books, Environment, wait
from sbxd.launcher.filters import Filters
from sbxd.launcher.helpers import Work, discard
from sbxd.launcher.kernel.process import ERROR, say
from sbxd.launcher.kernel.runsc import NOT_INSTALLED, Runsc, Unusable
from sbxd.launcher.legality import Illegal, ImageState, ImageTrigger, State, Trigger
from sbxd.launcher.pool import Job, Lane, Pool, QueueFull, Result
from sbxd.launcher.requests import (
    BOOTED_DESCRIPTORS,
    PREPARED_DESCRIPTORS,
    Acknowledged,
    Assign,
    Boot,
    Booted,
    Destroy,
    Died,
    DropLeaf,
    Erasing,
    Failed,
    ImageDrop,
    ImageUnpack,
    Inventory,
    Kernel,
    LauncherReply,
    LauncherRequest,
    Leaf,
    LeafMade,
    Prepare,
    Prepared,
    Probe,
    Share,
)
from sbxd.launcher.steps import describe
from sbxd.port.ids import EnvironmentId

PREPARE_SECONDS = 45.0
DESTROY_SECONDS = 30.0
UNPACK_SECONDS = 900.0
REST_SECONDS = 60.0
ERASE_SECONDS = 6 * erase.ROUND_SECONDS  # a round ends by itself, but for a disk that hangs
_STATUSES_MAX = 512
_PIDFDS = slice(PREPARED_DESCRIPTORS.index("init_pidfd"), 4)

# Takes over the descriptors.
Reply = Callable[[LauncherReply, list[int]], None]


class Verbs:
    """See the module. `pool` runs the slow ones."""

    def __init__(
        self, pool: Pool, filters: Filters, reply: Reply, runsc: Runsc | Unusable = NOT_INSTALLED
    ) -> None:
        self._pool = pool
        self._runsc = runsc
        self._filters = filters
        self._send = reply
        self._books = Books()
        self._preparing: dict[str, Job] = {}
        self._client_jobs: set[Job] = set()
        self._is_erasing = False
        self._roles: dict[int, tuple[str, str, int]] = {}  # pid: environment, process, ticket
        self._statuses: OrderedDict[int, int] = OrderedDict()

    def is_idle(self) -> bool:
        """Whether no environment is there but those that failed to be destroyed."""
        return all(
            environment.state in (State.ABSENT, State.FAILED)
            for environment in self._books.environments.values()
        )

    def end_all(self) -> None:
        """The client is gone: kill everything at once; then destroy it, one by one, in helpers."""
        for environment_id, environment in self._books.environments.items():
            if environment.state in (State.READY, State.ASSIGNED):
                destroy.kill_now(environment_id)
        for job in list(self._client_jobs):
            self._pool.cancel(job)
        for environment_id, environment in list(self._books.environments.items()):
            environment.waiters.clear()
            if environment.state in (State.PREPARING, State.READY, State.ASSIGNED):
                self._begin_destroy(environment_id)

    def reaped(self, pid: int, status: int) -> None:
        """A child has ended: init or a steward is told of, the rest is remembered for a while."""
        if pid in self._roles:
            self._died(pid, status)
            return
        self._statuses[pid] = status
        if len(self._statuses) > _STATUSES_MAX:
            self._statuses.popitem(last=False)

    def _reply(self, reply: LauncherReply, descriptors: list[int] | None = None) -> None:
        self._send(reply, descriptors or [])

    def dispatch(self, request: LauncherRequest) -> None:
        """Carry out one request, or begin to."""
        try:
            match request:
                case Prepare():
                    self._prepare(request)
                case Destroy():
                    self._destroy(request)
                case Leaf():
                    environment = self._books.admit_leaf(request)
                    descriptors = fast.make_leaf(request, environment)
                    environment.last_leaf = request.number
                    reply = LeafMade(
                        ticket=request.ticket,
                        environment_id=request.environment_id,
                        number=request.number,
                    )
                    self._reply(reply, list(descriptors))
                case DropLeaf():
                    self._books.admit_drop_leaf(request)
                    fast.drop_leaf(request)
                    self._reply(Acknowledged(ticket=request.ticket))
                case Boot():
                    self._boot(request)
                case Assign():
                    environment = self._books.admit_assign(request)
                    fast.assign(request, environment, self._init_of)
                    environment.move(Trigger.ASSIGN)
                    self._reply(Acknowledged(ticket=request.ticket))
                case ImageUnpack() | ImageDrop():
                    self._image(request)
                case Share():
                    live = self._books.only_assigned(request)
                    self._submit_rest(request.ticket, partial(rest.share, live), Lane.SHARE)
                case Erasing():
                    self._submit_rest(request.ticket, partial(erase.erasing, request))
                case Inventory():
                    self._submit_rest(request.ticket, partial(rest.inventory, request))
                case Probe():
                    self._submit_rest(request.ticket, partial(rest.probe, request, self._runsc))
        except Illegal as problem:
            say(ERROR, f"refused {request.__struct_config__.tag}: {problem}")
            self._reply(_failed(request.ticket, "legality", 0, str(problem)))
        except OSError as problem:
            step = str(request.__struct_config__.tag)
            self._reply(_failed(request.ticket, step, problem.errno or 0, describe(problem)))

    def _prepare(self, request: Prepare) -> None:
        environment = self._books.begin_prepare(request)
        job = Job(
            Lane.BUILD,
            request.ticket,
            PREPARE_SECONDS,
            self._preparation(request),
            lambda result: self._prepare_ended(request, environment, result),
        )
        self._preparing[request.environment_id] = job
        self._client_jobs.add(job)
        self._submit(job)

    def _preparation(self, request: Prepare) -> Work:
        if request.kernel is Kernel.SENTRY:
            return partial(sentry.prepare_sentry, request, self._filters, self._runsc)
        return partial(prepare.prepare, request, self._filters)

    def _boot(self, request: Boot) -> None:
        environment = self._books.admit_boot(request)
        assert environment.request is not None
        environment.last_leaf = request.number
        job = Job(
            Lane.BUILD,
            request.ticket,
            PREPARE_SECONDS,
            partial(
                sentry.boot,
                request,
                sentry.Known(environment.request, environment.uid_base),
                self._filters,
                self._runsc,
            ),
            lambda result: self._boot_ended(request, environment, result),
        )
        self._client_jobs.add(job)
        environment.boot = job
        self._submit(job)

    def _boot_ended(self, request: Boot, environment: Environment, result: Result) -> None:
        if environment.boot is not None:
            self._client_jobs.discard(environment.boot)
        environment.boot = None
        if environment.state is not State.ASSIGNED or result is None:
            # Whatever runs in the leaf by now goes with the environment.
            discard(result)
            self._reply(_failed(request.ticket, "helper", 0, "the boot was given up"))
            if environment.state is State.DESTROYING:
                self._submit_destroy(request.environment_id, environment)
            return
        report, descriptors = result
        is_booted = isinstance(report.reply, Booted)
        dead = is_booted and _has_ended(descriptors[BOOTED_DESCRIPTORS.index("init_pidfd")])
        self._reply(report.reply, descriptors)
        if is_booted:
            role = (request.environment_id, "init", request.ticket)
            self._give_role(report.init_pid, role, dead)

    def _prepare_ended(self, request: Prepare, environment: Environment, result: Result) -> None:
        job = self._preparing.pop(request.environment_id, None)
        if job is not None:
            self._client_jobs.discard(job)
        if environment.state is State.DESTROYING:  # it was cancelled by a Destroy
            discard(result)
            self._submit_destroy(request.environment_id, environment)
            return
        if result is None:
            failure = _failed(request.ticket, "helper", 0, "the helper died or took too long")
        elif isinstance(result[0].reply, Prepared):
            self._prepared(request, environment, result[0].reply, result)
            return
        elif isinstance(result[0].reply, Failed):
            failure = result[0].reply
        else:
            failure = _failed(request.ticket, "helper", 0, "the helper's report makes no sense")
        discard(result)
        environment.failure = failure
        environment.move(Trigger.PREPARE_FAILED)
        self._submit_destroy(request.environment_id, environment)

    def _prepared(
        self, request: Prepare, environment: Environment, reply: Prepared, result: Result
    ) -> None:
        assert result is not None
        report, descriptors = result
        environment.move(Trigger.PREPARED)
        environment.uid_base = report.uid_base
        environment.volume_kind = reply.volume_kind
        pids = (report.init_pid, report.steward_pid)
        dead = [_has_ended(pidfd) for pidfd in descriptors[_PIDFDS]]
        self._reply(reply, descriptors)
        for pid, process, ended in zip(pids, ("init", "steward"), dead, strict=True):
            self._give_role(pid, (request.environment_id, process, request.ticket), ended)

    def _init_of(self, environment_id: str) -> int:
        """The pid of its process 1. Raises OSError where it has died."""
        for pid, (owner, process, _) in self._roles.items():
            if (owner, process) == (environment_id, "init"):
                return pid
        raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))

    def _give_role(self, pid: int, role: tuple[str, str, int], has_ended: bool) -> None:
        """has_ended: what its pidfd says; a status may be of one that had its number before."""
        self._roles[pid] = role
        status = self._statuses.pop(pid, None)
        if has_ended and status is not None:  # it was reaped before it had a role
            self._died(pid, status)

    def _destroy(self, request: Destroy) -> None:
        environment = self._begin_destroy(request.environment_id)
        wait(environment.waiters, request.ticket)
        environment.party = request.party

    def _begin_destroy(self, environment_id: str) -> Environment:
        environment, before = self._books.begin_destroy(environment_id)
        match before:
            case State.PREPARING:
                assert environment.request is not None
                ticket = environment.request.ticket
                environment.failure = _failed(ticket, "cancelled", 0, "destroyed while prepared")
                self._pool.cancel(self._preparing[environment_id])
            case State.DESTROYING:
                pass
            case _ if environment.boot is not None:  # nothing may be born while it is taken apart
                self._pool.cancel(environment.boot)
            case _:
                self._submit_destroy(environment_id, environment)
        return environment

    def _submit_destroy(self, environment_id: str, environment: Environment) -> None:
        for pid in [pid for pid, role in self._roles.items() if role[0] == environment_id]:
            del self._roles[pid]
        name = EnvironmentId(environment_id)
        job = Job(
            Lane.END,
            1,
            DESTROY_SECONDS,
            lambda: destroy.destroy(
                Destroy(ticket=1, environment_id=name, party=environment.party)
            ),
            lambda result: self._destroy_ended(environment_id, environment, result),
        )
        self._submit(job)

    def _destroy_ended(self, environment_id: str, environment: Environment, result: Result) -> None:
        discard(result)
        reply = result[0].reply if result is not None else None
        tickets, environment.waiters = environment.waiters, []
        failure, environment.failure = environment.failure, None
        if result is not None and isinstance(reply, Acknowledged):
            environment.move(Trigger.DESTROYED)
            self._erase(result[0].is_erasing)
            self._books.forget(environment_id)
            if failure is not None:
                self._reply(failure)
            for ticket in tickets:
                self._reply(Acknowledged(ticket=ticket))
            return
        environment.move(Trigger.DESTROY_FAILED)
        if not isinstance(reply, Failed):
            reply = _failed(1, "helper", 0, "the helper died or took too long")
        say(ERROR, f"environment {environment_id} is not destroyed: {reply.step}: {reply.detail}")
        if failure is not None:
            left = f"{failure.detail}; and it is not cleaned up: {reply.step}"
            self._reply(msgspec.structs.replace(failure, detail=left[:500], retriable=False))
        for ticket in tickets:
            self._reply(msgspec.structs.replace(reply, ticket=ticket))

    def _image(self, request: ImageUnpack | ImageDrop) -> None:
        digest = request.image_digest
        if isinstance(request, ImageDrop):
            image = self._books.begin_image_drop(request)
            work, lane, fresh = partial(rest.image_drop, request), Lane.DROP, True
        else:
            image = self._books.image(digest)
            fresh = image.move(ImageTrigger.UNPACK) is ImageState.SETTLED
            work, lane = partial(rest.image_unpack, request, self._filters.unpacker), Lane.UNPACK
        wait(image.waiters, request.ticket)
        if not fresh:
            return

        def ended(result: Result) -> None:
            self._client_jobs.discard(job)
            discard(result)
            tickets = self._books.end_image(digest)
            reply = result[0].reply if result is not None else None
            if reply is None:
                reply = _failed(request.ticket, "helper", 0, "the helper died or took too long")
            for ticket in tickets:
                self._reply(msgspec.structs.replace(reply, ticket=ticket))

        job = Job(lane, request.ticket, UNPACK_SECONDS, work, ended)
        self._client_jobs.add(job)
        self._submit(job)

    def _submit_rest(self, ticket: int, work: Work, lane: Lane = Lane.REST) -> None:
        def ended(result: Result) -> None:
            self._client_jobs.discard(job)
            discard(result)
            if result is None:
                self._reply(_failed(ticket, "helper", 0, "the helper died or took too long"))
            else:
                self._reply(result[0].reply)
                self._erase(result[0].is_erasing)

        job = Job(lane, ticket, REST_SECONDS, work, ended)
        self._client_jobs.add(job)
        self._submit(job)

    def _erase(self, is_wanted: bool) -> None:
        """Erase what waits to be, unless that is under way. A round that gets nowhere is not
        followed by another until the next destruction, inventory or question about it."""
        if not is_wanted or self._is_erasing:
            return
        self._is_erasing = True

        def ended(result: Result) -> None:
            self._is_erasing = False
            discard(result)
            reply = result[0].reply if result is not None else None
            if result is not None and isinstance(reply, Acknowledged):
                self._erase(result[0].is_erasing)
            else:
                why = f"{reply.step}: {reply.detail}" if isinstance(reply, Failed) else "it died"
                say(ERROR, f"nothing of the dead volumes is erased now: {why}")

        work = partial(erase.erase, self._filters)
        self._submit(Job(Lane.ERASE, 1, ERASE_SECONDS, work, ended))

    def _submit(self, job: Job) -> None:
        try:
            self._pool.submit(job)
        except QueueFull:
            job.done(None)

    def _died(self, pid: int, status: int) -> None:
        environment_id, process, ticket = self._roles.pop(pid)
        self._reply(
            Died(
                ticket=ticket,
                environment_id=EnvironmentId(environment_id),
                process=process,
                wait_status=status,
            )
        )


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _failed(ticket: int, step: str, number: int, detail: str) -> Failed:
    return Failed(ticket=ticket, step=step, errno=number, detail=detail[:500])
