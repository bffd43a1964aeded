"""Percentiles are values that were measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.samples import percentile, summarise

values = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=300)


@pytest.mark.parametrize(
    ("per_cent", "expected"), [(1, 1.0), (50, 50.0), (95, 95.0), (99, 99.0), (100, 100.0)]
)
def test_percentile_of_one_to_a_hundred_is_its_rank(per_cent: float, expected: float) -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], per_cent) == expected


def test_p99_of_few_values_is_the_worst() -> None:
    assert percentile([3.0, 9.0, 1.0], 99) == 9.0


@given(values, st.floats(min_value=0.1, max_value=100))
def test_at_least_the_asked_share_is_at_most_the_percentile(
    measured: list[float], per_cent: float
) -> None:
    found = percentile(measured, per_cent)
    assert found in measured
    at_most = sum(value <= found for value in measured)
    assert at_most >= per_cent / 100 * len(measured) - 1e-9


def test_a_series_without_values_has_no_summary() -> None:
    assert summarise([], failures=3) is None


def test_a_summary_keeps_the_order_of_measurement() -> None:
    summary = summarise([2.0, 1.0, 3.0], failures=1)
    assert summary is not None
    assert summary.values_ms == (2.0, 1.0, 3.0)
    assert (summary.minimum, summary.p50, summary.n, summary.failures) == (1.0, 2.0, 3, 1)
