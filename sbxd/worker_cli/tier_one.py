"""Tier 1 of a worker's configuration: the variables that an operator listed, by name and value.

Invariants: they come out of the configuration and out of a file that it names, and never out of
this process' own environment; a name of tier 0 or tier 2 is an error at the start; a file that
cannot be read or parsed leaves tier 2 alone (none of tier 1, also not what the configuration
lists) and is logged as a configuration error, since a sandbox without an optional variable is
degraded and the run goes on.
"""

import logging
import tomllib
from collections.abc import Mapping

import msgspec

from sbxd.policy.child_environment import worker_environment
from sbxd.worker_cli.config import McpSettings

FILE_BYTES_MAX = 1024 * 1024

_LOG = logging.getLogger("sbxd.worker")


def tier_one(settings: McpSettings) -> Mapping[str, str]:
    """What a specification's environment carries. Read once, at the start.

    Raises: OperatorNamesRefused for a name that cannot be listed.
    """
    own = worker_environment(tuple(settings.environment), settings.environment)
    listed = _file(settings.environment_file) if settings.environment_file else {}
    if listed is None:
        return worker_environment(None, {}).environment
    return {**own.environment, **worker_environment(tuple(listed), listed).environment}


def _file(name: str) -> Mapping[str, str] | None:
    """By name and value; None, and a line in the log, when it cannot be read or parsed."""
    try:
        with open(name, "rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        if len(raw) > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX} bytes")
        return msgspec.convert(tomllib.loads(raw.decode()), dict[str, str])
    except (OSError, ValueError) as problem:  # tomllib's and msgspec's are ValueErrors too
        # What a parser says may repeat a value: its kind says enough.
        said = problem.strerror if isinstance(problem, OSError) else type(problem).__name__
        _LOG.error(
            "configuration error: mcp.environment_file (%s): %s: commands get none of the "
            "operator's variables",
            name,
            said,
        )
        return None
