"""The fixtures of the contract suite: one subject per adapter, and the clock that it runs on."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from trio.testing import MockClock

from sbxd.client.local_workspace import open_local_workspace
from sbxd.port.workspace import StreamingWorkspace
from tests.contract.subjects import (
    LIMITS,
    Subject,
    fake_behind_a_daemon,
    fake_in_process,
    real_daemon,
)

SUBJECTS = {
    "fake": fake_in_process,
    "fake-daemon": fake_behind_a_daemon,
    "daemon": real_daemon,
}


LOCAL = "local-directory"

REAL = (pytest.mark.needs("daemon"), pytest.mark.also("gvisor", "uml"))


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every adapter; the plain directory runs no commands, so only for tests of `files`."""
    if "kind" in metafunc.fixturenames:
        local = [LOCAL] if "files" in metafunc.fixturenames else []
        kinds = ["fake", "fake-daemon", pytest.param("daemon", marks=REAL), *local]
        metafunc.parametrize("kind", kinds, indirect=True)


@pytest.fixture
def clock(kind: str) -> MockClock | None:
    """Virtual time for what executes nothing; the real clock for a real mechanism."""
    return None if kind in ("daemon", LOCAL) else MockClock(autojump_threshold=0)


@pytest.fixture
async def subject(kind: str) -> AsyncIterator[Subject]:
    async with SUBJECTS[kind]() as made:
        yield made


@pytest.fixture
async def files(kind: str, tmp_path: Path) -> AsyncIterator[StreamingWorkspace]:
    """An empty workspace of an adapter, a plain directory of this host among them."""
    if kind == LOCAL:
        async with open_local_workspace(
            tmp_path, file_bytes_max=LIMITS.workspace_bytes
        ) as workspace:
            yield workspace
    else:
        async with SUBJECTS[kind]() as made, made.provisioned() as handle:
            yield made.workspace(handle)
