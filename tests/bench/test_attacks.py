"""What a run of attacks is judged by, and that it runs."""

import msgspec
import pytest
import trio

from tests.bench.attacker import ATTACKS
from tests.bench.attacks import NOTHING, OPERATIONS, Attacks, Row, attacks, render
from tests.bench.daemon import daemon_here
from tests.bench.samples import summarise

ROW = Row(
    attack=NOTHING,
    seconds=1.0,
    operations={name: summarise([1.0, 2.0], failures=0) for name in OPERATIONS},
    failures=(),
    memory=(),
)


def found(**changes: object) -> Attacks:
    return Attacks(rows=(ROW, msgspec.structs.replace(ROW, attack="refusals", **changes)))


def test_a_victim_whose_requests_all_finish_is_sound() -> None:
    assert found().sound
    assert "FAILED" not in "\n".join(render(found()))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kind_of_request_that_never_finishes_is_not(name: str) -> None:
    starved = found(operations={**ROW.operations, name: None})
    assert not starved.sound
    assert f"{name}: none was finished" in "\n".join(render(starved))


def test_a_request_that_fails_is_not_and_is_shown() -> None:
    failed = found(failures=("execute: UNREACHABLE: the connection is lost",))
    assert not failed.sound
    assert "FAILED: execute: UNREACHABLE" in "\n".join(render(failed))


@pytest.mark.needs("daemon", "systemd", "lane-container")
def test_a_victim_is_served_while_an_attacker_is_refused_again_and_again() -> None:
    async def run() -> Attacks:
        async with daemon_here(None) as daemon:
            return await attacks(daemon, 2.0, ["refusals"])

    assert "refusals" in ATTACKS
    result = trio.run(run)
    assert [row.attack for row in result.rows] == [NOTHING, "refusals"]
    assert result.sound, "\n".join(render(result))
    assert {each.name for each in result.rows[1].memory} == {"daemon", "launcher"}
