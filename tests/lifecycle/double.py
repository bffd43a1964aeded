"""A mechanism in memory that does what a test tells it to, and keeps account of what exists.

Faults: `fail_call(n)` makes the n-th call of the mechanism (of whatever method) raise. `existing`
is what a kernel's inventory would list.
"""

import errno
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from sbxd.mechanism.protocol import (
    Changes,
    CommandExit,
    CommandNotStarted,
    CommandSpec,
    Counters,
    Erasing,
    Inventory,
    ListPage,
    MechanismError,
    Orphan,
    SandboxLost,
    SlotProfile,
    VolumeBinding,
    VolumeReading,
)
from sbxd.port.errors import WorkspaceCode, WorkspaceError
from sbxd.port.ids import EnvironmentId
from sbxd.port.limits import ResourceLimits
from sbxd.port.network import NetworkShape
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.wire.descriptions import PostureItem
from tests.lifecycle.bridge_double import DoubleDoor

ROOMY = VolumeReading(
    bytes_left=32 << 20,
    bytes_used=4096,
    bytes_total=(32 << 20) + 4096,
    inodes_left=99,
    inodes_total=100,
)
PROXY_LISTENER = 1000  # a number to hand on, never a descriptor that is open
QUIET = Changes(entries=(), truncated=False, workspace_bytes=4096, workspace_inodes=1)


@dataclass
class Behaviour:
    """What one command does. seconds: until it ends by itself; None: never.

    output: (at second, stream, bytes). holds_pipes: a background process keeps the pipes open
    until the leaf is killed. counters: (at second, reading); the last one holds afterwards.
    lost_at: init dies then. dies: False leaves a process that no kill ends. last_words: written
    when the kill arrives. volume: as counters, ROOMY before the first.
    """

    seconds: float | None = 0.0
    exit: CommandExit = CommandExit(exit_code=0, signal=None)  # noqa: RUF009
    output: Sequence[tuple[float, str, bytes]] = ()
    holds_pipes: bool = False
    counters: Sequence[tuple[float, Counters]] = ()
    lost_at: float | None = None
    dies: bool = True
    last_words: bytes = b""
    changes: Changes = QUIET
    not_started: CommandNotStarted | None = None
    start_seconds: float = 0.0
    volume: Sequence[tuple[float, VolumeReading]] = ()


@dataclass
class Script:
    """What the whole double does."""

    behaviours: list[Behaviour] = field(default_factory=list)
    prepare_seconds: float = 0.0
    destroy_seconds: float = 0.0
    destroy_failures: int = 0
    unenforced: tuple[str, ...] = ()
    volume_binding: VolumeBinding = VolumeBinding.AT_BUILD
    fail_at: int | None = None
    bridge_fails: bool = False
    erases_later: bool = False  # the volume of what is gone stays until `erase`
    memory_bytes: int | None = 4 << 20  # what each sandbox holds
    disk_bytes: int | None = None  # of all volumes together, while they exist
    leaves_residue: bool = False  # a preparation that fails or is cancelled removes nothing
    on_call: Callable[[str], None] = lambda _name: None


