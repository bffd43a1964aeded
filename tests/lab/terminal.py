"""Joins a person's terminal to a shell in a lane.

Invariant: the person's terminal is put back as it was, however the shell ends.
"""

import json
import os
import selectors
import signal
import sys
import termios
import tty
from types import FrameType

from .channel import Decoder, Frame, Kind
from .host import LabError
from .session import Lane


def shell(lane: Lane, argv: list[str]) -> int:
    """Run `argv` on a terminal of the lane until it ends; returns its exit status."""
    if not sys.stdin.isatty():
        raise LabError("a shell needs a terminal: give a command instead")
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    with lane.connect() as connection:
        term = os.environ.get("TERM", "xterm")
        request = lane.request(argv, terminal=True, TERM=term)
        connection.sendall(Frame(Kind.RUN, 0, request).encode())

        def resized(number: int, frame: FrameType | None) -> None:
            size = os.get_terminal_size(keyboard)
            payload = json.dumps({"rows": size.lines, "columns": size.columns}).encode()
            connection.sendall(Frame(Kind.RESIZE, 0, payload).encode())

        resized(0, None)
        signal.signal(signal.SIGWINCH, resized)
        decoder = Decoder()
        selector = selectors.DefaultSelector()
        selector.register(keyboard, selectors.EVENT_READ)
        selector.register(connection, selectors.EVENT_READ)
        tty.setraw(keyboard)
        try:
            while True:
                for key, _ in selector.select():
                    if key.fd == keyboard:
                        typed = os.read(keyboard, 4096)
                        connection.sendall(Frame(Kind.STDIN, 0, typed).encode())
                        continue
                    data = connection.recv(65536)
                    if not data:
                        raise LabError("the lane ended")
                    for frame in decoder.feed(data):
                        if frame.kind is Kind.STDOUT:
                            os.write(1, frame.payload)
                        elif frame.kind is Kind.EXIT:
                            return int(json.loads(frame.payload)["status"])
                        elif frame.kind is Kind.REFUSED:
                            raise LabError(json.loads(frame.payload)["reason"])
        finally:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
