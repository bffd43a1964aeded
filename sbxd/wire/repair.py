"""What an operator asks of the reaper and the quarantine, and the replies. Admin socket only."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from sbxd.wire.base import Message, Request, RequestIdField


class Reap(Request, frozen=True, tag="reap", kw_only=True):
    """One pass of the reaper: ask the lease authorities, end what is stale, try again what is
    quarantined, report."""


class QuarantineList(Request, frozen=True, tag="quarantine_list", kw_only=True):
    pass


class ClearingWord(StrEnum):
    """What may release a quarantine. OPERATOR_WORD: also when not everything is proven gone."""

    ONLY_WITH_PROOF = "ONLY_WITH_PROOF"
    OPERATOR_WORD = "OPERATOR_WORD"


class QuarantineClear(Request, frozen=True, tag="quarantine_clear", kw_only=True):
    """Release what is quarantined. name: as QuarantineList shows it."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    word: ClearingWord = ClearingWord.ONLY_WITH_PROOF


class Reaped(Message, frozen=True, tag="reaped", kw_only=True):
    """asked: environments. stale: ids of those that were ended. unknown: how many the next pass
    may end. unanswered: names of the authorities that gave no answer. released: what was
    quarantined and is proven gone."""

    request_id: RequestIdField
    asked: int
    stale: tuple[str, ...]
    unknown: int
    unanswered: tuple[str, ...]
    released: tuple[str, ...] = ()


class QuarantinedItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """kinds: what the kernel holds of it now."""

    name: str
    kinds: tuple[str, ...]


class QuarantineIs(Message, frozen=True, tag="quarantine_is", kw_only=True):
    request_id: RequestIdField
    items: tuple[QuarantinedItem, ...]


class QuarantineWasCleared(Message, frozen=True, tag="quarantine_was_cleared", kw_only=True):
    """proof: PROVEN (nothing is left) or OPERATOR_WORD (its uids stay taken)."""

    request_id: RequestIdField
    proof: str
