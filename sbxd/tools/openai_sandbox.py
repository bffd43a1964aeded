"""A run's sandbox as a live session of the OpenAI Agents SDK's sandbox interface.

    async with RunScope(...) as scope:
        sandbox = SandboxRunConfig(session=RunSession(scope))
        await Runner.run(SandboxAgent(...), "…", run_config=RunConfig(sandbox=sandbox))

Implements `agents.sandbox.session.BaseSandboxSession` as openai-agents 0.24 publishes it, and is
the one module that knows that interface. Its loop is asyncio's.

Invariants: the scope owns the environment, so a session that is closed, or a run that ends, leaves
none; files go by the workspace port and its containment, commands by the scope and its deadline;
everything that comes out of the sandbox carries the label EXTERNAL_UNTRUSTED (`trust`);
calls take turns, also where a model asks for several at once;
the network is the profile's word and no argument. What the SDK asks of an environment and this one
does not have is refused by name: other users, terminals, mounts, ports, paths outside the
workspace, and archives of the workspace for later (it lives as long as its run; what is to be kept
is an artifact). Deliberately absent: a client that provisions, since a run's scope does.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, final

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceWriteTypeError,
)
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import BaseSandboxSession, SandboxSessionState
from agents.sandbox.snapshot import NoopSnapshot
from agents.sandbox.types import ExecResult, User

from sbxd.client.run_scope import HoldExceeded, RunScope, ScopeEnded
from sbxd.port.artifact import TrustLevel
from sbxd.port.command import ExecutionCommand, ExecutionResult, KillReason
from sbxd.port.environment import WORKSPACE_ROOT
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
    WorkspaceCode,
    WorkspaceError,
    WorkspaceEscape,
)
from sbxd.tools.network_use import PackageInstallDenied, network_enabled
from sbxd.tools.tool import Disposition, Profile, SideEffect

TIMEOUT_SECONDS = 300
OUTPUT_BYTES_MAX = 4 * 1_048_576
FILE_BYTES_MAX = 2**40
PIECE_BYTES = 256 * 1024
NOT_FOUND_STATUS = 127  # a shell's, for a program that is not there
KILLED_STATUS = 137

_Command = Sequence[str | Path]


class RunSessionState(SandboxSessionState):
    """What the SDK keeps of a session: nothing to come back to."""

    type: Literal["sbxd"] = "sbxd"  # pyright: ignore[reportIncompatibleVariableOverride]


class LabelledResult(ExecResult):
    """What a command gave, with the label that all of it has. The SDK's own tools show a model
    the text alone: put UNTRUSTED_NOTE (`sbxd.tools.tool`) into the agent's instructions."""

    trust = TrustLevel.EXTERNAL_UNTRUSTED


class LabelledFile(io.BytesIO):
    """A file's content, with its label. Whatever wrote it, it was in reach of the sandbox."""

    trust = TrustLevel.EXTERNAL_UNTRUSTED


class LabelledBytes(bytes):
    """The beginning of a file, with its label."""

    trust = TrustLevel.EXTERNAL_UNTRUSTED


