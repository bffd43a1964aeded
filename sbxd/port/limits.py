"""The limits and budgets of one environment.

Invariant: no limit of a specification has a default here. One that is forgotten is a decoding
error and never "unlimited"; defaults and ceilings belong to the configuration (S1, "Resource
limits, as numbers").
"""

from typing import Annotated

from msgspec import Meta, Struct

MIB = 1024 * 1024
GIB = 1024 * MIB


class ResourceLimits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one environment may use, in total.

    cpu_millicores: CPU rate, 1000 is one core. memory_bytes: memory.max, swap is always 0.
    pids_max: processes and threads of one command. workspace_bytes, inodes_max: the volume.
    wall_clock_seconds: the longest that one command may run.
    """

    cpu_millicores: Annotated[int, Meta(ge=10, le=1_024_000)]
    memory_bytes: Annotated[int, Meta(ge=8 * MIB, le=2**50)]
    pids_max: Annotated[int, Meta(ge=1, le=4_194_304)]
    workspace_bytes: Annotated[int, Meta(ge=1 * MIB, le=2**50)]
    inodes_max: Annotated[int, Meta(ge=16, le=2**32)]
    wall_clock_seconds: Annotated[int, Meta(ge=1, le=86_400)]


class EnvironmentBudgets(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one environment may do in all; beyond one of them it ends (`BudgetExhausted`).

    operations_max: attempts to execute and to use the workspace, also when they are denied.
    returned_bytes_max: output of commands and content of files that go back to the worker.
    wall_seconds_max: how long it may live; shorter than the service's own lifetime or not.
    """

    operations_max: Annotated[int, Meta(ge=1, le=10**9)]
    returned_bytes_max: Annotated[int, Meta(ge=1, le=2**50)]
    wall_seconds_max: Annotated[int, Meta(ge=1, le=604_800)]


class IoCeilings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What each environment may ask of the disk that holds the workspaces, per second; None is no
    ceiling. The operator's and in no specification: what a disk can give is the host's to know."""

    read_bytes: Annotated[int, Meta(ge=4096, le=2**50)] | None = None
    write_bytes: Annotated[int, Meta(ge=4096, le=2**50)] | None = None
    read_operations: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    write_operations: Annotated[int, Meta(ge=1, le=2**31)] | None = None
