"""One slot of the `gvisor` mechanism, from the daemon's side.

How a command starts: process 1 of the sandbox listens already, so `start` is one frame with three
pipes, and one answer. How it ends: process 1 kills what is left and proves it; a guest that does
not do so within `PATIENCE_SECONDS` is killed whole, by its leaf.

A Sentry that ended with a command (MEMORY, or a kill of the leaf) is replaced by a fresh one on the
same volume before the next command: what was in /tmp and /dev/shm is then gone.

Invariants: the leaf holds one Sentry and its gofer, and all that they run; killing the leaf and its
proof of emptiness need nobody's help. A Sentry that ends while no command runs, or without a
reason that the kernel counts, is a lost environment.
"""

import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace

import trio

from sbxd.jail.frames import RunFailed, Which
from sbxd.launcher.channel import close_all
from sbxd.launcher.requests import (
    BOOTED_DESCRIPTORS,
    LEAF_DESCRIPTORS,
    SENTRY_DESCRIPTORS,
    Boot,
    Booted,
    Died,
    DropLeaf,
    Prepared,
)
from sbxd.mechanism.bridge import BridgeDoors
from sbxd.mechanism.guest_bridge import GuestBridgeDoor
from sbxd.mechanism.guest_client import GuestClient, PortWanted
from sbxd.mechanism.guest_doors import GuestDoor
from sbxd.mechanism.launcher_client import LauncherClient
from sbxd.mechanism.leaf import Leaf
from sbxd.mechanism.namespaces_sandbox import NamespacesSandbox, socket_of
from sbxd.mechanism.protocol import (
    CommandExit,
    CommandSpec,
    Counters,
    MechanismError,
    RunningCommand,
    SandboxLost,
    SlotProfile,
)
from sbxd.mechanism.refused_forks import RefusedForks
from sbxd.mechanism.running import Streams
from sbxd.mechanism.starting import is_callers, run_frame, start_failure
from sbxd.port.limits import ResourceLimits
from sbxd.port.network import NetworkShape

# How long process 1 may take to kill a command's processes and to prove it.
PATIENCE_SECONDS = 2.0


class Sentry:
    """One running guest kernel: its leaf, process 1 within it, and what it tells of forks."""

    def __init__(
        self,
        leaf: Leaf,
        init: GuestClient,
        sock: trio.socket.SocketType,
        forks: RefusedForks,
        owned: list[int],
    ) -> None:
        self.leaf = leaf
        self.init = init
        self.forks = forks
        self.commands = 0  # that were started in it
        self.killed = False  # by us
        self.has_port = False  # the proxy's
        self._socket = sock
        self._owned = owned

    @property
    def is_gone(self) -> bool:
        """Whether no further command can run in it."""
        return self.killed or self.init.is_lost

    def kill(self) -> None:
        """Kill it with all that it runs."""
        self.killed = True
        self.leaf.kill()

    def close(self) -> None:
        """Release every descriptor. Idempotent."""
        self.init.lose()
        self._socket.close()
        self.forks.close()
        owned, self._owned = self._owned, []
        close_all(owned)
        self.leaf.close()


