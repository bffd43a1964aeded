"""How the processors of a busy host are divided: equally between tenants, then within each.

Invariants: a tenant's weights add up to about `WEIGHT_MAX`, however many environments it has, so
that one with ten gets no more than one with one; within a tenant an environment weighs as much as
the CPU rate that it asked for. A weight says nothing while the host has processors to spare.
Pure; who counts, and when, is the caller's.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
WEIGHT_MAX = 10_000  # cgroup v2: 1 to 10000


@dataclass(frozen=True)
class Claim:
    """Of one environment: on whose account, and the CPU rate that it may use."""

    tenant: Hashable
    cpu_millicores: int


def cpu_weights(claims: Mapping[KeyT, Claim]) -> dict[KeyT, int]:
    """The weight of each claim, from 1 to WEIGHT_MAX."""
    totals: Counter[Hashable] = Counter()
    for claim in claims.values():
        totals[claim.tenant] += claim.cpu_millicores
    return {
        key: max(WEIGHT_MAX * claim.cpu_millicores // totals[claim.tenant], 1)
        for key, claim in claims.items()
    }
