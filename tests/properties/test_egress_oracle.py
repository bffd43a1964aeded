"""`evaluate` and an independently written judge agree (tests/bench/oracle.py: on a million)."""

import random
from collections import Counter
from itertools import islice

import pytest

from sbxd.policy import addresses
from sbxd.policy.egress import EgressRefusal
from tests.bench.oracle import compare
from tests.properties.egress_oracle import Tuple, questions

TUPLES = 10_000
# Made by a resolver or a kernel that fails, or by another rule: not by a tuple.
NOT_GENERATED = {
    EgressRefusal.RESOLUTION_FAILED,
    EgressRefusal.RESOLUTION_TIMED_OUT,
    EgressRefusal.TOO_MANY_ADDRESSES,
    EgressRefusal.HOST_NETWORK_UNKNOWN,
    EgressRefusal.PAGE_NOT_PUBLIC_HTTPS,
    EgressRefusal.UNSUBSCRIBE_NOT_PUBLIC_HTTPS,
}


def drawn(seed: int) -> list[Tuple]:
    return list(islice(questions(random.Random(seed)), TUPLES))


@pytest.mark.case("EGR-03", "EGR-08", "EGR-09")
def test_both_judges_agree_and_every_outcome_occurs() -> None:
    found = compare(drawn(1))
    assert found.disagreements == []
    assert found.lookups_wrong == []
    expected = {str(reason) for reason in set(EgressRefusal) - NOT_GENERATED} | {"allowed"}
    assert expected == {outcome for outcome, count in found.outcomes.items() if count >= 5}
    assert found.outcomes.total() == TUPLES


@pytest.mark.parametrize("removed", ["private", "link-local", "IPv4-translated", "documentation"])
def test_control_a_table_without_a_row_is_noticed(
    removed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in ("_IPV4", "_IPV6"):
        rows = getattr(addresses, table)
        monkeypatch.setattr(
            addresses,
            table,
            tuple(row for row in rows if row.name not in (removed, "not allocated")),
        )
    assert compare(drawn(2)).disagreements


def test_control_the_generator_is_the_same_for_the_same_seed() -> None:
    assert Counter(each.host for each in drawn(3)) == Counter(each.host for each in drawn(3))
