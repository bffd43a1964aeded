"""The exit codes of sbxctl, in one table (README and the man page quote it).

`sbxctl run` and `sbxctl exec` pass the command's own exit code through (0 to 255; a command that
died of signal n by itself gives 128 + n). What sbxd did, rather than the command, has a code from
230 up; scripts that must tell them from a command's own use `--json`.
"""

from enum import IntEnum

from sbxd.port.command import KillReason


class Exit(IntEnum):
    OK = 0
    TIMEOUT = 230
    MEMORY = 231
    OUTPUT_LIMIT = 232
    PIDS = 233
    DISK = 234
    CANCELLED = 235
    EXPIRED = 236
    SERVICE_SHUTDOWN = 237
    INTERNAL = 239  # a fault of sbxctl itself; --debug shows where
    REJECTED = 240
    UNAVAILABLE = 241
    ESCAPE_SUSPECTED = 242
    WORKSPACE = 243
    CONFIGURATION = 244  # sbxctl config: the daemon would not start with this file
    USAGE = 245
    HOST_DEGRADED = 246  # sbxctl doctor: something is missing
    EGRESS_REFUSED = 247  # sbxctl egress check: the destination would be refused
    EGRESS_NOT_CONFORMING = 248  # sbxctl egress test: a probe failed, or a control of one
    ALERTING = 249  # sbxctl status: an alert stands
    AUDIT_INCOMPLETE = 250  # sbxctl audit verify: a record is missing, out of turn or forged
    AUDIT_NOT_KEPT = 251  # sbxctl audit verify: none is missing, but older ones are not kept
    INTERRUPTED = 130


def of_kill(reason: KillReason) -> Exit:
    """The exit code for a command that the service killed."""
    return Exit[reason.name]
