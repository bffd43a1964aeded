"""The orchestration bridge within one Execute: which of its messages is legal when, as data.

Theory. A program in the environment sends frames to the worker, and the worker answers. Each
direction ends on its own: BridgeClosed is the daemon's word that the program sends nothing more,
BridgeClose the worker's that it does not. One machine for both:

    ASKED --BridgeOpened--> OPEN --BridgeClosed--> SERVER_DONE --BridgeClose--> OVER
                              `----BridgeClose---> CLIENT_DONE --BridgeClosed--^

There is one opening in a request. What crosses with the other side's last word is legal: frames
of a direction until that direction has ended, credit always.

Guards: a frame is not empty and at most BRIDGE_FRAME_BYTES_MAX, and costs its length and
BRIDGE_FRAME_COST_BYTES of its direction's credit, so that empty talk is bounded too; credit
returns nothing that was not taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from sbxd.wire import messages as m


class Party(StrEnum):
    """Whose word it is."""

    CLIENT = "client"
    SERVER = "server"


class BridgeState(StrEnum):
    ASKED = "ASKED"
    OPEN = "OPEN"
    SERVER_DONE = "SERVER_DONE"
    CLIENT_DONE = "CLIENT_DONE"
    OVER = "OVER"


_S = BridgeState
_Row = dict[type[m.Message], BridgeState]

BRIDGE_TABLE: Final[Mapping[Party, Mapping[BridgeState, _Row]]] = {
    Party.CLIENT: {
        _S.ASKED: {},
        _S.OPEN: {m.BridgeFrame: _S.OPEN, m.BridgeCredit: _S.OPEN, m.BridgeClose: _S.CLIENT_DONE},
        _S.SERVER_DONE: {
            m.BridgeFrame: _S.SERVER_DONE,
            m.BridgeCredit: _S.SERVER_DONE,
            m.BridgeClose: _S.OVER,
        },
        _S.CLIENT_DONE: {m.BridgeCredit: _S.CLIENT_DONE},
        _S.OVER: {m.BridgeCredit: _S.OVER},
    },
    Party.SERVER: {
        _S.ASKED: {m.BridgeOpened: _S.OPEN},
        _S.OPEN: {m.BridgeFrame: _S.OPEN, m.BridgeCredit: _S.OPEN, m.BridgeClosed: _S.SERVER_DONE},
        _S.SERVER_DONE: {m.BridgeCredit: _S.SERVER_DONE},
        _S.CLIENT_DONE: {
            m.BridgeFrame: _S.CLIENT_DONE,
            m.BridgeCredit: _S.CLIENT_DONE,
            m.BridgeClosed: _S.OVER,
        },
        _S.OVER: {m.BridgeCredit: _S.OVER},
    },
}


class IllegalBridge(Exception):
    """The table or a guard refuses a message; nothing was changed."""


def cost_bytes(data: bytes) -> int:
    """What a frame takes of its direction's credit."""
    return len(data) + m.BRIDGE_FRAME_COST_BYTES


@dataclass(slots=True)
class BridgeAccount:
    """The bridge of one request, the same on both sides. window: credit of whoever sends."""

    state: BridgeState = BridgeState.ASKED
    window: dict[Party, int] = field(
        default_factory=lambda: dict.fromkeys(Party, m.BRIDGE_CREDIT_BYTES)
    )

    def enter(self, party: Party, message: m.Message) -> None:
        """Enter what one side says. Raises IllegalBridge, and then nothing is changed."""
        following = BRIDGE_TABLE[party][self.state].get(type(message))
        if following is None:
            name = type(message).__name__
            raise IllegalBridge(
                f"{name} from the {party} is illegal while the bridge is {self.state}"
            )
        if isinstance(message, m.BridgeFrame):
            if not 0 < len(message.data) <= m.BRIDGE_FRAME_BYTES_MAX:
                raise IllegalBridge("a frame of the bridge is empty or too long")
            cost = cost_bytes(message.data)
            if cost > self.window[party]:
                raise IllegalBridge("a frame of the bridge exceeds its credit")
            self.window[party] -= cost
        elif isinstance(message, m.BridgeCredit):
            other = Party.SERVER if party is Party.CLIENT else Party.CLIENT
            if self.window[other] + message.size_bytes > m.BRIDGE_CREDIT_BYTES:
                raise IllegalBridge("BridgeCredit returns more than was taken")
            self.window[other] += message.size_bytes
        self.state = following
