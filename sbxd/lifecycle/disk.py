"""Whether a command has exhausted its volume, judged from the file system's own numbers.

Theory: the limits are the file system's and hold without us; this decides alone what a command
that ran into them is told. A refusal leaves no trace that can be read, a volume without room
does. A command that goes on while there is no room left, in five readings in a row, is ended with
DISK; one that fails by itself after such a reading, or with the volume left so, has DISK as its
reason; one that ends well by itself is left alone, whatever it met.

Invariants: pure. What was exhausted before the command started is not its doing: each of the two
resources counts only once a reading has shown room in it, so that a full workspace can be cleaned
up by a command. Reason: decision 0030.
"""

from dataclasses import dataclass

from sbxd.mechanism.protocol import VolumeReading

# Less than this is no room: a directory or attribute operation of XFS may reserve as much.
EXHAUSTED_BYTES = 256 * 1024
# A program that was refused cleans up first, and what it removes comes back a moment later: a
# quarter of a second at the near pace.
SIGHTINGS = 5
PACE_SECONDS = 0.25
# With less than an eighth left, or after a sighting, the next reading comes sooner.
PACE_NEAR_SECONDS = 0.05
_NEAR = 8


@dataclass
class _Resource:
    """Bytes, or inodes."""

    total: int
    floor: int  # this much left, or less, is exhausted
    lowest: int
    armed: bool
    sightings: int = 0
    was_exhausted: bool = False

    def note(self, left: int) -> None:
        self.lowest = min(self.lowest, left)
        if left > self.floor:
            self.armed = True
            self.sightings = 0
        elif self.armed:
            self.sightings += 1
            self.was_exhausted = True


class DiskWatch:
    """Takes the readings of one command's volume, the first from before it started."""

    def __init__(self, first: VolumeReading) -> None:
        self._bytes = _resource(first.bytes_total, EXHAUSTED_BYTES - 1, first.bytes_left)
        self._inodes = _resource(first.inodes_total, 0, first.inodes_left)
        self._bytes_peak = first.bytes_used

    @property
    def bytes_left_min(self) -> int:
        """The fewest free bytes that a reading has shown."""
        return self._bytes.lowest

    @property
    def inodes_left_min(self) -> int:
        """The fewest free inodes that a reading has shown."""
        return self._inodes.lowest

    @property
    def bytes_peak(self) -> int:
        """The most bytes in use that a reading has shown."""
        return self._bytes_peak

    def note(self, reading: VolumeReading) -> None:
        """Take the next reading."""
        self._bytes.note(reading.bytes_left)
        self._inodes.note(reading.inodes_left)
        self._bytes_peak = max(self._bytes_peak, reading.bytes_used)

    @property
    def is_over(self) -> bool:
        """Whether the command is to be ended: it goes on with no room left."""
        return max(self._bytes.sightings, self._inodes.sightings) >= SIGHTINGS

    @property
    def was_exhausted(self) -> bool:
        """Whether a reading has shown no room that was there before: what a failure is laid to."""
        return self._bytes.was_exhausted or self._inodes.was_exhausted

    def pause_seconds(self, reading: VolumeReading) -> float:
        """How long after this reading the next one is due."""
        near = (
            reading.bytes_left * _NEAR < reading.bytes_total
            or reading.inodes_left * _NEAR < reading.inodes_total
        )
        return PACE_NEAR_SECONDS if near else PACE_SECONDS


def _resource(total: int, floor: int, left: int) -> _Resource:
    return _Resource(total=total, floor=floor, lowest=left, armed=left > floor)
