"""`sbxctl egress` where nothing is listed, and what it learns from runs that were refused."""

from collections.abc import Iterator

import pytest

from sbxctl.egress_test import PROBES
from sbxctl.exits import Exit
from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.redteam.egress import configured, networked
from tests.redteam.egress_operator import documents, sbxctl
from tests.redteam.live import admin

pytestmark = pytest.mark.needs("daemon", "root")


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built:
        yield built


def test_without_destinations_what_needs_a_proxy_is_not_run_and_is_not_called_a_pass() -> None:
    ran = sbxctl("test")
    assert ran.returncode == Exit.OK, ran
    assert "not run" in ran.stdout
    assert f"2 ok, 0 failed, 0 inconclusive, {len(PROBES) - 2} not run" in ran.stdout


async def test_a_refused_run_teaches_a_list_with_which_it_is_allowed(internet: Internet) -> None:
    asked = [
        "files.lab-allowed.com:443", "pypi.lab-allowed.com:443", "npm.lab-allowed.com:443",
        "private.lab-allowed.com:443", f"{lab.ALLOWED}:443", "files.lab-allowed.com:8443",
    ]  # fmt: skip
    only_private = '[egress]\nmode = "allowlist"\ndestinations = [{ host = %r, ports = [443] }]\n'
    with configured(only_private.replace("%r", '"private.lab-allowed.com"')):
        async with admin() as client:
            policy = (await client.egress_show()).policy
        async with networked(policy) as one:
            statuses = [status for status, _ in await one.statuses(*asked)]
            run_id = one.handle.run_id
            assert len(one.decisions()) == len(asked)  # and the journal has them
        assert 200 not in statuses
        learned = documents("learn", "--run", run_id)
        again = documents("learn", "--run", run_id)
        assert (await _statuses_of(asked[:1]))[0] == 403, "nothing was let through"
    assert again == learned
    assert {each["host"]: each["ports"] for each in learned["suggestions"]} == {
        "files.lab-allowed.com": [443, 8443],
        "pypi.lab-allowed.com": [443],
        "npm.lab-allowed.com": [443],
    }
    (wildcard,) = learned["wildcards"]
    assert wildcard["host"] == "*.lab-allowed.com"
    reasons = {each["reason"] for each in learned["never"]}
    assert reasons == {"address_refused", "malformed"}
    with configured(learned["toml"]):
        assert await _statuses_of(asked[:3]) == [200, 200, 200]


def test_who_may_not_read_the_journal_is_told_so_and_not_that_nothing_was_refused() -> None:
    assert sbxctl("learn", "--json").returncode == Exit.OK, "the control: root may"
    ran = sbxctl("learn", "--json", user=65534)
    assert ran.returncode == Exit.UNAVAILABLE
    assert "systemd-journal" in ran.stderr
    assert ran.stdout == ""


async def _statuses_of(asked: list[str]) -> list[int]:
    async with admin() as client:
        policy = (await client.egress_show()).policy
    async with networked(policy) as one:
        return [status for status, _ in await one.statuses(*asked)]
