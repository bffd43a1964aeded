"""What the tests of the tools are made of: a run over the fake, and an artifact store on disk."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sbxd.artifacts.opening import Artifacts
from sbxd.client.remote import RunDeadline
from sbxd.client.run_scope import RunScope
from sbxd.fake.environment import (
    DestroyCall,
    ExecuteCall,
    FakeExecutionEnvironment,
    ProvisionCall,
)
from sbxd.fake.script import Invocation, Outcome, Script
from sbxd.port.egress import DENY_ALL
from sbxd.port.environment import EnvironmentSpec
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import MIB, ResourceLimits
from sbxd.tools.run_artifacts import StoreOfRun
from sbxd.tools.tool import Profile
from sbxd.tools.toolbox import Toolbox
from tests.artifacts.world import Folder

TENANT = TenantId("tenant-a")
RUN = RunId("run-1")
LIMITS = ResourceLimits(
    cpu_millicores=1000,
    memory_bytes=256 * MIB,
    pids_max=64,
    workspace_bytes=64 * MIB,
    inodes_max=1000,
    wall_clock_seconds=300,
)
SPECIFICATION = EnvironmentSpec(
    tenant_id=TENANT,
    run_id=RUN,
    lease_epoch=1,
    image_digest="sha256:" + "a" * 64,
    limits=LIMITS,
    egress=DENY_ALL,
    environment={},
    bridge=None,
)


def total(invocation: Invocation) -> Outcome:
    """A program that adds the numbers of a file, as `python3 sum.py numbers.txt` would."""
    source = invocation.files[invocation.argv[-1]]
    result = sum(int(line) for line in source.split())
    return Outcome(
        stdout=f"{result}\n".encode(), writes={"total.csv": f"total\n{result}\n".encode()}
    )


PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(64)
SCRIPT = Script(
    by_argv={
        ("true",): Outcome(),
        ("false",): Outcome(exit_code=3, stderr=b"no\n"),
        ("forever",): Outcome(stdout=b"begun", sleep_seconds=float("inf")),
        ("long",): Outcome(stdout=b"a" * (2 * MIB) + "é".encode() * MIB),
        ("endless",): Outcome(stdout=b"x" * (5 * MIB)),
        ("odd",): Outcome(writes={"bad-\udcff": b"1", "formula.csv": b"=1+1,2\n"}),
        ("binary",): Outcome(stdout=b"\xff\xfe\0ok", writes={"blob": b"\xff\xfe\0"}),
        ("plot",): Outcome(writes={"plot.png": PICTURE}),
        ("rewrite",): Outcome(writes={"note.txt": b"by the sandbox"}),
        ("twelve",): Outcome(sleep_seconds=12.0),
    },
    by_program={"python3": total},
)


@dataclass
class World:
    """One run. environment: records every call to the port."""

    environment: FakeExecutionEnvironment
    scope: RunScope
    tools: Toolbox
    artifacts: Artifacts | None

    @property
    def calls(self) -> list[str]:
        """What was asked of the port, in order."""
        names: Mapping[type, str] = {
            ProvisionCall: "provision",
            ExecuteCall: "execute",
            DestroyCall: "destroy",
        }
        return [names[type(call)] for call in self.environment.calls]

    def last_command(self) -> ExecuteCall:
        found = [call for call in self.environment.calls if isinstance(call, ExecuteCall)]
        return found[-1]


@asynccontextmanager
async def world(
    folder: Folder | None = None,
    *,
    environment: FakeExecutionEnvironment | None = None,
    profile: Profile | None = None,
    deadline: RunDeadline | None = None,
) -> AsyncIterator[World]:
    """A run, with an artifact store when there is a folder for it."""
    if folder is not None:
        async with (
            folder.opened() as artifacts,
            world_of(artifacts, environment, profile, deadline) as made,
        ):
            yield made
    else:
        async with world_of(None, environment, profile, deadline) as made:
            yield made


@asynccontextmanager
async def world_of(
    artifacts: Artifacts | None,
    environment: FakeExecutionEnvironment | None,
    profile: Profile | None,
    deadline: RunDeadline | None,
) -> AsyncIterator[World]:
    environment = environment or FakeExecutionEnvironment(SCRIPT)
    async with RunScope(
        environment, SPECIFICATION, environment.workspace, deadline=deadline
    ) as scope:
        store = None if artifacts is None else StoreOfRun(artifacts, TENANT, RUN)
        yield World(environment, scope, Toolbox(scope, store, profile=profile), artifacts)


def store(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")


Main = Callable[[], Awaitable[None]]
