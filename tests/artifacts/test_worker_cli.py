"""`sbxd-worker artifacts`, as a process: what it does, prints and exits with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.artifacts.world import ALICE, Folder, exported, run
from tests.gates.source import REPOSITORY


def worker(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "sbxd.worker_cli", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def config(any_folder: Folder) -> Path:
    """A store with one artifact that has long expired and one that has not."""
    path = any_folder.path.parent / "worker.toml"
    path.write_text(
        f'[artifacts]\ndirectory = "{any_folder.path}"\nmetadata = "{any_folder.metadata}"\n'
        "[artifacts.retention]\ndefault_seconds = 86400\n"
    )

    async def main() -> None:
        async with any_folder.opened() as artifacts:
            await exported(artifacts, b"expired")
            any_folder.clock.time = any_folder.clock.time.replace(year=2100)
            await exported(artifacts, b"kept")

    run("asyncio", main)
    return path


def test_a_sweep_removes_what_has_expired_and_says_so(config: Path, any_folder: Folder) -> None:
    done = worker("--config", config, "artifacts", "sweep", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["by_retention"], report["removed_bytes"], report["failed"]) == (1, 7, 0)
    assert len(any_folder.objects()) == 1
    again = worker("--config", config, "artifacts", "sweep")
    assert again.stdout.startswith("Removed 0 expired")


def test_the_metrics_are_printed(config: Path) -> None:
    done = worker("--config", config, "artifacts", "metrics")
    assert (done.returncode, done.stderr) == (0, "")
    assert f'sbxd_artifact_stored_bytes{{tenant="{ALICE}"}} 11\n' in done.stdout
    assert done.stdout.endswith("# EOF\n")


def test_a_sweep_that_could_not_remove_all_says_so_by_its_exit_code(
    config: Path, any_folder: Folder
) -> None:
    for path in any_folder.objects():
        path.unlink()
        path.mkdir()
    done = worker("--config", config, "artifacts", "sweep")
    assert done.returncode == 1
    assert "1 could not be removed" in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("", "[artifacts]"),
        ("[artifacts", "worker.toml"),
        ('[artifacts]\ndirectory = "/x"\nretenton = 1\n', "retenton"),
        ('[artifacts]\ndirectory = "/x"\nmetadata = "mysql://x"\n', "postgresql"),
        ('[artifacts]\ndirectory = "/x"\n[artifacts.retention]\ndefault_seconds = 0\n', ">= 1"),
    ],
)
def test_a_wrong_configuration_is_a_usage_error(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "worker.toml"
    if text is not None:
        path.write_text(text)
    done = worker("--config", path, "artifacts", "sweep")
    assert done.returncode == 245
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_that_cannot_be_opened_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(0o777)
    path = tmp_path / "worker.toml"
    path.write_text(f'[artifacts]\ndirectory = "{store}"\n')
    done = worker("--config", path, "artifacts", "sweep")
    assert (done.returncode, done.stdout) == (241, "")
    assert "others may write" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(store.iterdir()) == []


def test_help_needs_no_configuration() -> None:
    for arguments in (["--help"], ["--config", "/none", "artifacts", "sweep", "--help"]):
        done = worker(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
