"""The steward's frames: every frame returns to itself, nothing else is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.steward import frames
from sbxd.steward.frames import FrameError

U64 = st.integers(0, 2**64 - 1)
COMPONENT = st.binary(min_size=1, max_size=255).filter(
    lambda raw: b"/" not in raw and b"\0" not in raw and raw not in (b".", b"..")
)
PATH = st.one_of(
    st.just(b"."), st.lists(COMPONENT, min_size=1, max_size=8).map(lambda parts: b"/".join(parts))
)
ENTRY_PATH = PATH.filter(lambda path: path != b".")
STAMP = st.binary(min_size=frames.STAMP_BYTES, max_size=frames.STAMP_BYTES)
MAXIMUM = st.integers(0, frames.ENTRIES_MAX)
DATA = st.binary(min_size=1, max_size=200)

REQUESTS: st.SearchStrategy[frames.Request] = st.one_of(
    st.builds(frames.Stop),
    st.builds(frames.Snapshot),
    st.builds(frames.Changes, MAXIMUM, U64),
    st.builds(frames.Read, U64, U64, st.integers(0, frames.READ_BYTES_MAX), STAMP, PATH),
    st.builds(frames.Begin, U64, PATH),
    st.builds(frames.Piece, U64, st.binary(max_size=200)),
    st.builds(frames.Commit, U64),
    st.builds(frames.Abandon, U64),
    st.builds(frames.List, st.integers(1, frames.ENTRIES_MAX), U64, st.binary(max_size=255), PATH),
    st.builds(frames.Provenance, PATH),
    st.builds(frames.Usage),
)
REPLIES: st.SearchStrategy[frames.Reply] = st.one_of(
    st.builds(frames.Opened, U64, STAMP),
    st.builds(frames.Data, DATA),
    st.builds(
        frames.Entry,
        st.sampled_from(frames.Kind),
        U64,
        st.one_of(st.none(), st.binary(min_size=32, max_size=32)),
        ENTRY_PATH,
    ),
    st.builds(frames.End, st.sampled_from(frames.Status), st.booleans(), U64, U64),
)


def body(raw: bytes) -> bytes:
    head, rest = raw[:4], raw[4:]
    assert frames.body_length(head) == len(rest)
    return rest


@given(request=REQUESTS)
def test_a_request_returns_to_itself(request: frames.Request) -> None:
    assert frames.decode_request(body(frames.encode(request))) == request


@given(reply=REPLIES)
def test_a_reply_returns_to_itself(reply: frames.Reply) -> None:
    assert frames.decode_reply(body(frames.encode(reply))) == reply


@given(reply=REPLIES, request=REQUESTS)
def test_neither_side_accepts_the_others_frames(
    reply: frames.Reply, request: frames.Request
) -> None:
    with pytest.raises(FrameError):
        frames.decode_request(body(frames.encode(reply)))
    with pytest.raises(FrameError):
        frames.decode_reply(body(frames.encode(request)))


@given(raw=st.binary(max_size=300))
def test_any_bytes_are_a_frame_that_encodes_back_or_refused(raw: bytes) -> None:
    for decode in (frames.decode_request, frames.decode_reply):
        try:
            frame = decode(raw)
        except FrameError:
            continue
        again = body(frames.encode(frame))
        assert decode(again) == frame


@given(head=st.binary(min_size=4, max_size=4))
def test_a_length_is_within_the_cap_or_refused(head: bytes) -> None:
    try:
        length = frames.body_length(head)
    except FrameError:
        assert not 1 <= int.from_bytes(head, "big") <= frames.FRAME_BYTES_MAX
    else:
        assert 1 <= length <= frames.FRAME_BYTES_MAX


@pytest.mark.parametrize(
    "path",
    [
        *(b"", b"/", b"/a", b"a/", b"a//b", b".", b"..", b"a/../b", b"./a", b"a\0"),
        b"x" * 256,
        b"/".join([b"x" * 255] * 17),
    ],
)
def test_an_entry_that_names_no_entry_is_refused(path: bytes) -> None:
    head = body(frames.encode(frames.Entry(frames.Kind.CREATED, 0, None, b"a")))[:-1]
    assert frames.decode_reply(head + b"a/b")
    with pytest.raises(FrameError):
        frames.decode_reply(head + path)


def test_data_above_the_cap_are_refused() -> None:
    whole = frames.Data(bytes(frames.DATA_BYTES_MAX))
    assert frames.decode_reply(body(frames.encode(whole))) == whole
    with pytest.raises(FrameError):
        frames.encode(frames.Data(bytes(frames.FRAME_BYTES_MAX)))
    with pytest.raises(FrameError):
        frames.decode_reply(bytes((frames.Verb.DATA,)) + bytes(frames.DATA_BYTES_MAX + 1))
