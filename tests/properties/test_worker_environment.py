"""Whatever an operator of the worker tier writes, into the configuration or into the file that it
names: no tier-0 name comes into an environment."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbxd.policy.child_environment import (
    TIER_TWO_CONSTANTS,
    TIER_ZERO_NAMES,
    TIER_ZERO_PREFIXES,
    OperatorNamesRefused,
    Tier,
    build,
    tier_of,
)
from sbxd.port.ids import TenantId
from sbxd.worker_cli.config import McpSettings
from sbxd.worker_cli.mcp import specification_of
from sbxd.worker_cli.tier_one import tier_one

SECRETS = sorted(TIER_ZERO_NAMES) + [f"{prefix}X" for prefix in TIER_ZERO_PREFIXES]
NAMES = (
    st.sampled_from([*SECRETS, "TZ", "LC_ALL", "HOME", "PATH", "MY_APP_TOKEN", "x_api_key", "A-B"])
    | st.sampled_from(SECRETS).map(str.lower)
    | st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
)


@given(st.dictionaries(NAMES, st.text("abc", max_size=5), max_size=6))
@example({"AWS_SECRET_ACCESS_KEY": "x"})
@example({"TZ": "UTC"})
def test_the_mcp_configuration_passes_no_tier_zero_name(environment: dict[str, str]) -> None:
    settings = McpSettings(
        tenant_id=TenantId("a"), image_digest="sha256:" + "a" * 64, environment=environment
    )
    if any(tier_of(name) is not Tier.OPERATOR for name in environment) or "A-B" in environment:
        with pytest.raises(OperatorNamesRefused):
            tier_one(settings)
        return
    specification = specification_of(settings, tier_one(settings))
    assert dict(specification.environment) == environment
    built = build(specification.environment, tuple(environment))
    assert set(built) == set(environment) | set(TIER_TWO_CONSTANTS)
    assert not any(tier_of(name) is Tier.NEVER for name in built)


def tier_one_of(folder: Path, data: bytes, environment: Mapping[str, str]) -> Mapping[str, str]:
    file = folder / "environment.toml"
    file.write_bytes(data)
    return tier_one(
        McpSettings(
            tenant_id=TenantId("a"),
            image_digest="sha256:" + "a" * 64,
            environment=dict(environment),
            environment_file=str(file),
        )
    )


@given(
    st.binary(max_size=60)
    | st.dictionaries(NAMES, st.text("abc", max_size=5), max_size=4).map(
        lambda found: "\n".join(f'"{name}" = "{value}"' for name, value in found.items()).encode()
    ),
    st.dictionaries(NAMES, st.text("abc", max_size=5), max_size=3),
)
@example(b"AWS_SECRET_ACCESS_KEY = 'x'", {})
@example(b"\xff", {"TZ": "UTC"})
@example(b"TZ = 'UTC'", {"LC_ALL": "C"})
def test_whatever_the_file_holds_no_tier_zero_name_passes(
    data: bytes, environment: dict[str, str]
) -> None:
    with TemporaryDirectory() as folder:
        try:
            passed = tier_one_of(Path(folder), data, environment)
        except OperatorNamesRefused:
            return
    assert all(tier_of(name) is Tier.OPERATOR for name in passed)
    built = build(passed, tuple(passed))
    assert set(built) == set(passed) | set(TIER_TWO_CONSTANTS)


@pytest.mark.parametrize("data", [b"TZ = ", b"\xff", b"TZ = 5", b"[TZ]\na = 1", b"#" * 2_000_000])
def test_a_file_that_cannot_be_parsed_is_tier_two_alone_and_a_logged_configuration_error(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert tier_one_of(tmp_path, data, {"LC_ALL": "C"}) == {}
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "configuration error" in record.getMessage()
    assert "environment_file" in record.getMessage()


@pytest.mark.parametrize("there", ["missing", "a directory"])
def test_a_file_that_cannot_be_read_is_the_same_and_the_parents_environment_stays_outside(
    tmp_path: Path, there: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "of the parent")
    settings = McpSettings(
        tenant_id=TenantId("a"),
        image_digest="sha256:" + "a" * 64,
        environment={"LC_ALL": "C"},
        environment_file=str(tmp_path if there == "a directory" else tmp_path / "no"),
    )
    assert tier_one(settings) == {}
    assert "configuration error" in caplog.text
    assert os.environ["TZ"] == "of the parent"  # the control: there was something to fall back to


def test_control_a_good_file_adds_to_the_configuration_and_wins_over_it(tmp_path: Path) -> None:
    passed = tier_one_of(tmp_path, b"TZ = 'UTC'\nLC_ALL = 'de'", {"LC_ALL": "C", "A": "1"})
    assert passed == {"TZ": "UTC", "LC_ALL": "de", "A": "1"}


def test_a_tier_zero_name_is_an_error_at_the_start_wherever_it_stands(tmp_path: Path) -> None:
    for data, environment in (
        (b"AWS_REGION = 'x'", {}),
        (b"", {"AWS_REGION": "x"}),
        # Also beside a file that cannot be parsed.
        (b"\xff", {"AWS_REGION": "x"}),
    ):
        with pytest.raises(OperatorNamesRefused, match="tier-0"):
            tier_one_of(tmp_path, data, environment)
