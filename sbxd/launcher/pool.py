"""Which slow verbs run now and which wait: bounded helpers per lane, first come first served.

Ending never waits behind building, and a question never behind an image: each lane has helpers of
its own.
"""

import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum

from sbxd.launcher import helpers
from sbxd.launcher.helpers import Helper, Report, Work

QUEUE_MAX = 8192


class Lane(StrEnum):
    """BUILD: preparations. END: destructions. SHARE: weights. UNPACK and DROP: images. REST:
    inventory, probe. ERASE: what is left of the dead."""

    BUILD = "build"
    END = "end"
    SHARE = "share"
    UNPACK = "unpack"
    DROP = "drop"
    REST = "rest"
    ERASE = "erase"


Result = tuple[Report, list[int]] | None
Done = Callable[[Result], None]


class Job:
    """One slow verb. `done` is called exactly once, with None when the helper died or was killed
    (by its deadline, by `cancel`), and then owns the descriptors."""

    def __init__(self, lane: Lane, ticket: int, seconds: float, work: Work, done: Done) -> None:
        self.lane = lane
        self.ticket = ticket
        self.seconds = seconds
        self.work = work
        self.done = done
        self.helper: Helper | None = None


class QueueFull(Exception):
    """Too many slow verbs wait."""


class Pool:
    """Runs jobs. The owner polls `channels()` and calls `readable` and `expire`."""

    def __init__(self, width: int) -> None:
        self._limits = {
            Lane.BUILD: width,
            Lane.END: width,
            Lane.SHARE: 1,
            Lane.UNPACK: 2,
            Lane.DROP: 1,
            Lane.REST: 2,
            Lane.ERASE: 1,
        }
        self._waiting: dict[Lane, deque[Job]] = {lane: deque() for lane in Lane}
        self._running: dict[int, Job] = {}

    def submit(self, job: Job) -> None:
        """Start the job now or later. Raises QueueFull."""
        waiting = self._waiting[job.lane]
        if len(waiting) >= QUEUE_MAX:
            raise QueueFull
        waiting.append(job)
        self._start()

    def cancel(self, job: Job) -> None:
        """End the job; its `done(None)` comes when the helper is gone, or now if it waited."""
        if job.helper is not None:
            job.helper.kill()
            return
        waiting = self._waiting[job.lane]
        if job in waiting:
            waiting.remove(job)
            job.done(None)

    def channels(self) -> list[int]:
        """The descriptors to poll for reading."""
        return list(self._running)

    def is_busy(self) -> bool:
        """Whether a helper works for anybody: erasing is nobody's verb."""
        return any(job.lane is not Lane.ERASE for job in self._running.values())

    def next_deadline(self) -> float | None:
        """When `expire` has something to do at the earliest (monotonic seconds)."""
        deadlines = [job.helper.deadline for job in self._running.values() if job.helper]
        return min(deadlines, default=None)

    def readable(self, channel: int) -> None:
        """A helper has reported or died."""
        job = self._running.pop(channel, None)
        if job is None or job.helper is None:
            return
        result = job.helper.result()
        if result is None:
            job.helper.kill()  # its group may have outlived it
        job.helper.close()
        job.done(result)
        self._start()

    def ended(self, pid: int) -> None:
        """A child has ended and is not reaped yet: a helper is over now, while its number, by
        which it and its group are killed, is nobody else's."""
        for channel, job in self._running.items():
            if job.helper is not None and job.helper.pid == pid:
                self.readable(channel)
                return

    def expire(self) -> None:
        """Kill the helpers that are over their deadline."""
        now = time.monotonic()
        for job in list(self._running.values()):
            if job.helper is not None and job.helper.deadline <= now:
                job.helper.kill()
                job.helper.deadline = float("inf")

    def _start(self) -> None:
        for lane, waiting in self._waiting.items():
            running = sum(1 for job in self._running.values() if job.lane is lane)
            while waiting and running < self._limits[lane]:
                job = waiting.popleft()
                try:
                    job.helper = helpers.fork(
                        job.work, ticket=job.ticket, deadline=time.monotonic() + job.seconds
                    )
                except OSError:
                    job.done(None)
                    continue
                self._running[job.helper.channel.fileno()] = job
                running += 1
