"""What every message is made of. The messages are `sbxd.wire.messages` and its siblings."""

from typing import Annotated

from msgspec import Meta, Struct

RequestIdField = Annotated[int, Meta(ge=1, le=2**53)]


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages: tagged by class name, unknown fields refused."""


class Request(Message, frozen=True, kw_only=True):
    """Base of what a client asks. `request_id` is larger than any before on this connection."""

    request_id: RequestIdField
