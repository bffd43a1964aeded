"""The worker tier's configuration file: TOML, one table for each part.

Invariant: a name that is not known is an error, so that a misspelt retention is never the default
one. Deliberately absent: a credential. What opens PostgreSQL is found by libpq.
"""

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from sbxd.artifacts.opening import ArtifactSettings
from sbxd.client.operator_guard import WORKER_CONFIG
from sbxd.port.egress import DENY_ALL, EgressPolicy
from sbxd.port.environment import ImageDigestField
from sbxd.port.ids import TenantIdField
from sbxd.port.limits import ResourceLimits
from sbxd.settings import DEFAULT_LIMITS, WORKER_SOCKET, EgressSettings
from sbxd.tools.tool import DEFAULT_ALLOWED, SideEffect

DEFAULT_CONFIG = WORKER_CONFIG


class McpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the sessions of `sbxd-worker mcp` get.

    socket: the daemon's worker socket. credential_file: holds the service credential where the
    daemon asks for one. image_digest: the image of every session. limits, egress: of every
    session; the daemon has its own word about both. environment: tier 1, by name and value.
    environment_file: more of it, one `NAME = "value"` a line (TOML); when it cannot be read,
    commands get none of tier 1 and the error is logged. allowed: what the tools may do; an MCP
    client cannot approve anything besides. package_registries: hosts that are package registries
    besides the public ones: reached only with PACKAGE_INSTALL among `allowed`. output_bytes: how
    much of a command's output a model is shown where it does not ask for another size.
    """

    tenant_id: TenantIdField
    image_digest: ImageDigestField
    socket: str = WORKER_SOCKET
    credential_file: str = ""
    limits: ResourceLimits = DEFAULT_LIMITS
    egress: EgressPolicy = DENY_ALL
    environment: dict[str, str] = {}
    environment_file: str = ""
    allowed: frozenset[SideEffect] = DEFAULT_ALLOWED
    package_registries: tuple[str, ...] = ()
    output_bytes: Annotated[int, Meta(ge=1024, le=1_048_576)] = 32_768


class WorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tables of the file. artifacts: None when this host keeps none. mcp: None when it serves
    no MCP client. egress: the policy of the outbound guard (`sbxd.client.operator_guard`); None
    where nothing of this tier has one."""

    egress: EgressSettings | None = None
    artifacts: ArtifactSettings | None = None
    mcp: McpSettings | None = None


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
