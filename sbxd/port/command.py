"""One command and everything that is reported about it.

Source: DESIGN section 3 (the execution contract) and S1. `signal`, `evidence`, `usage`,
`files_changed_truncated`, `network_enabled` and `unenforced_limits` are our additions to S1's
fields.
"""

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated

from msgspec import Meta, Struct

ARGV_BYTES_MAX = 64 * 1024
STDIN_BYTES_MAX = 64 * 1024 * 1024
OUTPUT_BYTES_MAX = 64 * 1024 * 1024
CHANGE_COST_BYTES = 400  # of memory, beside the path
CHANGES_BYTES_MAX = 4 * 1024 * 1024


class KillReason(StrEnum):
    """Why the service ended a command. Closed: every value is one that it can tell apart."""

    TIMEOUT = "TIMEOUT"
    MEMORY = "MEMORY"
    OUTPUT_LIMIT = "OUTPUT_LIMIT"
    PIDS = "PIDS"
    DISK = "DISK"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"
    SERVICE_SHUTDOWN = "SERVICE_SHUTDOWN"


class ChangeKind(StrEnum):
    CREATED = "CREATED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


class FileChange(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of the workspace that a command created, modified or deleted.

    path: relative to /workspace, never absolute; bytes that are not UTF-8 are kept with
    surrogateescape in Python and as bytes on the wire. size_bytes: of the entry now (before its
    deletion for DELETED). sha256: None for a deletion and for whatever is not a regular file
    (directory, FIFO, socket), and for a file that does not fit what one comparison may read (the
    volume's size: only sparse files get there); a link's digest is that of its target text.
    """

    path: str
    change: ChangeKind
    size_bytes: int
    sha256: str | None

    def __post_init__(self) -> None:
        if self.path.startswith("/") or not self.path:
            raise ValueError("path must be relative and not empty")
        if self.change is ChangeKind.DELETED and self.sha256 is not None:
            raise ValueError("sha256 is None for a deletion")


def changes_bytes_max(entries_max: int) -> int:
    """How many bytes the files_changed of one command may take in memory, for entries_max of them:
    1 KiB for each, and CHANGES_BYTES_MAX in all. What does not fit is truncated, and said to be."""
    return min(CHANGES_BYTES_MAX, entries_max * 1024)


def change_bytes(change: FileChange) -> int:
    """What one entry takes in memory."""
    return sys.getsizeof(change.path) + CHANGE_COST_BYTES


def fitting_changes(
    changes: Sequence[FileChange], entries_max: int
) -> tuple[tuple[FileChange, ...], bool]:
    """The first changes within entries_max and its bytes, and whether others were left out."""
    left = changes_bytes_max(entries_max)
    fitting: list[FileChange] = []
    for change in changes[:entries_max]:
        left -= change_bytes(change)
        if left < 0:
            break
        fitting.append(change)
    return tuple(fitting), len(fitting) < len(changes)


ArgumentField = Annotated[str, Meta(max_length=ARGV_BYTES_MAX)]


class ExecutionCommand(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One argument vector to run.

    argv: argv[0] is absolute or a bare name on the image's fixed PATH. working_directory:
    relative to /workspace, "." for the root. timeout_seconds: only ever lowers the effective
    timeout. stdin: None and b"" both mean immediate end of file. maximum_output_bytes: per
    stream. network_enabled: the policy's yes for this command (the operator's is the spec's
    allowlist).
    """

    argv: Annotated[tuple[ArgumentField, ...], Meta(min_length=1, max_length=4096)]
    working_directory: PurePosixPath | str
    timeout_seconds: Annotated[int, Meta(ge=1, le=86_400)]
    stdin: Annotated[bytes, Meta(max_length=STDIN_BYTES_MAX)] | None
    maximum_output_bytes: Annotated[int, Meta(ge=1, le=OUTPUT_BYTES_MAX)]
    network_enabled: bool = False


class Evidence(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The kernel's counters of the command's own leaf that a kill reason rests on.

    oom_kill: processes the kernel killed for memory. pids_max_events: refused forks (on gVisor as
    its Sentry tells them). The leaf's counters start at zero with the command.
    workspace_bytes_left, workspace_inodes_left: the fewest that a reading of the volume has shown;
    None where it is not read.
    """

    oom_kill: int = 0
    oom_group_kill: int = 0
    pids_max_events: int = 0
    effective_timeout_ms: int = 0
    workspace_bytes_left: int | None = None
    workspace_inodes_left: int | None = None


class Usage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the command used; None where this host cannot measure it.

    workspace_bytes, workspace_inodes: in use after it. workspace_bytes_peak: the most that a
    reading has shown while it ran. disk_written_bytes: sent to the disk by the end of the command;
    what still waits in the page cache then is not in it, nor what was never to reach a disk.
    """

    cpu_ms: int | None = None
    memory_peak_bytes: int | None = None
    pids_peak: int | None = None
    workspace_bytes: int | None = None
    workspace_inodes: int | None = None
    workspace_bytes_peak: int | None = None
    disk_written_bytes: int | None = None


class ExecutionResult(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What happened. exit_code is None exactly when killed_by is set; signal is the number of
    the signal that the command died of by itself, and then exit_code is 128 + signal."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: bool
    killed_by: KillReason | None
    files_changed: tuple[FileChange, ...]
    duration_ms: int
    signal: int | None = None
    files_changed_truncated: bool = False
    evidence: Evidence = Evidence()
    usage: Usage = Usage()
    # Limits of the specification that this host cannot enforce (development hosts that list
    # them in `allow_unenforced_limits`); empty everywhere else.
    unenforced_limits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.exit_code is None) != (self.killed_by is not None):
            raise ValueError("exit_code is None exactly when killed_by is set")
        if self.timed_out != (self.killed_by is KillReason.TIMEOUT):
            raise ValueError("timed_out is set exactly when killed_by is TIMEOUT")
        if self.signal is not None and self.exit_code != 128 + self.signal:
            raise ValueError("a command that died of a signal has exit_code 128 + signal")
