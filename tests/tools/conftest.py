"""Subjects: both kinds of event loop, and a store's folder."""

from pathlib import Path

import pytest

from tests.artifacts.world import Folder


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")
