"""The clients that agents' code uses reach a listed destination, as they are, by the variables.

Each runs unconfigured but for the lab's CA; the same client says in its own words that it was
refused when the destination is not listed.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.lab.internet_content import BIG_BYTES
from tests.redteam.egress import allowlist, configured, networked
from tests.workloads.images import LIMITS, imported

pytestmark = pytest.mark.needs("daemon", "image-workloads")


FRESH = "rm -rf lib project node_modules package*.json .npm .cache; "


@dataclass(frozen=True)
class Client:
    """script: what runs, HOST standing for the host. says: its whole output. host: the listed one.
    complains: part of what it says of a host that is not listed."""

    name: str
    host: str
    script: str
    says: str
    complains: str


CLIENTS = (
    Client(
        "curl",
        "files.lab-allowed.com",
        "curl -sS --cacert ca.pem https://HOST/files/greeting.txt",
        "hello from the other side\n",
        "403",
    ),
    Client(
        "pip",
        "pypi.lab-allowed.com",
        "python3 -m pip install --cert ca.pem --index-url https://HOST/simple --retries 1 "
        "--no-cache-dir --target lib labgreeting >&2 && "
        "PYTHONPATH=lib python3 -c 'import labgreeting; print(labgreeting.GREETING)'",
        "installed\n",
        "403",
    ),
    Client(
        "git",
        "git.lab-allowed.com",
        "git -c http.sslCAInfo=$PWD/ca.pem clone -q https://HOST/project.git && cat project/README",
        "cloned\n",
        "403",
    ),
    Client(
        "npm",
        "npm.lab-allowed.com",
        "npm install --silent --no-audit --no-fund --fetch-retries 0 --cafile ca.pem "
        "--loglevel error --registry https://HOST/npm/ labgreeting >&2 && "
        "node -e 'console.log(require(\"labgreeting\"))'",
        "installed\n",
        "403",
    ),
    Client(
        "requests",
        "files.lab-allowed.com",
        "python3 -c 'import requests; "
        'print(requests.get("https://HOST/files/greeting.txt", verify="ca.pem").text, end="")\'',
        "hello from the other side\n",
        "403",
    ),
    Client(
        "httpx",
        "files.lab-allowed.com",
        'python3 -c \'import httpx, ssl; context = ssl.create_default_context(cafile="ca.pem"); '
        'print(httpx.get("https://HOST/files/greeting.txt", verify=context).text, end="")\'',
        "hello from the other side\n",
        "403",
    ),
)


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built, configured(allowlist()):
        yield built


@pytest.fixture(scope="module")
def image(internet: Internet) -> Iterator[str]:
    """The larger image, in the store for as long as this module's tests run."""
    with imported("workloads") as digest:
        yield digest


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
async def test_a_client_works_and_says_what_was_refused(
    internet: Internet, image: str, client: Client
) -> None:
    async with networked(image=image, limits=LIMITS) as one:
        await one.workspace.write("ca.pem", internet.ca)
        script = client.script.replace("HOST", client.host)
        result = await one.run("sh", "-c", script, timeout_seconds=240, network_enabled=True)
        assert result.stdout.decode() == client.says, result
        assert ("EgressAllowed", f"{client.host}:443", None) in one.decisions()
        other = FRESH + client.script.replace("HOST", "other.lab-public.com")
        refused = await one.run("sh", "-c", other, timeout_seconds=240, network_enabled=True)
        assert refused.exit_code != 0
        assert client.complains in (refused.stdout + refused.stderr).decode(), refused
        assert ("EgressRefused", "other.lab-public.com:443", "host_not_listed") in one.decisions()
        without = await one.run("sh", "-c", FRESH + script)
        assert without.exit_code != 0, "the control: without the network the script fails"


async def test_a_large_file_comes_whole(internet: Internet, image: str) -> None:
    async with networked(image=image, limits=LIMITS) as one:
        await one.workspace.write("ca.pem", internet.ca)
        url = "https://files.lab-allowed.com/files/big.bin"
        script = f"curl -sS --cacert ca.pem {url} | sha256sum"
        result = await one.run("sh", "-c", script, timeout_seconds=240, network_enabled=True)
        raw = (internet.content / "files" / "big.bin").read_bytes()
        assert len(raw) == BIG_BYTES
        assert result.stdout.decode().split()[0] == hashlib.sha256(raw).hexdigest()
        closed = [each for each in one.egress() if each["SBX_EVENT"] == "EgressTunnelClosed"]
        assert int(closed[0]["SBX_DOWN_BYTES"]) > BIG_BYTES
