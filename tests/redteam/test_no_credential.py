"""What a worker and its host hold as credentials reaches no sandbox.

Source: gate.sandbox.no_credential_reaches. The worker is a process of its own whose environment is
full of fake credentials; others lie where a host has them (the service's own, root's files,
another process' environment). The sandbox searches all that it can read for their exact values and
for what looks like a credential. The controls: the same search finds each of them in the worker's
environment, and finds what is planted inside.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sbxd.policy.child_environment import (
    TIER_TWO_CONSTANTS,
    TIER_ZERO_NAMES,
    TIER_ZERO_PREFIXES,
    Tier,
    tier_of,
)
from tests.redteam.credential_worker import NOTE
from tests.redteam.credentials import fake_environment
from tests.redteam.egress import configured
from tests.redteam.live import live
from tests.redteam.scanner import PATTERNS, kinds

pytestmark = [
    pytest.mark.needs("daemon", "root"),
    pytest.mark.gate("gate.sandbox.no_credential_reaches"),
]

CREDENTIAL = Path("/etc/sbxd/service-credential")
SOURCE = Path(__file__).parents[2]
EVERY_TIER_ZERO = (*TIER_ZERO_NAMES, *(f"{prefix}NAME" for prefix in TIER_ZERO_PREFIXES))


@pytest.fixture
def of_the_host(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """Credentials where a host has them; the files and the process go with the test."""
    fakes, token = fake_environment(), secrets.token_hex(16)
    only_root = tmp_path / "credentials"
    only_root.write_text("\n".join(fakes.values()))
    only_root.chmod(0o600)
    readable = Path("/etc") / f"sbxd-test-{token[:8]}"
    readable.write_text(f"world-readable-{token}")
    temporary = Path("/tmp") / f"sbxd-test-{token[:8]}"
    temporary.write_text(f"in-tmp-{token}")
    holder = subprocess.Popen(["sleep", "600"], env={**os.environ, **fakes})
    try:
        yield (
            *fakes.values(),
            f"world-readable-{token}",
            f"in-tmp-{token}",
            CREDENTIAL.read_text().strip(),
        )
    finally:
        holder.kill()
        holder.wait()
        readable.unlink()
        temporary.unlink()


def test_nothing_that_a_worker_or_its_host_holds_is_found_inside(
    of_the_host: tuple[str, ...],
) -> None:
    own, inside = fake_environment(), fake_environment()["GITHUB_TOKEN"]
    values = [*own.values(), *of_the_host]
    assert all(len(value) >= 8 for value in values), "too short to be searched for"
    asked = {"values": [*values, inside], "note": f"here is {inside}", "listed": []}
    found = _worker(own, asked)
    # Of what a tool's command has, nothing is the worker's.
    assert found["environment"] == TIER_TWO_CONSTANTS
    places = found["exact"].pop(str(len(values)))
    assert f"/workspace/{NOTE}" in places, "the control: what is there is found by its value"
    assert found["exact"] == {}
    places = found["looks"].pop("GitHub token")
    assert set(places) == {f"/workspace/{NOTE}"}, "the control: it is found by its look, alone"
    assert found["looks"] == {}
    assert found["files"] > 500, "the search looked at too little"
    assert found["bytes"] > 10_000_000


def test_of_a_full_environment_a_tools_command_has_what_the_operator_listed_and_no_more() -> None:
    """The daemon's list has the last word too: it is what the lane configures for this test."""
    own = {**fake_environment(), **dict.fromkeys(EVERY_TIER_ZERO, "a-value-of-tier-zero")}
    with configured('[process_environment]\noperator_names = ["TZ"]\n'):
        asked = {"values": ["a-value-of-tier-zero"], "note": "", "listed": ["TZ"]}
        found = _worker({**own, "TZ": "Antarctica/Troll", "LC_ALL": "C"}, asked)
    # The control: what is listed is there, with the worker's value.
    assert found["environment"] == {**TIER_TWO_CONSTANTS, "TZ": "Antarctica/Troll"}
    assert found["exact"] == {}


def test_a_tier_zero_name_in_the_list_ends_the_worker_before_it_provisions() -> None:
    finished = _run({}, {"values": [], "note": "", "listed": ["AWS_SECRET_ACCESS_KEY"]})
    assert finished.returncode != 0
    assert "OperatorNamesRefused" in finished.stderr
    assert finished.stdout == ""


def test_the_search_finds_every_credential_in_the_workers_environment() -> None:
    """The control: what was not found inside is what this finds outside, one by one."""
    own = fake_environment()
    dumped = _worker_environment(own)
    seen = set()
    for name, value in own.items():
        line = f"{name}={value}".encode()
        assert line in dumped, name
        found = kinds(line)
        assert found, f"{name} is not seen for what it is"
        seen |= found
    assert seen >= set(PATTERNS), "a pattern that nothing tries"
    assert kinds(dumped) >= set(PATTERNS)


def test_what_is_no_credential_does_not_look_like_one() -> None:
    for line in (
        b"PATH=/usr/local/sbin:/usr/bin:/sbin:/bin",
        b"TOKEN=xxxxxxxxxxxxxxxxxxxxxxxx",
        b"https://example.org:8080/a@b",
        b"-----BEGIN CERTIFICATE-----",
        b"the key=value pairs",
    ):
        assert kinds(line) == set(), line


def test_every_fake_is_of_tier_zero() -> None:
    assert {name: tier_of(name) for name in fake_environment()} == dict.fromkeys(
        fake_environment(), Tier.NEVER
    )


async def test_the_hosts_own_names_and_users_are_not_shown() -> None:
    """Its hostname, its machine id and its boot id."""
    hostname, machine_id = os.uname().nodename, _machine_id()
    assert hostname
    assert len(machine_id) == 32, "the control: there is something to hide"
    async with live() as environment:
        found = await environment.look(
            """
answer([os.uname().nodename, os.path.exists("/etc/machine-id") and open("/etc/machine-id").read(),
        attempt(open, "/proc/sys/kernel/random/boot_id"), open("/etc/hostname").read()
        if os.path.exists("/etc/hostname") else ""])
"""
        )
    assert hostname not in found[0]
    assert machine_id not in str(found[1])
    assert found[2] in ("ENOENT", "EACCES")
    assert hostname not in found[3]


def _machine_id() -> str:
    return Path("/etc/machine-id").read_text().strip()


def _worker(environment: dict[str, str], request: dict[str, Any]) -> Any:
    """Run the worker with this besides its environment; what its sandbox found."""
    finished = _run(environment, request)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def _run(
    environment: dict[str, str], request: dict[str, Any]
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.redteam.credential_worker"],
        env={**os.environ, **environment},
        cwd=SOURCE,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )


def _worker_environment(environment: dict[str, str]) -> bytes:
    """What a process that is started as the worker is has as its environment, by the kernel."""
    return subprocess.run(
        ["cat", "/proc/self/environ"],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
    ).stdout