class GvisorSandbox(NamespacesSandbox):
    """Implements sbxd.mechanism.protocol.Sandbox."""

    _more_descriptors = SENTRY_DESCRIPTORS
    _sentry: Sentry | None = None
    _boot_failure: MechanismError | None = None
    _running: "GvisorCommand | None" = None
    _number = 0
    _proxy_descriptors = ()

    def __init__(
        self,
        client: LauncherClient,
        nursery: trio.Nursery,
        profile: SlotProfile,
        prepared: Prepared,
        descriptors: list[int],
        doors: BridgeDoors,
    ) -> None:
        super().__init__(client, nursery, profile, prepared, descriptors, doors)
        self._has_port = profile.network is NetworkShape.PROXY_PORT
        self._guest_doors = {which: GuestDoor(which) for which in Which}

    def _client_of(self, sock: trio.socket.SocketType) -> GuestClient:
        return GuestClient(sock, self._guest_ended)

    # --- the slot -----------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start listening to the first Sentry. Raises MechanismError."""
        self._booted = trio.Event()
        tasks = self._tasks = await self._nursery.start(self._live)
        tasks.start_soon(self._snapshots.take_ahead)
        leaf, self._first_leaf = self._first_leaf, None
        assert leaf is not None
        assert isinstance(self._init, GuestClient)
        (forks,), self._more = self._more, []
        sentry = Sentry(leaf, self._init, self._init_socket, RefusedForks(forks), [])
        await self._take(sentry)

    async def assign(self, limits: ResourceLimits) -> None:
        """Give the slot to an environment. Raises MechanismError."""
        await super().assign(limits)
        if self._sentry is not None:
            await self._tell(self._sentry)

    async def _take(self, sentry: Sentry) -> None:
        self._sentry = sentry
        await self._tell(sentry)
        self._booted.set()

    async def _tell(self, sentry: Sentry) -> None:
        """What process 1 has to know before a command comes."""
        await sentry.init.limit(self._limits.pids_max)
        if sentry.has_port is not self._has_port:
            sentry.has_port = self._has_port
            await sentry.init.port(PortWanted.YES if self._has_port else PortWanted.NO)

    @property
    def proxy_listener(self) -> GuestDoor | None:
        """The door to the proxy's port; None without one, and once released."""
        return self._guest_doors[Which.PROXY] if self._has_port and not self._released else None

    def give_up_proxy_port(self) -> None:
        """The environment is to have no such port: process 1 is told when it is assigned."""
        self._has_port = False

    def on_death(self, died: Died) -> None:
        """The launcher reaped a Sentry, of which its channel tells too, or the steward."""
        if died.process == "steward":
            self._lose("steward")

    def _guest_ended(self) -> None:
        if self._running is None:
            self._lose("init")

    def release(self) -> None:
        """End the tasks and close every descriptor but those of a running command. Idempotent."""
        super().release()
        more, self._more = self._more, []
        close_all(more)
        for door in self._guest_doors.values():
            door.close()
        if self._sentry is not None and self._running is None:
            self._sentry.close()

    def open_bridge(self, *, waiting_max: int) -> GuestBridgeDoor:
        """Have the bridge listen from the next command on; how many connections wait there is
        process 1's. Raises MechanismError."""
        if self._released:
            raise MechanismError("open the bridge", errno.EBADF)
        return self._doors.add(lambda: GuestBridgeDoor(self._guest_doors[Which.BRIDGE]))

    # --- commands -----------------------------------------------------------------------------

    async def start(self, command: CommandSpec) -> RunningCommand:
        """Know what the workspace is like and start one command.

        A kernel that cannot execute a program for a reason that is not the caller's (its gofer has
        no descriptor left, say) is replaced, and the command is given to the fresh one, once.

        Raises CommandNotStarted, SandboxLost, WorkspaceChanged, MechanismError. Cancellation:
        what was started is killed with its Sentry.
        """
        running = await self._attempt(command)
        if not isinstance(running, GvisorCommand):
            running = await self._attempt(command)
        if not isinstance(running, GvisorCommand):
            raise start_failure(running)
        return running

    async def _attempt(self, command: CommandSpec) -> "GvisorCommand | RunFailed":
        """As `start`; a failure that is not the caller's is returned, and its Sentry killed."""
        try:
            await self._snapshots.before_command()
            sentry = await self._next_sentry()
        except BaseException:
            self._snapshots.command_over()
            raise
        self._number += 1
        running = GvisorCommand(self, sentry, self._number, command.stdin)
        self._running = running
        started = False
        try:
            for door in self._guest_doors.values():
                await _open(door, sentry)
            failure = await sentry.init.run(
                run_frame(running.number, command), running.streams.theirs
            )
            running.streams.close_theirs()
            if failure is not None:
                if is_callers(failure):
                    raise start_failure(failure)
                sentry.kill()
                sentry.init.lose()  # while the command is there, so that nothing else is lost
                return failure
            started = True
            return running
        finally:
            if not started:
                if sentry.init.is_lost or trio.current_effective_deadline() == float("-inf"):
                    sentry.kill()
                running.release()

    async def _next_sentry(self) -> Sentry:
        while self._sentry is None:
            if self._released or self._boot_failure is not None:
                raise SandboxLost("boot", 0, "no Sentry could be booted")
            await self._booted.wait()
        return self._sentry

    def command_over(self, sentry: Sentry) -> None:
        """Of the command nothing is left. A Sentry that ended with it is replaced."""
        self._running = None
        self._snapshots.command_over()
        if not self._released and self._tasks is not None:
            self._tasks.start_soon(self._snapshots.take_ahead)
        if self._released or self._client.is_lost or self._tasks is None:
            sentry.close()
        elif sentry.is_gone:
            self._sentry = None
            self._booted = trio.Event()
            self._tasks.start_soon(self._replace, sentry)

    def sentry_lost(self) -> None:
        """A Sentry has ended under its command, and no limit is the reason."""
        self._lose("init")

    async def _replace(self, ended: Sentry) -> None:
        number = ended.leaf.number + 1
        try:
            ended.kill()
            await ended.leaf.wait_empty()
            with await self._client.request(
                lambda ticket: DropLeaf(
                    ticket=ticket,
                    environment_id=self.environment_id,
                    number=ended.leaf.number,
                )
            ):
                pass
            await self._boot(number)
        except MechanismError as problem:
            self._boot_failure = problem
            self._booted.set()
            self._lose("init")
        finally:
            ended.close()

    async def _boot(self, number: int) -> None:
        with await self._client.request(
            lambda ticket: Boot(
                ticket=ticket,
                environment_id=self.environment_id,
                number=number,
                limits=self._limits,
            )
        ) as answer:
            if not isinstance(answer.reply, Booted):
                raise MechanismError("launcher", 0, "the launcher answered with another message")
            names = (*BOOTED_DESCRIPTORS, *LEAF_DESCRIPTORS, *SENTRY_DESCRIPTORS)
            if len(answer.descriptors) != len(names):
                raise MechanismError("boot", 0, "the launcher sent another number of descriptors")
            channel, pidfd, *rest, forks = answer.take()
        sock = socket_of(channel)
        init = GuestClient(sock, self._guest_ended)
        sentry = Sentry(Leaf(number, rest), init, sock, RefusedForks(forks), [pidfd])
        assert self._tasks is not None
        self._tasks.start_soon(init.read)
        await self._take(sentry)


