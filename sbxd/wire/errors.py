"""The two ways in which the protocol can be broken: by us, or by them.

Invariant: the text of an error holds no byte of a credential and no unbounded or unprintable text
of the peer's, so it is safe to log. Whoever catches one closes the connection: after an error the
state of the connection is what it was before the offending message.
"""

ERROR_TEXT_MAX = 200


class ProtocolError(Exception):
    """Abstract: raise one of the subclasses."""

    def __init__(self, detail: str) -> None:
        if type(self) is ProtocolError:
            raise TypeError("ProtocolError is abstract: raise one of its subclasses")
        self.detail = printable(detail)
        super().__init__(self.detail)


class LocalProtocolError(ProtocolError):
    """We tried to do what the protocol forbids: a bug on this side. Nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer did what the protocol forbids. Nothing of the offending message was applied."""


def printable(text: str) -> str:
    """Make text of unknown origin safe for one line of a log: ASCII, escaped, bounded."""
    if len(text) > ERROR_TEXT_MAX:
        text = text[: ERROR_TEXT_MAX - 3] + "..."
    return "".join(
        c if c.isascii() and c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
