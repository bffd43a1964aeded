"""What the service asks of the lifecycle. The registry implements it; the fake does as well.

Invariants: every call names its caller (`Peer`), and an environment belongs to the uid that made
it: a peer with another uid is told the same as for an id that never was. A call that comes back
has finished its bookkeeping and emitted its audit event. Only the three port errors, and for
files WorkspaceError and WorkspaceEscape, leave these methods.

Deliberately absent: frames, credit and connections (the service's), images (the image store's).
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import trio

from sbxd.audit.lease_events import ClearingProof
from sbxd.mechanism.protocol import Erasing
from sbxd.port.command import ExecutionCommand, ExecutionResult, FileChange
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.ids import EnvironmentId
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.wire.descriptions import EnvironmentInfo, PostureItem
from sbxd.wire.messages import BridgeEnd, OutputStream
from sbxd.wire.observing import EnvironmentMeter
from sbxd.wire.repair import ClearingWord

LIST_PAGE_ENTRIES = 1024


class PeerRole(StrEnum):
    WORKER = "worker"
    ADMIN = "admin"


@dataclass(frozen=True)
class Peer:
    """Who asks. uid: of SO_PEERCRED. connection_id: fresh for each connection and never reused
    while the daemon runs. An ADMIN may act on every environment; a WORKER on those of its uid."""

    uid: int
    connection_id: int
    role: PeerRole


class OutputSink(Protocol):
    """Takes a command's output while it runs.

    Called with at most 64 KiB at a time, in order within a stream; stdout and stderr may be
    awaited at the same time. Bytes beyond `maximum_output_bytes` are never passed. A sink that
    blocks holds the command back through its pipes, and is awaited for at most
    `Budgets.delivery_seconds` after the command has ended; what it did not take by then is
    dropped and that stream's truncated flag is set. It may raise only by cancellation.
    """

    async def __call__(self, stream: OutputStream, data: bytes) -> None: ...


class ContentSink(Protocol):
    """Takes the pieces of a file that is read, in order. It may raise only by cancellation."""

    async def __call__(self, data: bytes) -> None: ...


class EntriesSink(Protocol):
    """Takes a page of a listing, at most LIST_PAGE_ENTRIES and never none; blocks while there is
    no room."""

    async def __call__(self, entries: Sequence[FileChange]) -> None: ...


class BridgeWorker(Protocol):
    """The worker's end of a bridge. What is called here may raise only by cancellation.

    `opened` is called first and once; `closed` at most once; `send` and `receive` between them,
    by one task each; `receive` also afterwards, until it returns None.
    """

    async def opened(self) -> None:
        """A program has presented the token."""
        ...

    async def send(self, data: bytes) -> None:
        """Pass on one frame of the program's. Blocks while the worker takes none."""
        ...

    async def receive(self) -> bytes | None:
        """The worker's next frame; None once it sends no more."""
        ...

    async def closed(self, reason: BridgeEnd) -> None:
        """The program sends no more frames."""
        ...


@dataclass(frozen=True)
class ReconcileReport:
    """destroyed: orphans of which nothing is left. quarantined: those not proven stopped.
    released: those quarantined before of which nothing is left any more."""

    destroyed: tuple[str, ...]
    quarantined: tuple[str, ...]
    released: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReapReport:
    """What one pass over the leases found. asked: environments. stale: those that it ended.
    unknown: those that the next pass may end. unanswered: authorities by name. released: those
    quarantined before of which nothing is left any more."""

    asked: int
    stale: tuple[EnvironmentId, ...]
    unknown: int
    unanswered: tuple[str, ...]
    released: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quarantined:
    """name: an environment id, or what the kernel showed that is none. kinds: what is there."""

    name: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """The lifecycle's part of what an operator is told. erasing: of what is proven dead."""

    mechanism: str
    environments: int
    quarantined: tuple[str, ...]
    reserve_ready: int
    reserve_target: int
    posture: tuple[PostureItem, ...]
    erasing: Erasing = field(default_factory=Erasing)


@dataclass(frozen=True)
class PoolCensus:
    """ages_seconds: of the slots that are ready, oldest first. memory_bytes: what those hold now;
    None when it is not counted for one of them."""

    building: int
    target: int
    ages_seconds: tuple[float, ...]
    memory_bytes: int | None = 0


@dataclass(frozen=True)
class Census:
    """states: how many environments that a tenant has are in each. waiting: requests that wait for
    a place."""

    states: Mapping[str, int]
    waiting: int
    pool: PoolCensus


