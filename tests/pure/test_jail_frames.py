"""The frames of init's channel: every frame survives the way, and nothing else is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.jail import frames
from sbxd.jail.frames import (
    Door,
    Exited,
    Filter,
    Frame,
    FrameError,
    Kill,
    Limit,
    Park,
    Parked,
    Port,
    Quiet,
    Ready,
    Run,
    RunFailed,
    Started,
    Which,
    decode,
    encode,
)

numbers = st.integers(0, 2**32 - 1)
signed = st.integers(-(2**31), 2**31 - 1)
words = st.binary(max_size=40).filter(lambda word: b"\0" not in word)
steps = st.text("abcdefghijklmnopqrstuvwxyz_.", max_size=30)
legal_frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Park, numbers),
    st.builds(Parked, numbers),
    st.builds(Started, numbers),
    st.builds(Exited, numbers, signed),
    st.builds(RunFailed, numbers, signed, steps),
    st.just(Ready()),
    st.builds(Kill, numbers),
    st.builds(Quiet, numbers),
    st.builds(Limit, numbers),
    st.builds(Port, st.integers(0, 1)),
    st.builds(Door, st.sampled_from(Which)),
    st.builds(
        Run,
        numbers,
        words,
        st.lists(words, min_size=1, max_size=6).map(tuple),
        st.lists(words, max_size=6).map(tuple),
        words,
    ),
)


@given(legal_frames)
def test_a_frame_survives_the_way(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_frame_error(raw: bytes) -> None:
    try:
        frame = decode(raw)
    except FrameError:
        return
    assert encode(frame) == raw


@given(legal_frames, st.data())
def test_a_frame_that_is_cut_is_refused(frame: Frame, data: st.DataObject) -> None:
    raw = encode(frame)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(FrameError):
        decode(raw[:cut])


@given(legal_frames, st.binary(min_size=1, max_size=8))
def test_a_frame_with_more_behind_it_is_refused(frame: Frame, more: bytes) -> None:
    with pytest.raises(FrameError):
        decode(encode(frame) + more)


@given(st.integers(12, 255), st.binary(max_size=20))
def test_an_unknown_verb_is_refused(verb: int, rest: bytes) -> None:
    with pytest.raises(FrameError):
        decode(bytes([verb]) + rest)


@given(st.binary(min_size=8, max_size=64).filter(lambda program: len(program) % 8 == 0))
def test_a_filter_survives_the_way_whole(program: bytes) -> None:
    raw = encode(Filter(program))
    assert decode(raw) == Filter(program)
    for cut in (raw[:-1], raw + b"x", raw[:5]):
        with pytest.raises(FrameError):
            decode(cut)


def test_no_argument_at_all_is_refused() -> None:
    raw = encode(Run(1, b".", (b"true",), (), b"/bin"))
    assert decode(raw)
    with pytest.raises(FrameError):
        decode(raw[:5] + b"\0\0\0\0" + b".\0/bin\0")


@pytest.mark.parametrize(
    "frame",
    [
        Run(1, b"a\0b", (b"true",), (), b"/bin"),
        Run(1, b".", (b"tr\0ue",), (), b"/bin"),
        Run(1, b".", (b"true",), (b"A=\0",), b"/bin"),
        Run(1, b".", (b"true",), (), b"/bin\0"),
        RunFailed(1, 2, "st\0ep"),
    ],
)
def test_a_nul_byte_is_not_encoded(frame: Frame) -> None:
    with pytest.raises(FrameError):
        encode(frame)


def test_a_frame_above_the_cap_is_not_encoded_and_one_at_the_cap_is() -> None:
    empty = len(encode(Run(1, b"", (b"",), (), b"")))
    room = frames.FRAME_BYTES_MAX - empty
    at_cap = Run(1, b"", (b"x" * room,), (), b"")
    assert len(encode(at_cap)) == frames.FRAME_BYTES_MAX
    with pytest.raises(FrameError):
        encode(Run(1, b"", (b"x" * (room + 1),), (), b""))


@pytest.mark.parametrize(
    "frame", [Run(1, b".", (), (), b""), Run(1, b".", (b"x",) * 65_536, (), b"")]
)
def test_a_count_that_is_no_count_is_not_encoded(frame: Frame) -> None:
    with pytest.raises(FrameError):
        encode(frame)


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_number_out_of_range_is_not_encoded(number: int) -> None:
    with pytest.raises(FrameError):
        encode(Park(number))


def test_a_step_that_is_not_ascii_is_refused() -> None:
    raw = encode(RunFailed(1, 2, "abc")).replace(b"abc", b"\xff\xff\xff")
    with pytest.raises(FrameError):
        decode(raw)
