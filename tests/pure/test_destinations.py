"""The grammar of destinations and what covers what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.policy.destinations import (
    DestinationInvalid,
    canonical_destination,
    canonical_host,
    canonical_policy,
    host_covers,
    policy_problems,
)
from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy

LABEL = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(
    ("host", "canonical"),
    [
        ("pypi.org", "pypi.org"),
        ("PyPI.ORG", "pypi.org"),
        ("*.PythonHosted.org", "*.pythonhosted.org"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("1.example", "1.example"),
        ("a-b.3com", "a-b.3com"),
        ("intranet", "intranet"),
        ("x" * 63 + ".example", "x" * 63 + ".example"),
    ],
)
def test_a_name_has_one_lower_case_form(host: str, canonical: str) -> None:
    assert canonical_host(host) == canonical


@pytest.mark.parametrize(
    "host",
    [
        "",
        ".",
        "*",
        "*.",
        "**.example",
        "*.*.example",
        "a.*.example",
        "*a.example",
        "a*.example",
        "*example",
        "example.",
        "a..example",
        ".example",
        "-a.example",
        "a-.example",
        "a_b.example",
        "a b.example",
        "a\0.example",
        "a.example\n",
        "bücher.example",
        "exam\u2024ple",
        "\uff45xample.org",
        "\u212a.example",
        "127.0.0.1",
        "0177.0.0.1",
        "0x7f.1",
        "1.2.3.0x",
        "2130706433",
        "*.1",
        "example.123",
        "::1",
        "[::1]",
        "example.org:443",
        "https://example.org",
        "example.org/path",
        "user@example.org",
        "x" * 64 + ".example",
        ".".join(["x" * 60] * 5),
    ],
)
def test_what_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(DestinationInvalid) as refused:
        canonical_host(host)
    assert refused.value.part == "host"


@given(st.text(max_size=40) | NAME)
def test_every_text_is_canonical_or_refused_and_canonical_is_a_fixed_point(host: str) -> None:
    try:
        canonical = canonical_host(host)
    except DestinationInvalid:
        return
    assert canonical_host(canonical) == canonical
    assert canonical == host.lower()


@given(NAME)
def test_every_plain_name_is_accepted(name: str) -> None:
    assert canonical_host(name) == name
    assert canonical_host("*." + name) == "*." + name


@given(NAME, LABEL, LABEL)
def test_a_wildcard_covers_one_label_and_nothing_else(name: str, one: str, two: str) -> None:
    wildcard = "*." + name
    assert host_covers(wildcard, f"{one}.{name}")
    assert host_covers(wildcard, wildcard)
    assert not host_covers(wildcard, name)
    assert not host_covers(wildcard, f"{two}.{one}.{name}")
    assert not host_covers(wildcard, one + name)
    assert not host_covers(wildcard, f"*.{one}.{name}")
    assert not host_covers(f"{one}.{name}", wildcard)


def test_ports_are_sorted_once_each_and_never_missing_or_out_of_range() -> None:
    given_ports = EgressDestination(host="A.example", ports=(8080, 443, 8080))
    assert canonical_destination(given_ports) == EgressDestination(
        host="a.example", ports=(443, 8080)
    )
    for ports in ((), (0,), (65536,), (443, -1)):
        with pytest.raises(DestinationInvalid) as refused:
            canonical_destination(EgressDestination(host="a.example", ports=ports))
        assert refused.value.part == "ports"


def test_every_problem_of_a_policy_is_reported_with_its_position() -> None:
    policy = EgressPolicy(
        mode=EgressMode.ALLOWLIST,
        destinations=(
            EgressDestination(host="10.0.0.1", ports=(443,)),
            EgressDestination(host="Good.example", ports=(443,)),
            EgressDestination(host="bad_.example", ports=(443,)),
        ),
    )
    assert [problem.position for problem in policy_problems(policy)] == [0, 2]
    with pytest.raises(DestinationInvalid):
        canonical_policy(policy)


def test_a_policys_canonical_form_keeps_its_mode_and_order() -> None:
    policy = EgressPolicy(
        mode=EgressMode.ALLOWLIST,
        destinations=(
            EgressDestination(host="B.example", ports=(2, 1)),
            EgressDestination(host="a.example", ports=(1,)),
        ),
    )
    canonical = canonical_policy(policy)
    assert canonical.mode is EgressMode.ALLOWLIST
    assert [each.host for each in canonical.destinations] == ["b.example", "a.example"]
