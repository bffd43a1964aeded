"""Frames: a 4-byte big-endian length, then that many bytes.

Invariants: a length is compared with the cap before one byte of its body is kept, so a peer can
never make us hold more than one frame and the piece that completed it. A length of zero is
refused: no message is that short. Deliberately absent: any notion of what a frame means.
"""

import struct

from sbxd.wire.errors import LocalProtocolError, RemoteProtocolError

HEADER = struct.Struct(">I")
HEADER_BYTES = HEADER.size


def encode_frame(body: bytes, *, frame_bytes_max: int) -> bytes:
    """Put the length before a body.

    Raises: LocalProtocolError when the body is empty or longer than frame_bytes_max.
    """
    if not 0 < len(body) <= frame_bytes_max:
        raise LocalProtocolError(
            f"a frame of {len(body)} bytes is not between 1 and {frame_bytes_max}"
        )
    return HEADER.pack(len(body)) + body


class FrameDecoder:
    """Cuts a stream of bytes into frames, however the bytes arrive.

    Use: `feed` one piece, then call `next_frame` until it returns None, then feed the next.
    Under that discipline `buffered_bytes` never exceeds `HEADER_BYTES + frame_bytes_max` plus
    the length of the last piece; a caller that feeds without draining gets LocalProtocolError.
    """

    def __init__(self, *, frame_bytes_max: int) -> None:
        """frame_bytes_max: the longest body that is accepted, 1 to 2**32 - 1."""
        if not 1 <= frame_bytes_max < 2**32:
            raise ValueError("frame_bytes_max is between 1 and 2**32 - 1")
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()
        self._start = 0

    @property
    def buffered_bytes(self) -> int:
        """How many received bytes have not yet been returned as a frame."""
        return len(self._buffer) - self._start

    @property
    def frame_bytes_max(self) -> int:
        return self._frame_bytes_max

    def raise_cap(self, frame_bytes_max: int) -> None:
        """Accept longer frames from now on (after the greeting). Never lowers the cap."""
        self._frame_bytes_max = max(self._frame_bytes_max, frame_bytes_max)

    def feed(self, data: bytes) -> None:
        """Add received bytes.

        Raises: RemoteProtocolError when the header at hand announces an illegal length (the
        bytes are then dropped); LocalProtocolError when a whole frame is still waiting here.
        """
        if self.buffered_bytes > HEADER_BYTES + self._frame_bytes_max:
            raise LocalProtocolError("received bytes are fed faster than frames are taken")
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data
        self._announced_length()

    def next_frame(self) -> bytes | None:
        """Take the next whole frame's body, or None when more bytes are needed.

        Raises: RemoteProtocolError when the next header announces an illegal length.
        """
        length = self._announced_length()
        if length is None or self.buffered_bytes < HEADER_BYTES + length:
            return None
        start = self._start + HEADER_BYTES
        body = bytes(memoryview(self._buffer)[start : start + length])
        self._start = start + length
        if self._start == len(self._buffer):
            self.clear()
        return body

    def clear(self) -> None:
        """Forget everything received."""
        self._buffer = bytearray()
        self._start = 0

    def _announced_length(self) -> int | None:
        if self.buffered_bytes < HEADER_BYTES:
            return None
        (length,) = HEADER.unpack_from(self._buffer, self._start)
        if not 0 < length <= self._frame_bytes_max:
            self.clear()
            raise RemoteProtocolError(
                f"a frame of {length} bytes is not between 1 and {self._frame_bytes_max}"
            )
        return int(length)
