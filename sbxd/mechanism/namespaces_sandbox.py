"""One slot of the `namespaces` mechanism, from the daemon's side.

How a command starts: while one runs, the leaf of the next is made and a child is parked in it, so
that `start` is one frame to init and one answer, with no launcher in between. A parked child that
dies (a host short of memory takes it first) is replaced, also when a command had just taken it; a
slot that nobody has yet is lost with it, so that the reserve makes another.

Invariants: killing, evidence and the proof of emptiness use descriptors that are held here, so
they never queue behind the launcher; the limits' headroom is the launcher's; the environment's
tasks end when it is released.
"""

import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import trio

from sbxd import rights
from sbxd.launcher.channel import close_all
from sbxd.launcher.requests import (
    LEAF_DESCRIPTORS,
    PREPARED_DESCRIPTORS,
    PROXY_DESCRIPTORS,
    STOP_PROOF,
    VOLUME_QUOTA,
    Assign,
    CgroupLimits,
    Destroy,
    Died,
    DropLeaf,
    Prepared,
    VolumeSize,
)
from sbxd.launcher.requests import Leaf as LeafRequest
from sbxd.mechanism import kernel_events
from sbxd.mechanism.bridge import BridgeDoors, SocketBridgeDoor
from sbxd.mechanism.init_client import InitClient
from sbxd.mechanism.kernel_events import BadCounter, parse_single
from sbxd.mechanism.launcher_client import LauncherClient, LauncherRefused
from sbxd.mechanism.leaf import Leaf
from sbxd.mechanism.protocol import (
    BridgeDoor,
    Changes,
    CommandSpec,
    ListPage,
    MechanismError,
    ProcessSurvived,
    ProxyDoor,
    RunningCommand,
    SandboxLost,
    SlotProfile,
    VolumeBinding,
    VolumeReading,
)
from sbxd.mechanism.proxy_port import ProxyPort
from sbxd.mechanism.running import NamespacesCommand, Streams
from sbxd.mechanism.snapshots import Snapshots
from sbxd.mechanism.starting import (
    KILLED_BEFORE_IT_WAITED,
    NeverReleased,
    run_frame,
    start_failure,
)
from sbxd.mechanism.steward_client import StewardClient
from sbxd.mechanism.volume import Volume
from sbxd.port.ids import EnvironmentId
from sbxd.port.limits import ResourceLimits
from sbxd.port.network import NetworkShape
from sbxd.port.workspace import WorkspaceProvenance


def cgroup_limits(limits: ResourceLimits) -> CgroupLimits:
    """The part of the limits that cgroups enforce."""
    return CgroupLimits(
        cpu_millicores=limits.cpu_millicores,
        memory_bytes=limits.memory_bytes,
        pids_max=limits.pids_max,
    )


def volume_size(limits: ResourceLimits) -> VolumeSize:
    """The part of the limits that the volume enforces."""
    return VolumeSize(workspace_bytes=limits.workspace_bytes, inodes_max=limits.inodes_max)


# How long the next command's process waits for the caller's next word.
NEXT_LEAF_SECONDS = 0.02
# So many parked children may die one after the other; with one more the environment is lost too.
PARKED_LOST_MAX = 3