class Environments(Protocol):
    """All live environments of this daemon. Methods may be awaited concurrently.

    `handle` is compared with the record (`sbxd.lifecycle.ownership`): an unknown id or another
    uid's is ExecutionRejected(ENVIRONMENT_GONE); another tenant is
    SandboxEscapeSuspected(TENANT_MISMATCH) and the environment is destroyed; another run or epoch
    is StaleLease; one that overran a budget is BudgetExhausted. The events of refusals
    (RequestRejected, RequestUnserved, PathDenied) are the service's to emit.
    """

    async def provision(self, owner: Peer, specification: EnvironmentSpec) -> EnvironmentHandle:
        """Build an environment, or hand out a prepared one, within the start budget.

        Destroys every environment of the same uid, tenant and run with a lower epoch.

        Raises: ExecutionRejected (admission, an epoch lower than one seen),
        ExecutionUnavailable (CAPACITY, START_BUDGET_EXCEEDED, SHUTTING_DOWN, SETUP_FAILED).

        Cancellation: nothing is left behind; a half-built environment is destroyed in the
        background.
        """
        ...

    def attempt(self, owner: Peer, handle: EnvironmentHandle) -> None:
        """Charge one operation to the environment's budgets. The caller does so before it judges
        a command or a workspace operation, and once for each. Raises the port errors, among them
        BudgetExhausted: then the environment ends. Never blocks."""
        ...

    async def execute(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        command: ExecutionCommand,
        *,
        cancelled: trio.Event,
        on_output: OutputSink | None = None,
        bridge: BridgeWorker | None = None,
    ) -> ExecutionResult:
        """Run one command to its end.

        bridge: serves the environment's bridge while the command runs; without it the command
        gets neither path nor token. The first command that is started with it is the turn, and
        its end is the bridge's.

        on_output: takes the output; then stdout and stderr of the result are b"" and only the
        flags and counts of the result speak of them. None: they are captured in the result.
        Output beyond `returned_bytes_max` is cut, the command is killed with OUTPUT_LIMIT, and the
        environment ends after the result.
        cancelled: when it is set, the command is killed with CANCELLED and the result is
        returned as for any other kill. It may be set before the call.

        Raises: ExecutionRejected (INVALID_COMMAND, COMMAND_NOT_FOUND, COMMAND_NOT_EXECUTABLE,
        WORKING_DIRECTORY_NOT_FOUND, ENVIRONMENT_BUSY, ENVIRONMENT_GONE, BRIDGE_REFUSED,
        StaleLease),
        ExecutionUnavailable(ENVIRONMENT_LOST, SETUP_FAILED, SHUTTING_DOWN),
        SandboxEscapeSuspected(TENANT_MISMATCH, PROCESS_SURVIVED, WORKSPACE_IDENTITY_CHANGED).

        Cancellation (of the task): the tree is killed with CANCELLED and proven dead, and the
        audit event is emitted, within a bounded shield; no result. The environment lives.
        """
        ...

    async def destroy(self, owner: Peer, handle: EnvironmentHandle) -> None:
        """End the environment, prove it stopped, take its workspace away, to be erased later.

        Idempotent: a gone or foreign handle returns. A handle of another tenant, run or epoch
        than the record's raises as for every method. ExecutionUnavailable(SETUP_FAILED) after an
        attempt that failed and until one is proven: it is repeated in the background.

        Cancellation: the environment is destroyed in the background.
        """
        ...

    async def read(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        path: bytes,
        *,
        maximum_bytes: int,
        on_content: ContentSink,
    ) -> None:
        """Hand the bytes of one regular file to `on_content`. Raises WorkspaceError (TOO_LARGE
        beyond maximum_bytes) and WorkspaceEscape besides the port errors; BudgetExhausted within
        the content when it is more than may be returned. Legal while a command runs."""
        ...

    async def write(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        path: bytes,
        *,
        size_bytes: int,
        data: AsyncIterator[bytes],
    ) -> None:
        """Create or replace one file atomically from exactly size_bytes.

        Cancellation: the file is as it was before.
        """
        ...

    async def listdir(
        self, owner: Peer, handle: EnvironmentHandle, path: bytes, *, on_entries: EntriesSink
    ) -> bool:
        """The entries of one directory, page by page: the next is asked for when on_entries has
        returned. Their `path` is the name alone. Returns whether the directory holds more than
        was told."""
        ...

    async def provenance(
        self, owner: Peer, handle: EnvironmentHandle, path: bytes
    ) -> WorkspaceProvenance: ...

    async def describe(self) -> Description: ...

    def census(self) -> Census:
        """How many environments there are in each state, and the pool. Never blocks."""
        ...

    async def meters(
        self, denials_of: Callable[[EnvironmentId], int]
    ) -> tuple[EnvironmentMeter, ...]:
        """What each environment uses now, oldest first."""
        ...

    async def list(self) -> tuple[EnvironmentInfo, ...]:
        """Every environment that has been handed out and is not gone, oldest first."""
        ...

    async def inspect(self, environment_id: EnvironmentId) -> EnvironmentInfo:
        """Raises ExecutionRejected(ENVIRONMENT_GONE)."""
        ...

    async def reconcile(self) -> ReconcileReport:
        """Compare the journal with the kernel's inventory and destroy what nobody owns; try again
        what is quarantined."""
        ...

    async def reap(self) -> ReapReport:
        """Ask the lease authorities, and end what is stale; try again what is quarantined."""
        ...

    async def quarantine(self) -> tuple[Quarantined, ...]:
        """What was not proven stopped, and what the kernel holds of it now."""
        ...

    async def clear_quarantine(self, peer: Peer, name: str, word: ClearingWord) -> ClearingProof:
        """Release one: proven gone, or on the operator's word.

        Raises: ExecutionRejected(ENVIRONMENT_GONE) for what is not quarantined;
        ExecutionUnavailable(SETUP_FAILED) when the proof fails and is asked for.
        """
        ...

    def images_in_use(self) -> Mapping[str, int]:
        """How many environments stand on each image digest; slots of the reserve give way."""
        ...

    def release_owner(self, connection_id: int) -> None:
        """A connection ended. Environments that only it held become orphans: unless their
        owner's uid uses them from another connection within `orphan_grace_seconds`, they are
        destroyed. Never blocks, never raises. Call it when every call of that connection has
        come back."""
        ...
