"""A client of the orchestration bridge, for a script that runs inside an environment.

    from bridge_client import Bridge

    with Bridge() as bridge:
        answer = bridge.call(b"whatever the worker's handler understands")

Standard library alone, Python 3.8 or later: copy it into the workspace. The token is good for one
connection, so make one Bridge and keep it. A call waits for as long as the worker takes; the
command's own time goes on meanwhile.
"""

import os
import socket
import struct


class BridgeRefused(Exception):
    """The daemon refused the connection: NO_TOKEN, WRONG_TOKEN or TOKEN_USED."""


class Bridge:
    """One connection. Raises OSError where the command has no bridge, BridgeRefused, and
    ConnectionError when the worker has closed."""

    def __init__(self) -> None:
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._end.connect(os.environ.get("SBX_BRIDGE_SOCKET", "/dev/sbx-bridge"))
            answer = self.call(os.environ.get("SBX_BRIDGE_TOKEN", "none").encode())
            if answer != b"ACCEPTED":
                raise BridgeRefused(answer.decode().replace("REFUSED ", ""))
        except BaseException:
            self._end.close()
            raise

    def call(self, frame: bytes) -> bytes:
        """Send one frame (1 byte to 256 KiB) and wait for the answer to it."""
        self._end.sendall(struct.pack(">I", len(frame)) + frame)
        (length,) = struct.unpack(">I", self._receive(4))
        return self._receive(length)

    def _receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            piece = self._end.recv(size - len(received))
            if not piece:
                raise ConnectionError("the worker has closed the bridge")
            received += piece
        return received

    def __enter__(self) -> "Bridge":
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()


if __name__ == "__main__":
    import sys

    with Bridge() as connection:
        for word in sys.argv[1:]:
            sys.stdout.buffer.write(connection.call(os.fsencode(word)) + b"\n")
