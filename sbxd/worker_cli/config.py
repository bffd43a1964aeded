"""The worker tier's configuration file: TOML, one table for each part.

Invariant: a name that is not known is an error, so that a misspelt retention is never the default
one. Deliberately absent: a credential. What opens PostgreSQL is found by libpq.
"""

import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from sbxd.artifacts.opening import ArtifactSettings

DEFAULT_CONFIG = "/etc/sbxd/worker.toml"


class WorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tables of the file. artifacts: None when this host keeps none."""

    artifacts: ArtifactSettings | None = None


class ConfigUnreadable(Exception):
    """The file is missing, no TOML, or says something that is not known."""


def load(path: Path) -> WorkerSettings:
    """The settings of a file. Raises ConfigUnreadable."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), WorkerSettings)
    except OSError as problem:
        raise ConfigUnreadable(f"{path}: {problem.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as problem:
        raise ConfigUnreadable(f"{path}: {problem}") from None
