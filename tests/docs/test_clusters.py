"""The examples for schedulers: Dask spreads the recipe over two nodes; the others are held to a
schema."""

import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from sbxd.audit.events import Door
from sbxd.fake.script import Outcome, Script
from tests.lab.host import REPOSITORY
from tests.service.memory import memory_daemon

pytestmark = pytest.mark.needs("lab")
# The libraries of the schemas are imported where they are used: a lane, which only collects this
# file, has none of them.

EXAMPLES = REPOSITORY / "docs" / "examples"
IMAGE = "sha256:" + "a" * 64
SECONDS_MAX = 240


# --- Kubernetes --------------------------------------------------------------------------------


@pytest.fixture
def daemonset() -> dict[str, Any]:
    import yaml

    document = yaml.safe_load((EXAMPLES / "daemonset.yaml").read_text())
    assert isinstance(document, dict)
    return document


def test_the_daemonset_is_one_by_the_schema_of_kubernetes(daemonset: dict[str, Any]) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(daemonset, kubernetes_validate.latest_version(), strict=True)


def test_control_the_schema_finds_a_wrong_field(daemonset: dict[str, Any]) -> None:
    import kubernetes_validate

    daemonset["spec"]["template"]["spec"]["hostUser"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(daemonset, kubernetes_validate.latest_version(), strict=True)


def test_its_pods_have_no_right_but_the_socket(daemonset: dict[str, Any]) -> None:
    pod = daemonset["spec"]["template"]["spec"]
    assert [pod[name] for name in ("hostNetwork", "hostPID", "hostIPC")] == [False] * 3
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not context["privileged"] and not context["allowPrivilegeEscalation"]  # noqa: PT018
    assert "@sha256:" in container["image"]
    paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    assert paths == ["/run/sbxd"]
    mounts = {mount["name"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts["sbxd"] and mounts["credential"]  # noqa: PT018


def test_every_line_of_its_security_context_is_explained(daemonset: dict[str, Any]) -> None:
    pod = daemonset["spec"]["template"]["spec"]
    lines = {*pod["securityContext"], *pod["containers"][0]["securityContext"]} - {"runAsGroup"}
    text = (REPOSITORY / "docs/clusters.md").read_text()
    for line in (*lines, "hostUsers", "nodeSelector", "automountServiceAccountToken", "hostPath"):
        assert line in text, line


# --- Nomad -------------------------------------------------------------------------------------


def test_the_nomad_job_is_hcl_and_its_task_has_no_right_but_the_socket() -> None:
    import hcl2

    text = (EXAMPLES / "nomad.hcl").read_text()
    assert hcl2.loads(text)["job"]
    for line in (
        r'cap_drop        = ["all"]',
        "readonly_rootfs = true",
        "privileged      = false",
        'security_opt    = ["no-new-privileges"]',
    ):
        assert line in text
    with pytest.raises(Exception, match=r"."):
        hcl2.loads(text.replace("group", "group {", 1))


# --- Dask --------------------------------------------------------------------------------------


@asynccontextmanager
async def node(name: str, folder: Path) -> AsyncIterator[Path]:
    """A daemon for one node: its worker socket; each command says which node it ran on."""
    path = folder / f"{name}.sock"
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await listening.bind(str(path))
    listening.listen(16)
    script = Script(by_program={"echo": Outcome(stdout=f"sandbox of {name}\n".encode())})
    async with memory_daemon(script) as daemon, trio.open_nursery() as nursery:
        offer = daemon.listeners[Door.WORKER].offer
        nursery.start_soon(partial(_pass_on, trio.SocketListener(listening), offer))
        yield path
        nursery.cancel_scope.cancel()


async def _pass_on(
    listener: trio.SocketListener, offer: Callable[[trio.abc.Stream], Awaitable[None]]
) -> None:
    async with listener:
        while True:
            await offer(await listener.accept())


def at_node(name: str, socket_path: Path) -> dict[str, str]:
    """The environment of a process of one node."""
    return {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}:{EXAMPLES}",
        "SBXD_SOCKET": str(socket_path),
        "SBXD_NODE": name,
    }


async def test_a_task_uses_the_daemon_of_the_node_that_it_runs_on(tmp_path: Path) -> None:
    program = f"import dask_recipe; print(*dask_recipe.in_sandbox(['echo'], {IMAGE!r}))"
    said = []
    with trio.fail_after(SECONDS_MAX):
        async with node("one", tmp_path) as one, node("two", tmp_path) as two:
            for name, where in (("one", one), ("two", two)):
                done = await trio.run_process(
                    [sys.executable, "-c", program],
                    env=at_node(name, where),
                    capture_stdout=True,
                )
                said.append(done.stdout.decode().strip())
    assert said == ["one sandbox of one", "two sandbox of two"]


@asynccontextmanager
async def dask_cluster(folder: Path, nodes: dict[str, Path]) -> AsyncIterator[Path]:
    """A scheduler of Dask and a worker for each node, on loopback: where a client finds them. All
    of them are ended and waited for on leaving."""
    file = folder / "scheduler.json"
    common = (
        *(f"--scheduler-file={file}", "--host=127.0.0.1"),
        *("--no-dashboard", "--dashboard-address=127.0.0.1:0"),
    )
    working = ("--nthreads=1", "--no-nanny", f"--local-directory={folder}", "--death-timeout=120")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(_lasting, folder, "dask_scheduler", *common, "--port=0"))
        for name, where in nodes.items():
            arguments = (*common, *working, f"--name={name}")
            env = at_node(name, where)
            nursery.start_soon(partial(_lasting, folder, "dask_worker", *arguments, env=env))
        yield file
        nursery.cancel_scope.cancel()


async def _lasting(
    folder: Path, program: str, *arguments: str, env: dict[str, str] | None = None
) -> None:
    """A program of Dask's, until cancelled; AssertionError when it ends before."""
    said = folder / f"{program}.log"
    with said.open("ab") as log:
        await trio.run_process(
            [sys.executable, "-m", f"distributed.cli.{program}", *arguments],
            env=env,
            stdout=log,
            stderr=log,
            check=False,
            deliver_cancel=_kill,
        )
    raise AssertionError(said.read_text())


async def _kill(process: trio.Process) -> None:
    # Not asked first: a worker that is asked while its scheduler ends may wait for it for ever.
    process.kill()


async def test_dask_spreads_the_recipe_over_two_nodes_and_each_task_uses_its_nodes_daemon(
    tmp_path: Path,
) -> None:
    with trio.fail_after(SECONDS_MAX):
        async with (
            node("one", tmp_path) as one,
            node("two", tmp_path) as two,
            dask_cluster(tmp_path, {"one": one, "two": two}) as scheduler,
        ):
            # The client is on neither node: no task can have run in its process.
            done = await trio.run_process(
                [
                    *(sys.executable, str(EXAMPLES / "dask_recipe.py")),
                    *(f"--scheduler-file={scheduler}", f"--image={IMAGE}", "--tasks=8"),
                ],
                env=at_node("none", tmp_path / "nothing.sock"),
                capture_stdout=True,
            )
    lines = Counter(done.stdout.decode().splitlines())
    assert lines == {"one: sandbox of one": 4, "two: sandbox of two": 4}
