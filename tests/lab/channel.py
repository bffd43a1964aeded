"""The frames between a lane's agent, its keeper and the programs that use the lane.

One stream carries any number of commands: a frame is a kind, the number of its command and at
most `LARGEST` bytes. Sans-IO: bytes in, frames out. The agent's side runs on the lane's Python
and the keeper's on the host's, so this is standard library only.

Invariants: bytes of output are never changed or joined across streams; each command gets exactly
one EXIT or REFUSED, after all its output.
"""

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = struct.Struct("!IBI")
LARGEST = 1 << 20


class Kind(enum.IntEnum):
    """Who sends what: the first group goes towards the lane, the second comes from it."""

    RUN = 1  # JSON: argv, directory, environment, terminal
    STDIN = 2  # for a command on a terminal; others read nothing
    RESIZE = 3  # JSON: rows, columns
    KILL = 4  # the command and all that it started
    STOP = 5  # to the keeper alone: end the lane

    HELLO = 16  # the agent is there
    STDOUT = 17
    STDERR = 18
    EXIT = 19  # JSON: status (128 + n for signal n)
    REFUSED = 20  # JSON: reason


@dataclass(frozen=True)
class Frame:
    kind: Kind
    command: int
    payload: bytes = b""

    def encode(self) -> bytes:
        return _HEADER.pack(len(self.payload), self.kind, self.command) + self.payload


class Broken(Exception):
    """The stream holds something that is no frame."""


class Decoder:
    """Cuts a stream of bytes into frames, however it is split."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            length, kind, command = _HEADER.unpack_from(self._buffer)
            if length > LARGEST:
                raise Broken(f"a frame of {length} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            try:
                yield Frame(Kind(kind), command, payload)
            except ValueError as error:
                raise Broken(f"a frame of kind {kind}") from error
