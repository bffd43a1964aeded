"""How many prepared slots of each kind to keep, from what was asked for lately.

Theory (Little's law): with λ requests a second, and W seconds from a hand-out until its replacement
is ready, λW slots are on their way at any moment, so as many must be ready for the next request to
find one. Arrivals are uneven: of a Poisson stream three standard deviations more, 3·sqrt(λW), leave
one request in some hundred without. Requests of agents come in bursts that no Poisson stream has,
so the most places that were missing at once is remembered too, and forgotten at its half-life.

Invariants: pure, of the clock that is handed in; never below `least` nor above `most`; a kind that
is asked for less than about once in `MEMORY_SECONDS` gets nothing; the shares of all kinds together
stay within the operator's bound, and what the operator promised to one kind comes first.
"""

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

MEMORY_SECONDS = 300.0
BURST_HALF_LIFE_SECONDS = 300.0
HEAD_ROOM_DEVIATIONS = 3.0
# Of the latest replacement in the mean of all.
REFILL_WEIGHT = 0.2
# Before the first was measured.
REFILL_SECONDS_ASSUMED = 0.5

KindT = TypeVar("KindT", bound=Hashable)


class Demand(Struct, frozen=True, kw_only=True):
    """What is remembered of the requests of one kind, as of `at` (seconds of any steady clock).

    arrivals_per_second: mean over about MEMORY_SECONDS. burst: the most places that were missing
    at once, fading. refill_seconds: from a hand-out until its replacement is ready.
    """

    at: float
    arrivals_per_second: float = 0.0
    burst: float = 0.0
    refill_seconds: float = REFILL_SECONDS_ASSUMED


def as_of(demand: Demand, now: float) -> Demand:
    """The same, as it has faded by `now`. A clock that went back changes nothing."""
    elapsed = now - demand.at
    if elapsed <= 0:
        return demand
    return replace(
        demand,
        at=now,
        arrivals_per_second=demand.arrivals_per_second * math.exp(-elapsed / MEMORY_SECONDS),
        burst=demand.burst * 0.5 ** (elapsed / BURST_HALF_LIFE_SECONDS),
    )


def after_arrival(demand: Demand, now: float, missing: int) -> Demand:
    """A request has come. missing: how many places are empty with it, those of requests that
    found none included."""
    faded = as_of(demand, now)
    return replace(
        faded,
        arrivals_per_second=faded.arrivals_per_second + 1 / MEMORY_SECONDS,
        burst=max(faded.burst, float(missing)),
    )


def after_refill(demand: Demand, seconds: float) -> Demand:
    """A place is filled again, so long after it was emptied."""
    mean = (1 - REFILL_WEIGHT) * demand.refill_seconds + REFILL_WEIGHT * max(seconds, 0.0)
    return replace(demand, refill_seconds=mean)


def slots_wanted(demand: Demand, now: float, *, least: int, most: int) -> int:
    """How many slots to keep ready, from `least` to `most`."""
    faded = as_of(demand, now)
    if faded.arrivals_per_second * MEMORY_SECONDS <= 1:
        return min(least, most)
    on_their_way = faded.arrivals_per_second * faded.refill_seconds
    steady = on_their_way + HEAD_ROOM_DEVIATIONS * math.sqrt(on_their_way)
    # A burst that has all but faded is no reason for one slot more.
    wanted = max(math.ceil(steady), math.floor(faded.burst + 0.5))
    return min(max(wanted, least), most)


def share_out(
    wanted: Mapping[KindT, int], promised: Mapping[KindT, int], most: int
) -> dict[KindT, int]:
    """What each kind gets of `most` slots in all: what is promised to it first, then, one after
    the other, what it wants; who has the least of what it wants comes next, in the order of
    `wanted` where that is the same."""
    given: dict[KindT, int] = {}
    left = most
    for kind, number in wanted.items():
        given[kind] = min(number, promised.get(kind, 0), left)
        left -= given[kind]
    while left > 0:
        short = [kind for kind, number in wanted.items() if given[kind] < number]
        if not short:
            break
        given[min(short, key=lambda kind: given[kind] / wanted[kind])] += 1
        left -= 1
    return given


def next_to_build(given: Mapping[KindT, int], have: Mapping[KindT, int]) -> KindT | None:
    """The kind that lacks most of what it is given; None when all are full."""
    short = [kind for kind, number in given.items() if have.get(kind, 0) < number]
    return min(short, key=lambda kind: have.get(kind, 0) / given[kind], default=None)
