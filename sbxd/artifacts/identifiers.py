"""Artifact ids: UUIDv7 (RFC 9562), made here because Python has them from 3.14 on only.

Invariants: ids of one generator never repeat and sort in the order in which they were made, also
within a millisecond and when the clock goes back; 62 bits of each are random. Clock and randomness
are the caller's.
"""

import threading
from collections.abc import Callable
from typing import final

from sbxd.port.artifact import ArtifactId

_COUNTER_BITS = 12
_RANDOM_BYTES = 8
_MILLISECONDS_MAX = (1 << 48) - 1


@final
class ArtifactIds:
    """Makes ids. Safe to call from several threads.

    Args:
        milliseconds: wall time since the epoch.
        random: that many random bytes, fit for secrets (`secrets.token_bytes`).
    """

    def __init__(self, milliseconds: Callable[[], int], random: Callable[[int], bytes]) -> None:
        self._milliseconds = milliseconds
        self._random = random
        self._last = 0
        self._lock = threading.Lock()

    def new(self) -> ArtifactId:
        """The next id: time, then a counter that starts anew each millisecond, then chance."""
        with self._lock:
            now = min(max(self._milliseconds(), 0), _MILLISECONDS_MAX)
            # Method 1 of RFC 9562, 6.2: time and counter are one number that only grows; an
            # overflow of the counter runs into the next millisecond.
            self._last = max(now << _COUNTER_BITS, self._last + 1)
            ordered = self._last
        chance = int.from_bytes(self._random(_RANDOM_BYTES), "big") >> 2
        value = (ordered >> _COUNTER_BITS) << 80
        value |= 0x7 << 76 | (ordered & ((1 << _COUNTER_BITS) - 1)) << 64
        value |= 0b10 << 62 | chance
        text = f"{value:032x}"
        return ArtifactId(f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}")


def milliseconds_of(artifact_id: ArtifactId) -> int:
    """When the id was made, by the clock of its maker."""
    return int(artifact_id.replace("-", "")[:12], 16)
