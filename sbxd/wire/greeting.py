"""How a connection begins and how the daemon ends it: the first and the last messages."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from sbxd.wire.base import Message


class Hello(Message, frozen=True, tag="hello", kw_only=True):
    """The client's first frame. credential: the service credential (auth_mode token)."""

    protocol_version: int
    client: Annotated[str, Meta(max_length=128)]
    credential: Annotated[bytes, Meta(max_length=1024)] | None = None

    def __repr__(self) -> str:
        return f"Hello(protocol_version={self.protocol_version}, client={self.client!r})"


class Welcome(Message, frozen=True, tag="welcome", kw_only=True):
    """The server's first frame, once the peer and its credential are accepted."""

    protocol_version: int
    server: str
    mechanism: str


class GoodbyeCode(StrEnum):
    """Why a server closes. NOT_AUTHORIZED and VERSION will not change by asking again."""

    NOT_AUTHORIZED = "NOT_AUTHORIZED"
    VERSION = "VERSION"
    PROTOCOL = "PROTOCOL"
    CAPACITY = "CAPACITY"
    IDLE = "IDLE"
    SHUTTING_DOWN = "SHUTTING_DOWN"


class Goodbye(Message, frozen=True, tag="goodbye", kw_only=True):
    """The server's last frame: why it closes. The same text for every failed authentication."""

    reason: str
    code: GoodbyeCode = GoodbyeCode.SHUTTING_DOWN
