"""What the lifecycle needs of a mechanism. This file imports no mechanism.

A mechanism builds slots ahead of need (the reserve), hands them out, and removes them. Decisions
(who owns an environment, which deadline applies, what killed a command) are the lifecycle's; a
mechanism only starts, measures and ends.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from sbxd.port.command import FileChange
from sbxd.port.ids import EnvironmentId
from sbxd.port.limits import ResourceLimits
from sbxd.port.network import NetworkShape
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.wire.descriptions import PostureItem


class MechanismError(Exception):
    """A step of a mechanism failed. `step` names the site, `errno` is 0 when it was no system
    call. Never holds a path."""

    def __init__(self, step: str, errno: int, detail: str = "") -> None:
        super().__init__(f"{step}: errno {errno} {detail}".rstrip())
        self.step = step
        self.errno = errno
        self.detail = detail


class SandboxLost(MechanismError):
    """Init, the steward or the launcher of this environment is gone."""


class ConfinementMismatch(MechanismError):
    """A slot was built and is not confined as it was asked to be; nothing of it is left."""


class ProcessSurvived(MechanismError):
    """Processes of the environment outlived the kill of all of them."""


class WorkspaceChanged(MechanismError):
    """The workspace is not the volume that the environment was prepared with."""


class StartFailure(StrEnum):
    NOT_FOUND = "NOT_FOUND"
    NOT_EXECUTABLE = "NOT_EXECUTABLE"
    BAD_WORKING_DIRECTORY = "BAD_WORKING_DIRECTORY"
    RESOURCES = "RESOURCES"


class CommandNotStarted(Exception):
    """The command could not be started: a typed refusal, not an exit code."""

    def __init__(self, failure: StartFailure, detail: str) -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure = failure
        self.detail = detail


@dataclass(frozen=True)
class SlotProfile:
    """What a slot is made for. Slots of one profile are interchangeable.

    ceilings: the most processor, memory and processes that the slot can be handed out with; None
    for its own limits.
    """

    image_digest: str
    limits: ResourceLimits
    network: NetworkShape = NetworkShape.NONE
    ceilings: ResourceLimits | None = None


class VolumeBinding(StrEnum):
    """When a volume gets its size: for good when it is built, or at the hand-out (a quota)."""

    AT_BUILD = "AT_BUILD"
    AT_HAND_OUT = "AT_HAND_OUT"


@dataclass(frozen=True)
class CommandSpec:
    """One command, validated: bytes, no NUL, working directory lexically inside."""

    argv: tuple[bytes, ...]
    environment: tuple[tuple[bytes, bytes], ...]
    working_directory: bytes
    stdin: bytes


@dataclass(frozen=True)
class Counters:
    """The kernel's evidence of one command's leaf; None where this host has no such counter."""

    oom_kill: int | None = None
    oom_group_kill: int | None = None
    pids_max_events: int | None = None
    pids_peak: int | None = None
    memory_peak_bytes: int | None = None
    cpu_usage_us: int | None = None
    disk_written_bytes: int | None = None


@dataclass(frozen=True)
class VolumeReading:
    """What the file system itself says of the workspace's volume.

    left: what may still be allocated. total: the limits, as the file system shows them.
    """

    bytes_left: int
    bytes_used: int
    bytes_total: int
    inodes_left: int
    inodes_total: int


@dataclass(frozen=True)
class CommandExit:
    """The main process's own end: exit_code, or the signal that it died of."""

    exit_code: int | None
    signal: int | None


@dataclass(frozen=True)
class Changes:
    entries: tuple[FileChange, ...]
    truncated: bool
    workspace_bytes: int
    workspace_inodes: int


@dataclass(frozen=True)
class ListPage:
    """Some entries of one directory, in bytewise order, each as CREATED. Their `path` is the name
    alone: a page is small, whatever the directory's own path is.

    more: there are others behind the last one. omitted: a name is left out since its path would be
    too long. hashed_bytes: read for digests."""

    entries: tuple[FileChange, ...]
    more: bool
    omitted: bool
    hashed_bytes: int


