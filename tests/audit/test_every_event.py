"""Every type of event is recorded by something that really happens, and the journal explains it."""

import inspect
import subprocess
from contextlib import suppress

import pytest
import trio

from sbxd.audit.confinement import MissingLayerAccepted
from sbxd.audit.stream_events import AuditRecovered
from sbxd.audit.vocabulary import EVENT_TYPES
from tests.audit.live_records import position, recording
from tests.audit.scenarios import SCENARIOS, Scenario, restored, seen
from tests.redteam import test_production

# What only a lane of another kind can bring about, and the test that does.
ELSEWHERE = {
    MissingLayerAccepted: (
        test_production.test_with_the_operators_written_word_it_starts_and_says_so_every_time
    ),
}


def test_no_type_of_event_is_without_a_scenario() -> None:
    covered = {kind for each in SCENARIOS for kind in each.records}
    assert set(EVENT_TYPES) - covered == set(ELSEWHERE)


@pytest.mark.parametrize("kind", ELSEWHERE, ids=lambda each: each.__name__)
def test_what_is_recorded_elsewhere_is_looked_for_there(kind: type[MissingLayerAccepted]) -> None:
    # Its module's reader of the journal is what the test calls.
    assert kind.__name__ in inspect.getsource(test_production.accepted)
    assert "accepted(" in inspect.getsource(ELSEWHERE[kind])


@pytest.mark.needs("daemon", "root", "lane-container")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
async def test_a_scenario_records_what_it_is_said_to(scenario: Scenario) -> None:
    await restored()
    before = position().sequence
    with recording() as recorded:
        await scenario.run()
        # What is missing after that is named below.
        with suppress(trio.TooSlowError):
            for kind in scenario.records:
                await seen(kind, before)
    assert {kind.__name__ for kind in scenario.records} <= recorded.events
    ids = {kind.__name__: kind.MESSAGE_ID for kind in EVENT_TYPES}
    for each in recorded.records:
        assert each.message_id == ids[each.event]
    numbers = [each.sequence or 0 for each in recorded.records]
    if AuditRecovered.__name__ in recorded.events:
        # What the journal that went away may not have read is there a second time.
        numbers = list(dict.fromkeys(numbers))
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(min(numbers), max(numbers) + 1))


@pytest.mark.needs("daemon", "root", "lane-container")
def test_the_journal_of_an_installed_host_explains_every_type() -> None:
    subprocess.run(["journalctl", "--update-catalog"], check=True, timeout=60)
    listed = subprocess.run(
        ["journalctl", "--list-catalog"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert {kind.MESSAGE_ID for kind in EVENT_TYPES} <= {
        line.split(" ")[0] for line in listed.splitlines()
    }
