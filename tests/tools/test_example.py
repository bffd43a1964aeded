"""docs/examples/agent_loop.py does what it says: against the fake, and against a real daemon."""

import importlib.util
import secrets
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from sbxd.artifacts.opening import ArtifactSettings, open_artifacts
from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.client.run_scope import remote_workspaces
from sbxd.fake.environment import FakeExecutionEnvironment
from tests.artifacts.world import Folder, run
from tests.contract.subjects import real_daemon
from tests.tools.test_mcp_program import fake_daemon
from tests.tools.world import SCRIPT, SPECIFICATION

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "agent_loop.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("agent_loop", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def check(outcome: object) -> None:
    """The workspace is gone after the pause, and the artifact is not."""
    found = msgspec.structs.asdict(outcome)  # type: ignore[arg-type]
    assert found["printed"] == "42\n"
    assert '["python3", "script.py"]' in found["told"]
    assert found["kept"] == b"total\n42\n"
    assert found["entries_after"] == 0
    assert "no such file" in found["missing_after"]


def test_the_example_runs_over_the_fake(example: ModuleType, folder: Folder, backend: str) -> None:
    async def main() -> None:
        environment = FakeExecutionEnvironment(SCRIPT)
        async with folder.opened() as artifacts:
            check(
                await example.example(
                    environment, environment.workspace, SPECIFICATION, artifacts, lambda _: None
                )
            )
        asked = [type(call).__name__ for call in environment.calls]
        # The resumed run only read: it made no sandbox.
        assert asked == ["ProvisionCall", "ExecuteCall", "DestroyCall"]

    run(backend, main)


def test_the_example_is_a_program(tmp_path: Path) -> None:
    with fake_daemon(tmp_path):
        done = subprocess.run(
            [
                sys.executable, str(EXAMPLE), "--socket", str(tmp_path / "worker.sock"),
                "--image", "sha256:" + "a" * 64, "--store", str(tmp_path / "store"),
            ],
            cwd=EXAMPLE.parents[2],
            env={"PYTHONPATH": str(EXAMPLE.parents[2])},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )  # fmt: skip
    assert "the artifact is still there: b'total\\n42\\n'" in done.stdout


@pytest.mark.needs("daemon", "image")
async def test_the_example_runs_in_a_real_sandbox(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    async with (
        open_artifacts(ArtifactSettings(directory=str(tmp_path / "store"))) as artifacts,
        real_daemon() as subject,
    ):
        environment = subject.environment
        assert isinstance(environment, RemoteExecutionEnvironment)
        wanted = example.specification(subject.image_digest, f"agent-{secrets.token_hex(8)}")
        check(await example.example(environment, remote_workspaces(environment), wanted, artifacts))
