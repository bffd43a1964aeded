"""What of an output goes back to a model: all of it, or its head and its tail.

Invariants: pure; the text that is given is at most `limit_bytes` long as UTF-8 whatever the bytes
were (a byte that is no UTF-8 becomes U+FFFD, which is three); no character is cut in two; the
mark in the middle says how much is missing.
"""

# Room for the mark that `shorten` puts into the middle.
MARK_BYTES_MAX = 256


def split_limit(stdout_bytes: int, stderr_bytes: int, limit_bytes: int) -> tuple[int, int]:
    """How much of one limit each of two streams gets: half, and what the other leaves over."""
    half = limit_bytes // 2
    for_stderr = min(stderr_bytes, max(half, limit_bytes - stdout_bytes))
    return limit_bytes - for_stderr, for_stderr


def as_text(data: bytes) -> str:
    """Output as text; what is no UTF-8 is replaced."""
    return data.decode("utf-8", "replace")


def fits(text: str, limit_bytes: int) -> bool:
    return len(text) <= limit_bytes and len(text.encode()) <= limit_bytes


def shorten(text: str, limit_bytes: int, *, where: str) -> str:
    """The head and the tail of a text, with a mark between them.

    Args:
        limit_bytes: of the whole result as UTF-8; at least 2 * MARK_BYTES_MAX.
        where: what the mark says of the rest, at most 128 bytes.
    """
    if fits(text, limit_bytes):
        return text
    encoded = text.encode()
    room = limit_bytes - MARK_BYTES_MAX
    head = _whole_characters_from_start(encoded[: room - room // 2])
    tail = _whole_characters_to_end(encoded[len(encoded) - room // 2 :])
    left_out = len(encoded) - len(head) - len(tail)
    mark = f"\n[... {left_out} bytes left out: {where} ...]\n"
    assert len(mark.encode()) <= MARK_BYTES_MAX
    return head.decode() + mark + tail.decode()


def _whole_characters_from_start(data: bytes) -> bytes:
    return data.decode("utf-8", "ignore").encode()


def _whole_characters_to_end(data: bytes) -> bytes:
    start = 0
    while start < len(data) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
