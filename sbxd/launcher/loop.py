"""The launcher's one loop: a client, its requests, the helpers, the dead.

Invariants: one client at a time; nothing here waits for anything but poll; every request gets
exactly one reply while its client is there; the end of the client (or SIGTERM) kills every
environment at once and destroys each before the next client is accepted.
"""

import os
import select
import signal
import socket
import struct
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from sbxd.launcher import channel, destroy, fast, prepare, rest
from sbxd.launcher.books import Books, Environment
from sbxd.launcher.channel import ChannelViolation, close_all
from sbxd.launcher.filters import Filters
from sbxd.launcher.helpers import Work, discard
from sbxd.launcher.legality import Illegal, ImageState, ImageTrigger, State, Trigger
from sbxd.launcher.notify import Notifier
from sbxd.launcher.pool import Job, Lane, Pool, QueueFull, Result
from sbxd.launcher.requests import (
    PREPARED_DESCRIPTORS,
    Acknowledged,
    Assign,
    Destroy,
    Died,
    DropLeaf,
    Failed,
    ImageDrop,
    ImageUnpack,
    Inventory,
    LauncherReply,
    LauncherRequest,
    Leaf,
    LeafMade,
    Prepare,
    Prepared,
    Probe,
)
from sbxd.launcher.steps import describe
from sbxd.port.ids import EnvironmentId

PREPARE_SECONDS = 45.0
DESTROY_SECONDS = 30.0
UNPACK_SECONDS = 900.0
REST_SECONDS = 60.0
OUTGOING_MAX = 4096
_STATUSES_MAX = 512
_REQUESTS_PER_TURN = 64
_UCRED = struct.Struct("iII")
_PIDFDS = slice(PREPARED_DESCRIPTORS.index("init_pidfd"), 4)


