"""A program's output on the operator's terminal: shown, and never acted on.

Invariants: where a stream is a terminal, of a program's bytes only newline, tab and carriage return
act on it; everything else that is no printable character of UTF-8 is written as an escape
(`\\x1b`, `\\u202e`, `\\xff`), whatever the pieces that it comes in. So a program has no style, no
cursor and no question that the terminal answers, and can return to the beginning of its own line
alone. sbxctl's lines begin on a line of their own and are the only ones with a style; a terminal
that has none shows a program's lines behind a gutter. Where a stream is a pipe or a file, and with
`--raw`, the bytes go out as they are.
"""

import codecs
import re
import sys
import unicodedata
from collections.abc import Callable
from os import get_terminal_size
from typing import TextIO, final

from sbxd.wire.messages import OutputStream

GUTTER = "| "
TAB_COLUMNS = 8
_DUBIOUS = re.compile(r"[^\n\r\t -~]")


def visible(text: str) -> str:
    """The text with everything escaped but what is printable, spaces, newlines, tabs and carriage
    returns."""
    return _DUBIOUS.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    if char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    return ascii(char)[1:-1]


@final
class Decoder:
    """The bytes of one stream as visible text. What a piece ends in the middle of is held back."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def feed(self, data: bytes) -> str:
        return visible(self._decoder.decode(data))

    def finish(self) -> str:
        """What was held back; the next piece begins anew."""
        held = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return visible(held)


@final
class Gutter:
    """Puts GUTTER before each line of visible text, and breaks the lines, so that nothing of it
    stands in a terminal's first column. columns: those of the terminal, asked for each piece."""

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0

    def feed(self, text: str) -> str:
        shown = []
        room = max(1, self._columns() - len(GUTTER) - 1)
        for char in text:
            # No terminal shows a character in more than two columns.
            width = TAB_COLUMNS if char == "\t" else 1 if char.isascii() else 2
            if char not in "\r\n" and self._column and self._column + width > room:
                shown.append("\n")
                self._column = 0
            if not self._column:
                shown.append(GUTTER)
            shown.append(char)
            self._column = 0 if char in "\r\n" else self._column + width
        return "".join(shown)


@final
class Output:
    """Where the output of programs goes: to our own streams, as it comes.

    raw: the bytes as they are, also to a terminal. styled: whether the terminal shows our own
    lines in a style, which nothing of a program's can have; where it does not, there is a gutter.
    """

    def __init__(self, *, raw: bool, styled: bool) -> None:
        self._decoders = {
            stream: Decoder() for stream in OutputStream if not raw and _sink(stream).isatty()
        }
        self._gutter = None if styled else Gutter(_columns)
        self._unended: TextIO | None = None

    def write(self, stream: OutputStream, data: bytes) -> None:
        """One piece of any length."""
        sink = _sink(stream)
        if stream in self._decoders:
            self._show(sink, self._decoders[stream].feed(data))
        else:
            sink.buffer.write(data)
            sink.buffer.flush()

    def end(self) -> None:
        """The program has ended: what follows on a terminal begins on a line of its own."""
        for stream, decoder in self._decoders.items():
            self._show(_sink(stream), decoder.finish())
        if self._unended is not None:
            self._show(self._unended, "\n")

    def _show(self, sink: TextIO, text: str) -> None:
        if not text:
            return
        self._unended = None if text.endswith("\n") else sink
        shown = text if self._gutter is None else self._gutter.feed(text)
        sink.buffer.write(shown.encode(sink.encoding, "backslashreplace"))
        sink.buffer.flush()


def _sink(stream: OutputStream) -> TextIO:
    return sys.stdout if stream is OutputStream.STDOUT else sys.stderr


def _columns() -> int:
    """Of the terminal that either stream is; 80 where it does not say."""
    for stream in OutputStream:
        if _sink(stream).isatty():
            return get_terminal_size(_sink(stream).fileno()).columns or 80
    return 80
