"""The fixtures of the contract suite: one subject per adapter, and the clock that it runs on."""

from collections.abc import AsyncIterator

import pytest
from trio.testing import MockClock

from tests.contract.subjects import Subject, fake_behind_a_daemon, fake_in_process, real_daemon

SUBJECTS = {
    "fake": fake_in_process,
    "fake-daemon": fake_behind_a_daemon,
    "daemon": real_daemon,
}


REAL = (pytest.mark.needs("daemon"), pytest.mark.also("gvisor", "uml"))


@pytest.fixture(params=["fake", "fake-daemon", pytest.param("daemon", marks=REAL)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock(kind: str) -> MockClock | None:
    """Virtual time for what executes nothing; the real clock for a real mechanism."""
    return None if kind == "daemon" else MockClock(autojump_threshold=0)


@pytest.fixture
async def subject(kind: str) -> AsyncIterator[Subject]:
    async with SUBJECTS[kind]() as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """gVisor lets no socket of the host's into the guest: there is no bridge to keep a contract."""
    for item in items:
        if "tests/contract/test_bridge.py" in item.nodeid:
            kept = [mark for mark in item.own_markers if mark.name != "also"]
            if len(kept) < len(item.own_markers):
                item.own_markers = [*kept, pytest.mark.also("uml").mark]
