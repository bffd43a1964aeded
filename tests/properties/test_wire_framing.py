"""Frames come out the same however the bytes arrive, and a length is judged before its body."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.wire.errors import LocalProtocolError, RemoteProtocolError
from sbxd.wire.framing import HEADER, HEADER_BYTES, FrameDecoder, encode_frame

CAP = 64


def drain(decoder: FrameDecoder) -> list[bytes]:
    frames = []
    while (frame := decoder.next_frame()) is not None:
        frames.append(frame)
    return frames


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


bodies = st.lists(st.binary(min_size=1, max_size=CAP), max_size=6)


@given(bodies, st.lists(st.integers(min_value=0), max_size=20))
def test_any_split_of_the_bytes_gives_the_same_frames(frames: list[bytes], cuts: list[int]) -> None:
    data = b"".join(encode_frame(frame, frame_bytes_max=CAP) for frame in frames)
    decoder = FrameDecoder(frame_bytes_max=CAP)
    received = []
    for piece in split(data, cuts):
        decoder.feed(piece)
        assert decoder.buffered_bytes <= HEADER_BYTES + CAP + len(piece)
        received += drain(decoder)
    assert received == frames
    assert decoder.buffered_bytes == 0


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_arbitrary_bytes_give_frames_or_a_remote_error_and_never_more_than_the_cap(
    pieces: list[bytes],
) -> None:
    decoder = FrameDecoder(frame_bytes_max=CAP)
    for piece in pieces:
        try:
            decoder.feed(piece)
            assert all(0 < len(frame) <= CAP for frame in drain(decoder))
        except RemoteProtocolError:
            assert decoder.buffered_bytes == 0
            return
        assert decoder.buffered_bytes <= HEADER_BYTES + CAP


@pytest.mark.parametrize("length", [0, CAP + 1, 2**31, 2**32 - 1])
def test_an_illegal_length_is_refused_before_its_body_arrives(length: int) -> None:
    decoder = FrameDecoder(frame_bytes_max=CAP)
    with pytest.raises(RemoteProtocolError):
        decoder.feed(HEADER.pack(length))
    assert decoder.buffered_bytes == 0


def test_the_longest_legal_length_is_accepted() -> None:
    decoder = FrameDecoder(frame_bytes_max=CAP)
    decoder.feed(HEADER.pack(CAP) + b"x" * CAP)
    assert drain(decoder) == [b"x" * CAP]


def test_an_illegal_length_behind_a_legal_frame_is_refused_after_that_frame() -> None:
    decoder = FrameDecoder(frame_bytes_max=CAP)
    decoder.feed(encode_frame(b"first", frame_bytes_max=CAP) + HEADER.pack(CAP + 1))
    assert decoder.next_frame() == b"first"
    with pytest.raises(RemoteProtocolError):
        decoder.next_frame()


def test_feeding_without_taking_frames_is_a_bug_of_the_caller() -> None:
    decoder = FrameDecoder(frame_bytes_max=CAP)
    decoder.feed(encode_frame(b"x" * CAP, frame_bytes_max=CAP) * 3)
    with pytest.raises(LocalProtocolError):
        decoder.feed(b"more")


@pytest.mark.parametrize("body", [b"", b"x" * (CAP + 1)])
def test_a_body_that_the_peer_would_refuse_is_not_framed(body: bytes) -> None:
    with pytest.raises(LocalProtocolError):
        encode_frame(body, frame_bytes_max=CAP)


def test_raising_the_cap_never_lowers_it() -> None:
    decoder = FrameDecoder(frame_bytes_max=CAP)
    decoder.raise_cap(1)
    assert decoder.frame_bytes_max == CAP
    decoder.raise_cap(CAP * 2)
    decoder.feed(HEADER.pack(CAP * 2))
