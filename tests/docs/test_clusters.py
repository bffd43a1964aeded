"""The examples for schedulers: a task of the recipe runs; the others are held to a schema."""

import os
import socket
import sys
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


async def test_a_task_uses_the_daemon_of_the_node_that_it_runs_on(tmp_path: Path) -> None:
    program = f"import dask_recipe; print(*dask_recipe.in_sandbox(['echo'], {IMAGE!r}))"
    said = []
    with trio.fail_after(SECONDS_MAX):
        async with node("one", tmp_path) as one, node("two", tmp_path) as two:
            for name, where in (("one", one), ("two", two)):
                done = await trio.run_process(
                    [sys.executable, "-c", program],
                    env={
                        **os.environ,
                        "PYTHONPATH": f"{REPOSITORY}:{EXAMPLES}",
                        "SBXD_SOCKET": str(where),
                        "SBXD_NODE": name,
                    },
                    capture_stdout=True,
                )
                said.append(done.stdout.decode().strip())
    assert said == ["one sandbox of one", "two sandbox of two"]
