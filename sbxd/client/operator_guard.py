"""The outbound guard by the operator's policy, in one call.

    guard = operator_guard()
    stream = await guard.connect("mcp.example.com", 443)

The policy is the table `[egress]` of the operator's file: of /etc/sbxd/worker.toml, or of another
file with that table, such as the daemon's own sbxd.toml.

Invariants: the policy is the file's and nothing else's; a file or table that is missing, or that
says something unknown, is an error and never a guard; mode deny makes a guard that reaches nothing.
Deliberately absent: reading the file again (make another guard), a policy of a tenant's.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from sbxd.client.guard import CONNECT_SECONDS, Decision, Guard
from sbxd.policy.destinations import configured_destinations
from sbxd.port.egress import EgressPolicy
from sbxd.settings import EgressSettings

WORKER_CONFIG: Final = "/etc/sbxd/worker.toml"


class OperatorPolicyUnreadable(Exception):
    """There is no operator's policy in the file. The text names the field, and what to write."""


def operator_policy(path: str | Path = WORKER_CONFIG) -> EgressPolicy:
    """The operator's policy, with canonical destinations.

    Raises: OperatorPolicyUnreadable.
    """
    try:
        whole = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as problem:
        raise OperatorPolicyUnreadable(f"{path}: {problem.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise OperatorPolicyUnreadable(f"{path}: {problem}") from None
    if "egress" not in whole:
        raise OperatorPolicyUnreadable(
            f'{path}: there is no table [egress]: write one with mode = "deny", or with '
            'mode = "allowlist" and destinations'
        )
    try:
        settings = msgspec.convert(whole["egress"], EgressSettings)
        destinations = configured_destinations(settings)
    except ValueError as problem:  # DestinationInvalid and ValidationError are ones
        raise OperatorPolicyUnreadable(f"{path}: egress: {problem}") from None
    return EgressPolicy(mode=settings.mode, destinations=destinations)


def operator_guard(
    path: str | Path = WORKER_CONFIG,
    *,
    connect_seconds: float = CONNECT_SECONDS,
    on_decision: Callable[[Decision], None] | None = None,
) -> Guard:
    """A guard by the operator's policy. The file is read once, here.

    Args:
        path: the operator's file; its user writes it and no tenant does.
        connect_seconds, on_decision: as `Guard`.

    Raises: OperatorPolicyUnreadable.
    """
    policy = operator_policy(path)
    return Guard(policy, connect_seconds=connect_seconds, on_decision=on_decision)