@final
class RunSession(BaseSandboxSession):
    """Made within the block of a scope, for one run."""

    def __init__(self, scope: RunScope, *, profile: Profile | None = None) -> None:
        """profile: what the run allows; None for the default one, which has no network."""
        self._scope = scope
        self._profile = profile or Profile()
        self._turn = asyncio.Lock()
        self.state = RunSessionState(
            snapshot=NoopSnapshot(id="none"), manifest=Manifest(root=str(WORKSPACE_ROOT))
        )

    async def running(self) -> bool:
        """Whether an environment lives now."""
        return self._scope.handle is not None

    async def _ensure_backend_started(self) -> None:
        try:
            await self._scope.environment()
        except (PortError, ScopeEnded) as error:
            raise _transport(("start",), error) from error

    async def _shutdown_backend(self) -> None:
        await self._scope.suspend()

    async def _exec_internal(
        self, *command: str | Path, timeout: float | None = None
    ) -> ExecResult:
        """Run one argument vector. A kill is told in the words of stderr, with status 137.

        Raises: ExecTimeoutError; ExecTransportError for what could not be run at all.
        """
        if self._profile.decide(SideEffect.CODE_EXECUTION) is Disposition.DENY:
            raise ExecTransportError(
                command=command, message="running code is denied for this run", retryable=False
            )
        try:
            network = network_enabled(self._profile, self._scope.specification.egress)
        except PackageInstallDenied as denied:
            raise ExecTransportError(
                command=command, message=denied.message, retryable=False
            ) from denied
        seconds = TIMEOUT_SECONDS if timeout is None else max(1, int(timeout))
        wanted = ExecutionCommand(
            argv=tuple(str(word) for word in command),
            working_directory=".",
            timeout_seconds=min(seconds, TIMEOUT_SECONDS),
            stdin=None,
            maximum_output_bytes=OUTPUT_BYTES_MAX,
            network_enabled=network,
        )
        try:
            async with self._turn:
                result = await self._scope.execute(wanted)
        except ExecutionRejected as error:
            if error.code is RejectedCode.COMMAND_NOT_FOUND:
                said = f"{command[0]}: not found in the image\n".encode()
                return LabelledResult(stdout=b"", stderr=said, exit_code=NOT_FOUND_STATUS)
            raise _transport(command, error) from error
        except (PortError, ScopeEnded, HoldExceeded) as error:
            raise _transport(command, error) from error
        if result.killed_by is KillReason.TIMEOUT:
            raise ExecTimeoutError(command=command, timeout_s=timeout)
        return _exec_result(result)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        """A file of at most 64 MiB, whole in memory, as the interface wants it."""
        name = self._name(path, user)
        try:
            async with self._turn:
                return LabelledFile(await (await self._scope.workspace()).read(name))
        except (PortError, WorkspaceError, WorkspaceEscape, ScopeEnded) as error:
            raise _read_error(path, error) from error

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        name = self._name(path, None)
        found = bytearray()
        try:
            async with self._turn:
                workspace = await self._scope.workspace()
                async with workspace.read_stream(name, maximum_bytes=FILE_BYTES_MAX) as content:
                    async for piece in content:
                        found += piece
                        if len(found) >= max_bytes:
                            break
        except (PortError, WorkspaceError, WorkspaceEscape, ScopeEnded) as error:
            raise _read_error(path, error) from error
        return LabelledBytes(found[:max_bytes])

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        """Create or replace a file, all at once or not at all; missing directories are made."""
        name = self._name(path, user)
        payload = data.read()
        if isinstance(payload, str):
            raise WorkspaceWriteTypeError(path=path, actual_type="str")
        try:
            async with self._turn:
                await (await self._scope.workspace()).write_stream(
                    name, size_bytes=len(payload), data=_pieces(payload)
                )
        except (PortError, WorkspaceError, WorkspaceEscape, ScopeEnded) as error:
            raise WorkspaceArchiveWriteError(path=path, context=_said(error)) from error

    async def persist_workspace(self) -> io.IOBase:
        """Refused: a workspace is a cache of its run."""
        raise WorkspaceArchiveReadError(
            path=Path(WORKSPACE_ROOT),
            context={"reason": "a workspace lives as long as its run: export what is to be kept"},
        )

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Refused, as `persist_workspace`."""
        raise WorkspaceArchiveWriteError(
            path=Path(WORKSPACE_ROOT),
            context={"reason": "a run begins with an empty workspace: write what it needs"},
        )

    def _name(self, path: Path, user: str | User | None) -> str:
        """The workspace's own name for a path of the SDK."""
        if user is not None:
            raise WorkspaceArchiveReadError(
                path=path, context={"reason": "an environment has one user"}
            )
        whole = PurePosixPath(self.normalize_path(path).as_posix())
        return str(whole.relative_to(WORKSPACE_ROOT))


def _exec_result(result: ExecutionResult) -> ExecResult:
    if result.exit_code is not None:
        return LabelledResult(
            stdout=result.stdout, stderr=result.stderr, exit_code=result.exit_code
        )
    said = f"\n[the sandbox ended the command: {result.killed_by}]\n".encode()
    return LabelledResult(
        stdout=result.stdout, stderr=result.stderr + said, exit_code=KILLED_STATUS
    )


async def _pieces(payload: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(payload), PIECE_BYTES):
        yield payload[start : start + PIECE_BYTES]


def _said(error: Exception) -> dict[str, object]:
    """No message of the port holds a host path."""
    return {"reason": str(error)}


def _read_error(path: Path, error: Exception) -> Exception:
    if isinstance(error, WorkspaceError) and error.code is WorkspaceCode.NOT_FOUND:
        return WorkspaceReadNotFoundError(path=path)
    return WorkspaceArchiveReadError(path=path, context=_said(error))


def _transport(command: _Command, error: Exception) -> ExecTransportError:
    return ExecTransportError(
        command=command,
        message=str(error),
        context=_said(error),
        retryable=isinstance(error, ExecutionUnavailable),
    )
