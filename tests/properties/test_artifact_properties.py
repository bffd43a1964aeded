"""Generated names, texts and clocks: what holds for all of them."""

import re
import time
from email.message import Message
from itertools import pairwise
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.artifacts.identifiers import ArtifactIds, milliseconds_of
from sbxd.policy.attachment import (
    NAME_BYTES_MAX,
    attachment_headers,
    content_disposition,
    served_name,
)
from sbxd.policy.content_flags import ContentScanner
from sbxd.port.artifact import ARTIFACT_ID_PATTERN, ContentFlag

FULL_WIDTH = "\uff1d\uff0b\uff0d\uff20"
ANY_TEXT = st.text(
    alphabet=st.one_of(
        st.characters(),
        st.characters(categories=["Cs", "Cc", "Cf", "Zl", "Zp"]),
        st.sampled_from(list("/\\:\"'%;*\r\n\x00 .\u202e\u2028")),
    ),
    max_size=400,
)
ANY_BYTES = st.lists(
    st.one_of(
        st.binary(max_size=6),
        st.text(max_size=6).map(lambda text: text.encode("utf-8", "replace")),
        st.sampled_from(
            [b"=", b"+", b"@", b"-", b",", b";", b"\t", b"\r", b"\n", b'"', b" ",
             b"\xef\xbb\xbf", FULL_WIDTH[0].encode(), "\u202e".encode(),
             "\u2028".encode(), b"\x1b", b"\x00", b"\xff"]
        ),
    ),
    max_size=24,
).map(b"".join)  # fmt: skip


@pytest.mark.case("EXP-10")
@given(ANY_TEXT)
def test_any_name_is_served_as_one_short_printable_component(name: str) -> None:
    served = served_name(name)
    assert served
    assert len(served.encode("utf-8")) <= NAME_BYTES_MAX
    assert not re.search(r'[\x00-\x1f\x7f/\\:*?"<>|%;]', served)
    assert served.strip(" .") == served
    assert served_name(served) == served


@pytest.mark.case("EXP-10")
@given(ANY_TEXT, st.text(max_size=60))
def test_any_header_is_one_line_of_ascii_that_parses_back_to_the_served_name(
    name: str, media_type: str
) -> None:
    headers = attachment_headers(name, media_type, 0)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    value = content_disposition(name)
    assert value.startswith('attachment; filename="')
    extended = re.search(r"filename\*=UTF-8''([A-Za-z0-9!#$&+.^_`|~%-]+)\Z", value)
    if extended:
        assert unquote(extended[1]) == served_name(name)
    else:
        message = Message()
        message["Content-Disposition"] = value
        assert message.get_filename() == served_name(name)


def scanned(*pieces: bytes) -> frozenset[ContentFlag]:
    scanner = ContentScanner()
    for piece in pieces:
        scanner.feed(piece)
    return scanner.finish()


@pytest.mark.case("EXP-07", "EXP-08")
@given(ANY_BYTES, st.lists(st.integers(0, 200), max_size=5))
def test_the_flags_do_not_depend_on_how_the_bytes_are_cut(data: bytes, at: list[int]) -> None:
    cuts = [0, *sorted(min(cut, len(data)) for cut in at), len(data)]
    pieces = [data[a:b] for a, b in pairwise(cuts)]
    assert b"".join(pieces) == data
    assert scanned(*pieces) == scanned(data) == scanned(*(bytes([b]) for b in data))


@given(ANY_BYTES)
def test_the_plain_flags_are_what_a_simple_reading_finds(data: bytes) -> None:
    found = scanned(data)
    assert (ContentFlag.NUL in found) == (b"\0" in data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        assert ContentFlag.NOT_UTF8 in found
        return
    assert ContentFlag.NOT_UTF8 not in found
    assert (ContentFlag.BYTE_ORDER_MARK in found) == text.startswith("\ufeff")
    assert (ContentFlag.LONE_CARRIAGE_RETURN in found) == bool(re.search("\r(?!\n)", text))
    lines = {"\u2028", "\u2029", "\x85"}
    assert (ContentFlag.UNICODE_LINE_SEPARATOR in found) == bool(lines & set(text))
    bidi = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    assert (ContentFlag.BIDIRECTIONAL_CONTROL in found) == bool(bidi & set(text))


@pytest.mark.case("EXP-08")
@given(
    st.text(alphabet="\" '", max_size=40), st.sampled_from("=+-@" + FULL_WIDTH), st.text(max_size=5)
)
def test_a_formula_is_found_behind_any_quotes_and_spaces(
    before: str, sign: str, after: str
) -> None:
    for start in ("", "\ufeff", "a,", "a\n", "a\r\n", "a;", "a\t", "a|"):
        assert ContentFlag.FORMULA_LIKE in scanned(f"{start}{before}{sign}{after}".encode())
    assert ContentFlag.FORMULA_LIKE not in scanned(f"a{before}{sign}b".encode())


SLOW_FORMULA = re.compile(
    b"[\n\r,;\t|][\"' ]*(?:[=+\\-@]|\xef\xbc[\x8b\x8d\x9d\xa0])"
    b"|[\n,;|][\"' ]*\t|[,;\t|][\"' ]*\r(?!\n)"
)


@pytest.mark.case("EXP-08")
@given(ANY_BYTES)
def test_the_fast_search_for_formulas_is_the_slow_one(data: bytes) -> None:
    slow = SLOW_FORMULA.search(b"\n" + data.removeprefix(b"\xef\xbb\xbf"))
    assert (ContentFlag.FORMULA_LIKE in scanned(data)) == (slow is not None)


@pytest.mark.parametrize("unit", [b'"', b" ", b",", b'," ', b"\r", b"=", b"\xef\xbb\xbf", b"\xef"])
def test_a_million_of_anything_takes_linear_time(unit: bytes) -> None:
    def seconds(count: int) -> float:
        data = unit * count
        began = time.process_time()
        scanned(*(data[at : at + 65_536] for at in range(0, len(data), 65_536)))
        return time.process_time() - began

    seconds(1000)
    # Quadratic would be a factor of 1024; CPU time, so that a busy machine is no failure.
    assert seconds(2_000_000) < 200 * max(seconds(62_500), 0.001)


@given(
    st.lists(st.integers(-5, 2**48 + 5), min_size=1, max_size=40),
    st.binary(min_size=8, max_size=8),
)
def test_ids_are_uuid7_unique_and_in_order_whatever_the_clock_does(
    times: list[int], chance: bytes
) -> None:
    clock = iter(times)
    ids = ArtifactIds(lambda: next(clock), lambda n: chance[:n])
    made = [ids.new() for _ in times]
    assert all(re.match(ARTIFACT_ID_PATTERN, each) for each in made if len(each) == 36)
    assert made == sorted(set(made))


def test_an_id_has_its_time_and_its_chance() -> None:
    ids = ArtifactIds(lambda: 1_645_557_742_000, lambda n: b"\xff" * n)
    made = ids.new()
    # The time of RFC 9562's example (A.6).
    assert made == "017f22e2-79b0-7000-bfff-ffffffffffff"
    assert milliseconds_of(made) == 1_645_557_742_000
    assert ids.new() == "017f22e2-79b0-7001-bfff-ffffffffffff"


def test_more_ids_in_a_millisecond_than_the_counter_holds_run_into_the_next() -> None:
    ids = ArtifactIds(lambda: 1_645_557_742_000, lambda n: bytes(n))
    made = [ids.new() for _ in range(5000)]
    assert made == sorted(set(made))
    assert milliseconds_of(made[-1]) == 1_645_557_742_001