class DoubleCommand:
    def __init__(self, sandbox: "DoubleSandbox", spec: CommandSpec, behaviour: Behaviour) -> None:
        self.spec = spec
        self.behaviour = behaviour
        self.killed = False
        self.kill_count = 0
        self.closed = False
        self.stdin_taken = False
        self._sandbox = sandbox
        self._started_at = trio.current_time()
        self._killed = trio.Event()
        self._pipes: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._pending = sorted(behaviour.output, key=lambda piece: piece[0])
        self._counters = Counters(oom_kill=0, pids_max_events=0, cpu_usage_us=1500)
        self._seen = 0

    def _is_past(self, second: float) -> bool:
        return trio.current_time() >= self._started_at + second

    def has_run_for(self, seconds: float) -> bool:
        return self._is_past(seconds)

    def _advance(self) -> None:
        while self._pending and self._is_past(self._pending[0][0]):
            _at, stream, data = self._pending.pop(0)
            if not self.killed:
                self._pipes[stream] += data

    def _writers_left(self) -> bool:
        if self.killed or self._sandbox.killed:
            return not self.behaviour.dies
        if self.behaviour.holds_pipes:
            return True
        return self.behaviour.seconds is None or not self._is_past(self.behaviour.seconds)

    async def receive_output(self, stream: str) -> bytes:
        while True:
            await trio.lowlevel.checkpoint()
            self._advance()
            if self._pipes[stream]:
                data = bytes(self._pipes[stream][:65536])
                del self._pipes[stream][:65536]
                return data
            if not self._writers_left() and not (self._pending and not self.killed):
                return b""
            await self._next_change()

    async def _next_change(self) -> None:
        moments = [piece[0] for piece in self._pending[:1]]
        if self.behaviour.seconds is not None:
            moments.append(self.behaviour.seconds)
        moments += [at for at, _reading in self.behaviour.counters[self._seen :][:1]]
        if self.behaviour.lost_at is not None:
            moments.append(self.behaviour.lost_at)
        later = [moment for moment in moments if not self._is_past(moment)]
        with trio.move_on_at(self._started_at + min(later, default=float("inf"))):
            if self.killed and self.behaviour.dies:
                return
            killed = self._killed
            if self.killed:
                await trio.sleep_forever()
            await killed.wait()

    async def send_stdin(self) -> None:
        await trio.lowlevel.checkpoint()
        self.stdin_taken = True

    async def wait_exit(self) -> CommandExit:
        while True:
            await trio.lowlevel.checkpoint()
            if self.behaviour.lost_at is not None and self._is_past(self.behaviour.lost_at):
                raise SandboxLost("init", 0)
            if self._sandbox.killed:
                raise SandboxLost("init", 0)
            if self.behaviour.seconds is not None and self._is_past(self.behaviour.seconds):
                return self.behaviour.exit
            if self.killed:
                return CommandExit(exit_code=None, signal=9)
            await self._next_change()

    async def wait_event(self) -> Counters:
        while True:
            await trio.lowlevel.checkpoint()
            readings = self.behaviour.counters
            if self._seen < len(readings) and self._is_past(readings[self._seen][0]):
                self._seen += 1
                return readings[self._seen - 1][1]
            if self._seen == len(readings):
                await trio.sleep_forever()
            await self._next_change()

    def counters(self) -> Counters:
        reading = self._counters
        for at, later in self.behaviour.counters:
            if self._is_past(at):
                reading = later
        return reading

    def kill(self) -> None:
        self.kill_count += 1
        if not self.killed:
            self._advance()
            self.killed = True
            self._pipes["stdout"] += self.behaviour.last_words
            self._killed.set()

    async def wait_empty(self) -> None:
        await trio.lowlevel.checkpoint()
        if not self.behaviour.dies:
            await trio.sleep_forever()
        assert self.killed or self._sandbox.killed

    async def aclose(self) -> None:
        self.closed = True
        await self._sandbox.owner.call("aclose")


class DoubleSandbox:
    def __init__(
        self, owner: "MechanismDouble", environment_id: EnvironmentId, profile: SlotProfile
    ) -> None:
        self.owner = owner
        self.environment_id = environment_id
        self.profile = profile
        self.scope = f"sbx-{environment_id}.scope"
        self.unenforced_limits = owner.script.unenforced
        self.volume_binding = owner.script.volume_binding
        self.assigned: list[ResourceLimits] = []
        self.commands: list[DoubleCommand] = []
        self.files: dict[bytes, bytes] = {}
        self.killed = False
        self.destroyed = False
        self._lost = trio.Event()
        self._lost_part = "init"
        self.changes_fail = False
        self.steward_is_gone = False
        self.reading: VolumeReading | None = ROOMY  # before the first command
        wants_proxy = profile.network is NetworkShape.PROXY_PORT
        self.proxy_listener: int | None = PROXY_LISTENER if wants_proxy else None
        self.door: DoubleDoor | None = None

    async def assign(self, limits: ResourceLimits) -> None:
        await self.owner.call("assign")
        self.assigned.append(limits)

    def give_up_proxy_port(self) -> None:
        self.proxy_listener = None

    async def start(self, command: CommandSpec) -> DoubleCommand:
        await self.owner.call("start")
        if self.killed:
            raise SandboxLost("start", 0)
        script = self.owner.script.behaviours
        behaviour = script.pop(0) if script else Behaviour()
        if behaviour.not_started is not None:
            raise behaviour.not_started
        await trio.sleep(behaviour.start_seconds)
        running = DoubleCommand(self, command, behaviour)
        self.commands.append(running)
        return running

    def open_bridge(self, *, waiting_max: int) -> DoubleDoor:
        if self.owner.script.bridge_fails:
            raise MechanismError("listen on the bridge", 22)
        assert self.door is None, "a sandbox's bridge is opened once"
        self.door = DoubleDoor(waiting_max)
        return self.door

    def volume(self) -> VolumeReading | None:
        reading = self.reading
        for command in self.commands:
            for at, later in command.behaviour.volume:
                if command.has_run_for(at):
                    reading = later
        return reading

    def memory_bytes(self) -> int | None:
        return self.owner.script.memory_bytes

    async def changes(self, maximum: int) -> Changes:
        await self.owner.call("changes")
        if self.killed or self.changes_fail:
            raise SandboxLost("changes", 0)
        return self.commands[-1].behaviour.changes

    async def read(self, path: bytes, maximum_bytes: int) -> AsyncIterator[bytes]:
        await self.owner.call("read")
        if path not in self.files:
            raise WorkspaceError(WorkspaceCode.NOT_FOUND, "no such file")
        return self._pieces(self.files[path])

    async def _pieces(self, content: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(content), 4):
            await trio.lowlevel.checkpoint()
            yield content[start : start + 4]

    async def write(self, path: bytes, size_bytes: int, data: AsyncIterator[bytes]) -> None:
        await self.owner.call("write")
        self.files[path] = b"".join([piece async for piece in data])

    async def list_page(
        self, path: bytes, *, after: bytes, maximum: int, hash_bytes_max: int
    ) -> ListPage:
        await self.owner.call("listdir")
        if self.steward_is_gone:
            self.lose("steward")
            raise SandboxLost("listdir", 0)
        return ListPage(entries=(), more=False, omitted=False, hashed_bytes=0)

    async def provenance(self, path: bytes) -> WorkspaceProvenance:
        await self.owner.call("provenance")
        return WorkspaceProvenance.UNKNOWN

    def lose(self, part: str) -> None:
        self._lost_part = part
        self._lost.set()

    async def wait_lost(self) -> str:
        await self._lost.wait()
        return self._lost_part

    def kill(self) -> None:
        self.killed = True
        for command in self.commands:
            command.kill()

    async def destroy(self, *, party: int = 0) -> None:
        self.kill()
        await self.owner.remove(self.environment_id, party)
        self.destroyed = True


