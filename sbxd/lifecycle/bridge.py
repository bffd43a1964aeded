"""One turn of the orchestration bridge: who may open it, and frames between two parties.

A program of the command connects and presents the token; from then on its frames go to the worker
and the worker's to it, in order, each direction for itself, until the connection or the command
ends (`sbxd.policy.bridge` has the terms). It is no network: no policy of egress speaks of it.

Invariants: of frames that neither side takes, at most one a direction waits here, and the rest in
the program's socket and under the worker's credit, so memory is flat whoever stalls; nothing of a
frame is looked into or kept; the token is taken once, by compare and set between two awaits; what
a connection costs is charged before it is judged, and what goes to the worker before it is sent.
A turn ends with its command: it is cancelled, and closes the door.

Deliberately absent: sockets (the mechanism's), credit and messages (the service's), holding a
call for an approval (the worker's; the command's own clocks go on).
"""

from collections.abc import Awaitable, Callable

import trio

from sbxd.audit.bridge_events import BridgeClosed, BridgeOpened, BridgeRefused
from sbxd.audit.events import AuditEvent
from sbxd.lifecycle.end_records import Identity
from sbxd.lifecycle.environments import BridgeWorker
from sbxd.mechanism.protocol import (
    BridgeDoor,
    BridgeStream,
    BridgeStreamBroken,
    MechanismError,
)
from sbxd.policy.bridge import (
    ACCEPTED,
    REFUSED,
    TOKEN_FRAME_BYTES_MAX,
    BridgeCaps,
    BridgeCounts,
    Refusal,
    same_token,
)
from sbxd.policy.budgets import Account
from sbxd.port.environment import BridgeEndpoint
from sbxd.port.errors import BudgetExhausted
from sbxd.wire.errors import RemoteProtocolError
from sbxd.wire.framing import FrameDecoder, encode_frame
from sbxd.wire.messages import BRIDGE_FRAME_BYTES_MAX, BridgeEnd

EmitEvent = Callable[[AuditEvent], Awaitable[bool]]  # whether it is recorded; bounds itself


class BridgeFrames:
    """Frames over one connection of a program's. A frame is returned as soon as it is whole."""

    def __init__(self, stream: BridgeStream) -> None:
        self._stream = stream
        self._decoder = FrameDecoder(frame_bytes_max=TOKEN_FRAME_BYTES_MAX)

    def allow_long(self) -> None:
        """The token is past: frames of full length may come."""
        self._decoder.raise_cap(BRIDGE_FRAME_BYTES_MAX)

    async def receive(self) -> bytes | None:
        """The next frame; None at the end. Raises RemoteProtocolError for an illegal length, and
        for a stream that ends within a frame."""
        while True:
            frame = self._decoder.next_frame()
            if frame is not None:
                return frame
            data = await self._stream.receive()
            if not data:
                if self._decoder.buffered_bytes:
                    raise RemoteProtocolError("the stream ends within a frame")
                return None
            self._decoder.feed(data)

    async def send(self, body: bytes) -> None:
        """Raises BridgeStreamBroken."""
        await self._stream.send(encode_frame(body, frame_bytes_max=BRIDGE_FRAME_BYTES_MAX))


