"""What a scripted command says over its bridge, and a worker's handler as the other end.

The rules are the real ones (`sbxd.policy.bridge`): a turn is one command, and what is said is
charged to the environment's budgets. Nobody connects and no token is compared: there is no
program that could hold a wrong one.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from sbxd.policy.budgets import Account
from sbxd.wire.messages import BridgeEnd

BridgeHandler = Callable[[bytes], Awaitable[bytes]]


class BridgePeer(Protocol):
    """The worker's end, as the daemon's lifecycle sees it."""

    async def opened(self) -> None: ...

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes | None: ...

    async def closed(self, reason: BridgeEnd) -> None: ...


class HandledBridge:
    """A handler of this process as a BridgePeer: it is called where the frame is sent."""

    def __init__(self, handler: BridgeHandler) -> None:
        self._handler = handler
        self._replies: deque[bytes] = deque()

    async def opened(self) -> None:
        """Nothing is to be told."""

    async def send(self, data: bytes) -> None:
        """Have the handler answer. Raises what it raises."""
        self._replies.append(await self._handler(data))

    async def receive(self) -> bytes | None:
        """The answer to the oldest frame that has one."""
        return self._replies.popleft() if self._replies else None

    async def closed(self, reason: BridgeEnd) -> None:
        """Nothing is to be told."""


@dataclass(frozen=True)
class Spoken:
    """replies: to the frames that were sent. over_budget: one more was not allowed."""

    replies: tuple[bytes, ...] = ()
    over_budget: bool = False


async def talk(frames: tuple[bytes, ...], peer: BridgePeer, account: Account) -> Spoken:
    """Send each frame after the reply to the one before. Raises what the peer raises."""
    replies: list[bytes] = []
    await peer.opened()
    for frame in frames:
        if account.grant_returned(len(frame)) < len(frame):
            await peer.closed(BridgeEnd.BUDGET)
            return Spoken(tuple(replies), over_budget=True)
        await peer.send(frame)
        reply = await peer.receive()
        if reply is None:
            break
        account.meter_written(len(reply))
        replies.append(reply)
    await peer.closed(BridgeEnd.ENDED)
    return Spoken(tuple(replies))
