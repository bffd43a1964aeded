"""An operator's requests about what could not be proven stopped, and what nobody holds."""

from typing import assert_never

from sbxd.lifecycle.environments import Environments, Peer
from sbxd.wire import messages as m


async def repair(
    peer: Peer,
    request: m.Reconcile | m.Reap | m.QuarantineList | m.QuarantineClear,
    environments: Environments,
) -> m.TerminalReply:
    """The answer. That the peer is an operator is the caller's to have checked.

    Raises the port's errors. Cancellation: as the methods of Environments say.
    """
    request_id = request.request_id
    match request:
        case m.Reconcile():
            report = await environments.reconcile()
            return m.Reconciled(
                request_id=request_id,
                destroyed=report.destroyed,
                quarantined=report.quarantined,
                released=report.released,
            )
        case m.Reap():
            reaped = await environments.reap()
            return m.Reaped(
                request_id=request_id,
                asked=reaped.asked,
                stale=reaped.stale,
                unknown=reaped.unknown,
                unanswered=reaped.unanswered,
                released=reaped.released,
            )
        case m.QuarantineList():
            items = await environments.quarantine()
            return m.QuarantineIs(
                request_id=request_id,
                items=tuple(m.QuarantinedItem(name=i.name, kinds=i.kinds) for i in items),
            )
        case m.QuarantineClear():
            proof = await environments.clear_quarantine(peer, request.name, request.word)
            return m.QuarantineWasCleared(request_id=request_id, proof=proof.value)
        case _:
            assert_never(request)
