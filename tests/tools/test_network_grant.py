"""How the second yes for the network reaches a command: by the profile or an approval, never by
anything that a model writes."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbxd.client.run_scope import RunScope
from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.fake.environment import FakeExecutionEnvironment, ProvisionCall
from sbxd.port.egress import DENY_ALL, EgressDestination, EgressMode, EgressPolicy
from sbxd.settings import EgressSettings
from sbxd.tools.run_command import FIELDS, command_of
from sbxd.tools.tool import DEFAULT_ALLOWED, Profile, SideEffect, ToolName, ToolValidationError
from sbxd.tools.toolbox import SPECS, Toolbox
from tests.tools.world import SCRIPT, SPECIFICATION, world

NETWORK = frozenset({SideEffect.SANDBOX_NETWORK})
LISTED = (EgressDestination(host="api.example.org", ports=(443,)),)
ALLOWLIST = EgressPolicy(mode=EgressMode.ALLOWLIST, destinations=LISTED)
# What a model might hope for.
WISHES = st.sampled_from(
    ["network_enabled", "network", "approved", "allowed", "profile", "egress", "environment", "env"]
)
VALUES = st.sampled_from([True, "yes", 1, ["SANDBOX_NETWORK"], {"host": "evil.com"}, None])


@given(
    st.dictionaries(WISHES | st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=4),
    st.booleans(),
)
@example({"command": ["true"], "network_enabled": True}, False)
@example({"command": ["true"]}, True)
def test_no_argument_of_a_model_gives_or_takes_the_network(
    arguments: dict[str, object], granted: bool
) -> None:
    try:
        command = command_of({"command": ["true"], **arguments}, network_enabled=granted)
    except ToolValidationError:
        return
    assert command.network_enabled is granted
    assert set(arguments) <= set(FIELDS)


def test_no_schema_has_a_field_for_it() -> None:
    for spec in SPECS.values():
        text = msgspec.json.encode(dict(spec.input_schema)).decode().lower()
        assert "network" not in text
        assert spec.input_schema["additionalProperties"] is False


async def test_what_a_prompt_shows_is_what_the_environment_was_specified_with() -> None:
    settings = msgspec.structs.replace(
        FAKE_SETTINGS, egress=EgressSettings(mode=EgressMode.ALLOWLIST, destinations=LISTED)
    )
    environment = FakeExecutionEnvironment(SCRIPT, settings=settings)
    assert (await environment.network_grant()).destinations == LISTED
    wide = msgspec.structs.replace(SPECIFICATION, egress=ALLOWLIST)
    async with RunScope(environment, wide, environment.workspace) as scope:
        tools = Toolbox(scope, None)
        assert tools.network_grant == ALLOWLIST
        # The approval changes no destination.
        await tools.call(ToolName.RUN_COMMAND, {"command": ["true"]}, approved=NETWORK)
        assert tools.network_grant == ALLOWLIST
    made = environment.calls[0]
    assert isinstance(made, ProvisionCall)
    assert made.specification.egress == ALLOWLIST


async def test_without_destinations_an_approval_grants_nothing() -> None:
    async with world(profile=Profile(DEFAULT_ALLOWED | NETWORK)) as made:
        assert made.tools.network_grant == DENY_ALL


async def test_an_approval_is_for_one_call_and_for_what_a_tool_may_use() -> None:
    async with world() as made:
        run = {"command": ["true"]}
        for approved, expected in ((NETWORK, True), (frozenset(), False)):
            await made.tools.call(ToolName.RUN_COMMAND, run, approved=approved)
            assert made.last_command().command.network_enabled is expected
        with pytest.raises(ToolValidationError, match="no field"):
            await made.tools.call(ToolName.RUN_COMMAND, {**run, "approved": ["SANDBOX_NETWORK"]})
        assert made.calls.count("execute") == 2