class Turn:
    """Serves one command's bridge. `run` is called once, and ends by cancellation."""

    def __init__(
        self,
        door: BridgeDoor,
        endpoint: BridgeEndpoint,
        worker: BridgeWorker,
        *,
        account: Account,
        emit: EmitEvent,
        over_budget: Callable[[], None],
        identity: Identity,
        command_number: int,
        caps: BridgeCaps,
    ) -> None:
        """over_budget: is told, once or more, that the environment overran a budget here."""
        self._door = door
        self._endpoint = endpoint
        self._worker = worker
        self._account = account
        self._emit = emit
        self._over_budget = over_budget
        self._identity = identity
        self._number = command_number
        self._caps = caps
        self._greetings = trio.Semaphore(caps.greetings_max)
        self._token_is_used = False
        self._refused = 0
        self._sent = [0, 0]  # frames and bytes from the environment
        self._received = [0, 0]  # and from the worker
        self._end: BridgeEnd | None = None
        self._delivered: trio.Event | None = None  # of the connection with the token

    async def run(self) -> None:
        """Accept, judge, relay.

        Cancellation: every connection is closed and nobody listens any more.
        """
        try:
            async with trio.open_nursery() as connections:
                while self._refused < self._caps.refusals_max:
                    await self._greetings.acquire()
                    try:
                        stream = await self._door.accept()
                    except MechanismError:
                        break
                    connections.start_soon(self._serve, stream)
                self._door.close()
        finally:
            self._door.close()

    async def wait_delivered(self) -> None:
        """Until what the program sent before its end is with the worker."""
        if self._delivered is not None:
            await self._delivered.wait()

    def closing_event(self) -> BridgeClosed:
        """What the turn was, once it is over."""
        return BridgeClosed(
            **self._identity,
            command_number=self._number,
            opened=self._token_is_used,
            refused=self._refused,
            counts=BridgeCounts(
                frames_from_environment=self._sent[0],
                bytes_from_environment=self._sent[1],
                frames_from_worker=self._received[0],
                bytes_from_worker=self._received[1],
            ),
        )

    # --- one connection -----------------------------------------------------------------------

    async def _serve(self, stream: BridgeStream) -> None:
        frames = BridgeFrames(stream)
        try:
            try:
                self._account.charge_operation()
                refusal = await self._judge(frames)
            except BudgetExhausted:
                self._over_budget()
                return
            finally:
                self._greetings.release()
            if refusal is None:
                await self._open(stream, frames)
            else:
                await self._refuse(frames, refusal)
        except BridgeStreamBroken:
            return
        finally:
            stream.close()

    async def _judge(self, frames: BridgeFrames) -> Refusal | None:
        presented: bytes | None = None
        with trio.move_on_after(self._caps.greeting_seconds):
            try:
                presented = await frames.receive()
            except RemoteProtocolError:
                presented = None
        if presented is None:
            return Refusal.NO_TOKEN
        if not same_token(presented, self._endpoint):
            return Refusal.WRONG_TOKEN
        if self._token_is_used:
            return Refusal.TOKEN_USED
        self._token_is_used = True
        return None

    async def _refuse(self, frames: BridgeFrames, refusal: Refusal) -> None:
        self._refused += 1
        if self._refused <= self._caps.refusals_audited_max:
            await self._emit(
                BridgeRefused(**self._identity, command_number=self._number, refusal=refusal)
            )
        if self._refused >= self._caps.refusals_max:
            self._door.close()
        await frames.send(REFUSED + refusal.value.encode("ascii"))

    async def _open(self, stream: BridgeStream, frames: BridgeFrames) -> None:
        if not await self._emit(BridgeOpened(**self._identity, command_number=self._number)):
            return
        self._delivered = trio.Event()
        try:
            await frames.send(ACCEPTED)
            frames.allow_long()
            await self._relay(stream, frames)
        finally:
            self._set_delivered()

    async def _relay(self, stream: BridgeStream, frames: BridgeFrames) -> None:
        await self._worker.opened()
        told = False
        async with trio.open_nursery() as relay:
            relay.start_soon(self._to_environment, stream, frames, relay.cancel_scope)
            end = await self._to_worker(frames)
            self._end = self._end or end
            if self._end is BridgeEnd.ENDED:
                await self._worker.closed(BridgeEnd.ENDED)
                told = True
                self._set_delivered()
            else:
                relay.cancel_scope.cancel()
        stream.close()
        if not told:
            await self._worker.closed(self._end or BridgeEnd.ENDED)

    def _set_delivered(self) -> None:
        if self._delivered is not None:
            self._delivered.set()

    async def _to_worker(self, frames: BridgeFrames) -> BridgeEnd:
        """Pass on what the program sends, until it may or does send no more."""
        while True:
            try:
                data = await frames.receive()
            except RemoteProtocolError:
                return BridgeEnd.FRAME_ILLEGAL
            if data is None:
                return BridgeEnd.ENDED
            if self._sent[1] + len(data) > self._caps.turn_bytes_max:
                return BridgeEnd.TURN_BYTES
            if self._account.grant_returned(len(data)) < len(data):
                self._over_budget()
                return BridgeEnd.BUDGET
            await self._worker.send(data)
            self._sent[0] += 1
            self._sent[1] += len(data)

    async def _to_environment(
        self, stream: BridgeStream, frames: BridgeFrames, relay: trio.CancelScope
    ) -> None:
        """Pass on what the worker sends, until it says that it sends no more. What a program that
        is gone cannot take is dropped, so that the worker is not held back."""
        is_broken = False
        while (data := await self._worker.receive()) is not None:
            if self._received[1] + len(data) > self._caps.turn_bytes_max:
                self._end = BridgeEnd.TURN_BYTES
                relay.cancel()
                return
            self._account.meter_written(len(data))
            self._received[0] += 1
            self._received[1] += len(data)
            if not is_broken:
                try:
                    await frames.send(data)
                except BridgeStreamBroken:
                    is_broken = True
        stream.end()
