"""The server name of a ClientHello, of a TLS library's and of ones made byte by byte."""

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.egress.sni import HELLO_BYTES_MAX, Hello, HelloFlaw, HelloReader
from tests.egress.hello import client_hello, extension, message, records, server_name

NAME = "files.example.org"
FOUND = Hello(server_name=NAME)


def read(data: bytes) -> Hello | HelloFlaw | None:
    return HelloReader().receive(data)


def of_the_library(name: str | None) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@pytest.mark.case("EGR-18")
def test_the_name_in_the_hello_of_a_tls_library_is_read() -> None:
    assert read(of_the_library(NAME)) == FOUND
    assert read(of_the_library(NAME.upper())) == FOUND
    assert read(of_the_library(None)) is HelloFlaw.NO_NAME


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_hello_in_many_records_is_read(size: int) -> None:
    assert read(records(message(server_name(NAME.encode())), size)) == FOUND


def test_what_follows_the_hello_in_later_records_is_kept_and_not_read() -> None:
    reader = HelloReader()
    data = client_hello(NAME) + b"\x14\x03\x03\x00\x01\x01"
    assert reader.receive(data) == FOUND
    assert reader.held == data


@pytest.mark.parametrize(
    ("data", "flaw"),
    [
        (records(message(None)), HelloFlaw.NO_NAME),
        (records(message(b"")), HelloFlaw.NO_NAME),
        (b"GET / HTTP/1.1\r\n\r\n", HelloFlaw.NOT_TLS),
        (b"\x16\x02", HelloFlaw.NOT_TLS),
        (b"\x80\x2e\x01\x03\x01", HelloFlaw.NOT_TLS),  # SSL 2
        (b"\x15\x03\x01\x00\x02\x02\x28", HelloFlaw.NOT_TLS),
        (records(b"\x02" + message(None)[1:]), HelloFlaw.NOT_TLS),
        (b"\x16\x03\x01\x00\x00", HelloFlaw.NOT_TLS),  # an empty record
        (b"\x16\x03\x01\xff\xff", HelloFlaw.NOT_TLS),
        (records(b"\x01\xff\xff\xff" + b"x" * 40), HelloFlaw.NOT_TLS),
        (records(message(server_name(NAME.encode())) + b"x"), HelloFlaw.NOT_TLS),
        (records(message(server_name(NAME.encode()) * 2)), HelloFlaw.NOT_TLS),
        (records(message(server_name(NAME.encode(), b"b.example"))), HelloFlaw.NOT_TLS),
        (records(message(server_name(NAME.encode(), kind=1))), HelloFlaw.NOT_TLS),
        (records(message(server_name(b"caf\xe9.example"))), HelloFlaw.NOT_TLS),
        (records(message(extension(0, b""))), HelloFlaw.NOT_TLS),
        (records(message(extension(0, b"\0\0"))), HelloFlaw.NOT_TLS),
        (records(message(b"\0\0\0\xff")), HelloFlaw.NOT_TLS),
        (records(b"\x01\0\0\x02\x03\x03"), HelloFlaw.NOT_TLS),
    ],
)
def test_what_no_server_should_read_has_no_name(data: bytes, flaw: HelloFlaw) -> None:
    assert read(data) is flaw


def test_another_record_between_two_parts_of_the_hello_is_refused() -> None:
    whole = message(server_name(NAME.encode()))
    assert read(records(whole[:20]) + records(whole[20:])) == FOUND
    alert = b"\x15\x03\x01\x00\x02\x01\x00"
    assert read(records(whole[:20]) + alert + records(whole[20:])) is HelloFlaw.NOT_TLS


def test_a_hello_that_never_ends_is_given_up() -> None:
    reader, record = HelloReader(), b"\x16\x03\x01\x00\x01"
    assert reader.receive(record + b"\x01" + record + b"\x00") is None
    assert reader.receive(record + b"\x80" + record + b"\x00") is HelloFlaw.NOT_TLS
    reader = HelloReader()
    assert reader.receive(records(message(None)[:8])) is None
    assert reader.receive((record + b"x") * (HELLO_BYTES_MAX // 6 + 1)) is HelloFlaw.NOT_TLS


def test_the_outer_name_counts_with_encrypted_client_hello() -> None:
    hello = records(message(extension(0xFE0D, b"\0" * 40) + server_name(NAME.encode())))
    assert read(hello) == FOUND


@given(
    st.sampled_from([client_hello(NAME), client_hello(None), records(message(b"\0\0\0\xff"))])
    | st.binary(max_size=40),
    st.binary(max_size=10),
)
def test_no_split_changes_the_result(data: bytes, tail: bytes) -> None:
    whole, split = HelloReader(), HelloReader()
    expected = whole.receive(data + tail)
    found = None
    for byte in data + tail:
        found = split.receive(bytes([byte]))
    assert found == expected
    assert split.held == whole.held == data + tail


@given(st.data())
def test_a_damaged_hello_is_read_or_refused_and_never_an_error(data: st.DataObject) -> None:
    hello = bytearray(client_hello(NAME))
    place = data.draw(st.integers(0, len(hello) - 1))
    hello[place] = data.draw(st.integers(0, 255))
    assert read(bytes(hello)) is None or isinstance(read(bytes(hello)), Hello | HelloFlaw)