class GvisorCommand:
    """Implements sbxd.mechanism.protocol.RunningCommand."""

    def __init__(self, sandbox: GvisorSandbox, sentry: Sentry, number: int, stdin: bytes) -> None:
        self.number = number
        self.streams = Streams()
        self._sandbox = sandbox
        self._sentry = sentry
        self._stdin = stdin
        self._is_first = sentry.commands == 0
        sentry.commands += 1
        self._before = sentry.leaf.counters()
        sentry.forks.begin()
        sentry.init.expect(number)
        self._watch = sentry.leaf.watch()
        self._closed = False

    async def receive_output(self, stream: str) -> bytes:
        """Next bytes of "stdout" or "stderr"; b"" at end of file."""
        return await self.streams.receive(stream)

    async def send_stdin(self) -> None:
        """Feed the command's standard input and close it."""
        await self.streams.feed(self._stdin)

    async def wait_exit(self) -> CommandExit:
        """Until the main process ended; for ever when the kernel's counters tell why the Sentry
        ended, since they are the evidence. Raises SandboxLost."""
        try:
            return await self._sentry.init.wait_exit(self.number)
        except SandboxLost:
            with trio.move_on_after(PATIENCE_SECONDS):
                await self._sentry.leaf.wait_empty()
            if not self.counters().oom_kill:
                if not self._sentry.killed:
                    self._sandbox.sentry_lost()
                raise
        await trio.sleep_forever()
        raise AssertionError

    async def wait_event(self) -> Counters:
        """Until a counter may have changed; they are read before this returns."""
        async with trio.open_nursery() as nursery:

            async def first(wait: Callable[[], Awaitable[None]]) -> None:
                await wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(first, self._watch.wait)
            nursery.start_soon(first, self._sentry.forks.wait_more)
        return self.counters()

    def counters(self) -> Counters:
        """What this command has added to the leaf's counters, and the forks that its kernel has
        refused it. None for what they cannot tell of one command among several (the peak), or of
        the guest's processes (the host's threads)."""
        now = self._sentry.leaf.counters()
        return replace(
            now,
            oom_kill=_added(now.oom_kill, self._before.oom_kill),
            oom_group_kill=_added(now.oom_group_kill, self._before.oom_group_kill),
            cpu_usage_us=_added(now.cpu_usage_us, self._before.cpu_usage_us),
            disk_written_bytes=_added(now.disk_written_bytes, self._before.disk_written_bytes),
            memory_peak_bytes=now.memory_peak_bytes if self._is_first else None,
            pids_max_events=self._sentry.forks.count(),
            pids_peak=None,
        )

    def kill(self) -> None:
        """Have every process of the command killed."""
        if not self._sentry.init.kill_nowait(self.number):
            self._sentry.kill()

    async def wait_empty(self) -> None:
        """Until nothing is left of the command: by process 1's word while it gives it in time,
        else with the Sentry."""
        with trio.move_on_after(PATIENCE_SECONDS):
            try:
                await self._sentry.init.wait_quiet(self.number)
                return
            except SandboxLost:
                pass
        self._sentry.kill()
        await self._sentry.leaf.wait_empty()

    async def aclose(self) -> None:
        """Release the streams and the Sentry."""
        self.release()
        await trio.lowlevel.checkpoint()

    def release(self) -> None:
        """As `aclose`, at once. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        self.streams.close()
        self._sentry.init.forget(self.number)
        self._sandbox.command_over(self._sentry)


async def _open(door: GuestDoor, sentry: Sentry) -> None:
    """Have process 1 serve the door if it is to listen. Raises MechanismError."""
    try:
        channels = door.make_channels()
    except OSError as problem:
        raise MechanismError("open the door", problem.errno or 0) from None
    if channels:
        try:
            await sentry.init.open_door(door.which, channels)
        finally:
            close_all(channels)


def _added(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before