class Launcher:
    """See the module. `allowed_uids`: who may be the client (SO_PEERCRED)."""

    def __init__(
        self,
        listener: socket.socket,
        filters: Filters,
        *,
        allowed_uids: frozenset[int],
        notifier: Notifier,
        watchdog_seconds: float | None,
        width: int,
    ) -> None:
        self._listener = listener
        self._filters = filters
        self._allowed_uids = allowed_uids
        self._notifier = notifier
        self._watchdog = watchdog_seconds / 2 if watchdog_seconds else None
        self._client: socket.socket | None = None
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._books = Books()
        self._pool = Pool(width)
        self._preparing: dict[str, Job] = {}
        self._client_jobs: set[Job] = set()
        self._roles: dict[int, tuple[str, str, int]] = {}  # pid: environment, process, ticket
        self._statuses: OrderedDict[int, int] = OrderedDict()
        self._stop_requested = False
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    # --- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until SIGTERM; returns when every environment is destroyed or failed to be."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGTERM, self._request_stop)
        signal.signal(signal.SIGINT, self._request_stop)
        self._listener.setblocking(False)
        self._notifier.tell("READY=1")
        told = time.monotonic()
        while not (self._stopping and self._is_idle()):
            self._turn(self._timeout(told))
            if self._watchdog is not None and time.monotonic() >= told + self._watchdog:
                self._notifier.tell("WATCHDOG=1")
                told = time.monotonic()

    def _turn(self, timeout_seconds: float | None) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        handlers: dict[int, Callable[[int], None]] = {self._wake_read: self._woken}
        for helper in self._pool.channels():
            poll.register(helper, select.POLLIN)
            handlers[helper] = partial(self._helper_ready, helper)
        if self._client is not None:
            events = select.POLLOUT if self._outgoing else select.POLLIN
            poll.register(self._client, events)
            handlers[self._client.fileno()] = self._client_ready
        elif self._is_idle() and not self._stopping:
            poll.register(self._listener, select.POLLIN)
            handlers[self._listener.fileno()] = self._accept
        milliseconds = None if timeout_seconds is None else int(timeout_seconds * 1000) + 1
        for descriptor, events in poll.poll(milliseconds):
            handlers[descriptor](events)
        if self._stop_requested and not self._stopping:
            self._stop()
        self._pool.expire()
        self._reap()

    def _timeout(self, told: float) -> float | None:
        moments = [self._pool.next_deadline()]
        if self._watchdog is not None:
            moments.append(told + self._watchdog)
        wanted = [moment for moment in moments if moment is not None]
        if not wanted or min(wanted) == float("inf"):
            return None
        return max(min(wanted) - time.monotonic(), 0.0)

    def _is_idle(self) -> bool:
        """Whether nothing of the last client is under way."""
        busy = any(
            environment.state not in (State.ABSENT, State.FAILED)
            for environment in self._books.environments.values()
        )
        return self._client is None and not busy and not self._pool.channels()

    def _helper_ready(self, channel_fd: int, _: int) -> None:
        self._pool.readable(channel_fd)

    def _woken(self, _: int) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _request_stop(self, *_: object) -> None:
        """A signal handler may run in the middle of anything: the loop does the work."""
        self._stop_requested = True

    def _stop(self) -> None:
        self._stopping = True
        self._notifier.tell("STOPPING=1")
        self._lose_client("stopping")

    # --- the client ---------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            client, _address = self._listener.accept()
        except OSError:
            return
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _pid, uid, _gid = _UCRED.unpack(raw)
        if uid not in self._allowed_uids:
            _log(f"refusing a client with uid {uid}")
            client.close()
            return
        client.setblocking(False)
        self._client = client

    def _client_ready(self, events: int) -> None:
        if events & (select.POLLHUP | select.POLLERR):
            self._lose_client("end of file")
            return
        if events & select.POLLOUT:
            self._flush()
            return
        for _ in range(_REQUESTS_PER_TURN):
            if self._client is None or self._outgoing:
                return
            try:
                request = channel.receive_request(self._client)
            except BlockingIOError:
                return
            except (ChannelViolation, OSError) as problem:
                self._lose_client(f"protocol: {problem}")
                return
            if request is None:
                self._lose_client("end of file")
                return
            self._dispatch(request)

    def _lose_client(self, why: str) -> None:
        """Kill everything at once; then destroy it, one by one, in helpers."""
        if self._client is not None:
            _log(f"the client's channel ended ({why}): ending all environments")
            self._client.close()
            self._client = None
        while self._outgoing:
            close_all(self._outgoing.popleft()[1])
        for environment_id, environment in self._books.environments.items():
            if environment.state in (State.READY, State.ASSIGNED):
                destroy.kill_now(environment_id)
        for job in list(self._client_jobs):
            self._pool.cancel(job)
        for environment_id, environment in list(self._books.environments.items()):
            environment.waiters.clear()
            if environment.state in (State.PREPARING, State.READY, State.ASSIGNED):
                self._begin_destroy(environment_id)

    def _reply(self, reply: LauncherReply, descriptors: list[int] | None = None) -> None:
        """Send or queue; takes over the descriptors."""
        descriptors = descriptors or []
        if self._client is None:
            close_all(descriptors)
            return
        self._outgoing.append((channel.encode(reply), descriptors))
        self._flush()

    def _flush(self) -> None:
        while self._outgoing and self._client is not None:
            raw, descriptors = self._outgoing[0]
            try:
                channel.send(self._client, raw, descriptors)
            except BlockingIOError:
                if len(self._outgoing) > OUTGOING_MAX:
                    self._lose_client("it does not read")
                return
            except OSError as problem:
                self._lose_client(describe(problem))
                return
            self._outgoing.popleft()
            close_all(descriptors)

    # --- requests -----------------------------------------------------------------------------

    def _dispatch(self, request: LauncherRequest) -> None:
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
                case Assign():
                    environment = self._books.admit_assign(request)
                    fast.assign(request, environment)
                    environment.move(Trigger.ASSIGN)
                    self._reply(Acknowledged(ticket=request.ticket))
                case ImageUnpack() | ImageDrop():
                    self._image(request)
                case Inventory():
                    self._submit_rest(request.ticket, partial(rest.inventory, request))
                case Probe():
                    self._submit_rest(request.ticket, partial(rest.probe, request))
        except Illegal as problem:
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
            partial(prepare.prepare, request, self._filters),
            lambda result: self._prepare_ended(request, environment, result),
        )
        self._preparing[request.environment_id] = job
        self._client_jobs.add(job)
        self._submit(job)

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
            self._roles[pid] = (request.environment_id, process, request.ticket)
            status = self._statuses.pop(pid, None)
            if ended and status is not None:  # it was reaped before it had a role
                self._died(pid, status)

    def _destroy(self, request: Destroy) -> None:
        environment = self._begin_destroy(request.environment_id)
        environment.waiters.append(request.ticket)

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
            case _:
                self._submit_destroy(environment_id, environment)
        return environment

    def _submit_destroy(self, environment_id: str, environment: Environment) -> None:
        for pid in [pid for pid, role in self._roles.items() if role[0] == environment_id]:
            del self._roles[pid]
        request = Destroy(ticket=1, environment_id=EnvironmentId(environment_id))
        job = Job(
            Lane.END,
            1,
            DESTROY_SECONDS,
            partial(destroy.destroy, request),
            lambda result: self._destroy_ended(environment_id, environment, result),
        )
        self._submit(job)

    def _destroy_ended(self, environment_id: str, environment: Environment, result: Result) -> None:
        discard(result)
        reply = result[0].reply if result is not None else None
        tickets, environment.waiters = environment.waiters, []
        failure, environment.failure = environment.failure, None
        if isinstance(reply, Acknowledged):
            environment.move(Trigger.DESTROYED)
            self._books.forget(environment_id)
            if failure is not None:
                self._reply(failure)
            for ticket in tickets:
                self._reply(Acknowledged(ticket=ticket))
            return
        environment.move(Trigger.DESTROY_FAILED)
        if not isinstance(reply, Failed):
            reply = _failed(1, "helper", 0, "the helper died or took too long")
        _log(f"environment {environment_id} is not destroyed: {reply.step}: {reply.detail}")
        if failure is not None:
            left = f"{failure.detail}; and it is not cleaned up: {reply.step}"
            self._reply(msgspec.structs.replace(failure, detail=left[:500], retriable=False))
        for ticket in tickets:
            self._reply(msgspec.structs.replace(reply, ticket=ticket))

    def _image(self, request: ImageUnpack | ImageDrop) -> None:
        digest = request.image_digest
        if isinstance(request, ImageDrop):
            image = self._books.begin_image_drop(request)
            work, fresh = partial(rest.image_drop, request), True
        else:
            image = self._books.image(digest)
            fresh = image.move(ImageTrigger.UNPACK) is ImageState.SETTLED
            work = partial(rest.image_unpack, request)
        image.waiters.append(request.ticket)
        if not fresh:
            return

        def ended(result: Result) -> None:
            self._client_jobs.discard(job)
            discard(result)
            image.move(ImageTrigger.ENDED)
            tickets, image.waiters = image.waiters, []
            reply = result[0].reply if result is not None else None
            if reply is None:
                reply = _failed(request.ticket, "helper", 0, "the helper died or took too long")
            for ticket in tickets:
                self._reply(msgspec.structs.replace(reply, ticket=ticket))

        job = Job(Lane.REST, request.ticket, UNPACK_SECONDS, work, ended)
        self._client_jobs.add(job)
        self._submit(job)

    def _submit_rest(self, ticket: int, work: Work) -> None:
        def ended(result: Result) -> None:
            self._client_jobs.discard(job)
            discard(result)
            if result is None:
                self._reply(_failed(ticket, "helper", 0, "the helper died or took too long"))
            else:
                self._reply(result[0].reply)

        job = Job(Lane.REST, ticket, REST_SECONDS, work, ended)
        self._client_jobs.add(job)
        self._submit(job)

    def _submit(self, job: Job) -> None:
        try:
            self._pool.submit(job)
        except QueueFull:
            job.done(None)

    # --- the dead -----------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._roles:
                self._died(pid, status)
            else:
                self._statuses[pid] = status
                if len(self._statuses) > _STATUSES_MAX:
                    self._statuses.popitem(last=False)

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


def _ignore(*_: object) -> None:
    """SIGCHLD only has to wake the loop."""


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _failed(ticket: int, step: str, number: int, detail: str) -> Failed:
    return Failed(ticket=ticket, step=step, errno=number, detail=detail[:500])


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
