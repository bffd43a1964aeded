"""The denials of one proxy: `sbxd.policy.denials`, with the proxy's record of what was counted.

A denial that gets a token is recorded by itself and answered at once. One that gets none is counted
by its reason and answered after a pause, during which it holds one of the proxy's few places for
connections without a tunnel: so the rate of denials is bounded by places over pause, whatever the
sandbox does, and the audit gets a bounded number of records with exact counts.
"""

from sbxd.egress.decisions import DenialsCounted, Reason
from sbxd.policy.denials import Bucket


class Denials(Bucket[Reason]):
    """rate: per second, as is the most that may come at once."""

    def __init__(self, *, rate: int, now: float) -> None:
        super().__init__(most=rate, now=now)

    def counted(self) -> DenialsCounted | None:
        """Everything counted since the last call, None for nothing."""
        counts = self.take_counts()
        return DenialsCounted(counts=counts) if counts else None

    def put_back(self, denials: DenialsCounted) -> None:
        """These were not recorded."""
        self.put_counts_back(denials.counts)
