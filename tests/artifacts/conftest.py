"""Subjects: both kinds of event loop, both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.artifacts import postgres
from tests.artifacts.world import Folder


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with postgres.server() as uri:
        yield uri


@pytest.fixture
def postgres_uri(postgres_server: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A schema of the test's own."""
    import psycopg

    schema = f"test_{abs(hash(request.node.nodeid)):x}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}".encode())
    yield postgres.with_schema(postgres_server, schema)
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {schema} CASCADE".encode())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A store's folder, with SQLite."""
    return Folder(tmp_path / "store")


@pytest.fixture(params=["sqlite", "postgresql"])
def any_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """A store's folder, with either database."""
    metadata = request.getfixturevalue("postgres_uri") if request.param == "postgresql" else ""
    return Folder(tmp_path / "store", metadata)
