"""The shipped conformance suite of the egress boundary, in an environment of the installed daemon.

The same probes that `sbxctl egress test` runs; that a wrong proxy fails each of them is in
tests/egress/test_conformance.py.
"""

import json
import subprocess
from collections.abc import Iterator

import pytest

from sbxctl.egress_test import PROBES, Row, row, target_of
from sbxctl.exits import Exit
from sbxd.probes.egress_probe import EgressProbe, Yes, program_of
from sbxd.probes.probe import Verdict
from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.redteam.egress import Networked, allowlist, configured, networked
from tests.redteam.egress_operator import documents, sbxctl
from tests.redteam.live import admin

pytestmark = [
    pytest.mark.needs("daemon", "root"),
    pytest.mark.gate("gate.sandbox.egress_allowlisted"),
]
HOST = "files.lab-allowed.com"


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built:
        yield built


@pytest.fixture(scope="module")
def with_destinations(internet: Internet) -> Iterator[None]:
    with configured(allowlist(more="tunnels_max = 24\n")):
        yield


async def run(one: Networked, each: EgressProbe) -> Row:
    async with admin() as client:
        target = target_of(await client.egress_show())
    source = program_of(each, target)
    network = each.yes is Yes.BOTH
    argv = ("python3", "-c", source)
    return row(each, await one.run(*argv, network_enabled=network, timeout_seconds=110))


@pytest.mark.usefixtures("with_destinations")
@pytest.mark.parametrize("each", PROBES, ids=[each.probe.id for each in PROBES])
async def test_a_probe_finds_what_it_is_to_find(each: EgressProbe) -> None:
    async with networked() as one:
        found = await run(one, each)
    assert [attempt for attempt in found.attempts if not attempt.is_right] == []
    assert found.verdict is Verdict.OK, found.note


# --- test ---------------------------------------------------------------------------------------


@pytest.mark.also("uml")
@pytest.mark.usefixtures("with_destinations")
def test_the_operators_run_of_the_suite_finds_the_same_and_leaves_nothing() -> None:
    # What the tests before this one were refused is in the journal by now.
    subprocess.run(["journalctl", "--sync"], check=True, timeout=60)
    before = documents("learn")
    ran = sbxctl("test", "--json")
    rows = json.loads(ran.stdout)["rows"]
    wrong = [each for each in rows if each["verdict"] != "ok"]
    assert (ran.returncode, wrong) == (Exit.OK, []), ran.stderr
    assert [each["probe"] for each in rows] == [each.probe.id for each in PROBES]
    listing = subprocess.run(["sbxctl", "ls", "--json"], capture_output=True, check=True)
    assert json.loads(listing.stdout) == []
    # What the suite was refused is not what a run would have needed.
    subprocess.run(["journalctl", "--sync"], check=True, timeout=60)
    assert documents("learn") == before


@pytest.mark.usefixtures("with_destinations")
def test_a_destination_that_is_not_reached_proves_nothing(internet: Internet) -> None:
    """The negative control: the suite says so, and where."""
    ran = sbxctl("test", "--destination", "private.lab-allowed.com:443")
    assert ran.returncode == Exit.EGRESS_NOT_CONFORMING
    assert "INCONCLUSIVE" in ran.stdout
    assert "403 address_refused" in ran.stdout


# --- check and show -----------------------------------------------------------------------------


@pytest.mark.usefixtures("with_destinations")
@pytest.mark.parametrize(
    ("destination", "reason", "address"),
    [
        (f"{HOST}:443", None, None),
        (f"{HOST}:8443", "port_not_listed", None),
        ("other.lab-public.com:443", "host_not_listed", None),
        ("private.lab-allowed.com:443", "address_refused", lab.PRIVATE),
        ("metadata.lab-allowed.com:443", "address_refused", lab.METADATA),
        ("on-link.lab-allowed.com:443", "host_network", lab.LINK_PEER),
        ("nowhere.lab-allowed.com:443", "resolution_failed", None),
        (f"{lab.ALLOWED}:443", "host_malformed", None),
    ],
)
async def test_a_check_says_what_the_proxy_would_and_names_the_address(
    internet: Internet, destination: str, reason: str | None, address: str | None
) -> None:
    before = internet.connections()
    ran = sbxctl("check", destination, "--json")
    found = json.loads(ran.stdout)
    assert ran.returncode == (Exit.OK if reason is None else Exit.EGRESS_REFUSED)
    assert (found["allowed"], found["reason"]) == (reason is None, reason)
    assert found["address"] == address
    assert internet.connections() == before, "it was dialled"
    async with networked() as one:
        (answered,) = await one.statuses(destination)
    if reason is None:
        assert (answered[0], found["addresses"]) == (200, [lab.ALLOWED])
    else:
        # The proxy reads an address as no request at all.
        assert (answered[0] == 400) if reason == "host_malformed" else (reason in answered[1])


@pytest.mark.usefixtures("with_destinations")
def test_what_is_shown_is_what_is_configured_and_what_is_the_hosts() -> None:
    shown = documents("show")
    assert [each["host"] for each in shown["policy"]["destinations"]] == [HOST, "*.lab-allowed.com"]
    assert shown["caps"]["tunnels_max"] == 24
    assert "127.0.0.0/8" in shown["host_network"]
    assert f"{HOST}:443,7777" in sbxctl("show").stdout
