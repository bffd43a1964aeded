"""The exit codes of sbxd-worker. Where sbxctl has the same condition, the number is the same."""

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    INCOMPLETE = 1  # a sweep that could not remove everything; the next one tries again
    INTERRUPTED = 130
    UNAVAILABLE = 241
    USAGE = 245
    EGRESS_REFUSED = 247  # sbxd-worker guard: the destination would be refused
