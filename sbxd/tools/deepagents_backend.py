"""A run's sandbox as a backend of LangChain's deepagents.

    with blocking_sandbox("/run/sbxd/worker.sock", specification) as sandbox:
        agent = create_deep_agent(model=…, backend=RunBackend(sandbox))
        agent.invoke({"messages": [...]})

Implements `deepagents.backends.protocol.SandboxBackendProtocol` as deepagents 0.7 publishes it, by
its `BaseSandbox`, and is the one module that knows deepagents. Any thread may call; calls take
turns, since two commands never share a workspace at once.

Invariants: the shell that deepagents' `execute` means is named in the argument vector; files go by
the workspace port and its containment, and only /workspace has any; the network is the profile's
word and no argument; what ends the run (its budget, its lease, a suspected escape) is raised, and
everything else is an answer that the model reads; everything that comes out of the sandbox carries
the label EXTERNAL_UNTRUSTED (`trust`). Deliberately absent: making and ending sandboxes,
which is the run's (`sbxd.client.blocking`).
"""

import asyncio
from dataclasses import dataclass, fields

from deepagents.backends.protocol import (
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
)
from deepagents.backends.sandbox import BaseSandbox

from sbxd.client.blocking import BlockingSandbox
from sbxd.policy.child_environment import TIER_TWO_CONSTANTS
from sbxd.policy.timeouts import clamp_model_timeout
from sbxd.port.artifact import TrustLevel
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.environment import WORKSPACE_ROOT
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    WorkspaceCode,
    WorkspaceError,
    WorkspaceEscape,
)
from sbxd.tools.network_use import PackageInstallDenied, network_enabled
from sbxd.tools.tool import Disposition, Profile, SideEffect

TIMEOUT_SECONDS = 300
OUTPUT_BYTES_MAX = 1_048_576
LINE_BYTES_MAX = 16 * 1024  # of a shell line as an argument; a longer one goes by stdin
# The statuses by which shells say the same.
KILLED_STATUS = 137
NOT_RUN_STATUS = 126
_ANSWERED = (WorkspaceEscape, WorkspaceError, ExecutionUnavailable)
_ROOT = f"{WORKSPACE_ROOT}/"
_TMP = f"{TIER_TWO_CONSTANTS['TMPDIR']}/"
_ERRORS = {
    WorkspaceCode.NOT_FOUND: "file_not_found",
    WorkspaceCode.IS_A_DIRECTORY: "is_directory",
    WorkspaceCode.NOT_A_DIRECTORY: "invalid_path",
}


@dataclass(eq=False)
class LabelledResponse(ExecuteResponse):
    """What a command gave, with the label that all of it has. deepagents shows a model the text
    alone: put UNTRUSTED_NOTE (`sbxd.tools.tool`) into the agent's instructions."""

    trust: TrustLevel = TrustLevel.EXTERNAL_UNTRUSTED

    def __eq__(self, other: object) -> bool:
        """Whether the framework's own fields are equal: it knows no label."""
        return isinstance(other, ExecuteResponse) and _same(ExecuteResponse, self, other)


@dataclass(eq=False)
class LabelledDownload(FileDownloadResponse):
    """A file's content, with its label. Whatever wrote it, it was in reach of the sandbox."""

    trust: TrustLevel = TrustLevel.EXTERNAL_UNTRUSTED

    def __eq__(self, other: object) -> bool:
        """Whether the framework's own fields are equal: it knows no label."""
        return isinstance(other, FileDownloadResponse) and _same(FileDownloadResponse, self, other)


def _same(kind: type[ExecuteResponse | FileDownloadResponse], one: object, other: object) -> bool:
    return all(getattr(one, each.name) == getattr(other, each.name) for each in fields(kind))


