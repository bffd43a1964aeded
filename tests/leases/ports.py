"""An execution environment that keeps account of what is live."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import anyio

from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.egress import DENY_ALL
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.settings import DEFAULT_LIMITS

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def specification(*, epoch: int, run: str = "run") -> EnvironmentSpec:
    return EnvironmentSpec(
        tenant_id=TenantId("tenant"),
        run_id=RunId(run),
        lease_epoch=epoch,
        image_digest="sha256:" + "a" * 64,
        limits=DEFAULT_LIMITS,
        egress=DENY_ALL,
        environment={},
        bridge=None,
    )


@dataclass
class PortDouble:
    """fails: every provision. hangs: it makes the environment and never returns it."""

    on_provision: Callable[[], object] = lambda: None
    fails: bool = False
    hangs: bool = False
    live: set[EnvironmentId] = field(default_factory=set)

    async def provision(self, specification: EnvironmentSpec) -> EnvironmentHandle:
        await anyio.lowlevel.checkpoint()
        self.on_provision()
        if self.fails:
            raise ExecutionUnavailable(UnavailableCode.CAPACITY, "told to")
        environment_id = EnvironmentId(secrets.token_hex(16))
        self.live.add(environment_id)
        if self.hangs:
            await anyio.sleep_forever()
        return EnvironmentHandle(
            environment_id=environment_id,
            tenant_id=specification.tenant_id,
            run_id=specification.run_id,
            lease_epoch=specification.lease_epoch,
            created_at=NOW,
            expires_at=NOW,
        )

    async def execute(
        self, environment: EnvironmentHandle, command: ExecutionCommand
    ) -> ExecutionResult:
        raise NotImplementedError

    async def destroy(self, environment: EnvironmentHandle) -> None:
        await anyio.lowlevel.checkpoint()
        self.live.discard(environment.environment_id)
