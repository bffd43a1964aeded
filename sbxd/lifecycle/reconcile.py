"""Journal against kernel: what nobody owns is removed, what cannot be is quarantined.

Theory: an environment may exist only after its intent (`sbxd.lifecycle.journal`), and is over
only when that is proven. After a start nothing that is found is owned (running environments do
not survive the daemon: the workspace is a cache), so every id that the journal or the kernel
knows is destroyed by id, also where the kernel shows nothing: that is what proves it. A name that
is no environment id can only be reported.

What is quarantined is no part of that: it is tried again by the reaper's passes and on demand, once
each and bounded together, and released when its destruction is proven and the inventory shows
nothing of it (decision 0165). Until then its record stands, whatever is interrupted.
"""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from sbxd.audit.events import EnvironmentQuarantined, OrphanDestroyed
from sbxd.audit.lease_events import ClearingProof, QuarantineCleared, QuarantineReleased
from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.lifecycle.budgets import Budgets
from sbxd.lifecycle.environments import Quarantined, ReconcileReport
from sbxd.lifecycle.finalize import BudgetSpent, within
from sbxd.lifecycle.journal import Journal, JournalState, JournalUnreadable, JournalUnwritable
from sbxd.mechanism.protocol import Inventory, Mechanism, MechanismError
from sbxd.port.ids import ENVIRONMENT_ID_PATTERN, EnvironmentId
from sbxd.wire.repair import ClearingWord


@dataclass(frozen=True)
class Plan:
    """destroy: id and what the kernel holds of it. quarantine: names that are no ids."""

    destroy: tuple[tuple[EnvironmentId, tuple[str, ...]], ...]
    quarantine: tuple[tuple[str, tuple[str, ...]], ...]


def plan(
    journal: Mapping[EnvironmentId, JournalState],
    inventory: Inventory,
    owned: Collection[EnvironmentId],
) -> Plan:
    """Decide about every name that the journal or the kernel knows. Pure.

    owned: environments and slots of this run of the daemon, which are not touched.
    """
    held = {item.environment_id: item.kinds for item in inventory.items}
    destroy, quarantine = [], []
    for name in sorted(held.keys() | journal.keys()):
        if name in owned or journal.get(EnvironmentId(name)) is JournalState.QUARANTINED:
            continue
        kinds = held.get(name, ())
        if re.fullmatch(ENVIRONMENT_ID_PATTERN, name):
            destroy.append((EnvironmentId(name), kinds))
        else:
            quarantine.append((name, kinds))
    return Plan(destroy=tuple(destroy), quarantine=tuple(quarantine))