class RunningCommand(Protocol):
    """One command that has been started. All methods may be awaited concurrently."""

    async def receive_output(self, stream: str) -> bytes:
        """Next bytes of "stdout" or "stderr" (at most 64 KiB); b"" at end of file."""
        ...

    async def send_stdin(self) -> None:
        """Feed CommandSpec.stdin and close; returns early, silently, when the reader is gone."""
        ...

    async def wait_exit(self) -> CommandExit:
        """Until the main process ended. Raises SandboxLost when init is gone first."""
        ...

    async def wait_event(self) -> Counters:
        """Until the leaf's kernel counters may have changed (an oom kill, a refused fork)."""
        ...

    def counters(self) -> Counters:
        """Read the counters now. Non-blocking."""
        ...

    def kill(self) -> None:
        """Kill every process of the command's leaf. Non-blocking, idempotent."""
        ...

    async def wait_empty(self) -> None:
        """Until the leaf has no process (the proof that the whole tree is dead)."""
        ...

    async def aclose(self) -> None:
        """Release descriptors and give the leaf back for removal."""
        ...


class BridgeStreamBroken(Exception):
    """The program at the other end of a connection is gone, or reads no more."""


class BridgeStream(Protocol):
    """One connection that a program in the environment made to its bridge. Each direction is one
    task's at a time."""

    async def receive(self) -> bytes:
        """Next bytes (at most 64 KiB); b"" once the program has ended its direction, or itself."""
        ...

    async def send(self, data: bytes) -> None:
        """Until all is in the program's socket. Raises BridgeStreamBroken."""
        ...

    def end(self) -> None:
        """The program reads the end of the stream after what was sent. Never blocks or raises."""
        ...

    def close(self) -> None:
        """End both directions. Non-blocking, idempotent."""
        ...


class BridgeDoor(Protocol):
    """Where programs of one environment, and of no other, connect to its bridge."""

    async def accept(self) -> BridgeStream:
        """The next connection. Raises MechanismError when the door is closed or fails."""
        ...

    def close(self) -> None:
        """From now on, and for good, a connect is refused. Non-blocking, idempotent."""
        ...


class ProxyDoor(Protocol):
    """The proxy's port of a sandbox whose network is not the host kernel's: what is connected to it
    there comes out here as stream sockets, which are reset by closing them without an end."""

    def begin(self) -> None:
        """It is to listen from the start of the next command on. Non-blocking."""
        ...

    async def accept(self) -> Any:  # a socket.socket, which this vocabulary does not import
        """The next connection, a non-blocking socket, owned by the caller. Waits for ever where
        none can come: ends by cancellation."""
        ...

    def end(self) -> None:
        """Listen no more; connections that were taken stay. Non-blocking, idempotent."""
        ...

    def close(self) -> None:
        """As `end`."""
        ...


