"""What a denial violated: one closed code per kind, for counting and for alerts.

Invariant: every denial in the audit carries one, whatever error the peer was told. The codes are
coarser than the errors on purpose: a rise of one of them from one tenant means one thing.
"""

from collections.abc import Mapping
from enum import StrEnum

from sbxd.port.errors import ExecutionRejected, RejectedCode


class ViolationCode(StrEnum):
    IMAGE_DENIED = "IMAGE_DENIED"
    LIMIT_DENIED = "LIMIT_DENIED"
    EGRESS_DENIED = "EGRESS_DENIED"
    ENVIRONMENT_NAME_DENIED = "ENVIRONMENT_NAME_DENIED"
    COMMAND_DENIED = "COMMAND_DENIED"
    PATH_TRAVERSAL = "PATH_TRAVERSAL"
    HANDLE_DENIED = "HANDLE_DENIED"
    LEASE_STALE = "LEASE_STALE"
    RUN_BUDGET = "RUN_BUDGET"
    OPERATIONS_MAX = "OPERATIONS_MAX"
    RETURNED_BYTES_MAX = "RETURNED_BYTES_MAX"
    WALL_SECONDS_MAX = "WALL_SECONDS_MAX"
    BRIDGE_DENIED = "BRIDGE_DENIED"
    NOT_AUTHORIZED = "NOT_AUTHORIZED"
    PROTOCOL = "PROTOCOL"


_BY_CODE: Mapping[RejectedCode, ViolationCode] = {
    RejectedCode.UNKNOWN_IMAGE: ViolationCode.IMAGE_DENIED,
    RejectedCode.LIMIT_ABOVE_CEILING: ViolationCode.LIMIT_DENIED,
    RejectedCode.LIMIT_NOT_ENFORCEABLE: ViolationCode.LIMIT_DENIED,
    RejectedCode.DESTINATION_NOT_CONFIGURED: ViolationCode.EGRESS_DENIED,
    RejectedCode.ENVIRONMENT_NAME_REFUSED: ViolationCode.ENVIRONMENT_NAME_DENIED,
    RejectedCode.INVALID_COMMAND: ViolationCode.COMMAND_DENIED,
    RejectedCode.COMMAND_NOT_FOUND: ViolationCode.COMMAND_DENIED,
    RejectedCode.COMMAND_NOT_EXECUTABLE: ViolationCode.COMMAND_DENIED,
    RejectedCode.WORKING_DIRECTORY_NOT_FOUND: ViolationCode.COMMAND_DENIED,
    RejectedCode.ENVIRONMENT_BUSY: ViolationCode.COMMAND_DENIED,
    RejectedCode.ENVIRONMENT_GONE: ViolationCode.HANDLE_DENIED,
    RejectedCode.STALE_LEASE: ViolationCode.LEASE_STALE,
    RejectedCode.RUN_BUDGET_TOO_LOW: ViolationCode.RUN_BUDGET,
    RejectedCode.BUDGET_EXHAUSTED: ViolationCode.OPERATIONS_MAX,
    RejectedCode.BRIDGE_REFUSED: ViolationCode.BRIDGE_DENIED,
    RejectedCode.NOT_AUTHORIZED: ViolationCode.NOT_AUTHORIZED,
    RejectedCode.PROTOCOL: ViolationCode.PROTOCOL,
    RejectedCode.UNSUPPORTED: ViolationCode.PROTOCOL,
}
_BY_BUDGET: Mapping[str | None, ViolationCode] = {
    "budgets.operations_max": ViolationCode.OPERATIONS_MAX,
    "budgets.returned_bytes_max": ViolationCode.RETURNED_BYTES_MAX,
    "budgets.wall_seconds_max": ViolationCode.WALL_SECONDS_MAX,
}


def violation_of(error: ExecutionRejected) -> ViolationCode:
    """The one code of a rejection."""
    if error.code is RejectedCode.BUDGET_EXHAUSTED:
        return _BY_BUDGET[error.field]
    return _BY_CODE[error.code]
