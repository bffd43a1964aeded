"""Doctor says that runsc is old, and is content otherwise."""

import json
from datetime import date, timedelta

import pytest
from click.testing import CliRunner

from sbxctl import doctor
from sbxctl.runsc_age import AGE_DAYS_MAX, FIX, built, judged
from sbxd.launcher.kernel import probe
from sbxd.launcher.kernel.runsc import NOT_INSTALLED, Runsc
from sbxd.wire.descriptions import PostureItem

TODAY = date(2026, 3, 1)


def item(version: str) -> PostureItem:
    """What the launcher tells of a program with this version."""
    told = probe.of_runsc(Runsc("/usr/bin/runsc", "20260102" * 8, version, ()))
    return PostureItem(name=told.name, state=told.state, detail=told.detail, fix=told.fix)


@pytest.mark.parametrize(
    ("version", "day"),
    [
        ("release-20240729.0", date(2024, 7, 29)),
        ("0.0~20240729.0-4", date(2024, 7, 29)),
        ("0.0~20240729.0-4+deb13u1", date(2024, 7, 29)),
        ("release-20251103.0-12-g0123456789ab", date(2025, 11, 3)),
        ("release-20251399.0", None),
        ("release-202511030.0", None),
        ("VERSION_MISSING", None),
        ("1.2.3", None),
        ("", None),
    ],
)
def test_the_day_of_a_version_is_read_or_is_not_known(version: str, day: date | None) -> None:
    assert built(version) == day


@pytest.mark.parametrize("version", ["release-20240729.0", "0.0~20240729.0-4", "0.0~20240729.0-9"])
def test_an_old_runsc_is_degraded_and_has_a_fix(version: str) -> None:
    found = judged(item(version), TODAY)
    assert (found.name, found.state, found.fix) == ("runsc", "degraded", FIX)
    assert f"version {version} sha256 " in found.detail
    assert "built on 2024-07-29, 580 days ago" in found.detail
    assert "runsc_sha256" in found.fix


@pytest.mark.parametrize("days", [0, 1, AGE_DAYS_MAX])
def test_a_runsc_within_the_bound_is_ok(days: int) -> None:
    version = f"release-{TODAY - timedelta(days):%Y%m%d}.0"
    assert judged(item(version), TODAY) == item(version)
    older = f"release-{TODAY - timedelta(AGE_DAYS_MAX + 1):%Y%m%d}.0"
    assert judged(item(older), TODAY).state == "degraded"


@pytest.mark.parametrize(
    "version", ["1.2.3", "VERSION_MISSING", "", "release-20251399.0", "release-20260302.0"]
)
def test_a_runsc_of_an_unknown_age_is_degraded_and_says_so(version: str) -> None:
    """No day, none of the calendar, one that has not come; the digest is never read as one."""
    found = judged(item(version), TODAY)
    assert found.state == "degraded"
    assert "age is not known" in found.detail


def test_what_is_missing_or_another_item_is_left_alone() -> None:
    told = probe.of_runsc(NOT_INSTALLED)
    missing = PostureItem(name=told.name, state=told.state, detail=told.detail, fix=told.fix)
    other = PostureItem(name="kernel", state="ok", detail="version release-20200101.0")
    assert judged(missing, TODAY) is missing
    assert judged(other, TODAY) is other


def test_doctor_warns_of_an_old_runsc_and_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def from_daemon(_: str) -> tuple[PostureItem, ...]:
        return (item("0.0~20240729.0-4"),)

    monkeypatch.setattr(doctor, "_from_daemon", from_daemon)
    ran = CliRunner().invoke(doctor.doctor, ["--json"], obj="no socket")
    told = {each["name"]: each for each in json.loads(ran.stdout)}
    assert (told["runsc"]["state"], told["runsc"]["fix"]) == ("degraded", FIX)
    assert ran.exit_code == 0