class MechanismDouble:
    name = "double"

    def __init__(self, script: Script | None = None) -> None:
        self.script = script if script is not None else Script()
        self.existing: dict[EnvironmentId, tuple[str, ...]] = {}
        self.volumes: dict[EnvironmentId, int] = {}
        self.erasing_asked = 0
        self.dead: dict[EnvironmentId, tuple[int, int]] = {}  # party and bytes of what is erased
        self.sandboxes: list[DoubleSandbox] = []
        self.calls: list[str] = []
        self.shares: list[dict[EnvironmentId, int]] = []
        self.lost = trio.Event()
        self._numbers = itertools.count(1)

    async def call(self, name: str) -> None:
        number = next(self._numbers)
        self.calls.append(name)
        self.script.on_call(name)
        await trio.lowlevel.checkpoint()
        if number == self.script.fail_at:
            raise MechanismError(f"double {name}", 5)

    async def prepare(
        self, environment_id: EnvironmentId, profile: SlotProfile, *, back_stop_seconds: int
    ) -> DoubleSandbox:
        self.existing[environment_id] = ("scope", "volume")
        try:
            await self.call("prepare")
            self._allocate(environment_id, profile.limits.workspace_bytes)
            await trio.sleep(self.script.prepare_seconds)
        except BaseException:
            if not self.script.leaves_residue:
                del self.existing[environment_id]
                self.volumes.pop(environment_id, None)
            raise
        sandbox = DoubleSandbox(self, environment_id, profile)
        self.sandboxes.append(sandbox)
        return sandbox

    def _allocate(self, environment_id: EnvironmentId, size: int) -> None:
        disk_bytes = self.script.disk_bytes
        taken = sum(self.volumes.values()) + sum(held for _, held in self.dead.values())
        if disk_bytes is not None and taken + size > disk_bytes:
            raise MechanismError("volume", errno.ENOSPC)
        self.volumes[environment_id] = size

    async def remove(self, environment_id: EnvironmentId, party: int = 0) -> None:
        await self.call("destroy")
        await trio.sleep(self.script.destroy_seconds)
        if self.script.destroy_failures > 0:
            self.script.destroy_failures -= 1
            raise MechanismError("umount", 16)
        self.existing.pop(environment_id, None)
        held = self.volumes.pop(environment_id, None)
        if held is not None and self.script.erases_later:
            self.dead[environment_id] = (party, held)

    def erase(self, environment_id: EnvironmentId) -> None:
        """What the script leaves to be erased is erased now."""
        del self.dead[environment_id]

    async def erasing(self) -> Erasing:
        self.erasing_asked += 1
        await trio.lowlevel.checkpoint()
        return Erasing(len(self.dead), sum(held for _, held in self.dead.values()))

    async def share(self, weights: Mapping[EnvironmentId, int]) -> None:
        await self.call("share")
        self.shares.append(dict(weights))

    async def destroy_orphan(self, environment_id: EnvironmentId) -> None:
        await self.remove(environment_id)

    async def inventory(self) -> Inventory:
        await trio.lowlevel.checkpoint()
        return Inventory(
            boot_id="boot",
            items=tuple(Orphan(name, kinds) for name, kinds in self.existing.items()),
        )

    async def posture(self) -> tuple[PostureItem, ...]:
        await trio.lowlevel.checkpoint()
        return ()

    async def unpack_image(self, image_digest: str) -> None:
        await trio.lowlevel.checkpoint()

    async def drop_image(self, image_digest: str) -> None:
        await trio.lowlevel.checkpoint()

    async def wait_lost(self) -> None:
        await self.lost.wait()
