"""Whole programs run in an environment, on both mechanisms."""

from collections.abc import Iterator

import pytest

from sbxd.client.remote import connect
from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.redteam.egress import allowlist, configured, networked
from tests.redteam.live import WORKER_SOCKET, Live, specification
from tests.workloads.images import LIMITS, imported
from tests.workloads.programs import CLIENTS, PROGRAMS, Program

pytestmark = [pytest.mark.needs("daemon", "image-programs"), pytest.mark.also("gvisor")]

HOST = "files.lab-allowed.com"


def ids(programs: tuple[Program, ...]) -> list[str]:
    return [each.name.replace(", ", "-") for each in programs]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    with imported("programs") as digest:
        yield digest


@pytest.fixture(scope="module")
def internet(image: str) -> Iterator[Internet]:
    with lab.internet() as built, configured(allowlist()):
        yield built


@pytest.mark.parametrize("program", PROGRAMS, ids=ids(PROGRAMS))
async def test_a_program_runs(image: str, program: Program) -> None:
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        handle = await remote.provision(specification(image, LIMITS))
        try:
            result = await Live(remote, handle).run("sh", "-c", program.script, timeout_seconds=240)
        finally:
            await remote.destroy(handle)
    assert (result.stdout.decode(), result.exit_code) == (program.says, 0), result


@pytest.mark.parametrize("client", CLIENTS, ids=ids(CLIENTS))
async def test_a_client_finds_the_proxy(internet: Internet, image: str, client: Program) -> None:
    script = client.script.replace("HOST", HOST)
    async with networked(image=image, limits=LIMITS) as one:
        await one.workspace.write("ca.pem", internet.ca)
        result = await one.run("sh", "-c", script, timeout_seconds=240, network_enabled=True)
        assert result.stdout.decode() == client.says, result
        assert ("EgressAllowed", f"{HOST}:443", None) in one.decisions()
        without = await one.run("sh", "-c", script, timeout_seconds=240)
        assert without.stdout.decode() != client.says, "the control: there is no other way out"
