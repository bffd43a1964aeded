"""Dask tasks that run untrusted code: each task uses the sbxd of the node that it lands on.

    dask scheduler --scheduler-file s.json
    SBXD_SOCKET=/run/sbxd/worker.sock dask worker --scheduler-file s.json      # on every node
    python docs/examples/dask_recipe.py --scheduler-file s.json --image sha256:…

Nothing of sbxd crosses the network: a task is a plain function, and what it calls is the socket
of its own node. `pip install sbxd distributed`; the image has to be in every node's store.
"""

import argparse
import os
import secrets
from pathlib import Path

from dask.distributed import Client

from sbxd.client.blocking import blocking_sandbox
from sbxd.port.egress import DENY_ALL
from sbxd.port.environment import EnvironmentSpec
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import MIB, ResourceLimits

LIMITS = ResourceLimits(
    cpu_millicores=1000,
    memory_bytes=256 * MIB,
    pids_max=64,
    workspace_bytes=64 * MIB,
    inodes_max=1000,
    wall_clock_seconds=60,
)


def in_sandbox(argv: list[str], image: str) -> tuple[str, str]:
    """One task: a fresh environment on this node, one command. Returns the node's name and what
    the command wrote; raises when it was killed or failed, and Dask then tells the caller.

    A task that is retried is another run: nothing of the first is there.
    """
    credential = os.environ.get("SBXD_CREDENTIAL_FILE")
    specification = EnvironmentSpec(
        tenant_id=TenantId("dask"),
        run_id=RunId(f"task-{secrets.token_hex(8)}"),
        lease_epoch=0,
        image_digest=image,
        limits=LIMITS,
        egress=DENY_ALL,
        environment={},
        bridge=None,
    )
    with blocking_sandbox(
        os.environ.get("SBXD_SOCKET", "/run/sbxd/worker.sock"),
        specification,
        credential=None if credential is None else Path(credential).read_bytes().strip(),
    ) as sandbox:
        result = sandbox.run(argv, timeout_seconds=60)
    if result.exit_code != 0:
        raise RuntimeError(f"killed by {result.killed_by}, exit code {result.exit_code}")
    return os.environ.get("SBXD_NODE", os.uname().nodename), result.stdout.decode()


def main() -> None:
    """Run one command for each of a few inputs, spread over the nodes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scheduler-file", required=True)
    parser.add_argument("--image", required=True)
    parser.add_argument("--nodes", type=int, default=2, help="wait until so many are there")
    parser.add_argument("--tasks", type=int, default=8)
    arguments = parser.parse_args()
    with Client(scheduler_file=arguments.scheduler_file) as client:
        client.wait_for_workers(arguments.nodes)
        nodes = sorted(client.scheduler_info(n_workers=-1)["workers"])
        futures = [
            client.submit(
                in_sandbox,
                ["echo", str(number)],
                arguments.image,
                workers=nodes[number % len(nodes)],
                pure=False,
            )
            for number in range(arguments.tasks)
        ]
        for node, output in client.gather(futures):
            print(f"{node}: {output.strip()}")


if __name__ == "__main__":
    main()
