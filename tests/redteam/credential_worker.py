"""A worker whose own environment is full: provisions, has a sandbox search itself, and reports.

A program (`python3 -m tests.redteam.credential_worker`): on stdin JSON, the values to search for
and, by name, what the operator listed; on stdout what the sandbox found, and the environment that a
command of `sandbox.run_command` has. The client, the run's scope and the tools are those of every
worker; what goes into the specification comes out of the operator's list in the one way that there
is, `worker_environment`, whose values are the worker's own environment.
"""

import json
import os
import sys
from pathlib import Path

import msgspec
import trio

from sbxd.client.remote import connect
from sbxd.client.run_scope import RunScope, remote_workspaces
from sbxd.policy.child_environment import worker_environment
from sbxd.port.environment import EnvironmentSpec
from sbxd.tools.tool import ToolName
from sbxd.tools.toolbox import Toolbox
from tests.redteam.live import WORKER_SOCKET, Live, default_image, specification

SCANNER = Path(__file__).with_name("scanner.py")
# Where the search is to find something: the controls inside.
NOTE = "note"


async def search(values: list[str], note: str, listed: list[str]) -> dict[str, object]:
    """What a search inside a fresh environment finds."""
    image = await default_image()
    wanted: EnvironmentSpec = msgspec.structs.replace(
        specification(image), environment=worker_environment(listed, os.environ).environment
    )
    async with (
        connect(WORKER_SOCKET, client_name="credential-worker") as remote,
        RunScope(remote, wanted, remote_workspaces(remote)) as scope,
    ):
        one = Live(remote, await scope.environment())
        await one.workspace.write(NOTE, note.encode())
        await one.workspace.write("scanner.py", SCANNER.read_bytes())
        result = await one.run(
            "python3",
            "scanner.py",
            stdin=json.dumps([os.fsencode(value).hex() for value in values]).encode(),
            timeout_seconds=110,
        )
        shown = await Toolbox(scope, None).call(ToolName.RUN_COMMAND, {"command": ["env", "-0"]})
    if result.exit_code != 0:
        raise SystemExit(f"the search failed: {result}")
    found: dict[str, object] = json.loads(result.stdout)
    found["environment"] = dict(
        line.split("=", 1) for line in shown.value["stdout"].split("\0") if line
    )
    return found


def main() -> None:
    """Search, and print what was found."""
    request = json.load(sys.stdin)
    found = trio.run(search, request["values"], request["note"], request["listed"])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