class Sandbox(Protocol):
    """One slot, prepared or handed out. Owned by exactly one environment; used once."""

    @property
    def environment_id(self) -> EnvironmentId: ...

    @property
    def profile(self) -> SlotProfile: ...

    @property
    def scope(self) -> str: ...

    @property
    def unenforced_limits(self) -> tuple[str, ...]: ...

    @property
    def volume_binding(self) -> VolumeBinding: ...

    async def assign(self, limits: ResourceLimits) -> None:
        """Give the slot to an environment with these limits. Raises MechanismError."""
        ...

    @property
    def proxy_listener(self) -> int | ProxyDoor | None:
        """The descriptor of the proxy's socket, non-blocking, bound in the sandbox's own network
        and not listening; or the door to a port of a guest's kernel. It stays the sandbox's, which
        closes it when it is destroyed. None when the environment has no such port, or is
        released."""
        ...

    def give_up_proxy_port(self) -> None:
        """The environment is to have no such port. Non-blocking, idempotent."""
        ...

    async def start(self, command: CommandSpec) -> RunningCommand:
        """Start one command (in a leaf of its own). Raises CommandNotStarted, SandboxLost,
        WorkspaceChanged, MechanismError. Takes the workspace snapshot first."""
        ...

    def open_bridge(self, *, waiting_max: int) -> BridgeDoor:
        """Let programs connect to the bridge's socket; until then the kernel refuses them. Once
        for a sandbox. waiting_max: connections that wait to be accepted. Never blocks. Raises
        MechanismError."""
        ...

    def volume(self) -> VolumeReading | None:
        """Read how full the volume is. Non-blocking; None where it cannot be read (any more)
        without asking anybody. Raises MechanismError when the file system refuses to say."""
        ...

    def memory_bytes(self) -> int | None:
        """What all of the environment's processes hold now. Non-blocking; None where the host
        does not count it, and once the environment is released."""
        ...

    async def changes(self, maximum: int) -> Changes:
        """What changed in the workspace since the snapshot of the last start()."""
        ...

    async def read(self, path: bytes, maximum_bytes: int) -> AsyncIterator[bytes]:
        """The bytes of one regular file in chunks. Raises WorkspaceError, WorkspaceEscape."""
        ...

    async def write(self, path: bytes, size_bytes: int, data: AsyncIterator[bytes]) -> None:
        """Create or replace one file atomically from exactly size_bytes."""
        ...

    async def list_page(
        self, path: bytes, *, after: bytes, maximum: int, hash_bytes_max: int
    ) -> ListPage:
        """At most `maximum` (1 or more) entries of one directory behind the name `after`, of which
        files are digested up to hash_bytes_max in all. Raises WorkspaceError, WorkspaceEscape."""
        ...

    async def provenance(self, path: bytes) -> WorkspaceProvenance: ...

    async def wait_lost(self) -> str:
        """Until "init", "steward" or "launcher" is gone by itself (not by destroy): which one."""
        ...

    def kill(self) -> None:
        """Kill everything in the environment at once. Non-blocking, idempotent."""
        ...

    async def destroy(self, *, party: int = 0) -> None:
        """Kill, prove empty, detach the workspace, which is erased later. Idempotent. Raises
        MechanismError when not proven, as ProcessSurvived when processes outlived the kill.

        party: below 2**32; whose workspace it was, so that parties take turns at the erasing."""
        ...


@dataclass(frozen=True)
class Orphan:
    environment_id: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Erasing:
    """What of the dead is not erased yet: volumes, and the bytes of disk that they use."""

    volumes: int = 0
    bytes_used: int = 0


@dataclass(frozen=True)
class Inventory:
    boot_id: str
    items: tuple[Orphan, ...] = field(default=())


class Mechanism(Protocol):
    """namespaces, gvisor, microvm."""

    name: str

    async def prepare(
        self, environment_id: EnvironmentId, profile: SlotProfile, *, back_stop_seconds: int
    ) -> Sandbox:
        """Build one slot. Raises MechanismError, as ConfinementMismatch when it is not confined
        as it was asked to be; then nothing is left behind.

        Cancellation: what was half built is destroyed before it is re-raised.
        """
        ...

    async def share(self, weights: Mapping[EnvironmentId, int]) -> None:
        """Weigh these environments against each other for the processors of a busy host, each from
        1 to CPU_WEIGHT_MAX (what it begins with). One that is gone is left out. Raises
        MechanismError."""
        ...

    async def destroy_orphan(self, environment_id: EnvironmentId) -> None:
        """Remove whatever the kernel still holds under this id. Idempotent."""
        ...

    async def inventory(self) -> Inventory: ...

    async def erasing(self) -> Erasing:
        """What is still to be erased. Erasing that has stopped begins again. Raises
        MechanismError."""
        ...

    async def posture(self) -> tuple[PostureItem, ...]: ...

    async def unpack_image(self, image_digest: str) -> None: ...

    async def drop_image(self, image_digest: str) -> None: ...

    async def wait_lost(self) -> None:
        """Until the mechanism itself is gone (the launcher's channel ended)."""
        ...


ByteSource = Callable[[], Awaitable[bytes]]
