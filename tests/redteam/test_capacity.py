"""More than this host may promise, and a start that takes too long: typed, with what to do.

Source: DESIGN section 4, decision 0115. The rules over a double are in
`tests/lifecycle/test_overload.py`.
"""

import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from sbxd.client.remote import connect
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    UnavailableCode,
)
from tests.redteam import operator
from tests.redteam.configuration import current
from tests.redteam.live import LIMITS, WORKER_SOCKET, default_image, live, specification

pytestmark = pytest.mark.needs("daemon", "root", "loop-volumes")
# Far below what the watchdog gives a launcher that has just said that it lives or is about to, and
# enough for the control on a busy machine.
START_SECONDS = 6


@pytest.fixture(scope="module", autouse=True)
def small_host() -> Iterator[None]:
    """A host that may promise the memory of two environments, and prepares none ahead."""
    own = current()
    slots = next(line for line in own.splitlines() if line.startswith("slots = "))
    keys = f"memory_committed_max_bytes = {2 * LIMITS.memory_bytes}\n"
    text = own.replace("[limits]\n", f"[limits]\n{keys}").replace(slots, "slots = 0")
    with operator.configured(text):
        assert operator.start() == 0, operator.said()
        yield


async def test_memory_beyond_what_may_be_promised_is_refused_with_a_time_and_given_when_free() -> (
    None
):
    image = await default_image()
    async with live() as first:
        async with live(), connect(WORKER_SOCKET, client_name="tests") as remote:
            with pytest.raises(ExecutionUnavailable) as refused:
                await remote.provision(specification(image))
        assert refused.value.code is UnavailableCode.CAPACITY
        assert refused.value.retry_after_seconds is not None
        assert 1 <= refused.value.retry_after_seconds <= 30
        assert "bytes of memory are promised" in refused.value.detail
        async with live() as again:  # waits for the end of the one that is gone
            assert (await again.run("true")).exit_code == 0
        assert (await first.run("true")).exit_code == 0


async def test_one_that_wants_more_than_all_may_have_is_rejected_for_good() -> None:
    most = msgspec.structs.replace(LIMITS, memory_bytes=2 * LIMITS.memory_bytes + 1)
    with pytest.raises(ExecutionRejected) as refused:
        async with live(most):
            raise AssertionError("it was provisioned")
    assert refused.value.code is RejectedCode.LIMIT_ABOVE_CEILING
    assert refused.value.field == "limits.memory_bytes"


async def test_a_start_beyond_its_budget_says_what_was_slow() -> None:
    own = current()
    keys = f"[limits]\nstart_budget_seconds = {START_SECONDS}\n"
    with operator.configured(own.replace("[limits]\n", keys)):
        assert operator.start() == 0
        image = await default_image()
        async with connect(WORKER_SOCKET, client_name="tests") as remote:
            _signal_launcher("STOP")
            try:
                with pytest.raises(ExecutionUnavailable) as late:
                    await remote.provision(specification(image))
            finally:
                _signal_launcher("CONT")
    assert late.value.code is UnavailableCode.START_BUDGET_EXCEEDED
    assert f"within {START_SECONDS} s: building the environment took " in late.value.detail
    assert "and was not over" in late.value.detail
    async with live() as control:
        assert (await control.run("true")).exit_code == 0, "a launcher that runs builds in time"


def _signal_launcher(name: str) -> None:
    subprocess.run(
        ["systemctl", "kill", "--kill-whom=main", f"--signal={name}", "sbxd-launcher.service"],
        check=True,
        timeout=60,
    )
