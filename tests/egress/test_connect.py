"""The head of a CONNECT request: what is one, what is not, and that no split of it matters."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.egress.connect import (
    HEAD_BYTES_MAX,
    ConnectParser,
    Event,
    Flaw,
    Malformed,
    MethodNotAllowed,
    Request,
    TooLarge,
)

TARGET = "files.example.org:443"
REQUEST = Request(host="files.example.org", port=443)


def head(target: str = TARGET, *fields: str, version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"CONNECT {target} {version}", *fields, "", ""]).encode("latin-1")


def parse(data: bytes) -> tuple[Event | None, bytes]:
    parser = ConnectParser()
    return parser.receive(data), parser.early


def flaw(data: bytes) -> Flaw:
    event, early = parse(data)
    assert isinstance(event, Malformed), event
    assert early == b""
    return event.flaw


@pytest.mark.parametrize(
    ("data", "host", "port"),
    [
        (head(), "files.example.org", 443),
        (head(version="HTTP/1.0"), "files.example.org", 443),
        (head("FILES.Example.ORG:1"), "files.example.org", 1),
        (head("xn--bcher-kva.example:65535"), "xn--bcher-kva.example", 65535),
        (head("localhost:80"), "localhost", 80),  # the policy's to refuse
        (head(TARGET, "Host: another:1", "Proxy-Connection:keep-alive"), "files.example.org", 443),
        (head(TARGET, "Content-Length: 0"), "files.example.org", 443),
        (head(TARGET, "X:"), "files.example.org", 443),
    ],
)
def test_a_well_formed_request_is_a_canonical_host_and_a_port(
    data: bytes, host: str, port: int
) -> None:
    assert parse(data) == (Request(host=host, port=port), b"")


@pytest.mark.case("EGR-06", "EGR-19")
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "0177.0.0.1", "0x7f.1", "2130706433", "127.1", "1.2.3.4.", "[::1]",
        "[::ffff:169.254.169.254]", "fe80::1", "[fe80::1%25eth0]", "[example.com]", "::1",
        "\xef\xbc\x91\xef\xbc\x92", "\xe3\x80\x82example", "example.com.", "a..example.org",
        ".example.org", "a_b.example.org", "a" * 64 + ".example.org", "-a.example.org",
        "a-.example.org", "*.example.org", "*", "", "b\xc3\xbccher.example",
        "soft\xc2\xadhyphen.org", ".".join(["a" * 49] * 6), "example.0x7f", "example.123",
    ],
)  # fmt: skip
def test_a_host_outside_the_grammar_is_malformed(host: str) -> None:
    assert flaw(head(f"{host}:443")) in (Flaw.HOST, Flaw.BYTES, Flaw.TARGET)


@pytest.mark.case("EGR-13")
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("user@files.example.org:443", Flaw.TARGET),
        ("user:password@files.example.org:443", Flaw.TARGET),
        ("http://files.example.org:443", Flaw.TARGET),
        ("files.example.org:443/", Flaw.TARGET),
        ("files.example.org:443#f", Flaw.TARGET),
        ("files.example.org:443?q", Flaw.TARGET),
        ("files.example.org", Flaw.TARGET),
        ("files.example.org:", Flaw.PORT),
        ("files.example.org:0", Flaw.PORT),
        ("files.example.org:0443", Flaw.PORT),
        ("files.example.org:+443", Flaw.PORT),
        ("files.example.org:65536", Flaw.PORT),
        ("files.example.org:443:443", Flaw.HOST),
        ("files.example.org:443 ", Flaw.REQUEST_LINE),
        (" files.example.org:443", Flaw.REQUEST_LINE),
        ("files.example.org:\t443", Flaw.BYTES),
        ("files.example.org\0:443", Flaw.BYTES),
        ("files.example.org:443\r", Flaw.LINE_END),
        ("files.example.org\r\nx:443", Flaw.REQUEST_LINE),
        ("files.example.org%00:443", Flaw.TARGET),
    ],
)
def test_a_target_with_anything_else_is_malformed(target: str, expected: Flaw) -> None:
    assert flaw(head(target)) is expected


@pytest.mark.case("EGR-13")
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (head().replace(b"\r\n", b"\n"), Flaw.LINE_END),
        (head().replace(b"\r\n", b"\r"), Flaw.LINE_END),
        (head()[:-2] + b"\n", Flaw.LINE_END),
        (head().lower(), Flaw.REQUEST_LINE),
        (b"Connect" + head()[7:], Flaw.REQUEST_LINE),
        (b"\r\n" + head(), Flaw.REQUEST_LINE),
        (b" " + head(), Flaw.REQUEST_LINE),
        (b"GET /\r\n", Flaw.REQUEST_LINE),
        (b"CONNECT files.example.org:443\r\n\r\n", Flaw.REQUEST_LINE),
        (head(version="HTTP/0.9"), Flaw.VERSION),
        (head(version="HTTP/1.2"), Flaw.VERSION),
        (head(version="HTTP/2.0"), Flaw.VERSION),
        (head(version="http/1.1"), Flaw.VERSION),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Flaw.VERSION),
        (b"\x16\x03\x01\x00\xa5\x01", Flaw.BYTES),
        (b"\x04\x01\x01\xbb\x01\x02\x03\x04\x00", Flaw.BYTES),
        (b"\x05\x01\x00", Flaw.BYTES),
        (b"\x80", Flaw.BYTES),
        (head(TARGET, "X-Tab:\tvalue"), Flaw.BYTES),
        (head(TARGET, "X: caf\xe9"), Flaw.BYTES),
        (head(TARGET, "Host: a", " folded"), Flaw.FIELD),
        (head(TARGET, "Host : a"), Flaw.FIELD),
        (head(TARGET, "no colon"), Flaw.FIELD),
        (head(TARGET, ": no name"), Flaw.FIELD),
        (head(TARGET, "Content-Length: 5"), Flaw.BODY),
        (head(TARGET, "Transfer-Encoding: chunked"), Flaw.BODY),
    ],
)
def test_what_could_be_read_in_two_ways_is_malformed(data: bytes, expected: Flaw) -> None:
    assert flaw(data) is expected


@pytest.mark.case("EGR-15")
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "TRACE", "PUT", "M-SEARCH"])
def test_another_method_is_not_allowed(method: str) -> None:
    assert parse(f"{method} http://files.example.org/ HTTP/1.1\r\n".encode())[0] == (
        MethodNotAllowed()
    )


@pytest.mark.case("EGR-16")
def test_a_head_of_the_most_bytes_is_read_and_one_byte_more_is_too_large() -> None:
    room = HEAD_BYTES_MAX - len(head(TARGET, "x: "))
    assert parse(head(TARGET, "x: " + "a" * room)) == (REQUEST, b"")
    assert parse(head(TARGET, "x: " + "a" * (room + 1))) == (TooLarge(), b"")
    parser = ConnectParser()
    assert parser.receive(head()[:-2] + b"x: " + b"a" * (HEAD_BYTES_MAX - len(head()) - 1)) is None
    assert parser.receive(b"") is None
    assert parser.receive(b"a") == TooLarge()


def test_an_end_in_the_middle_is_malformed_and_one_before_the_first_byte_is_nothing() -> None:
    assert ConnectParser().end() is None
    for size in range(1, len(head())):
        parser = ConnectParser()
        assert parser.receive(head()[:size]) is None
        event = parser.end()
        assert isinstance(event, Malformed)
        assert event.flaw is Flaw.INCOMPLETE


def test_bytes_after_the_head_are_kept_as_they_are_and_only_for_a_request() -> None:
    early = bytes(range(256)) + head() + b"GET / HTTP/1.1\r\n\r\n"
    parser = ConnectParser()
    assert parser.receive(head() + early) == REQUEST
    assert parser.receive(b"more") == REQUEST
    assert parser.early == early + b"more"
    assert parse(head(version="HTTP/3") + early)[1] == b""


LINES = st.lists(
    st.sampled_from(
        [
            b"CONNECT files.example.org:443 HTTP/1.1", b"CONNECT 10.0.0.1:1 HTTP/1.1", b"Host: a",
            b"GET / HTTP/1.1", b"X:\t", b"a\rb", b" fold", b"", b"x: " + b"y" * 100,
        ]
    )
    | st.binary(max_size=12),
    max_size=8,
)  # fmt: skip
ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n"])
DOCUMENTS = st.tuples(LINES, ENDS, st.binary(max_size=20)).map(
    lambda parts: parts[1].join((*parts[0], b"")) + parts[2]
) | st.binary(max_size=20).map(lambda tail: head() + tail)


@given(DOCUMENTS, st.lists(st.integers(0, 400)), st.sampled_from([20, 64, 8192]))
def test_no_split_of_the_bytes_changes_the_result(
    data: bytes, cuts: list[int], head_bytes_max: int
) -> None:
    whole = ConnectParser(head_bytes_max=head_bytes_max)
    expected = whole.receive(data)
    for places in (sorted(cuts), range(len(data))):
        split, start = ConnectParser(head_bytes_max=head_bytes_max), 0
        found = None
        for place in (*places, len(data)):
            found = split.receive(data[start:place])
            start = max(start, place)
        assert found == expected
        assert split.early == whole.early
        assert split.end() == whole.end()


@given(DOCUMENTS)
def test_a_request_comes_only_of_a_head_that_a_stricter_reader_takes(data: bytes) -> None:
    event, early = parse(data)
    if isinstance(event, Request):
        text = data[: len(data) - len(early)]
        assert re.fullmatch(
            rb"CONNECT [A-Za-z0-9.-]+:[1-9][0-9]{0,4} HTTP/1\.[01]\r\n"
            rb"(?:[!-9;-~]+:[ -~]*\r\n)*\r\n",
            text,
        )
        assert text + early == data
