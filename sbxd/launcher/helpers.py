"""A slow verb as a forked child: bounded in time, its result in one packet, its death an answer.

Invariants: a helper holds no descriptor of the launcher but its own socket; it dies with the
launcher (PDEATHSIG) and so do the children it has not handed over, which share its process group;
it reports once and leaves by _exit. Which processes become the launcher's (init, steward) is
written in its report: the launcher is their subreaper.
"""

import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from msgspec import Struct
from msgspec.msgpack import Decoder

from sbxd.launcher.channel import close_all, encode, receive, send
from sbxd.launcher.kernel import process
from sbxd.launcher.requests import (
    Acknowledged,
    Booted,
    ErasingIs,
    Failed,
    InventoryIs,
    Prepared,
    Probed,
)
from sbxd.launcher.steps import StepFailed

HelperReply = Prepared | Booted | Acknowledged | Failed | ErasingIs | InventoryIs | Probed


class Report(Struct, frozen=True, kw_only=True):
    """What a helper reports. The descriptors travel beside it, in the reply's order. is_erasing:
    a volume waits to be erased."""

    reply: HelperReply
    init_pid: int = 0
    steward_pid: int = 0
    uid_base: int = 0
    is_erasing: bool = False


_decoder = Decoder(Report)


class Outcome:
    """A report and the descriptors that belong to it, before they are sent."""

    def __init__(self, report: Report, descriptors: Sequence[int] = ()) -> None:
        self.report = report
        self.descriptors = list(descriptors)


Work = Callable[[], Outcome]


class Helper:
    """One running helper, as the launcher sees it. `deadline` is in monotonic seconds."""

    def __init__(self, pid: int, channel: socket.socket, ticket: int, deadline: float) -> None:
        self.pid = pid
        self.channel = channel
        self.ticket = ticket
        self.deadline = deadline

    def result(self) -> tuple[Report, list[int]] | None:
        """The report, when the channel is readable; None when the helper died without one."""
        try:
            raw, descriptors = receive(self.channel)
        except OSError:
            return None
        if not raw:
            return None
        return _decoder.decode(raw), descriptors

    def kill(self) -> None:
        """Kill the helper and all children that it did not hand over. Only while it is not reaped:
        then its number is its own (`Pool.ended`)."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it may not have made its group yet
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Release the launcher's end."""
        self.channel.close()


def fork(work: Work, *, ticket: int, deadline: float) -> Helper:
    """Run `work` in a child. Raises OSError when the machine has no room for one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        here.close()
        there.close()
        raise
    if pid == 0:
        _child(work, ticket, there, parent)
    there.close()
    here.setblocking(False)
    return Helper(pid, here, ticket, deadline)


def _child(work: Work, ticket: int, channel: socket.socket, parent: int) -> NoReturn:
    try:
        process.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        process.close_all_but(channel.fileno())
        try:
            outcome = work()
        except StepFailed as problem:
            outcome = Outcome(Report(reply=problem.reply(ticket)))
        send(channel, encode(outcome.report), outcome.descriptors)
        os._exit(0)
    except BaseException as problem:
        # The launcher sees the death; the journal gets the reason.
        process.say(process.ERROR, f"helper: {type(problem).__name__}: {problem}")
        os._exit(1)


def discard(result: tuple[Report, list[int]] | None) -> None:
    """Close what a result carries that nobody wants any more."""
    if result is not None:
        close_all(result[1])