class RunBackend(BaseSandbox):
    """One run's sandbox. Made within the block of `blocking_sandbox`."""

    def __init__(self, sandbox: BlockingSandbox, *, profile: Profile | None = None) -> None:
        """profile: what the run allows; None for the default one, which has no network."""
        self._sandbox = sandbox
        self._profile = profile or Profile()

    @property
    def id(self) -> str:
        """The run's: an environment that is lost is replaced, and the run goes on."""
        return self._sandbox.specification.run_id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a shell line; stdout and stderr are one text, as they came.

        Raises: BudgetExhausted, StaleLease, SandboxEscapeSuspected, RunBudgetTooLow, ScopeEnded,
        HoldExceeded.
        """
        if self._denied:
            return _DENIED
        try:
            return _response(self._sandbox.execute(self._command(command, timeout)))
        except PackageInstallDenied as denied:
            return _not_run(denied.message)
        except (ExecutionRejected, ExecutionUnavailable) as error:
            return _answer(error)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """The same. Cancellation: the command is killed, and the environment lives on."""
        if self._denied:
            return _DENIED
        try:
            running = self._sandbox.submit(self._command(command, timeout))
        except PackageInstallDenied as denied:
            return _not_run(denied.message)
        try:
            return _response(await asyncio.wrap_future(running))
        except (ExecutionRejected, ExecutionUnavailable) as error:
            return _answer(error)

    @property
    def _denied(self) -> bool:
        return self._profile.decide(SideEffect.CODE_EXECUTION) is Disposition.DENY

    def _command(self, line: str, timeout: int | None) -> ExecutionCommand:
        """timeout: 0 is no wish, like None: no command is without a bound."""
        seconds = clamp_model_timeout(
            timeout if timeout and timeout > 0 else None, declared_seconds=TIMEOUT_SECONDS
        )
        text = line.encode("utf-8", "surrogateescape")
        if len(text) <= LINE_BYTES_MAX:
            return self._shell(("sh", "-c", f"exec 2>&1\n{line}"), seconds)
        # deepagents writes the text of an edit into its line: more than arguments may hold.
        return self._shell(("sh", "-c", 'exec 2>&1\neval "$(cat)"'), seconds, stdin=text)

    def _shell(
        self, argv: tuple[str, ...], seconds: int, *, stdin: bytes | None = None
    ) -> ExecutionCommand:
        return ExecutionCommand(
            argv=argv,
            working_directory=".",
            timeout_seconds=seconds,
            stdin=stdin,
            maximum_output_bytes=OUTPUT_BYTES_MAX,
            network_enabled=network_enabled(self._profile, self._sandbox.specification.egress),
        )

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Create or replace files below /workspace, each all at once or not at all; and in /tmp,
        where deepagents puts the two texts of a large edit, as a command would."""
        return [self._uploaded(path, data) for path, data in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files below /workspace, of at most 64 MiB each."""
        return [self._downloaded(path) for path in paths]

    def _uploaded(self, path: str, data: bytes) -> FileUploadResponse:
        if path.startswith(_TMP):
            return self._written_in_tmp(path, data)
        try:
            self._sandbox.write(_name(path), data)
        except _ANSWERED as error:
            return FileUploadResponse(path=path, error=_in_its_words(error))
        return FileUploadResponse(path=path)

    def _written_in_tmp(self, path: str, data: bytes) -> FileUploadResponse:
        argv = ("sh", "-c", 'exec 2>&1\ncat >"$1"', "sh", path)
        try:
            result = self._sandbox.execute(self._shell(argv, TIMEOUT_SECONDS, stdin=data))
        except PackageInstallDenied as denied:
            return FileUploadResponse(path=path, error=denied.message)
        except (ExecutionRejected, ExecutionUnavailable) as error:
            return FileUploadResponse(path=path, error=str(error))
        said = _response(result)
        return FileUploadResponse(path=path, error=said.output.strip() if said.exit_code else None)

    def _downloaded(self, path: str) -> FileDownloadResponse:
        try:
            content = self._sandbox.read(_name(path))
        except _ANSWERED as error:
            return LabelledDownload(path=path, error=_in_its_words(error))
        return LabelledDownload(path=path, content=content)


def _in_its_words(error: Exception) -> str:
    """Why a file was refused, by the protocol's name where it has one."""
    match error:
        case WorkspaceEscape():
            return "invalid_path"
        case WorkspaceError():
            return _ERRORS.get(error.code, f"{error.code}: {error.detail}")
        case _:
            return str(error)


def _name(path: str) -> str:
    """The workspace's own name for a path. Raises WorkspaceEscape."""
    if not path.startswith(_ROOT):
        raise WorkspaceEscape(f"files are below {WORKSPACE_ROOT}")
    return path.removeprefix(_ROOT)


def _response(result: ExecutionResult) -> ExecuteResponse:
    # stderr is empty but for what came before the shell joined the two.
    output = (result.stdout + result.stderr).decode("utf-8", "replace")
    truncated = result.stdout_truncated or result.stderr_truncated
    status = result.exit_code
    if status is None:
        output += f"\n[the sandbox ended the command: {result.killed_by}]\n"
        status = KILLED_STATUS
    return LabelledResponse(output=output, exit_code=status, truncated=truncated)


def _answer(error: ExecutionRejected | ExecutionUnavailable) -> ExecuteResponse:
    """What the model reads. Raises the error of a run that has no budget left."""
    if error.code is RejectedCode.RUN_BUDGET_TOO_LOW:
        raise error
    return _not_run(f"{error.code}: {error.detail}")


def _not_run(why: str) -> ExecuteResponse:
    return LabelledResponse(output=f"[not run: {why}]\n", exit_code=NOT_RUN_STATUS)


_DENIED = _not_run("running code is denied for this run")
