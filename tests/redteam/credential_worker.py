"""A worker whose own environment is full: provisions, has a sandbox search itself, and reports.

A program (`python3 -m tests.redteam.credential_worker`): on stdin a JSON list of further values to
search for, on stdout what the sandbox found. What it puts into the specification comes from its
environment in the one way that there is, `worker_environment`.
"""

import json
import os
import sys
from pathlib import Path

import msgspec
import trio

from sbxd.client.remote import connect
from sbxd.policy.child_environment import worker_environment
from sbxd.port.environment import EnvironmentSpec
from tests.redteam.live import WORKER_SOCKET, Live, default_image, specification

SCANNER = Path(__file__).with_name("scanner.py")
# Where the search is to find something: the controls inside.
NOTE = "note"


async def search(values: list[str], note: str) -> dict[str, object]:
    """What a search inside a fresh environment finds."""
    image = await default_image()
    wanted: EnvironmentSpec = msgspec.structs.replace(
        specification(image), environment=worker_environment((), os.environ).environment
    )
    async with connect(WORKER_SOCKET, client_name="credential-worker") as remote:
        handle = await remote.provision(wanted)
        try:
            one = Live(remote, handle)
            await one.workspace.write(NOTE, note.encode())
            await one.workspace.write("scanner.py", SCANNER.read_bytes())
            result = await one.run(
                "python3",
                "scanner.py",
                stdin=json.dumps([os.fsencode(value).hex() for value in values]).encode(),
                timeout_seconds=110,
            )
        finally:
            await remote.destroy(handle)
    if result.exit_code != 0:
        raise SystemExit(f"the search failed: {result}")
    found: dict[str, object] = json.loads(result.stdout)
    return found


def main() -> None:
    """Search, and print what was found."""
    request = json.load(sys.stdin)
    json.dump(trio.run(search, request["values"], request["note"]), sys.stdout)


if __name__ == "__main__":
    main()