class Reconciler:
    """Carries a plan out. Raises AuditUnavailable, JournalUnreadable, JournalUnwritable and
    MechanismError (no inventory): then the daemon must not start."""

    def __init__(
        self, mechanism: Mechanism, journal: Journal, audit: AuditSink, budgets: Budgets
    ) -> None:
        self._mechanism = mechanism
        self._journal = journal
        self._audit = audit
        self._budgets = budgets
        self._turn = trio.Lock()  # two never work on one name
        self._tried: dict[EnvironmentId, int] = {}  # of what is quarantined: in which pass last
        self._passes = 0

    async def run(self, owned: Callable[[], Collection[EnvironmentId]]) -> ReconcileReport:
        """Remove what nobody owns. `owned` is asked before the journal is read, so that what is
        being ended is left to its supervisor, and after the inventory was taken, so that an
        environment that is being built is never taken for an orphan."""
        async with self._turn:
            return await self._run(owned)

    async def _run(self, owned: Callable[[], Collection[EnvironmentId]]) -> ReconcileReport:
        ending = frozenset(owned())
        journal = await self._journal.states()
        inventory = await self._mechanism.inventory()
        decided = plan(journal, inventory, ending.union(owned()))
        destroyed, quarantined = [], []
        for environment_id, kinds in decided.destroy:
            problem = await self._destroy(environment_id, attempts=self._attempts)
            if problem is None:
                await self._journal.note(environment_id, JournalState.GONE)
                if kinds:
                    await self._audit.emit(
                        OrphanDestroyed(environment_id=environment_id, kinds=kinds)
                    )
                destroyed.append(environment_id)
                continue
            await self._quarantine(environment_id, kinds, problem)
            quarantined.append(str(environment_id))
        for name, kinds in decided.quarantine:
            await self._quarantine(
                EnvironmentId(name), kinds, MechanismError("read the inventory", 0)
            )
            quarantined.append(name)
        return ReconcileReport(destroyed=tuple(destroyed), quarantined=tuple(quarantined))

    async def retry_quarantined(
        self, owned: Callable[[], Collection[EnvironmentId]]
    ) -> tuple[EnvironmentId, ...]:
        """Try once more to destroy what is quarantined, and release what is proven gone by that;
        returns which. Whatever was tried least lately is first, and what the budget leaves out is
        the next pass's. What cannot be proven, recorded or written down stays quarantined.

        owned: as of `run`; what a supervisor is not done with is its own. Cancellation: what was
        released until then is; the rest is the next pass's.
        """
        async with self._turn:
            released: list[EnvironmentId] = []
            with suppress(MechanismError, JournalUnreadable, JournalUnwritable, AuditUnavailable):
                await self._retry(frozenset(owned()), released)
            return tuple(released)

    async def _retry(
        self, ending: Collection[EnvironmentId], released: list[EnvironmentId]
    ) -> None:
        held = {each.name: each.kinds for each in await self.quarantine()}
        names = [
            EnvironmentId(name)
            for name in held
            if re.fullmatch(ENVIRONMENT_ID_PATTERN, name) and name not in ending
        ]
        self._tried = {name: self._tried.get(name, 0) for name in names}
        self._passes += 1
        destroyed = []
        with trio.move_on_after(self._budgets.quarantine_seconds):
            for name in sorted(names, key=self._tried.__getitem__):
                self._tried[name] = self._passes
                if await self._destroy(name, attempts=1) is None:
                    destroyed.append(name)
        if not destroyed:
            return
        left = {str(item.environment_id) for item in (await self._mechanism.inventory()).items}
        for name in destroyed:
            if name not in left:
                # Recorded first, as in `clear`.
                await self._audit.emit(QuarantineReleased(environment_id=name, kinds=held[name]))
                await self._journal.release(name)
                released.append(name)

    async def quarantined(self) -> tuple[str, ...]:
        """Every environment id that is quarantined, of this run and of earlier ones."""
        states = await self._journal.states()
        return tuple(
            str(environment_id)
            for environment_id, state in states.items()
            if state is JournalState.QUARANTINED
        )

    async def quarantine(self) -> tuple[Quarantined, ...]:
        """Everything that is quarantined, and what the kernel holds of each now."""
        names = await self.quarantined()
        if not names:
            return ()
        inventory = await self._mechanism.inventory()
        held = {str(item.environment_id): item.kinds for item in inventory.items}
        return tuple(Quarantined(name, held.get(name, ())) for name in names)

    async def clear(self, name: str, word: ClearingWord, peer_uid: int) -> ClearingProof | None:
        """Try once more to prove that one is gone, and release it then, or on the operator's word.

        Returns what the release rests on; None when it stays, because something of it cannot be
        proven gone. On a word alone its uids stay taken: the launcher keeps them from reuse until
        its own destruction is proven. Raises KeyError for what is not quarantined.
        """
        async with self._turn:
            return await self._clear(name, word, peer_uid)

    async def _clear(self, name: str, word: ClearingWord, peer_uid: int) -> ClearingProof | None:
        found = {each.name: each for each in await self.quarantine()}[name]
        problem: MechanismError | None = MechanismError("read the inventory", 0)
        if re.fullmatch(ENVIRONMENT_ID_PATTERN, name):
            problem = await self._destroy(EnvironmentId(name), attempts=self._attempts)
        if problem is not None and word is ClearingWord.ONLY_WITH_PROOF:
            return None
        proof = ClearingProof.OPERATOR_WORD if problem is not None else ClearingProof.PROVEN
        # Recorded first: what is released unrecorded could not be asked about.
        await self._audit.emit(
            QuarantineCleared(
                environment_id=name, proof=proof, kinds=found.kinds, peer_uid=peer_uid
            )
        )
        await self._journal.release(EnvironmentId(name))
        return proof

    @property
    def _attempts(self) -> int:
        return len(self._budgets.destroy_retry_seconds) + 1

    async def _destroy(
        self, environment_id: EnvironmentId, *, attempts: int
    ) -> MechanismError | None:
        """Destroy until it is proven, without pauses: nothing of ours is using it."""
        problem = MechanismError("destroy", 0)
        for _attempt in range(attempts):
            try:
                await within(
                    self._budgets.destroy_seconds,
                    partial(self._mechanism.destroy_orphan, environment_id),
                )
            except MechanismError as failure:
                problem = failure
            except BudgetSpent:
                problem = MechanismError("destroy", 0, "not finished in time")
            else:
                return None
        return problem

    async def _quarantine(
        self, environment_id: EnvironmentId, kinds: tuple[str, ...], problem: MechanismError
    ) -> None:
        await self._journal.quarantine(environment_id)
        await self._audit.emit(
            EnvironmentQuarantined(
                environment_id=environment_id,
                step=problem.step,
                errno=problem.errno,
                kinds=kinds,
            )
        )
