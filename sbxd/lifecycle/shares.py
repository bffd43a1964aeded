"""Keeps the weights of the environments such that no tenant gains by having many of them.

Counted are the environments that run a command, since the others use no processor. Where one
tenant alone runs commands nothing is divided, and nothing is sent: a change comes with the first
command of a second one. At most one round in `PACE_SECONDS`, so that a flood of short commands
costs the launcher and PID 1 no more than that. Reason: decision 0032.

Invariant: a round that fails is repeated, and never ends anything; until it succeeds the weights
are those of the round before, and the limits hold without them.
"""

from collections.abc import Callable, Mapping

import trio

from sbxd.mechanism.protocol import Mechanism, MechanismError
from sbxd.policy.shares import WEIGHT_MAX, Claim, cpu_weights
from sbxd.port.ids import EnvironmentId

PACE_SECONDS = 1.0


class Shares:
    """`claims` are of the environments that run a command now, `alive` says what still exists."""

    def __init__(
        self,
        mechanism: Mechanism,
        claims: Callable[[], Mapping[EnvironmentId, Claim]],
        is_alive: Callable[[EnvironmentId], object],
    ) -> None:
        self._mechanism = mechanism
        self._claims = claims
        self._is_alive = is_alive
        self._given: dict[EnvironmentId, int] = {}  # where it is not WEIGHT_MAX
        self._changed = trio.Event()

    def wake(self) -> None:
        """A command began or ended. Never blocks."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            await self._divide()
            await trio.sleep(PACE_SECONDS)

    async def _divide(self) -> None:
        self._given = {each: weight for each, weight in self._given.items() if self._is_alive(each)}
        claims = self._claims()
        if len({claim.tenant for claim in claims.values()}) < 2:
            return
        wanted = {
            each: weight
            for each, weight in cpu_weights(claims).items()
            if self._given.get(each, WEIGHT_MAX) != weight
        }
        if not wanted:
            return
        try:
            await self._mechanism.share(wanted)
        except MechanismError:
            self.wake()
        else:
            self._given |= wanted
