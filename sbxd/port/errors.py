"""The failures that cross the port.

Invariants: `code` is from a closed vocabulary; `detail` is for people and never holds a host
path, a uid, a unit name or a file descriptor (`gate.sandbox.spec_has_no_host_path`).
"""

from enum import StrEnum


class UnavailableCode(StrEnum):
    UNREACHABLE = "UNREACHABLE"
    CAPACITY = "CAPACITY"
    START_BUDGET_EXCEEDED = "START_BUDGET_EXCEEDED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    ENVIRONMENT_LOST = "ENVIRONMENT_LOST"
    SETUP_FAILED = "SETUP_FAILED"
    CONFINEMENT_MISMATCH = "CONFINEMENT_MISMATCH"
    AUDIT_UNAVAILABLE = "AUDIT_UNAVAILABLE"


class RejectedCode(StrEnum):
    UNKNOWN_IMAGE = "UNKNOWN_IMAGE"
    INVALID_IMAGE = "INVALID_IMAGE"
    IMAGE_IN_USE = "IMAGE_IN_USE"
    LIMIT_ABOVE_CEILING = "LIMIT_ABOVE_CEILING"
    LIMIT_NOT_ENFORCEABLE = "LIMIT_NOT_ENFORCEABLE"
    DESTINATION_NOT_CONFIGURED = "DESTINATION_NOT_CONFIGURED"
    ENVIRONMENT_NAME_REFUSED = "ENVIRONMENT_NAME_REFUSED"
    INVALID_COMMAND = "INVALID_COMMAND"
    COMMAND_NOT_FOUND = "COMMAND_NOT_FOUND"
    COMMAND_NOT_EXECUTABLE = "COMMAND_NOT_EXECUTABLE"
    WORKING_DIRECTORY_NOT_FOUND = "WORKING_DIRECTORY_NOT_FOUND"
    ENVIRONMENT_BUSY = "ENVIRONMENT_BUSY"
    ENVIRONMENT_GONE = "ENVIRONMENT_GONE"
    STALE_LEASE = "STALE_LEASE"
    RUN_BUDGET_TOO_LOW = "RUN_BUDGET_TOO_LOW"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    BRIDGE_REFUSED = "BRIDGE_REFUSED"
    NOT_AUTHORIZED = "NOT_AUTHORIZED"
    PROTOCOL = "PROTOCOL"
    UNSUPPORTED = "UNSUPPORTED"


class EscapeCode(StrEnum):
    TENANT_MISMATCH = "TENANT_MISMATCH"
    WORKSPACE_IDENTITY_CHANGED = "WORKSPACE_IDENTITY_CHANGED"
    PROCESS_SURVIVED = "PROCESS_SURVIVED"
    CONFINEMENT_MISMATCH = "CONFINEMENT_MISMATCH"


class WorkspaceCode(StrEnum):
    NOT_FOUND = "NOT_FOUND"
    NOT_A_FILE = "NOT_A_FILE"
    NOT_A_DIRECTORY = "NOT_A_DIRECTORY"
    IS_A_DIRECTORY = "IS_A_DIRECTORY"
    HARD_LINKED = "HARD_LINKED"
    TOO_LARGE = "TOO_LARGE"
    NO_SPACE = "NO_SPACE"
    CHANGED_DURING_READ = "CHANGED_DURING_READ"
    REFUSED = "REFUSED"


class PortError(Exception):
    """Abstract: raise one of the subclasses. Each narrows `code`, which is set once."""

    code: StrEnum
    detail: str

    def __init__(self, code: StrEnum, detail: str) -> None:
        if type(self) is PortError:
            raise TypeError("PortError is abstract: raise one of its subclasses")
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class ExecutionUnavailable(PortError):
    """The service cannot do it now: unreachable, out of capacity, shutting down. Retriable.

    retry_after_seconds: before that nothing will have changed; None when that is not known.
    """

    code: UnavailableCode  # pyright: ignore[reportIncompatibleVariableOverride]
    retry_after_seconds: float | None

    def __init__(
        self, code: UnavailableCode, detail: str, *, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(code, detail)
        self.retry_after_seconds = retry_after_seconds


class ServiceShuttingDown(ExecutionUnavailable):
    """The service is being stopped or restarted, and takes nothing new over this connection, now
    or later: every environment of it ends. Over a new connection, which waits until the next
    service is there, everything begins anew: leave the block of `sbxd.client.remote.connect`, enter
    it again, provision again."""

    def __init__(self, detail: str) -> None:
        super().__init__(UnavailableCode.SHUTTING_DOWN, detail)


def unavailable(
    code: UnavailableCode, detail: str, *, retry_after_seconds: float | None = None
) -> ExecutionUnavailable:
    """The error of this code, of the class that a caller can tell it by."""
    if code is UnavailableCode.SHUTTING_DOWN:
        return ServiceShuttingDown(detail)
    return ExecutionUnavailable(code, detail, retry_after_seconds=retry_after_seconds)


class ExecutionRejected(PortError):
    """The request is wrong and will stay wrong. A bug in the caller; not retriable.

    field: the path of the offending field ("limits.memory_bytes") or None.
    """

    code: RejectedCode  # pyright: ignore[reportIncompatibleVariableOverride]
    field: str | None

    def __init__(self, code: RejectedCode, detail: str, *, field: str | None = None) -> None:
        super().__init__(code, detail)
        self.field = field


class StaleLease(ExecutionRejected):
    """The handle's lease epoch or run is not the current one."""

    def __init__(self, detail: str) -> None:
        super().__init__(RejectedCode.STALE_LEASE, detail, field="lease_epoch")


class RunBudgetTooLow(ExecutionRejected):
    """Less is left of the run's budget than the floor: the command was not sent."""

    def __init__(self, detail: str) -> None:
        super().__init__(RejectedCode.RUN_BUDGET_TOO_LOW, detail, field="timeout_seconds")


class BudgetExhausted(ExecutionRejected):
    """The environment has used up a budget and has ended: every call on it is told so."""

    def __init__(self, detail: str, *, field: str | None = None) -> None:
        super().__init__(RejectedCode.BUDGET_EXHAUSTED, detail, field=field)


class SandboxEscapeSuspected(PortError):
    """An invariant of the isolation was violated. The environment is destroyed; alert."""

    code: EscapeCode  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, code: EscapeCode, detail: str) -> None:
        super().__init__(code, detail)


class WorkspaceEscape(Exception):
    """A path that leaves the workspace, or breaks the lexical rules for one."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class WorkspaceError(Exception):
    """The file system's refusal of a workspace operation, as a closed code."""

    def __init__(self, code: WorkspaceCode, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
