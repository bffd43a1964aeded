"""Instruments count what they are told, in a bounded number of series; texts are what readers of
both formats accept."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.metrics.exposition import number, render
from sbxd.metrics.families import OTHERS, Counter, Family, Histogram, Kind, Sample, Unit, gauge
from sbxd.wire.observing import MetricsForm


def test_a_counter_begins_at_0_and_grows() -> None:
    counter = Counter("sbxd_x", "X.")
    assert [sample.value for sample in counter.family().samples] == [0]
    counter.add()
    counter.add(by=2.5)
    assert counter.total == counter.value() == 3.5


def test_declared_series_exist_before_their_first_increment() -> None:
    counter = Counter("sbxd_x", "X.", "reason").declare(("a",), ("b",))
    counter.add("b")
    assert {s.labels[0].value: s.value for s in counter.family().samples} == {"a": 0, "b": 1}


@given(st.lists(st.text(max_size=6), max_size=200), st.integers(1, 8))
def test_no_values_of_labels_make_more_series_than_the_bound_and_nothing_is_lost(
    values: list[str], most: int
) -> None:
    counter = Counter("sbxd_x", "X.", "word", series_max=most)
    for each in values:
        counter.add(each)
    samples = counter.family().samples
    assert len(samples) <= most + 1  # and the others
    assert sum(sample.value for sample in samples) == len(values)


def test_what_is_beyond_the_bound_is_counted_together() -> None:
    counter = Counter("sbxd_x", "X.", "a", "b", series_max=1)
    counter.add("1", "1")
    counter.add("2", "2")
    counter.add("3", "3")
    assert counter.value(OTHERS, OTHERS) == 2


@given(
    st.lists(st.floats(0, 100, allow_nan=False), max_size=100),
    st.floats(0.01, 1, allow_nan=False),
)
def test_a_histograms_buckets_are_cumulative_and_its_quantiles_upper_bounds(
    values: list[float], share: float
) -> None:
    histogram = Histogram("sbxd_x_seconds", "X.", bounds=(0.1, 1.0, 10.0))
    for each in values:
        histogram.observe(each)
    (distribution,) = histogram.family().distributions
    for bucket in distribution.buckets:
        assert bucket.count == sum(1 for each in values if each <= bucket.upper)
    assert distribution.count == len(values)
    assert distribution.sum == pytest.approx(sum(values))
    found = histogram.quantile(share)
    if not values:
        assert found is None
    else:
        assert found is not None
        below = sum(1 for each in values if each <= found)
        assert below >= share * len(values)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Family(name="x", kind=Kind.GAUGE, help=""),
        lambda: Family(name="sbxd_x_total", kind=Kind.COUNTER, help=""),
        lambda: Family(name="sbxd_x", kind=Kind.GAUGE, help="", unit=Unit.SECONDS),
        lambda: Histogram("sbxd_x_seconds", "", bounds=(1.0, 0.5)),
        lambda: Histogram("sbxd_x_seconds", "", bounds=(1.0, math.inf)),
        lambda: Counter("sbxd_x", "", "Not A Label"),
    ],
)
def test_names_units_and_bounds_that_no_reader_takes_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"sbxd_x|'x'"):
        make()


# --- texts ----------------------------------------------------------------------------------------

COUNTED = Counter("sbxd_denials", 'With "quotes" and a \\.', "tenant").declare(('a"b\\c\nd',))
TIMED = Histogram("sbxd_wait_seconds", "Waits.", "mechanism", bounds=(0.5, 1.0))
TIMED.observe(0.7, "gvisor")
TIMED.observe(9, "gvisor")
FREE = gauge("sbxd_free_bytes", "Free.", (1.5, ()), unit=Unit.BYTES)
FAMILIES = (COUNTED.family(), TIMED.family(), FREE)


def test_openmetrics_as_its_standard_writes_it() -> None:
    assert (
        render(FAMILIES, MetricsForm.OPENMETRICS)
        == r"""# TYPE sbxd_denials counter
# HELP sbxd_denials With \"quotes\" and a \\.
sbxd_denials_total{tenant="a\"b\\c\nd"} 0
# TYPE sbxd_wait_seconds histogram
# UNIT sbxd_wait_seconds seconds
# HELP sbxd_wait_seconds Waits.
sbxd_wait_seconds_bucket{mechanism="gvisor",le="0.5"} 0
sbxd_wait_seconds_bucket{mechanism="gvisor",le="1.0"} 1
sbxd_wait_seconds_bucket{mechanism="gvisor",le="+Inf"} 2
sbxd_wait_seconds_count{mechanism="gvisor"} 2
sbxd_wait_seconds_sum{mechanism="gvisor"} 9.7
# TYPE sbxd_free_bytes gauge
# UNIT sbxd_free_bytes bytes
# HELP sbxd_free_bytes Free.
sbxd_free_bytes 1.5
# EOF
"""
    )


def test_the_older_format_as_the_textfile_collector_reads_it() -> None:
    assert (
        render(FAMILIES, MetricsForm.PROMETHEUS)
        == r"""# TYPE sbxd_denials_total counter
# HELP sbxd_denials_total With "quotes" and a \\.
sbxd_denials_total{tenant="a\"b\\c\nd"} 0
# TYPE sbxd_wait_seconds histogram
# HELP sbxd_wait_seconds Waits.
sbxd_wait_seconds_bucket{mechanism="gvisor",le="0.5"} 0
sbxd_wait_seconds_bucket{mechanism="gvisor",le="1"} 1
sbxd_wait_seconds_bucket{mechanism="gvisor",le="+Inf"} 2
sbxd_wait_seconds_count{mechanism="gvisor"} 2
sbxd_wait_seconds_sum{mechanism="gvisor"} 9.7
# TYPE sbxd_free_bytes gauge
# HELP sbxd_free_bytes Free.
sbxd_free_bytes 1.5
"""
    )


def test_json_has_the_same_families() -> None:
    document = json.loads(render(FAMILIES, MetricsForm.JSON))
    assert [each["name"] for each in document] == [each.name for each in FAMILIES]
    assert document[1]["distributions"][0]["count"] == 2


def test_one_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="sbxd_free_bytes"):
        render((FREE, FREE), MetricsForm.OPENMETRICS)


@given(st.text(max_size=40))
def test_no_value_ends_its_line_or_its_label(value: str) -> None:
    family = gauge("sbxd_x", value, (1, (value,)), labels=("word",))
    for exposition in (MetricsForm.OPENMETRICS, MetricsForm.PROMETHEUS):
        text = render((family,), exposition)
        lines = text.split("\n")
        assert len(lines) == (5 if exposition is MetricsForm.OPENMETRICS else 4)
        sample = lines[2]
        inner = sample.removeprefix('sbxd_x{word="').removesuffix('"} 1')
        assert sample == f'sbxd_x{{word="{inner}"}} 1'
        unescaped = inner.replace("\\\\", "").replace('\\"', "").replace("\\n", "")
        assert '"' not in unescaped
        assert "\\" not in unescaped
        text.encode("utf-8")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.0, "3"),
        (0.25, "0.25"),
        (1e300, "1e+300"),
        (math.inf, "+Inf"),
        (2.5e60, "2.5e+60"),
    ],
)
def test_numbers_as_every_format_writes_them(value: float, text: str) -> None:
    assert number(value).startswith(text)


def test_a_sample_of_a_gauge_may_be_negative() -> None:
    family = Family(name="sbxd_x", kind=Kind.GAUGE, help="X.", samples=(Sample(value=-1),))
    assert "sbxd_x -1\n" in render((family,), MetricsForm.OPENMETRICS)
