"""What `sbxctl status` calls wrong, and that the rules for Prometheus mean the same by it."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from sbxd.lifecycle.environments import Census, PoolCensus
from sbxd.metrics import alerts, pool, readings
from sbxd.metrics.derived import DerivedMetrics, Happening
from sbxd.metrics.exposition import render
from sbxd.metrics.families import Kind
from sbxd.metrics.loop_lag import LoopLag
from sbxd.metrics.readings import Backlog, Reading, Store
from sbxd.metrics.recent import RECENT_SECONDS
from sbxd.policy.violations import ViolationCode
from sbxd.wire.observing import AlertInfo, MetricsForm, Severity
from tests.metrics.test_pool import KEPT
from tests.monitoring import queries

ROOMY = Store(free_bytes=50, size_bytes=100, free_inodes=50, size_inodes=100)
POOL = PoolCensus(building=0, target=4, ages_seconds=(3.0,))
WELL = Reading(
    version="1",
    mechanism="gvisor",
    deployment_mode="production",
    started_at=0.0,
    census=Census(states={"LIVE": 2}, waiting=0, pool=POOL),
    quarantined=(),
    erasing_volumes=0,
    erasing_bytes=0,
    environments_max=256,
    tunnels_open=0,
    store=ROOMY,
    unenforced=0,
)
EGRESS = ViolationCode.EGRESS_DENIED
# What only Prometheus can see.
OF_PROMETHEUS = {"SbxdDown", "SbxdMetricsOld", "SbxdOrphansReaped"}


def standing(
    reading: Reading = WELL,
    recent: Mapping[tuple[Happening, str], int] | None = None,
    denials: Mapping[tuple[str, ViolationCode], int] | None = None,
    *,
    lag: float = 0.0,
) -> tuple[AlertInfo, ...]:
    return alerts.standing(reading, recent or {}, denials or {}, lag_worst_seconds=lag)


def names(found: tuple[AlertInfo, ...]) -> list[str]:
    return [each.name for each in found]


EVERYTHING = standing(
    replace(WELL, quarantined=("x",), store=replace(ROOMY, free_bytes=9)),
    {
        (Happening.UNRECORDED, ""): 1,
        (Happening.JOURNAL_REFUSED, ""): 1,
        (Happening.ESCAPE_SUSPECTED, "PROCESS_SURVIVED"): 1,
        (Happening.AUTHORITY_MISSED, "tier"): 1,
        (Happening.POOL_MISS, ""): 9,
    },
    {("t", EGRESS): 50},
    lag=1.0,
)


def test_nothing_is_wrong_with_a_daemon_that_is_well() -> None:
    assert standing() == ()


def test_every_alert_says_what_is_wrong_and_what_to_do_the_worst_first() -> None:
    severities = [each.severity for each in EVERYTHING]
    assert severities == sorted(severities, key=lambda each: each is not Severity.PAGE)
    for each in EVERYTHING:
        assert each.detail
        assert each.fix


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (standing(denials={("t", EGRESS): 49}), []),
        (standing(denials={("t", EGRESS): 30, ("t", ViolationCode.PROTOCOL): 20}), ["Spike"]),
        (standing(denials={("t", EGRESS): 30, ("u", EGRESS): 30}), []),
        (standing(recent={(Happening.POOL_MISS, ""): 4}), []),
        (standing(recent={(Happening.POOL_MISS, ""): 5}), ["PoolMisses"]),
        (standing(recent={(Happening.POOL_MISS, ""): 5, (Happening.POOL_HIT, ""): 6}), []),
        (standing(lag=0.249), []),
        (standing(lag=0.25), ["EventLoopLag"]),
        (standing(replace(WELL, store=replace(ROOMY, free_inodes=9))), ["StorePressure"]),
        (standing(replace(WELL, store=replace(ROOMY, free_bytes=10))), []),
        (standing(replace(WELL, store=None)), []),
        (standing(replace(WELL, backlog=Backlog(spooled=9, waiting=1))), ["AuditNotRecording"]),
        (standing(replace(WELL, backlog=Backlog(spooled=9, waiting=0))), []),
        # A file system without a number of inodes has none to run out of.
        (standing(replace(WELL, store=replace(ROOMY, free_inodes=0, size_inodes=0))), []),
    ],
)
def test_thresholds(found: tuple[AlertInfo, ...], expected: list[str]) -> None:
    assert len(found) == len(expected)
    for each, wanted in zip(found, expected, strict=True):
        assert wanted in each.name


def test_a_pool_that_is_to_be_empty_misses_nothing() -> None:
    census = replace(WELL.census, pool=replace(POOL, target=0))
    without = replace(WELL, census=census)
    assert standing(without, {(Happening.POOL_MISS, ""): 99}) == ()


# --- the rules mean the same --------------------------------------------------------------------


def test_status_and_the_rules_know_the_same_alerts() -> None:
    assert set(names(EVERYTHING)) == queries.alerts() - OF_PROMETHEUS


def test_the_severities_are_the_same() -> None:
    text = queries.RULES.read_text()
    for each in EVERYTHING:
        rule = text.partition(f"- alert: {each.name}\n")[2].partition("- alert:")[0]
        assert f"severity: {each.severity.value}}}" in rule, each.name


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("SbxdDenialSpike", f">= {alerts.DENIALS_OF_TENANT}"),
        ("SbxdPoolMisses", f">= {alerts.POOL_MISSES}"),
        ("SbxdPoolMisses", f">= {alerts.POOL_MISS_SHARE} *"),
        ("SbxdEventLoopLag", f">= {alerts.LAG_SECONDS}"),
        ("SbxdStorePressure", f"< {alerts.STORE_FREE_SHARE} *"),
        ("SbxdDenialSpike", f"[{RECENT_SECONDS / 60:g}m]"),
    ],
)
def test_the_thresholds_are_the_same(name: str, number: str) -> None:
    rule = queries.RULES.read_text().partition(f"- alert: {name}\n")[2].partition("- alert:")[0]
    assert number in rule


# --- the files name what there is -----------------------------------------------------------------


def exported() -> set[str]:
    """Every name that the daemon exports, as Prometheus stores it."""
    found: set[str] = set()
    derived = DerivedMetrics("gvisor", lambda: 0.0)
    for family in (
        *readings.families(WELL),
        *derived.families(),
        *LoopLag().families(),
        *pool.families(KEPT),
    ):
        match family.kind:
            case Kind.COUNTER:
                found.add(f"{family.name}_total")
            case Kind.GAUGE:
                found.add(family.name)
            case Kind.HISTOGRAM:
                found |= {f"{family.name}_{end}" for end in ("bucket", "count", "sum")}
    return found


def unknown(text: str) -> set[str]:
    known = exported() | queries.recorded() | queries.FOREIGN
    return {
        name
        for name in queries.named(text)
        if name not in known and not name.startswith(queries.OF_WORKERS)
    }


def test_the_dashboard_and_the_rules_name_metrics_that_exist() -> None:
    found = list(queries.expressions())
    assert len(found) > 30
    assert {title: unknown(text) for title, text in found if unknown(text)} == {}
    assert unknown(queries.rule_expressions()) == set()
    # The control: a name that does not exist is found.
    assert unknown("rate(sbxd_denial_total[5m])") == {"sbxd_denial_total"}


def test_the_dashboard_shows_all_of_s1s_and_what_an_operator_needs() -> None:
    text = json.dumps(queries.dashboard())
    for wanted in (
        "sbxd:provision_seconds:p99",
        "sbxd:utilization:ratio",
        "sbxd:egress_refused:rate5m",
        "sbxd:kills:rate5m",
        "sbxd:orphans_reaped:increase1h",
        "sbxd_artifact_stored_bytes",
        "sbxd_artifact_removed_by_retention_ratio",
    ):
        assert wanted in text


def test_the_dashboards_panels_are_ones_that_grafana_places() -> None:
    board = queries.dashboard()
    assert board["uid"]
    assert board["schemaVersion"] >= 36
    identities = [panel["id"] for panel in board["panels"]]
    assert len(set(identities)) == len(identities)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] in ("stat", "timeseries")
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0


def test_every_metric_is_in_the_document() -> None:
    text = (queries.FOLDER.parent / "monitoring.md").read_text()
    documented = set(re.findall(r"`(sbxd_[a-z0-9_]+)`", text))
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported()}
    assert families - documented == set()
    assert documented - families == set()


def test_every_alert_is_in_the_document() -> None:
    text = (queries.FOLDER.parent / "monitoring.md").read_text()
    assert set(re.findall(r"`(Sbxd[A-Za-z]+)`", text)) == queries.alerts()


def test_an_unknown_number_is_left_out() -> None:
    text = render(readings.families(replace(WELL, store=None)), MetricsForm.OPENMETRICS)
    assert "sbxd_store_free_bytes" not in text
    assert "sbxd_up 1\n" in text