class NamespacesSandbox:
    """Implements sbxd.mechanism.protocol.Sandbox."""

    # What a mechanism's slot has besides, last of its descriptors.
    _more_descriptors: tuple[str, ...] = ()
    # What the launcher sends besides for a slot with the proxy's port.
    _proxy_descriptors: tuple[str, ...] = PROXY_DESCRIPTORS

    def __init__(
        self,
        client: LauncherClient,
        nursery: trio.Nursery,
        profile: SlotProfile,
        prepared: Prepared,
        descriptors: list[int],
        doors: BridgeDoors,
    ) -> None:
        names: tuple[str, ...] = (*PREPARED_DESCRIPTORS, *LEAF_DESCRIPTORS)
        if profile.network is NetworkShape.PROXY_PORT:
            names += self._proxy_descriptors
        names += self._more_descriptors
        if len(descriptors) != len(names):
            close_all(descriptors)
            raise MechanismError("prepare", 0, "the launcher sent another number of descriptors")
        self.environment_id = EnvironmentId(prepared.environment_id)
        self.profile = profile
        self.scope = prepared.scope
        self.unenforced_limits = prepared.unenforced
        self.volume_binding = (
            VolumeBinding.AT_HAND_OUT
            if prepared.volume_kind == VOLUME_QUOTA
            else VolumeBinding.AT_BUILD
        )
        self.steps = prepared.steps
        self._client = client
        self._nursery = nursery
        self._limits = cgroup_limits(profile.limits)
        fds = dict(zip(names, descriptors, strict=True))
        self._more = [fds[name] for name in self._more_descriptors]
        self._first_leaf: Leaf | None = Leaf(1, [fds[name] for name in LEAF_DESCRIPTORS])
        self._proxy = ProxyPort(fds.get("proxy_listener"))
        self._box_kill = fds["box_kill"]
        self._box_memory = fds["box_memory_current"]
        self._volume = Volume(fds["volume"], prepared.workspace)
        self._owned = [
            fds[name]
            for name in PREPARED_DESCRIPTORS
            if name != "bridge" and not name.endswith("_channel")
        ]
        self._bridge: int | SocketBridgeDoor = fds["bridge"]
        self._doors = doors
        self._init_socket = socket_of(fds["init_channel"])
        self._init = self._client_of(self._init_socket)
        self._steward_stream = trio.SocketStream(socket_of(fds["steward_channel"]))
        self._steward = StewardClient(self._steward_stream, on_lost=partial(self._lose, "steward"))
        self._snapshots = Snapshots(self._steward, self._volume)
        self._lost = trio.Event()
        self._wanted = trio.Event()
        self._lost_part = "init"
        self._ending = False
        self._released = False
        self._destroying = trio.Lock()
        self._destroyed = False
        self._tasks: trio.Nursery | None = None
        self._is_assigned = False
        self._parked_lost = 0
        self._supply: trio.MemorySendChannel[Leaf | MechanismError]
        self._supply, self._demand = trio.open_memory_channel[Leaf | MechanismError](1)

    def _client_of(self, sock: trio.socket.SocketType) -> InitClient:
        return InitClient(sock, self._lose)

    # --- the slot -----------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start listening to init and park the first child. Raises MechanismError."""
        self._proxy.check()
        tasks = self._tasks = await self._nursery.start(self._live)
        tasks.start_soon(self._snapshots.take_ahead)
        leaf, self._first_leaf = self._first_leaf, None
        assert leaf is not None
        await self._park(leaf)

    async def _live(self, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """The environment's tasks; they end when it is released."""
        async with trio.open_nursery() as tasks:
            tasks.start_soon(self._init.read)
            tasks.start_soon(trio.sleep_forever)  # so that it is open until it is cancelled
            task_status.started(tasks)

    async def assign(self, limits: ResourceLimits) -> None:
        """Give the slot to an environment. Raises MechanismError."""
        wanted = cgroup_limits(limits)
        volume = volume_size(limits)
        with await self._client.request(
            lambda ticket: Assign(
                ticket=ticket, environment_id=self.environment_id, limits=wanted, volume=volume
            )
        ):
            self._limits = wanted
            self._is_assigned = True

    @property
    def proxy_listener(self) -> int | ProxyDoor | None:
        """The proxy's socket; None for an environment without one, or one that is released."""
        return self._proxy.descriptor

    def give_up_proxy_port(self) -> None:
        """The environment is to have no such port."""
        self._proxy.close()

    def on_death(self, died: Died) -> None:
        """The launcher reaped init or the steward."""
        if died.process == "init":
            self._init.lose()
        self._lose(died.process)

    def _lose(self, part: str = "init") -> None:
        if not self._ending:
            if not self._lost.is_set():
                self._lost_part = "launcher" if self._client.is_lost else part
            self._lost.set()

    def on_launcher_lost(self) -> None:
        """The launcher's channel has ended: this environment ends with it, at once."""
        self._lose("launcher")
        self._kill_box()

    async def wait_lost(self) -> str:
        """Until "init", "steward" or "launcher" is gone by itself: which one."""
        await self._lost.wait()
        return self._lost_part

    def kill(self) -> None:
        """Kill everything in the environment at once."""
        self._ending = True
        self._kill_box()

    def _kill_box(self) -> None:
        if self._released:
            return
        kernel_events.kill(self._box_kill)

    async def destroy(self, *, party: int = 0) -> None:
        """Kill, prove empty, detach the workspace. Raises MechanismError when not proven."""
        self.kill()
        async with self._destroying:
            if self._destroyed:
                return
            self.release()
            await destroy_environment(self._client, self.environment_id, party)
            self._client.unwatch(self.environment_id)
            self._destroyed = True

    def release(self) -> None:
        """End the tasks and close every descriptor but those of running commands. Idempotent."""
        if self._released:
            return
        self._released = True
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
        self._init.lose()
        self._supply.close()
        while True:
            try:
                ahead = self._demand.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                break
            if isinstance(ahead, Leaf):
                ahead.close()
        if self._first_leaf is not None:
            self._first_leaf.close()
        self._init_socket.close()
        self._proxy.close()
        close_all(self._owned)
        if isinstance(self._bridge, int):
            os.close(self._bridge)
        else:
            self._bridge.close()
        self._steward_stream.socket.close()

    # --- commands -----------------------------------------------------------------------------

    async def start(self, command: CommandSpec) -> RunningCommand:
        """Know what the workspace is like and start one command in the leaf that waits.

        A child that died in its leaf before it was released ran nothing: it is replaced, so often.
        Raises CommandNotStarted, SandboxLost, WorkspaceChanged, MechanismError. Cancellation:
        what was started is killed with its leaf.
        """
        while True:
            try:
                return await self._start(command)
            except NeverReleased:
                self._parked_lost += 1
                if self._parked_lost > PARKED_LOST_MAX:
                    raise

    async def _start(self, command: CommandSpec) -> RunningCommand:
        try:
            await self._snapshots.before_command()
            leaf = await self._next_leaf()
        except BaseException:
            self._snapshots.command_over()
            raise
        running: NamespacesCommand | None = None
        streams: Streams | None = None
        try:
            streams = Streams()
            failure = await self._init.run(run_frame(leaf.number, command), streams.theirs)
            streams.close_theirs()
            if failure is not None:
                raise start_failure(failure)
            running = NamespacesCommand(leaf, streams, self._init, command.stdin, self._give_back)
            self._parked_lost = 0
            return running
        finally:
            if running is None:
                leaf.kill()
                self._init.forget(leaf.number)
                self._give_back(leaf)
                if streams is not None:
                    streams.close()

    def open_bridge(self, *, waiting_max: int) -> BridgeDoor:
        """Listen on the bridge's socket. Once. Raises MechanismError."""
        if self._released or not isinstance(self._bridge, int):
            raise MechanismError("open the bridge", errno.EBADF)
        self._bridge = door = self._doors.open(self._bridge, waiting_max=waiting_max)
        return door

    async def _next_leaf(self) -> Leaf:
        self._wanted.set()
        try:
            ahead = await self._demand.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise SandboxLost("leaf", 0, "the environment is ending") from None
        if isinstance(ahead, MechanismError):
            raise ahead
        return ahead

    async def _make_next_leaf(self, number: int) -> None:
        # An environment that is destroyed after one command needs no second process.
        with trio.move_on_after(NEXT_LEAF_SECONDS):
            await self._wanted.wait()
        try:
            with await self._client.request(
                lambda ticket: LeafRequest(
                    ticket=ticket,
                    environment_id=self.environment_id,
                    number=number,
                    limits=self._limits,
                )
            ) as answer:
                leaf = Leaf(number, answer.take())
            await self._park(leaf)
        except MechanismError as problem:
            killed = (problem.step, problem.errno) == KILLED_BEFORE_IT_WAITED
            self._parked_lost += killed
            if killed and self._parked_lost <= PARKED_LOST_MAX and self._tasks is not None:
                self._tasks.start_soon(self._make_next_leaf, number + 1)
            else:
                self._offer(problem)

    async def _park(self, leaf: Leaf) -> None:
        try:
            await self._init.park(leaf.number, leaf.directory)
        except BaseException:
            leaf.close()
            raise
        self._offer(leaf)
        if self._tasks is not None:
            self._tasks.start_soon(self._watch_parked, leaf.number)

    async def _watch_parked(self, number: int) -> None:
        """Replace a parked child that is gone before anybody wanted it."""
        if not await self._init.wait_unparked(number):
            return
        try:
            ahead = self._demand.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
            return  # it has been taken: whoever did is told
        if not isinstance(ahead, Leaf):
            self._offer(ahead)
            return
        self._init.forget(number)
        self._parked_lost += 1
        if self._is_assigned and self._parked_lost <= PARKED_LOST_MAX:
            self._give_back(ahead)
        else:
            ahead.close()
            self._lose()

    def _offer(self, ahead: Leaf | MechanismError) -> None:
        try:
            self._supply.send_nowait(ahead)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.WouldBlock):
            if isinstance(ahead, Leaf):
                ahead.close()

    def _give_back(self, leaf: Leaf) -> None:
        self._snapshots.command_over()
        if self._released or self._client.is_lost or self._tasks is None:
            leaf.close()
        else:
            # Not sooner: init makes the next process, and it reports this one's end.
            self._wanted = trio.Event()
            self._tasks.start_soon(self._snapshots.take_ahead)
            self._tasks.start_soon(self._change_leaves, leaf)

    async def _change_leaves(self, used: Leaf) -> None:
        """Make the next leaf, then remove the used one: neither while the reply is under way."""
        try:
            await self._make_next_leaf(used.number + 1)
            await self._drop_leaf(used)
        finally:
            used.close()

    async def _drop_leaf(self, leaf: Leaf) -> None:
        """An empty leaf that stays is removed with its environment: a failure changes nothing."""
        with suppress(MechanismError):
            leaf.kill()
            await leaf.wait_empty()
            with await self._client.request(
                lambda ticket: DropLeaf(
                    ticket=ticket, environment_id=self.environment_id, number=leaf.number
                )
            ):
                pass

    # --- the workspace ------------------------------------------------------------------------

    def volume(self) -> VolumeReading | None:
        """How full the volume is; None once the environment is released."""
        return None if self._released else self._volume.read()

    def memory_bytes(self) -> int | None:
        """What the environment's processes hold now; None where that is not counted."""
        if self._released:
            return None
        try:
            return parse_single(kernel_events.read(self._box_memory))
        except (OSError, BadCounter):
            return None  # an empty file where the controller is missing, ENODEV once it is gone

    async def changes(self, maximum: int) -> Changes:
        """What changed in the workspace since the snapshot of the last start()."""
        return await self._steward.changes(maximum)

    async def read(self, path: bytes, maximum_bytes: int) -> AsyncIterator[bytes]:
        """The bytes of one regular file in chunks."""
        return await self._steward.read(path, maximum_bytes)

    async def write(self, path: bytes, size_bytes: int, data: AsyncIterator[bytes]) -> None:
        """Create or replace one file atomically."""
        with self._snapshots.writing():
            await self._steward.write(path, size_bytes, data)

    async def list_page(
        self, path: bytes, *, after: bytes, maximum: int, hash_bytes_max: int
    ) -> ListPage:
        """Some entries of one directory."""
        return await self._steward.list_page(
            path, after=after, maximum=maximum, hash_bytes_max=hash_bytes_max
        )

    async def provenance(self, path: bytes) -> WorkspaceProvenance:
        """Who wrote this file last."""
        return await self._steward.provenance(path)


async def destroy_environment(
    client: LauncherClient, environment_id: EnvironmentId, party: int = 0
) -> None:
    """Have the launcher kill, prove empty and detach the workspace. Raises MechanismError, as
    ProcessSurvived when processes outlived the kill."""
    try:
        with await client.request(
            lambda ticket: Destroy(ticket=ticket, environment_id=environment_id, party=party)
        ):
            pass
    except LauncherRefused as problem:
        if (problem.step, problem.errno) == (STOP_PROOF, errno.ETIMEDOUT):
            raise ProcessSurvived(problem.step, problem.errno, problem.detail) from None
        raise


def socket_of(descriptor: int) -> trio.socket.SocketType:
    """The socket that this descriptor is; it owns the descriptor, and takes none from its peer
    where the kernel can refuse them."""
    end = socket.socket(fileno=descriptor)
    rights.refuse(end)
    return trio.socket.from_stdlib_socket(end)
