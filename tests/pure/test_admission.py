"""Admission: one test per row of the limits table, and image, destinations and environment."""

from typing import Any

import pytest
from msgspec import structs

from sbxd.policy.admission import LIMIT_FIELDS, admit, admit_egress
from sbxd.port.egress import DENY_ALL, EgressDestination, EgressMode, EgressPolicy
from sbxd.port.environment import EnvironmentSpec
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import GIB, MIB, ResourceLimits
from sbxd.settings import (
    DEFAULT_CEILINGS,
    DEFAULT_LIMITS,
    EgressSettings,
    ProcessEnvironmentSettings,
    Settings,
)

DIGEST = "sha256:" + "a" * 64
KNOWN = frozenset({DIGEST})


def spec(**changes: Any) -> EnvironmentSpec:
    fields: dict[str, Any] = {
        "tenant_id": TenantId("t"),
        "run_id": RunId("r"),
        "lease_epoch": 1,
        "image_digest": DIGEST,
        "limits": DEFAULT_LIMITS,
        "egress": DENY_ALL,
        "environment": {},
        "bridge": None,
    }
    return EnvironmentSpec(**(fields | changes))


def allowlist(*destinations: tuple[str, tuple[int, ...]]) -> EgressPolicy:
    return EgressPolicy(
        mode=EgressMode.ALLOWLIST,
        destinations=tuple(EgressDestination(host=h, ports=p) for h, p in destinations),
    )


def rejection(specification: EnvironmentSpec, settings: Settings | None = None) -> tuple[str, str]:
    with pytest.raises(ExecutionRejected) as refused:
        admit(specification, settings or Settings(), KNOWN)
    assert refused.value.field is not None
    assert refused.value.detail.startswith(refused.value.field)
    return refused.value.code, refused.value.field


def test_a_specification_within_everything_is_admitted() -> None:
    admit(spec(), Settings(), KNOWN)
    admit(spec(limits=DEFAULT_CEILINGS), Settings(), KNOWN)


# S1's table: limit, default, ceiling.
TABLE = [
    ("cpu_millicores", 2000, 8000),
    ("memory_bytes", 2 * GIB, 16 * GIB),
    ("pids_max", 512, 4096),
    ("workspace_bytes", 4 * GIB, 16 * GIB),
    ("inodes_max", 100_000, 1_000_000),
    ("wall_clock_seconds", 300, 1800),
]


def test_the_table_has_a_row_for_every_limit() -> None:
    assert [row[0] for row in TABLE] == list(LIMIT_FIELDS)


@pytest.mark.parametrize(("name", "default", "ceiling"), TABLE)
def test_each_limit_has_its_default_and_is_refused_above_its_ceiling(
    name: str, default: int, ceiling: int
) -> None:
    assert getattr(Settings().limits.defaults, name) == default
    assert getattr(Settings().limits.ceilings, name) == ceiling
    at_ceiling: ResourceLimits = structs.replace(DEFAULT_LIMITS, **{name: ceiling})
    admit(spec(limits=at_ceiling), Settings(), KNOWN)
    above: ResourceLimits = structs.replace(DEFAULT_LIMITS, **{name: ceiling + 1})
    with pytest.raises(ExecutionRejected) as refused:
        admit(spec(limits=above), Settings(), KNOWN)
    assert refused.value.code is RejectedCode.LIMIT_ABOVE_CEILING
    assert refused.value.field == f"limits.{name}"
    assert str(ceiling + 1) in refused.value.detail
    assert f"ceiling of {ceiling}:" in refused.value.detail


def test_a_volume_below_the_smallest_that_can_be_made_is_refused() -> None:
    small: ResourceLimits = structs.replace(DEFAULT_LIMITS, workspace_bytes=16 * MIB - 1)
    assert rejection(spec(limits=small)) == (
        RejectedCode.LIMIT_NOT_ENFORCEABLE,
        "limits.workspace_bytes",
    )
    smallest: ResourceLimits = structs.replace(DEFAULT_LIMITS, workspace_bytes=16 * MIB)
    admit(spec(limits=smallest), Settings(), KNOWN)


def test_an_image_that_the_store_does_not_hold_is_refused() -> None:
    other = "sha256:" + "b" * 64
    assert rejection(spec(image_digest=other)) == (RejectedCode.UNKNOWN_IMAGE, "image_digest")


OPERATOR = EgressSettings(
    mode=EgressMode.ALLOWLIST,
    destinations=allowlist(
        ("pypi.example", (443,)), ("*.files.example", (443, 8443)), ("API.example", (8080,))
    ).destinations,
)


@pytest.mark.parametrize(
    "requested",
    [
        ("pypi.example", (443,)),
        ("PyPI.Example", (443,)),
        ("a.files.example", (443,)),
        ("a.files.example", (8443, 443)),
        ("*.files.example", (8443,)),
        ("api.example", (8080,)),
    ],
)
def test_a_destination_that_the_operators_list_covers_is_admitted(
    requested: tuple[str, tuple[int, ...]],
) -> None:
    admit(spec(egress=allowlist(requested)), Settings(egress=OPERATOR), KNOWN)


@pytest.mark.parametrize(
    ("requested", "field"),
    [
        (("other.example", (443,)), "egress.destinations[0].host"),
        (("sub.pypi.example", (443,)), "egress.destinations[0].host"),
        (("evilpypi.example", (443,)), "egress.destinations[0].host"),
        (("files.example", (443,)), "egress.destinations[0].host"),
        (("a.b.files.example", (443,)), "egress.destinations[0].host"),
        (("evilfiles.example", (443,)), "egress.destinations[0].host"),
        (("*.pypi.example", (443,)), "egress.destinations[0].host"),
        (("*.b.files.example", (443,)), "egress.destinations[0].host"),
        (("*.example", (443,)), "egress.destinations[0].host"),
        (("pypi.example", (80,)), "egress.destinations[0].host"),
        (("a.files.example", (443, 80)), "egress.destinations[0].ports"),
        (("127.0.0.1", (443,)), "egress.destinations[0].host"),
        (("pypi.example.", (443,)), "egress.destinations[0].host"),
    ],
)
def test_a_destination_that_the_operator_did_not_configure_is_refused(
    requested: tuple[str, tuple[int, ...]], field: str
) -> None:
    code, named = rejection(spec(egress=allowlist(requested)), Settings(egress=OPERATOR))
    assert (code, named) == (RejectedCode.DESTINATION_NOT_CONFIGURED, field)


def test_the_offending_destination_is_named_by_its_position() -> None:
    policy = allowlist(("pypi.example", (443,)), ("other.example", (443,)))
    _, field = rejection(spec(egress=policy), Settings(egress=OPERATOR))
    assert field == "egress.destinations[1].host"


def test_under_deny_no_destination_is_configured() -> None:
    with pytest.raises(ExecutionRejected):
        admit_egress(allowlist(("pypi.example", (443,))), DENY_ALL)
    admit_egress(DENY_ALL, DENY_ALL)
    admit_egress(DENY_ALL, OPERATOR)


def test_an_environment_name_is_admitted_only_when_the_operator_lists_it() -> None:
    settings = Settings(process_environment=ProcessEnvironmentSettings(operator_names=("TZ",)))
    admit(spec(environment={"TZ": "UTC"}), settings, KNOWN)
    for name in ("OTHER", "AWS_SECRET_ACCESS_KEY", "LD_PRELOAD"):
        code, field = rejection(spec(environment={name: "x"}), settings)
        assert (code, field) == (RejectedCode.ENVIRONMENT_NAME_REFUSED, f"environment.{name}")
