"""The environment of a command is built: tier 0 never, tier 1 when listed, tier 2 always."""

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.policy.child_environment import (
    BRIDGE_SOCKET_NAME,
    BRIDGE_TOKEN_NAME,
    ENVIRONMENT_BYTES_MAX,
    IMAGE_PATH,
    PROXY_NAMES,
    TIER_TWO_CONSTANTS,
    TIER_ZERO_KEY_KINDS,
    TIER_ZERO_NAMES,
    TIER_ZERO_PREFIXES,
    TIER_ZERO_WORDS,
    ListState,
    OperatorNamesRefused,
    Tier,
    build,
    encode,
    is_loader_name,
    operator_name_problems,
    tier_of,
    worker_environment,
)
from sbxd.port.environment import BridgeEndpoint
from sbxd.port.errors import ExecutionRejected, RejectedCode

# Every rule of the tier-0 list, as names that a real host has or could have.
TIER_ZERO_EXAMPLES = sorted(
    TIER_ZERO_NAMES
    | {prefix + "X" for prefix in TIER_ZERO_PREFIXES}
    | {f"MY_{word}_2" for word in TIER_ZERO_WORDS}
    | {f"SOME_{kind}_KEY" for kind in TIER_ZERO_KEY_KINDS}
    | {"openai_api_key", "Aws_Secret_Access_Key", "API_KEYS", "DB_PWD", "GITHUB_PAT", "S3_BUCKET"}
)
HARMLESS = ["GREETING", "TZ", "TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "PGSIZE", "PATTERN"]
BASE = {
    "HOME": "/workspace",
    "PWD": "/workspace",
    "PATH": IMAGE_PATH,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "MPLCONFIGDIR": "/tmp/.matplotlib",
    "UV_LINK_MODE": "copy",
}


def refused(environment: dict[str, str], operator_names: tuple[str, ...] = ()) -> ExecutionRejected:
    with pytest.raises(ExecutionRejected) as rejection:
        build(environment, operator_names)
    assert rejection.value.code is RejectedCode.ENVIRONMENT_NAME_REFUSED
    return rejection.value


def test_nothing_asked_for_is_tier_two_alone() -> None:
    assert build({}, ()) == BASE
    assert build({}, ("GREETING",)) == BASE


def test_the_parents_environment_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBX_TEST_PLANTED", "planted")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    built = build({}, ("SBX_TEST_PLANTED",))
    assert "planted" not in built.values()
    assert built.keys() == BASE.keys()


@pytest.mark.parametrize("name", TIER_ZERO_EXAMPLES)
def test_a_tier_zero_name_is_refused_in_a_specification_even_when_listed(name: str) -> None:
    assert tier_of(name) is Tier.NEVER
    rejection = refused({name: "value-of-it"}, (name,))
    assert rejection.field == f"environment.{name}"
    assert "value-of-it" not in str(rejection)


@pytest.mark.parametrize("name", TIER_ZERO_EXAMPLES)
def test_a_tier_zero_name_cannot_be_listed(name: str) -> None:
    (problem,) = operator_name_problems((name,))
    assert problem.name == name
    with pytest.raises(OperatorNamesRefused, match=name):
        worker_environment((name,), {name: "x"})


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_name_is_passed_when_listed_and_refused_when_not(name: str) -> None:
    assert build({name: "v"}, (name,)) == BASE | {name: "v"}
    assert refused({name: "v"}).field == f"environment.{name}"


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "BASH_ENV", "NODE_OPTIONS", "PERL5LIB"]
)
def test_a_loaders_name_is_passed_only_when_listed_and_the_refusal_says_what_it_does(
    name: str,
) -> None:
    assert is_loader_name(name)
    assert build({name: "/workspace/x"}, (name,))[name] == "/workspace/x"
    assert "loader" in refused({name: "x"}, ("GREETING",)).detail
    assert "loader" not in refused({"GREETING": "x"}).detail


@pytest.mark.parametrize("name", [*TIER_TWO_CONSTANTS, *sorted(PROXY_NAMES), "https_proxy"])
def test_a_synthesised_name_can_be_neither_listed_nor_changed(name: str) -> None:
    assert operator_name_problems((name,))
    assert refused({name: "/somewhere/else"}, (name,)).field == f"environment.{name}"


def test_a_tier_two_name_with_the_services_own_value_is_no_error() -> None:
    assert build(BASE, ()) == BASE


def test_the_bridge_brings_its_two_variables_and_nobody_else_can() -> None:
    bridge = BridgeEndpoint(socket_path="/run/bridge.sock", token="t" * 32)
    built = build({}, (), bridge=bridge)
    assert built == BASE | {BRIDGE_SOCKET_NAME: "/run/bridge.sock", BRIDGE_TOKEN_NAME: "t" * 32}
    assert "t" * 32 not in repr(bridge)
    for name in (BRIDGE_SOCKET_NAME, BRIDGE_TOKEN_NAME):
        refused({name: "x"}, (name,))


def test_pwd_follows_the_working_directory() -> None:
    assert build({}, (), working_directory=PurePosixPath("/workspace/a"))["PWD"] == "/workspace/a"


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "Ä", "A\n", "x" * 129])
def test_something_that_is_no_name_is_refused(name: str) -> None:
    refused({name: "x"}, (name,))
    assert operator_name_problems((name,))


def test_a_value_with_nul_or_above_the_cap_is_refused() -> None:
    assert build({"A": "x" * 32_768}, ("A",))
    refused({"A": "x\0"}, ("A",))
    refused({"A": "x" * 32_769}, ("A",))


def test_an_environment_above_the_cap_of_the_whole_is_refused() -> None:
    names = tuple(f"N{number}" for number in range(4))
    big = dict.fromkeys(names, "x" * (ENVIRONMENT_BYTES_MAX // 4))
    assert refused(big, names).field == "environment"
    assert build(dict.fromkeys(names, "x" * 1000), names)


def test_the_worker_passes_listed_names_that_have_a_value_and_no_other() -> None:
    values = {"TZ": "UTC", "SECRET_TOKEN": "s", "HOME": "/root", "OTHER": "o"}
    passed = worker_environment(("TZ", "MISSING"), values)
    assert passed.environment == {"TZ": "UTC"}
    assert passed.list_state is ListState.READ


def test_an_unreadable_list_is_tier_two_alone_and_neither_the_parent_nor_a_failure() -> None:
    passed = worker_environment(None, {"TZ": "UTC", "AWS_SECRET_ACCESS_KEY": "x"})
    assert passed.environment == {}
    assert passed.list_state is ListState.UNREADABLE
    assert build(passed.environment, ()) == BASE


def test_encoding_is_sorted_bytes() -> None:
    assert encode({"B": "é", "A": "\udcff"}) == ((b"A", b"\xff"), (b"B", "é".encode()))


@given(
    st.dictionaries(
        st.sampled_from([*TIER_ZERO_EXAMPLES, *HARMLESS, *BASE, "LD_PRELOAD"]), st.text(max_size=5)
    ),
    st.lists(st.sampled_from([*TIER_ZERO_EXAMPLES, *HARMLESS, "LD_PRELOAD"]), max_size=12),
)
def test_no_tier_zero_name_is_in_any_built_environment(
    environment: dict[str, str], operator_names: list[str]
) -> None:
    try:
        built = build(environment, operator_names)
    except ExecutionRejected:
        return
    assert all(tier_of(name) is not Tier.NEVER for name in built)
    assert built.keys() <= BASE.keys() | set(operator_names)
    assert {name: built[name] for name in BASE} == BASE
