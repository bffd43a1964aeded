"""Denials by violation and tenant, with a bounded number of tenants. Pure; times are given.

Theory: the signal is in the distribution: many denials of one kind from one tenant mean one thing.
A tenant's id is a peer's word, so whoever lies about it could make any number of series. At most
`TENANTS_MAX` tenants have series of their own. A new one takes the place of the one that has been
quiet the longest, if that is at least `QUIET_SECONDS`; where nobody is quiet it is counted as
`_others`, of which the alert for a spike speaks as of any tenant. So a tenant's series are never
taken away while they move, and no more than `TENANTS_MAX` appear in `QUIET_SECONDS`.

Invariants: `total` is exact whatever tenants do; a series that is shown only grows until it is
not shown any more.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from sbxd.metrics.families import OTHERS, Counter, Family
from sbxd.metrics.recent import Recent
from sbxd.policy.violations import ViolationCode

TENANTS_MAX = 64
QUIET_SECONDS = 900.0
# What was denied before it was known whose it is. No tenant's id begins so.
NOBODY = "_nobody"


class _Tenant:
    def __init__(self) -> None:
        self.counts: dict[ViolationCode, int] = {}
        self.last_at = 0.0


class Denials:
    """Counts them."""

    def __init__(self, *, tenants_max: int = TENANTS_MAX) -> None:
        self.total = Counter("sbxd_denials", "Denials, by what was violated.", "violation")
        self.total.declare(*((each.value,) for each in ViolationCode))
        self._tenants_max = tenants_max
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # longest quiet first
        self._others = _Tenant()
        self._recent: Recent[tuple[str, ViolationCode]] = Recent()

    def note(
        self, tenant_id: str | None, violation: ViolationCode, now: float, *, count: int = 1
    ) -> None:
        """Count denials. now: seconds, never going back."""
        self.total.add(violation.value, by=count)
        name = self._admitted(tenant_id or NOBODY, now)
        tenant = self._others if name == OTHERS else self._tenants[name]
        tenant.counts[violation] = tenant.counts.get(violation, 0) + count
        tenant.last_at = now
        if name != OTHERS:
            self._tenants.move_to_end(name)
        self._recent.add((name, violation), now, by=count)

    def _admitted(self, name: str, now: float) -> str:
        """Under which name this tenant is counted."""
        if name in self._tenants:
            return name
        if len(self._tenants) >= self._tenants_max:
            longest_quiet = next(iter(self._tenants))
            if now - self._tenants[longest_quiet].last_at < QUIET_SECONDS:
                return OTHERS
            del self._tenants[longest_quiet]
        self._tenants[name] = _Tenant()
        return name

    def recent(self, now: float) -> Mapping[tuple[str, ViolationCode], int]:
        """By tenant and violation, of the last RECENT_SECONDS, most first."""
        return self._recent.counts(now)

    def families(self) -> Sequence[Family]:
        """By violation, and by tenant and violation."""
        by_tenant = Counter(
            "sbxd_tenant_denials",
            "Denials by tenant. Beyond a bound tenants are _others; a quiet one is left out.",
            *("tenant", "violation"),
            series_max=(self._tenants_max + 1) * len(ViolationCode),
        )
        shown = [*self._tenants.items()]
        if self._others.counts:
            shown.append((OTHERS, self._others))
        for name, tenant in shown:
            for violation, count in tenant.counts.items():
                by_tenant.add(name, violation.value, by=count)
        return (self.total.family(), by_tenant.family())
