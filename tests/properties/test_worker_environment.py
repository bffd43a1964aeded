"""Whatever an operator of the worker tier writes: no tier-0 name comes into an environment."""

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
            specification_of(settings)
        return
    specification = specification_of(settings)
    assert dict(specification.environment) == environment
    built = build(specification.environment, tuple(environment))
    assert set(built) == set(environment) | set(TIER_TWO_CONSTANTS)
    assert not any(tier_of(name) is Tier.NEVER for name in built)
