"""Leases as the worker tier and the daemon speak of them.

A worker holds a lease on a run, under an epoch that rises whenever the run is claimed anew. The
tier's lease authority knows which leases are held; the daemon asks it about environments by
their ids and about nothing else.
"""

from enum import StrEnum
from typing import Annotated, NewType

from msgspec import Meta

LeaseNonce = NewType("LeaseNonce", str)
RunKey = NewType("RunKey", str)

# 128 unguessable bits: whoever knows the nonce of a lease may bind, take over and release it.
LeaseNonceField = Annotated[LeaseNonce, Meta(pattern=r"^[0-9a-f]{32}\Z")]
# A digest of tenant and run: the authority compares runs and learns the name of none.
RunKeyField = Annotated[RunKey, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class LeaseStanding(StrEnum):
    """What an authority says of an environment. UNKNOWN: it was never told of it, or has
    forgotten."""

    CURRENT = "CURRENT"
    STALE = "STALE"
    UNKNOWN = "UNKNOWN"


class LeaseRefusalCode(StrEnum):
    """Why an authority does not grant. STALE_EPOCH: a higher epoch of the run has been seen.
    NOT_HELD: no such lease (any more). TAKEN: the nonce or the environment is another lease's.
    CAPACITY: too many leases."""

    STALE_EPOCH = "STALE_EPOCH"
    NOT_HELD = "NOT_HELD"
    TAKEN = "TAKEN"
    CAPACITY = "CAPACITY"
