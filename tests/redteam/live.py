"""A live environment of the installed daemon, for tests in a lane.

Everything goes through the worker socket, as a worker would; the image is the daemon's default.
"""

import json
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio

from sbxd.client.admin import AdminClient, connect_admin
from sbxd.client.bridge import BridgeHandler
from sbxd.client.remote import RemoteExecutionEnvironment, connect
from sbxd.client.workspace import RemoteWorkspace
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.egress import DENY_ALL
from sbxd.port.environment import (
    BRIDGE_SOCKET_PATH,
    BridgeEndpoint,
    EnvironmentHandle,
    EnvironmentSpec,
)
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import MIB, EnvironmentBudgets, ResourceLimits
from sbxd.probes.probe import PRELUDE
from tests.pacing import next_look

WORKER_SOCKET = "/run/sbxd/worker.sock"
ADMIN_SOCKET = "/run/sbxd/admin.sock"
WITHIN_SECONDS = 60.0

LIMITS = ResourceLimits(
    cpu_millicores=2000,
    memory_bytes=128 * MIB,
    pids_max=64,
    workspace_bytes=32 * MIB,
    inodes_max=2000,
    wall_clock_seconds=120,
)


def fresh_bridge() -> BridgeEndpoint:
    """A bridge with a token of its own."""
    return BridgeEndpoint(socket_path=BRIDGE_SOCKET_PATH, token=secrets.token_hex(16))


@dataclass(frozen=True)
class Live:
    """One provisioned environment."""

    remote: RemoteExecutionEnvironment
    handle: EnvironmentHandle

    @property
    def workspace(self) -> RemoteWorkspace:
        return RemoteWorkspace(self.remote.channel, self.handle)

    async def run(
        self,
        *argv: str,
        timeout_seconds: int = 60,
        maximum_output_bytes: int = MIB,
        stdin: bytes | None = None,
        directory: str = ".",
        network_enabled: bool = False,
    ) -> ExecutionResult:
        """Execute one command with generous defaults."""
        return await self.remote.execute(
            self.handle,
            ExecutionCommand(
                argv=argv,
                working_directory=directory,
                timeout_seconds=timeout_seconds,
                stdin=stdin,
                maximum_output_bytes=maximum_output_bytes,
                network_enabled=network_enabled,
            ),
        )

    async def python(self, source: str, **options: int) -> ExecutionResult:
        """Run a Python program in the environment."""
        return await self.run("python3", "-c", source, **options)  # type: ignore[arg-type]

    def with_bridge(
        self, handler: BridgeHandler, *, approval_hold_seconds: float = 300.0
    ) -> "Live":
        """The same environment; what runs through this has its bridge."""
        hooks = replace(
            self.remote.hooks, bridge=handler, approval_hold_seconds=approval_hold_seconds
        )
        return Live(self.remote.with_hooks(hooks), self.handle)

    async def look(self, source: str) -> Any:
        """Run a program that begins with PRELUDE and calls `answer` once: what it answered."""
        result = await self.python(PRELUDE + source)
        assert result.exit_code == 0, result
        return json.loads(result.stdout)


async def until(holds: Callable[[], object]) -> None:
    """As soon as it holds. For what comes after an answer, as the record of an end does."""
    with trio.fail_after(WITHIN_SECONDS):
        while not holds():
            await next_look()


async def wait_process_on_the_host(marker: str) -> Path:
    """The /proc directory, on the host, of the process that has this word as an argument, as
    soon as it is there."""
    with trio.fail_after(WITHIN_SECONDS):
        while True:
            found = _process_on_the_host(marker.encode())
            if found is not None:
                return found
            await next_look()


def _process_on_the_host(marker: bytes) -> Path | None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if marker in words:
                return entry
    return None


async def default_image() -> str:
    """The digest of the daemon's default image."""
    async with connect_admin(ADMIN_SOCKET) as admin:
        digest = (await admin.describe()).default_image
    assert digest is not None, "the lane's daemon has no image"
    return digest


def specification(
    image: str,
    limits: ResourceLimits = LIMITS,
    *,
    bridge: BridgeEndpoint | None = None,
    budgets: EnvironmentBudgets | None = None,
    **ids: str,
) -> EnvironmentSpec:
    """A specification under a run of its own."""
    return EnvironmentSpec(
        tenant_id=TenantId(ids.get("tenant", "tenant-1")),
        run_id=RunId(ids.get("run", f"run-{secrets.token_hex(6)}")),
        lease_epoch=1,
        image_digest=image,
        limits=limits,
        egress=DENY_ALL,
        environment={},
        bridge=bridge,
        budgets=budgets,
    )


@asynccontextmanager
async def live(
    limits: ResourceLimits = LIMITS,
    *,
    bridge: BridgeEndpoint | None = None,
    budgets: EnvironmentBudgets | None = None,
    **ids: str,
) -> AsyncIterator[Live]:
    """An environment for one test, destroyed afterwards."""
    image = await default_image()
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        handle = await remote.provision(
            specification(image, limits, bridge=bridge, budgets=budgets, **ids)
        )
        try:
            yield Live(remote, handle)
        finally:
            await remote.destroy(handle)


@asynccontextmanager
async def admin() -> AsyncIterator[AdminClient]:
    """The operator's side."""
    async with connect_admin(ADMIN_SOCKET) as client:
        yield client
