"""Whether a peer may act on an environment with the handle that it presents.

Invariants: pure. The uid is compared first, so that a foreign peer learns nothing and causes
nothing: neither that the id exists nor the destruction that a tenant mismatch brings.
"""

from enum import StrEnum

from sbxd.lifecycle.environments import Peer, PeerRole
from sbxd.port.environment import EnvironmentHandle


class Standing(StrEnum):
    GRANTED = "GRANTED"
    FOREIGN = "FOREIGN"
    TENANT_MISMATCH = "TENANT_MISMATCH"
    STALE = "STALE"


def judge(
    peer: Peer, *, owner_uid: int, record: EnvironmentHandle, presented: EnvironmentHandle
) -> Standing:
    """Compare what a peer presents with the record. The two times of a handle inform and are not
    compared."""
    if peer.role is not PeerRole.ADMIN and peer.uid != owner_uid:
        return Standing.FOREIGN
    if presented.environment_id != record.environment_id:
        return Standing.FOREIGN
    if presented.tenant_id != record.tenant_id:
        return Standing.TENANT_MISMATCH
    if presented.run_id != record.run_id or presented.lease_epoch != record.lease_epoch:
        return Standing.STALE
    return Standing.GRANTED
