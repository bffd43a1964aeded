"""What a reader should know of text: found while it streams by, in one pass and flat memory.

Invariants: the bytes are not altered; the answer does not depend on how they are cut into pieces;
the time is linear in their number, whatever they are. All searches are over bytes, which UTF-8
allows (no character's bytes occur within another's), so text that turns out not to be UTF-8 is
still searched for what a spreadsheet or a terminal would act on. Deliberately absent: a
judgement. Flags are facts; `ContentRule.TEXT` refuses two of them.
"""

import codecs
import re

from sbxd.port.artifact import ContentFlag

REFUSED_AS_TEXT = frozenset({ContentFlag.NUL, ContentFlag.NOT_UTF8})

_UTF8_MARK = b"\xef\xbb\xbf"
_MARKS = (_UTF8_MARK, b"\xff\xfe", b"\xfe\xff")
_LINE_OR_CELL = b"\n\r,;\t|"
_DROPPED_BY_SPREADSHEETS = b"\"' "

# One of these bytes must occur for a flag to be worth the search: finding one byte costs nothing.
_PATTERNS: tuple[tuple[ContentFlag, tuple[bytes, ...], re.Pattern[bytes]], ...] = (
    (ContentFlag.NUL, (b"\x00",), re.compile(b"\x00")),
    (ContentFlag.ESCAPE_SEQUENCE, (b"\x1b", b"\xc2"), re.compile(b"\x1b|\xc2\x9b")),
    (
        ContentFlag.UNICODE_LINE_SEPARATOR,
        (b"\xe2", b"\xc2"),
        re.compile(b"\xe2\x80[\xa8\xa9]|\xc2\x85"),
    ),
    (
        ContentFlag.BIDIRECTIONAL_CONTROL,
        (b"\xd8", b"\xe2"),
        # U+061C; U+200E, 200F, 202A to 202E; U+2066 to 2069
        re.compile(b"\xd8\x9c|\xe2\x80[\x8e\x8f\xaa-\xae]|\xe2\x81[\xa6-\xa9]"),
    ),
    (ContentFlag.LONE_CARRIAGE_RETURN, (b"\r",), re.compile(b"\r(?!\n)")),
)
# CWE-1236: a cell that starts with = + - @ (also full-width), a tab or a return, after the quotes
# and spaces that a spreadsheet drops. For most of it those are dropped here too, all signs are
# made one and all separators but tab and return another; then four pairs of bytes are all.
_SIMPLER = bytes.maketrans(b"+-@,;|", b"===\n\n\n")
_FORMULA_PAIRS = (b"\n=", b"\r=", b"\t=", b"\n\t")
_FORMULA_SIGNS = (b"=", b"+", b"-", b"@", b"\t")
_FULL_WIDTH_CELL = re.compile(b"[\n\r,;\t|][\"' ]*\xef\xbc[\x8b\x8d\x9d\xa0]")
_RETURN_CELL = re.compile(b"[,;\t|][\"' ]*\r(?!\n)")
_LONE_RETURN = re.compile(b"\r(?!\n)")


class ContentScanner:
    """Fed with the pieces of a content in order; `finish` says what was in them."""

    def __init__(self) -> None:
        self._found: set[ContentFlag] = set()
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        # The separator before the cell that the last piece ended in the start of, or nothing.
        # The text's first cell starts as if after a line break.
        self._before = b"\n"
        self._held = b""
        self._begun = False

    def feed(self, data: bytes) -> None:
        """Look at the next piece (any length)."""
        self._judge_encoding(data, last=False)
        data = self._held + data
        if not self._begun and len(data) < len(_UTF8_MARK):
            self._held = data
            return
        whole = len(data) - _unfinished(data)
        self._held = data[whole:]
        self._look(data[:whole])

    def finish(self) -> frozenset[ContentFlag]:
        """The flags of the whole; call once, after the last piece."""
        self._judge_encoding(b"", last=True)
        self._look(self._held)
        return frozenset(self._found)

    def _judge_encoding(self, data: bytes, *, last: bool) -> None:
        if ContentFlag.NOT_UTF8 not in self._found:
            try:
                self._decoder.decode(data, last)
            except UnicodeDecodeError:
                self._found.add(ContentFlag.NOT_UTF8)

    def _look(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            if data.startswith(_MARKS):
                self._found.add(ContentFlag.BYTE_ORDER_MARK)
            data = data.removeprefix(_UTF8_MARK)
        window = self._before + data
        for flag, signs, pattern in _PATTERNS:
            if flag not in self._found and any(s in data for s in signs) and pattern.search(data):
                self._found.add(flag)
        if ContentFlag.FORMULA_LIKE not in self._found and _has_formula(window):
            self._found.add(ContentFlag.FORMULA_LIKE)
        end = window.rstrip(_DROPPED_BY_SPREADSHEETS)[-1:]
        self._before = end if end and end in _LINE_OR_CELL else b""


def _has_formula(window: bytes) -> bool:
    if any(sign in window for sign in _FORMULA_SIGNS):
        simpler = window.translate(_SIMPLER, _DROPPED_BY_SPREADSHEETS)
        if any(pair[:1] in simpler and pair in simpler for pair in _FORMULA_PAIRS):
            return True
    if b"\xef" in window and _FULL_WIDTH_CELL.search(window):
        return True
    lone = b"\r" in window and _LONE_RETURN.search(window)
    return bool(lone and _RETURN_CELL.search(window))


def _unfinished(data: bytes) -> int:
    """How many bytes at the end belong with what follows: a return, or a character's first."""
    if data.endswith(b"\r"):
        return 1
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if length > back else 0
        if byte < 0x80:
            return 0
    return 0


def is_scanned(media_type: str) -> bool:
    """Whether content of this type is text, whose flags are kept."""
    bare = media_type.partition(";")[0].strip().lower()
    return bare.startswith("text/") or bare in {
        "application/csv", "application/json", "application/x-ndjson", "application/yaml",
    }  # fmt: skip
