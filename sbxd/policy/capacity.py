"""Whether there is room for one more environment: places, and memory that has been promised.

Invariants: pure. The memory that the environments in being may use by their limits never adds up
to more than `memory_committed_max_bytes`, so no host is overcommitted by what it has promised; one
that is ending counts until it is over.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from sbxd.settings import Settings

RETRY_SECONDS_MIN = 1.0
RETRY_SECONDS_MAX = 30.0


@dataclass(frozen=True)
class Held:
    """What one environment takes. owner: the peer's uid. memory_bytes: its limit."""

    owner: int
    memory_bytes: int


def environments_per_peer_max(settings: Settings) -> int:
    """How many environments one worker uid may have at a time.

    As the operator says; otherwise half of `environments_max`, at least 1, where more than one uid
    is listed or a group is, so that no worker can take the places of all others; and all of them
    where nobody else could want one.
    """
    limits, service = settings.limits, settings.service
    if limits.environments_per_peer_max is not None:
        return limits.environments_per_peer_max
    if service.worker_gids or len(set(service.worker_uids)) > 1:
        return max(limits.environments_max // 2, 1)
    return limits.environments_max


class Room:
    """What is taken now, against the operator's limits."""

    def __init__(self, settings: Settings, held: Collection[Held]) -> None:
        self._limits = settings.limits
        self._per_peer_max = environments_per_peer_max(settings)
        self._of_owner = Counter(each.owner for each in held)
        self._count = len(held)
        self._memory_bytes = sum(each.memory_bytes for each in held)

    def has(self, wanted: Held) -> bool:
        """Whether there is room for this one besides."""
        most = self._limits.memory_committed_max_bytes
        return (
            self._count < self._limits.environments_max
            and self._of_owner[wanted.owner] < self._per_peer_max
            and (most is None or self._memory_bytes + wanted.memory_bytes <= most)
        )

    def describe(self, wanted: Held) -> str:
        """What is taken, for whoever is refused."""
        limits = self._limits
        text = (
            f"{self._count} environments are live (at most {limits.environments_max}), "
            f"{self._of_owner[wanted.owner]} of this peer "
            f"(at most {self._per_peer_max})"
        )
        if limits.memory_committed_max_bytes is not None:
            text += (
                f", and {self._memory_bytes} bytes of memory are promised (at most "
                f"{limits.memory_committed_max_bytes}, of which this one wants "
                f"{wanted.memory_bytes})"
            )
        return text


def retry_after_seconds(until_next_end: float) -> float:
    """When to ask again, given the time until the next environment ends by itself."""
    return min(max(until_next_end, RETRY_SECONDS_MIN), RETRY_SECONDS_MAX)
