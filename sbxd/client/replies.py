"""From replies of the wire to the results and errors of the port.

Invariant: every terminal reply that is no success becomes exactly one typed error. Pure.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath

from sbxd.port.command import ExecutionResult, FileChange
from sbxd.port.errors import (
    BudgetExhausted,
    ExecutionRejected,
    RejectedCode,
    SandboxEscapeSuspected,
    ServiceShuttingDown,
    StaleLease,
    WorkspaceError,
    WorkspaceEscape,
    unavailable,
)
from sbxd.wire import messages as m


def error_of(reply: m.Message) -> Exception | None:
    """The error that a terminal reply stands for, or None when it is a success."""
    match reply:
        case m.Unavailable(code=code, detail=detail, retry_after_ms=after_ms):
            return unavailable(
                code,
                detail,
                retry_after_seconds=None if after_ms is None else after_ms / 1000,
            )
        case m.Rejected(code=RejectedCode.STALE_LEASE, detail=detail):
            return StaleLease(detail)
        case m.Rejected(code=RejectedCode.BUDGET_EXHAUSTED, detail=detail, field=field):
            return BudgetExhausted(detail, field=field)
        case m.Rejected(code=rejected, detail=detail, field=field):
            return ExecutionRejected(rejected, detail, field=field)
        case m.EscapeSuspected(code=escape, detail=detail):
            return SandboxEscapeSuspected(escape, detail)
        case m.WorkspaceEscaped(detail=detail):
            return WorkspaceEscape(detail)
        case m.WorkspaceFailed(code=failed, detail=detail):
            return WorkspaceError(failed, detail)
        case m.Cancelled():
            return ServiceShuttingDown("the daemon gave up the request")
        case _:
            return None


def execution_result(
    reply: m.Executed, *, stdout: bytes, stderr: bytes, files_changed: Iterable[FileChange]
) -> ExecutionResult:
    """The port's result from the terminal reply and what was streamed before it."""
    return ExecutionResult(
        exit_code=reply.exit_code,
        stdout=stdout,
        stderr=stderr,
        stdout_truncated=reply.stdout_truncated,
        stderr_truncated=reply.stderr_truncated,
        timed_out=reply.timed_out,
        killed_by=reply.killed_by,
        files_changed=tuple(files_changed),
        duration_ms=reply.duration_ms,
        signal=reply.signal,
        files_changed_truncated=reply.files_changed_truncated,
        evidence=reply.evidence,
        usage=reply.usage,
        unenforced_limits=reply.unenforced_limits,
    )


def file_changes(entries: Iterable[m.WireChange], prefix: bytes = b"") -> list[FileChange]:
    """Entries with their names as text (surrogateescape where they are not UTF-8). prefix: of the
    folder that was listed."""
    return [
        FileChange(
            path=name_to_text(prefix + entry.path),
            change=entry.change,
            size_bytes=entry.size_bytes,
            sha256=entry.sha256,
        )
        for entry in entries
    ]


def name_to_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def path_to_bytes(path: str | PurePosixPath) -> bytes:
    return str(path).encode("utf-8", "surrogateescape")
