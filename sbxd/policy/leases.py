"""The book of a lease authority: who holds which run, and what that means for an environment.

Invariants: for each run the highest epoch ever named decides, and it never sinks while a lease of
the run is in the book; a lease belongs to the connection that registered it last; whatever is
repeated word for word changes nothing, so a reply that was lost is asked for again. Every table is
bounded. Pure: time is an argument, in seconds of a clock that never jumps.

Theory. A lease is registered under a nonce before its environment exists, bound to the environment
when that is known, and released. It is stale when a higher epoch of its run was named, when it was
released, or when its holder's connection has been gone for longer than the grace.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.leases import LeaseNonce, LeaseRefusalCode, LeaseStanding, RunKey

LEASES_MAX = 65_536
RUNS_MAX = 65_536
ENDED_MAX = 65_536


class LeaseRefusal(Exception):
    """The book does not take it; nothing was changed (but see `LeaseBook.bind`)."""

    def __init__(self, code: LeaseRefusalCode) -> None:
        super().__init__(code.value)
        self.code = code


@dataclass
class _Lease:
    run: RunKey
    lease_epoch: int
    holder: int
    environment_id: EnvironmentId | None = None
    lost_at: float | None = None


def run_key(tenant_id: TenantId, run_id: RunId) -> RunKey:
    """The digest under which the tier's workers name a run to their authority."""
    return RunKey(hashlib.sha256(f"{tenant_id}\0{run_id}".encode()).hexdigest())


class LeaseBook:
    """Who holds what. `holder` numbers connections; a number is never used twice."""

    def __init__(
        self,
        *,
        grace_seconds: float,
        leases_max: int = LEASES_MAX,
        runs_max: int = RUNS_MAX,
        ended_max: int = ENDED_MAX,
    ) -> None:
        """grace_seconds: how long a lease outlives its holder's connection."""
        self._grace_seconds = grace_seconds
        self._leases_max = leases_max
        self._runs_max = runs_max
        self._ended_max = ended_max
        self._leases: dict[LeaseNonce, _Lease] = {}
        self._bound: dict[EnvironmentId, LeaseNonce] = {}
        self._runs: OrderedDict[RunKey, int] = OrderedDict()
        self._ended: OrderedDict[EnvironmentId, None] = OrderedDict()

    @property
    def held(self) -> int:
        """How many leases are in the book."""
        return len(self._leases)

    def register(
        self, holder: int, nonce: LeaseNonce, run: RunKey, lease_epoch: int, now: float
    ) -> None:
        """Enter a lease, or take it over with a new connection. The run's lower epochs are stale
        from now on. Raises LeaseRefusal(STALE_EPOCH, TAKEN, CAPACITY)."""
        known = self._leases.get(nonce)
        if known is not None and (known.run, known.lease_epoch) != (run, lease_epoch):
            raise LeaseRefusal(LeaseRefusalCode.TAKEN)
        if self._runs.get(run, lease_epoch) > lease_epoch:
            raise LeaseRefusal(LeaseRefusalCode.STALE_EPOCH)
        if known is not None:
            known.holder, known.lost_at = holder, None
            return
        if len(self._leases) >= self._leases_max:
            self.prune(now)
        if len(self._leases) >= self._leases_max:
            raise LeaseRefusal(LeaseRefusalCode.CAPACITY)
        self._leases[nonce] = _Lease(run, lease_epoch, holder)
        self._see(run, lease_epoch)

    def bind(self, nonce: LeaseNonce, environment_id: EnvironmentId) -> None:
        """Say which environment a lease is for; once. Raises LeaseRefusal(NOT_HELD, TAKEN,
        STALE_EPOCH); with the last the environment is entered all the same, as stale."""
        lease = self._leases.get(nonce)
        if lease is None:
            raise LeaseRefusal(LeaseRefusalCode.NOT_HELD)
        if lease.environment_id not in (None, environment_id):
            raise LeaseRefusal(LeaseRefusalCode.TAKEN)
        if self._bound.get(environment_id, nonce) != nonce:
            raise LeaseRefusal(LeaseRefusalCode.TAKEN)
        lease.environment_id = environment_id
        self._bound[environment_id] = nonce
        if self._runs[lease.run] > lease.lease_epoch:
            raise LeaseRefusal(LeaseRefusalCode.STALE_EPOCH)

    def release(self, nonce: LeaseNonce) -> None:
        """The holder gives a lease up. Raises LeaseRefusal(NOT_HELD)."""
        if nonce not in self._leases:
            raise LeaseRefusal(LeaseRefusalCode.NOT_HELD)
        self._end(nonce)

    def fence(self, run: RunKey, lease_epoch: int) -> None:
        """Epochs of the run below this one are stale from now on, whoever holds them. Raises
        LeaseRefusal(STALE_EPOCH) when a higher one has been named."""
        if self._runs.get(run, lease_epoch) > lease_epoch:
            raise LeaseRefusal(LeaseRefusalCode.STALE_EPOCH)
        self._see(run, lease_epoch)

    def lose(self, holder: int, now: float) -> None:
        """A connection has ended: what it held is stale after the grace, unless it is registered
        again until then."""
        for lease in self._leases.values():
            if lease.holder == holder and lease.lost_at is None:
                lease.lost_at = now

    def standing(self, environment_id: EnvironmentId, now: float) -> LeaseStanding:
        """What the daemon is to be told of an environment."""
        nonce = self._bound.get(environment_id)
        if nonce is None:
            ended = environment_id in self._ended
            return LeaseStanding.STALE if ended else LeaseStanding.UNKNOWN
        lease = self._leases[nonce]
        if self._is_over(lease, now) or self._runs[lease.run] > lease.lease_epoch:
            return LeaseStanding.STALE
        return LeaseStanding.CURRENT

    def prune(self, now: float) -> None:
        """Forget the leases whose holders are gone for longer than the grace."""
        over = [nonce for nonce, lease in self._leases.items() if self._is_over(lease, now)]
        for nonce in over:
            self._end(nonce)

    def _is_over(self, lease: _Lease, now: float) -> bool:
        return lease.lost_at is not None and now - lease.lost_at >= self._grace_seconds

    def _see(self, run: RunKey, lease_epoch: int) -> None:
        self._runs[run] = max(lease_epoch, self._runs.get(run, 0))
        self._runs.move_to_end(run)
        if len(self._runs) > self._runs_max:
            # Many at once: what is held is looked up anew each time.
            held = {lease.run for lease in self._leases.values()}
            free = (each for each in self._runs if each not in held and each != run)
            for oldest in list(islice(free, 1 + self._runs_max // 16)):
                del self._runs[oldest]

    def _end(self, nonce: LeaseNonce) -> None:
        lease = self._leases.pop(nonce)
        if lease.environment_id is None:
            return
        del self._bound[lease.environment_id]
        self._ended[lease.environment_id] = None
        while len(self._ended) > self._ended_max:
            self._ended.popitem(last=False)
