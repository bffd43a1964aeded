"""The guard on a network: sockets, TLS and /etc/hosts, in a network namespace whose only addresses
are a public one of each family and loopback."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.service.guard_scenes import INSIDE, PUBLIC, PUBLIC_6

pytestmark = pytest.mark.needs("root")
SOURCE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("guard")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
            *("-subj", "/CN=a.example.com", "-addext", "subjectAltName=DNS:a.example.com"),
        ],
        check=True,
        capture_output=True,
    )
    done = subprocess.run(
        [
            *("unshare", "--net", "--mount"),
            *(sys.executable, "-m", "tests.service.guard_scenes", str(folder)),
        ],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(params=["asyncio", "trio", "blocking"])
def scenes(request: pytest.FixtureRequest, found: dict[str, Any]) -> dict[str, str]:
    answer: dict[str, str] = found[request.param]
    return answer


def test_what_was_judged_is_the_peer(scenes: dict[str, str]) -> None:
    assert scenes["connect a.example.com"] == PUBLIC
    assert scenes["connect six.example.org"] == PUBLIC_6
    assert scenes["connect mapped.example.org"] == PUBLIC
    assert scenes["connect inside.example.org"] == "denied: address_refused"


def test_the_certificate_is_verified_for_the_name_and_the_host_header_is_the_name(
    scenes: dict[str, str],
) -> None:
    assert scenes["get https://a.example.com/"] == f"{PUBLIC} a.example.com"
    # The same server and certificate under another name.
    assert scenes["get https://b.example.org/"] == "ConnectError"
    assert scenes["get http://b.example.org/"] == f"{PUBLIC} b.example.org"


def test_a_redirect_and_a_mixed_answer_lead_nowhere(scenes: dict[str, str]) -> None:
    assert scenes["get http://a.example.com/away"] == "denied: address_refused"
    assert scenes["get http://mixed.example.org/"] == "denied: address_refused"


@pytest.mark.case("EGR-12")
def test_what_etc_hosts_says_is_judged_like_any_answer(scenes: dict[str, str]) -> None:
    assert scenes["system a.example.com"] == "denied: address_refused"
    assert scenes["system b.example.org"] == PUBLIC
    # Written there without its last dot, it is another name than the one that is asked for.
    assert scenes["system c.example.org"] == "denied: resolution_failed"


@pytest.mark.case("EGR-07")
def test_no_scene_reached_the_server_inside_though_it_answers(found: dict[str, Any]) -> None:
    assert {found[way]["inside"] for way in ("asyncio", "trio", "blocking")} == {"0"}
    assert found["control"] == f"{INSIDE} {INSIDE}"
    assert found["inside"] == 1
