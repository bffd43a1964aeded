"""What a worker asks for and what it gets: the specification and the handle.

Invariant: no field of either holds a host path, a container id, a socket or a credential of the
worker's side (`gate.sandbox.spec_has_no_host_path`). `BridgeEndpoint.socket_path` is a path
inside the environment.
"""

from collections.abc import Mapping
from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated, Protocol

from msgspec import Meta, Struct

from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.egress import EgressPolicy
from sbxd.port.ids import EnvironmentIdField, LeaseEpochField, RunIdField, TenantIdField
from sbxd.port.limits import EnvironmentBudgets, ResourceLimits

WORKSPACE_ROOT = PurePosixPath("/workspace")
BRIDGE_SOCKET_PATH = "/dev/sbx-bridge"

ImageDigestField = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
EnvironmentNameField = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z")]
EnvironmentValueField = Annotated[str, Meta(max_length=32_768, pattern=r"^[^\x00]*\Z")]


class BridgeEndpoint(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The orchestration bridge of one turn: a socket inside the environment and its token.

    socket_path: BRIDGE_SOCKET_PATH; another is refused. token: of the worker's making, from at
    least 128 bits of chance, and for this environment alone.
    """

    socket_path: Annotated[str, Meta(pattern=r"^/[^\x00]{1,106}\Z")]
    token: Annotated[str, Meta(min_length=16, max_length=256)]

    def __repr__(self) -> str:
        return f"BridgeEndpoint(socket_path={self.socket_path!r}, token=<redacted>)"


class EnvironmentSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One environment, completely: identity, image, limits, egress and process environment.

    image_digest: the OCI manifest digest, never a tag. environment: already built by the worker's
    side (`sbxd.policy.child_environment`); the service adds nothing of its own to it but tier 2.
    budgets: None for the operator's.
    """

    tenant_id: TenantIdField
    run_id: RunIdField
    lease_epoch: LeaseEpochField
    image_digest: ImageDigestField
    limits: ResourceLimits
    egress: EgressPolicy
    environment: Annotated[
        Mapping[EnvironmentNameField, EnvironmentValueField], Meta(max_length=256)
    ]
    bridge: BridgeEndpoint | None
    budgets: EnvironmentBudgets | None = None


class EnvironmentHandle(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names one live environment. Opaque: the id is all that a worker may use to name it."""

    environment_id: EnvironmentIdField
    tenant_id: TenantIdField
    run_id: RunIdField
    lease_epoch: LeaseEpochField
    created_at: datetime
    expires_at: datetime


class ExecutionEnvironment(Protocol):
    """The port (S1): three methods, three failures.

    Each raises ExecutionUnavailable (retry), ExecutionRejected (a bug in the caller) or
    SandboxEscapeSuspected (alert) of `sbxd.port.errors`, and nothing else of its own.
    """

    async def provision(self, specification: EnvironmentSpec) -> EnvironmentHandle:
        """Build an environment within the start budget.

        Cancellation: nothing is left behind; what was half built is destroyed by the service.
        """
        ...

    async def execute(
        self, environment: EnvironmentHandle, command: ExecutionCommand
    ) -> ExecutionResult:
        """Run one command to its end and report what happened. One at a time per handle.

        Cancellation: the command's whole tree is killed with CANCELLED; the environment lives.
        """
        ...

    async def destroy(self, environment: EnvironmentHandle) -> None:
        """End the environment and take its workspace away. Idempotent; a gone handle is no error.

        Returns once nothing of it runs and nobody reaches its workspace any more, which is erased
        then. ExecutionUnavailable(SETUP_FAILED): it has ended, and that is not proven yet.
        """
        ...
