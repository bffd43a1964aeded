"""The daemon's end of one environment's init: PARK, RUN, and what init says of each number.

Invariants: init's words are believed for exit statuses alone. A frame that does not parse, or that
init has no business to send, ends the environment as lost; one about a number that was given up
meanwhile is ignored. Sending never interleaves.
"""

import array
import os
import socket
from collections.abc import Callable, Sequence

import trio

from sbxd.jail import frames
from sbxd.mechanism.protocol import CommandExit, MechanismError, SandboxLost


class Number:
    """What is known of one command number."""

    def __init__(self) -> None:
        self.parked = trio.Event()
        self.answered = trio.Event()  # STARTED or FAILED
        self.ended = trio.Event()
        self.failure: frames.RunFailed | None = None
        self.wait_status: int | None = None

    def learn(self, frame: frames.Frame) -> None:
        """Take in what init says; what makes an earlier answer moot wakes for that one too."""
        match frame:
            case frames.Parked():
                self.parked.set()
            case frames.Started():
                self.answered.set()
            case frames.RunFailed():
                self.failure = frame
                self.wake()
            case frames.Exited():
                self.wait_status = frame.wait_status
                self.wake()

    def wake(self) -> None:
        """Wake everybody."""
        for event in (self.parked, self.answered, self.ended):
            event.set()


def exit_of(wait_status: int) -> CommandExit:
    """A wait status as the protocol has it."""
    if os.WIFSIGNALED(wait_status):
        return CommandExit(exit_code=None, signal=os.WTERMSIG(wait_status))
    return CommandExit(exit_code=os.WEXITSTATUS(wait_status), signal=None)


class InitClient:
    """One channel. `on_lost` is called once, when init is gone or talks nonsense."""

    def __init__(self, sock: trio.socket.SocketType, on_lost: Callable[[], None]) -> None:
        self._socket = sock
        self._on_lost = on_lost
        self._sending = trio.Lock()
        self._numbers: dict[int, Number] = {}
        self._lost = False

    @property
    def is_lost(self) -> bool:
        """Whether init is gone."""
        return self._lost

    async def park(self, number: int, leaf_directory: int) -> None:
        """Have a child made in this leaf, and wait until it waits.

        Raises MechanismError when init could not, SandboxLost.
        """
        state = self.expect(number)
        await self._send(frames.Park(number), [leaf_directory])
        await state.parked.wait()
        self._require_alive()
        if state.failure is not None:
            raise MechanismError(f"park.{state.failure.step}", state.failure.errno)

    def expect(self, number: int) -> Number:
        """Begin to listen to what init says of this number."""
        state = self._numbers[number] = Number()
        return state

    async def run(self, run: frames.Run, streams: Sequence[int]) -> frames.RunFailed | None:
        """Release the parked child into the program; its failure, or None when it runs.

        Raises SandboxLost, and MechanismError when the frame is too long.
        """
        state = self._numbers[run.number]
        await self._send(run, streams)
        await state.answered.wait()
        if state.failure is None and state.wait_status is None:
            self._require_alive()
        return state.failure

    async def wait_unparked(self, number: int) -> bool:
        """Until a parked child is released, given up, or gone. Whether it is gone by itself."""
        state = self._numbers.get(number)
        if state is None:
            return False
        await state.answered.wait()
        return state.failure is not None and not self._lost

    async def wait_exit(self, number: int) -> CommandExit:
        """Until the main process of this number ended. Raises SandboxLost."""
        state = self._numbers[number]
        await state.ended.wait()
        if state.wait_status is None:
            raise SandboxLost("init", 0, "init is gone")
        return exit_of(state.wait_status)

    def forget(self, number: int) -> None:
        """Nobody asks for this number any more."""
        state = self._numbers.pop(number, None)
        if state is not None:
            state.answered.set()

    def lose(self) -> None:
        """Init is gone: wake everybody. Idempotent."""
        if self._lost:
            return
        self._lost = True
        for state in self._numbers.values():
            state.wake()
        self._on_lost()

    async def read(self) -> None:
        """Receive until the channel ends. Runs once, in a task of its own."""
        try:
            while True:
                raw = await self._socket.recv(frames.FRAME_BYTES_MAX)
                if not raw or not self._deliver(raw):
                    return
        except (OSError, trio.ClosedResourceError):
            return
        finally:
            self.lose()

    def _deliver(self, raw: bytes) -> bool:
        try:
            frame = frames.decode(raw)
        except frames.FrameError:
            return False
        match frame:
            case frames.Parked() | frames.Started() | frames.RunFailed() | frames.Exited():
                state = self._numbers.get(frame.number)
            case _:
                return False
        if state is not None:  # else it was given up meanwhile
            state.learn(frame)
        return True

    async def _send(self, frame: frames.Frame, descriptors: Sequence[int]) -> None:
        try:
            raw = frames.encode(frame)
        except frames.FrameError as problem:
            raise MechanismError("frame", 0, str(problem)) from None
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        async with self._sending:
            self._require_alive()
            try:
                await self._socket.sendmsg([raw], control, socket.MSG_NOSIGNAL)
            except (OSError, trio.ClosedResourceError):
                self.lose()
        self._require_alive()

    def _require_alive(self) -> None:
        if self._lost:
            raise SandboxLost("init", 0, "init is gone")
