"""Whatever the wire can carry, the rules answer it or refuse it with their own error."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sbxd.policy.admission import LIMIT_FIELDS, admit
from sbxd.policy.child_environment import build
from sbxd.policy.command import validate_argv, validate_command
from sbxd.port.command import ARGV_BYTES_MAX, ExecutionCommand
from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy
from sbxd.port.environment import EnvironmentSpec
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import ResourceLimits
from sbxd.settings import EgressSettings, ProcessEnvironmentSettings, Settings

DIGESTS = ["sha256:" + letter * 64 for letter in "ab"]
HOSTS = st.sampled_from(
    ["a.example", "*.a.example", "b.a.example", "A.EXAMPLE", "10.0.0.1", "x.", "", "é", "\udcff"]
) | st.text(max_size=12)
DESTINATIONS = st.lists(
    st.builds(
        EgressDestination, host=HOSTS, ports=st.lists(st.integers(1, 5), max_size=3).map(tuple)
    ),
    max_size=3,
).map(tuple)
POLICIES = st.builds(EgressPolicy, mode=st.just(EgressMode.ALLOWLIST), destinations=DESTINATIONS)
OPERATOR = Settings(
    egress=EgressSettings(
        mode=EgressMode.ALLOWLIST,
        destinations=(
            EgressDestination(host="a.example", ports=(1, 2)),
            EgressDestination(host="*.a.example", ports=(3,)),
        ),
    ),
    process_environment=ProcessEnvironmentSettings(operator_names=("TZ", "LC_ALL")),
)
LIMITS = st.builds(
    ResourceLimits,
    **{
        name: st.sampled_from(
            [getattr(OPERATOR.limits.ceilings, name) + step for step in (-1, 0, 1)]
        )
        | st.integers(1, 2**50)
        for name in LIMIT_FIELDS
    },
)
SPECIFICATIONS = st.builds(
    EnvironmentSpec,
    tenant_id=st.just(TenantId("t")),
    run_id=st.just(RunId("r")),
    lease_epoch=st.just(0),
    image_digest=st.sampled_from(DIGESTS),
    limits=LIMITS,
    egress=POLICIES,
    environment=st.dictionaries(
        st.sampled_from(["TZ", "LC_ALL", "HOME", "AWS_X"]) | st.text(max_size=4),
        st.text(max_size=4),
        max_size=3,
    ),
    bridge=st.none(),
)
ARGUMENTS = st.text(max_size=6) | st.sampled_from(
    ["", ".", "..", "/bin/x", "./x", "a\0", "\ud800", "\udcff", "y" * ARGV_BYTES_MAX]
)


@settings(max_examples=500, deadline=None)
@given(SPECIFICATIONS)
def test_what_is_admitted_is_within_everything_and_what_is_not_names_its_field(
    specification: EnvironmentSpec,
) -> None:
    try:
        admit(specification, OPERATOR, {DIGESTS[0]})
    except ExecutionRejected as rejected:
        assert rejected.field is not None  # noqa: PT017
        assert rejected.detail.startswith(rejected.field)  # noqa: PT017
        return
    assert specification.image_digest == DIGESTS[0]
    for name in LIMIT_FIELDS:
        assert getattr(specification.limits, name) <= getattr(OPERATOR.limits.ceilings, name)
    for destination in specification.egress.destinations:
        host = destination.host.lower()
        if host == "a.example":
            assert set(destination.ports) <= {1, 2}
        else:
            assert host.partition(".")[2] == "a.example"
            assert set(destination.ports) == {3}
    assert set(specification.environment) <= {"TZ", "LC_ALL", "HOME"}
    build(specification.environment, OPERATOR.process_environment.operator_names)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(ARGUMENTS, max_size=4).map(tuple) | ARGUMENTS,
    st.text(max_size=6) | st.sampled_from([".", "a/b", "../x", "/x"]),
    st.integers(-1, 100_000) | st.booleans(),
)
def test_a_command_is_bytes_without_nul_or_an_invalid_command(
    argv: Any, working_directory: str, timeout_seconds: int
) -> None:
    command = ExecutionCommand(
        argv=argv,
        working_directory=working_directory,
        timeout_seconds=timeout_seconds,
        stdin=None,
        maximum_output_bytes=1,
    )
    try:
        line = validate_command(command)
    except ExecutionRejected as rejected:
        assert rejected.code is RejectedCode.INVALID_COMMAND  # noqa: PT017
        return
    assert all(isinstance(each, bytes) and b"\0" not in each for each in line.argv)
    assert line.argv[0].startswith(b"/") or b"/" not in line.argv[0]
    assert validate_argv(line.argv) == line.argv
    assert tuple(each.decode("utf-8", "surrogateescape") for each in line.argv) == argv
