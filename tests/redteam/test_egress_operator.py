"""What an operator and a worker see of the network: `run --network`, the grant, the posture."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.client.remote import connect
from sbxd.port.egress import DENY_ALL, EgressDestination, EgressMode, EgressPolicy
from sbxd.port.errors import ExecutionRejected, RejectedCode
from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.lab.internet_content import GREETING
from tests.redteam.egress import CLIENT, allowlist, configured, networked
from tests.redteam.live import WORKER_SOCKET, admin
from tests.redteam.test_egress_allowlisted import FETCH

pytestmark = pytest.mark.needs("daemon", "root")


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built:
        yield built


@pytest.fixture(scope="module")
def with_destinations(internet: Internet) -> Iterator[None]:
    with configured(allowlist()):
        yield


def sbxctl(*arguments: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        ["sbxctl", *arguments], capture_output=True, timeout=180, check=False, cwd="/"
    )


def fetch(ca: Path, *options: str) -> "subprocess.CompletedProcess[bytes]":
    put = ("--put", f"{ca}:ca.pem")
    return sbxctl("run", *put, *options, "--", "python3", "-c", CLIENT + FETCH)


async def test_without_destinations_a_run_with_the_network_is_refused_and_says_what_to_do() -> None:
    ran = sbxctl("run", "--network", "--", "true")
    assert ran.returncode == 240, ran
    assert b"egress.destinations" in ran.stderr
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        assert await remote.network_grant() == DENY_ALL
    async with admin() as client:
        posture = {item.name: item.detail for item in (await client.describe()).posture}
    assert posture["egress"].startswith("mode deny")


@pytest.mark.usefixtures("with_destinations")
async def test_a_run_with_the_network_reaches_what_is_listed_and_one_without_does_not(
    internet: Internet, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(internet.ca)
    assert fetch(ca, "--network").stdout == GREETING
    without = fetch(ca)
    assert without.returncode == 1
    assert b"ConnectionRefusedError" in without.stderr


@pytest.mark.usefixtures("with_destinations")
async def test_the_grant_is_what_a_prompt_can_show_and_admission_takes_and_no_more() -> None:
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        grant = await remote.network_grant()
    assert [each.host for each in grant.destinations] == [
        "files.lab-allowed.com", "*.lab-allowed.com",
    ]  # fmt: skip
    async with networked(grant) as one:
        assert (await one.statuses("pypi.lab-allowed.com:443"))[0][0] == 200
    narrow = EgressPolicy(
        mode=EgressMode.ALLOWLIST,
        destinations=(EgressDestination(host="npm.lab-allowed.com", ports=(443,)),),
    )
    async with networked(narrow) as one:
        answers = await one.statuses("npm.lab-allowed.com:443", "pypi.lab-allowed.com:443")
        assert [status for status, _ in answers] == [200, 403]
    more = EgressPolicy(
        mode=EgressMode.ALLOWLIST,
        destinations=(EgressDestination(host="other.lab-public.com", ports=(443,)),),
    )
    with pytest.raises(ExecutionRejected) as caught:
        async with networked(more):
            pass
    assert caught.value.code is RejectedCode.DESTINATION_NOT_CONFIGURED


@pytest.mark.usefixtures("with_destinations")
async def test_the_posture_names_the_hosts_own_network() -> None:
    async with admin() as client:
        posture = {item.name: item for item in (await client.describe()).posture}
    assert posture["egress"].detail == "mode allowlist, destinations listed: 2"
    assert "127.0.0.0/8" in posture["egress.host_network"].detail
    shown = json.loads(sbxctl("doctor", "--json").stdout)
    assert "egress.host_network" in json.dumps(shown)
