"""An agent loop over the tools, whole: write a file, run code on it, export, pause, resume.

    python docs/examples/agent_loop.py --image sha256:… --store DIR [--socket PATH]

The model is a script here; in its place belongs whatever calls tools. It needs a running sbxd
whose worker socket this user may use, and a folder of this user for artifacts (mode 0700).
"""

import argparse
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from sbxd.artifacts.opening import Artifacts, ArtifactSettings, open_artifacts
from sbxd.client.remote import connect
from sbxd.client.run_scope import RunScope, WorkspaceOf, remote_workspaces
from sbxd.port.artifact import ArtifactRef
from sbxd.port.egress import DENY_ALL
from sbxd.port.environment import EnvironmentSpec, ExecutionEnvironment
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import MIB, ResourceLimits
from sbxd.tools.run_artifacts import StoreOfRun
from sbxd.tools.tool import ToolError
from sbxd.tools.toolbox import Toolbox

PROGRAM = """\
import sys
with open(sys.argv[1]) as source:
    total = sum(int(line) for line in source)
print(total)
with open("total.csv", "w") as result:
    result.write(f"total\\n{total}\\n")
"""
Call = tuple[str, dict[str, Any]]
Say = Callable[[str], None]

# What the model does, before and after the pause. A step that fails is a result that it reads.
BEFORE: Sequence[Call] = (
    ("workspace.write_text", {"path": "numbers.txt", "text": "1\n2\n39\n"}),
    ("workspace.write_text", {"path": "sum.py", "text": PROGRAM}),
    ("sandbox.run_command", {"command": "python3 sum.py numbers.txt"}),
    ("sandbox.run_command", {"command": ["python3", "sum.py", "numbers.txt"]}),
    ("artifact.export", {"path": "total.csv"}),
)
AFTER: Sequence[Call] = (
    ("workspace.list", {"path": "."}),
    ("workspace.read_text", {"path": "total.csv"}),
)


class Outcome(msgspec.Struct):
    """What the example found; a test reads it."""

    printed: str = ""
    told: str = ""
    artifact: ArtifactRef | None = None
    kept: bytes = b""
    entries_after: int = -1
    missing_after: str = ""


async def play(tools: Toolbox, calls: Sequence[Call], say: Say) -> AsyncIterator[Any]:
    """One call after the other, as a loop around a model would make them."""
    for name, arguments in calls:
        try:
            result = await tools.call(name, arguments)
        except ToolError as error:
            say(f"{name} -> {error.code}: {error.message}")
            yield error
        else:
            say(f"{name} -> {json.dumps(shown(result.value))} [{result.trust}]")
            yield result


def shown(value: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a result that fit on a line."""
    return {name: part for name, part in value.items() if part not in (None, [], "", False)}


async def example(
    environments: ExecutionEnvironment,
    workspace_of: WorkspaceOf,
    specification: EnvironmentSpec,
    artifacts: Artifacts,
    say: Say = print,
) -> Outcome:
    """Run the loop, pause it, and look again. `specification`: of the run's first claim."""
    tenant_id, run_id = specification.tenant_id, specification.run_id
    store = StoreOfRun(artifacts, tenant_id, run_id)
    outcome = Outcome()

    say("the run begins: its sandbox is made by the first call that needs one")
    async with RunScope(environments, specification, workspace_of) as scope:
        results = [each async for each in play(Toolbox(scope, store), BEFORE, say)]
    outcome.told = str(results[2])
    outcome.printed = results[3].value["stdout"]
    outcome.artifact = results[4].artifacts[0]

    say("the run pauses: its sandbox and its workspace are gone; it resumes with another")
    resumed = msgspec.structs.replace(specification, lease_epoch=specification.lease_epoch + 1)
    async with RunScope(environments, resumed, workspace_of) as scope:
        listed, read = [each async for each in play(Toolbox(scope, store), AFTER, say)]
    outcome.entries_after = len(listed.value["entries"])
    outcome.missing_after = str(read)

    async with artifacts.service.content(tenant_id, outcome.artifact.artifact_id) as content:
        outcome.kept = b"".join([piece async for piece in content.chunks])
    say(f"the artifact is still there: {outcome.kept!r}")
    return outcome


def specification(image_digest: str, run_id: str) -> EnvironmentSpec:
    """A small environment without a network."""
    return EnvironmentSpec(
        tenant_id=TenantId("example"),
        run_id=RunId(run_id),
        lease_epoch=1,
        image_digest=image_digest,
        limits=ResourceLimits(
            cpu_millicores=1000,
            memory_bytes=128 * MIB,
            pids_max=64,
            workspace_bytes=32 * MIB,
            inodes_max=1000,
            wall_clock_seconds=60,
        ),
        egress=DENY_ALL,
        environment={},
        bridge=None,
    )


async def main(socket: str, image_digest: str, folder: Path, credential: bytes | None) -> None:
    settings = ArtifactSettings(directory=str(folder))
    async with (
        open_artifacts(settings) as artifacts,
        connect(socket, credential=credential, client_name="example") as environment,
    ):
        wanted = specification(image_digest, "agent-loop")
        await example(environment, remote_workspaces(environment), wanted, artifacts)


def parsed() -> tuple[str, str, Path, bytes | None]:
    """The command line, as `main` takes it."""
    parser = argparse.ArgumentParser(description="An agent loop over the tools of sbxd.")
    parser.add_argument("--socket", default="/run/sbxd/worker.sock")
    parser.add_argument("--image", required=True, help="the digest of an image of the store")
    parser.add_argument("--store", required=True, type=Path, help="a folder for artifacts")
    parser.add_argument("--credential", type=Path, help="a file with the service credential")
    given = parser.parse_args()
    credential = given.credential.read_bytes().strip() if given.credential else None
    return given.socket, given.image, given.store, credential


if __name__ == "__main__":
    anyio.run(main, *parsed())
