"""Decoding of a message that says nothing twice.

Theory. msgspec takes the last of two equal keys, silently. A body that is exactly what encoding its
own values gives has no key twice, since a dict has none; that is what our own clients send, and is
found out without a loop in Python. Any other body is walked once.

Invariants: a body with a key twice, in any map of it, or without its `type` is refused before a
message is made of it; the walk looks at VALUES_MAX values at most (some milliseconds), and has a
stack of DEPTH_MAX.
"""

from typing import Any, Final, Generic, TypeVar

import msgspec

DEPTH_MAX: Final = 64
VALUES_MAX: Final = 20_000
_LARGE_BYTES: Final = 16 * 1024
_FEW_VALUES: Final = 64
TAG: Final = "type"

Decoded = TypeVar("Decoded")

_decode_plain = msgspec.msgpack.Decoder().decode
_encode_plain = msgspec.msgpack.Encoder().encode

# By their first byte: how many bytes of length follow, for what that is a length of.
_TEXTS: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BYTES: Final = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_ARRAYS: Final = {0xDC: 2, 0xDD: 4}
_MAPS: Final = {0xDE: 2, 0xDF: 4}
_FIXED: Final = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
    0xCA: 4,
    0xCB: 8,
    0xD4: 2,
    0xD5: 3,
    0xD6: 5,
    0xD7: 9,
    0xD8: 17,
}


class TooManyValues(msgspec.ValidationError):
    """The walk gave up."""


class StrictDecoder(Generic[Decoded]):
    """Decodes messages of one type."""

    def __init__(self, type: Any) -> None:
        """type: a tagged struct, or a union of them."""
        self._decoder: msgspec.msgpack.Decoder[Decoded] = msgspec.msgpack.Decoder(type)

    def decode(self, body: bytes) -> Decoded:
        """The message. Raises msgspec.MsgspecError, ValueError, OverflowError, RecursionError."""
        if TAG not in keys_of(body):
            raise msgspec.ValidationError(f"Object missing required field `{TAG}`")
        return self._decoder.decode(body)


def keys_of(body: bytes) -> "frozenset[str] | dict[str, Any]":
    """The keys of the map that a body is, of which none, in any map of it, is there twice.

    Raises: msgspec.ValidationError for a key that is there twice or is no text, for what is no map
    and for more depth than DEPTH_MAX.
    """
    if len(body) > _LARGE_BYTES:  # a chunk: one long value, which is not to be copied twice
        try:
            return walked(body, values_max=_FEW_VALUES)
        except TooManyValues:
            pass
    try:
        plain = _decode_plain(body)
        if type(plain) is dict and _encode_plain(plain) == body:
            return plain
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        pass  # the walk says what is wrong, or the decoder does
    return walked(body)


def walked(body: bytes, *, values_max: int = VALUES_MAX) -> frozenset[str]:
    """As `keys_of`, whatever the body's form. Raises TooManyValues besides."""
    left = values_max
    top: set[bytes] | None = None
    # Of each array and map that is open: how many items are left, and the keys of a map.
    opened: list[tuple[int, set[bytes] | None]] = []
    place = 0
    while True:
        keys = opened[-1][1] if opened else None
        is_key = keys is not None and opened[-1][0] % 2 == 0
        left -= 1
        if left < 0:
            raise TooManyValues("more values than a message that is not in its shortest form has")
        head = _byte(body, place)
        place += 1
        inner: tuple[int, set[bytes] | None] | None = None
        if 0xA0 <= head <= 0xBF or head in _TEXTS:
            width = _TEXTS.get(head, 0)
            size = _number(body, place, width) if width else head & 0x1F
            text = body[place + width : place + width + size]
            place += width + size
            if is_key and keys is not None:
                if text in keys:
                    raise msgspec.ValidationError(f"the key {ascii(text)[1:40]} is there twice")
                keys.add(text)
        elif is_key:
            raise msgspec.ValidationError("a key is no text")
        elif 0x80 <= head <= 0x8F or head in _MAPS:
            width = _MAPS.get(head, 0)
            size = _number(body, place, width) if width else head & 0x0F
            place += width
            inner = (2 * size, set())
        elif 0x90 <= head <= 0x9F or head in _ARRAYS:
            width = _ARRAYS.get(head, 0)
            size = _number(body, place, width) if width else head & 0x0F
            place += width
            inner = (size, None)
        elif head in _BYTES:
            width, more = _BYTES[head]
            place += width + more + _number(body, place, width)
        elif 0x7F < head < 0xE0:
            if head not in _FIXED:
                raise msgspec.DecodeError("not a value")
            place += _FIXED[head]
        if place > len(body):
            raise msgspec.DecodeError("the message ends within a value")
        if top is None:
            if inner is None or inner[1] is None:
                raise msgspec.ValidationError("a message is a map")
            top = inner[1]
        else:
            opened[-1] = (opened[-1][0] - 1, opened[-1][1])
        if inner is not None:
            if len(opened) == DEPTH_MAX:
                raise msgspec.ValidationError("a message is too deep")
            opened.append(inner)
        while opened and not opened[-1][0]:
            opened.pop()
        if not opened:
            return frozenset(key.decode("utf-8", "backslashreplace") for key in top)


def _byte(body: bytes, place: int) -> int:
    if place >= len(body):
        raise msgspec.DecodeError("the message ends within a value")
    return body[place]


def _number(body: bytes, place: int, width: int) -> int:
    return int.from_bytes(body[place : place + width], "big")
