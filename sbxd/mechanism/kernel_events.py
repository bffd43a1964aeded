"""Wait for the kernel's word about a cgroup, and read its counters, by descriptors alone.

A cgroup's event file tells of a change by POLLPRI, which the event loop cannot wait for; an epoll
descriptor that watches it becomes readable, and that it can. A file must be read before a wait
(the kernel compares with what this descriptor has seen), so every wait here begins with a read.
"""

import errno
import os
import select
import stat

import trio

from sbxd.mechanism.protocol import MechanismError

_BYTES_MAX = 16 * 1024
# The kernel tells of a cgroup file at most every 10 ms, later changes by a timer that the removal
# of the cgroup deletes; so the last word about a removed cgroup may never come.
RECHECK_SECONDS = 0.02


class BadCounter(ValueError):
    """A counter file does not have the form that the kernel documents."""


def parse_flat_keyed(raw: bytes) -> dict[str, int]:
    """`key number` lines. Raises BadCounter for anything else."""
    found: dict[str, int] = {}
    for line in raw.decode("ascii", "replace").splitlines():
        key, separator, value = line.partition(" ")
        if not separator or not key or key in found or not _is_number(value):
            raise BadCounter("not a flat keyed file")
        found[key] = int(value)
    return found


def parse_single(raw: bytes) -> int:
    """One number and a newline. Raises BadCounter for anything else."""
    text = raw.decode("ascii", "replace")
    if not text.endswith("\n") or not _is_number(text[:-1]):
        raise BadCounter("not a single number")
    return int(text)


def parse_bytes_written(raw: bytes) -> int:
    """Of an `io.stat` file: the bytes that were sent to a disk. Disks that are stacked each count
    the same bytes, so it is the largest of the numbers and not their sum. Raises BadCounter."""
    most = 0
    for line in raw.decode("ascii", "replace").splitlines():
        for word in line.split()[1:]:
            key, _, value = word.partition("=")
            if key == "wbytes":
                if not _is_number(value):
                    raise BadCounter("wbytes is not a number")
                most = max(most, int(value))
    return most


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def is_absent(descriptor: int) -> bool:
    """Whether this is the null device, which stands for a counter that the host lacks."""
    return stat.S_ISCHR(os.fstat(descriptor).st_mode)


def kill(kill_fd: int) -> None:
    """Kill every process of a cgroup by its `cgroup.kill`. One that is gone has none, and one that
    is being removed neither (ENOENT, between the end of its last process and its own).

    Raises MechanismError.
    """
    try:
        os.write(kill_fd, b"1")
    except OSError as problem:
        if problem.errno not in (errno.ENODEV, errno.ENOENT):
            raise MechanismError("kill", problem.errno or 0) from None


def read(descriptor: int) -> bytes:
    """The whole file now. Raises OSError(ENODEV) once the cgroup is removed."""
    return os.pread(descriptor, _BYTES_MAX, 0)


def is_populated(descriptor: int) -> bool:
    """Whether the cgroup of this `cgroup.events` has a live process; a removed one has none."""
    try:
        return parse_flat_keyed(read(descriptor)).get("populated") != 0
    except OSError as problem:
        if problem.errno == errno.ENODEV:
            return False
        raise


class Watch:
    """Waits for a change of any of these files. Owns its epoll, borrows the files."""

    def __init__(self, *borrowed: int) -> None:
        self._epoll = select.epoll()
        self._files = [descriptor for descriptor in borrowed if not is_absent(descriptor)]
        for descriptor in self._files:
            self._epoll.register(descriptor, select.EPOLLPRI)
        self.arm()

    def arm(self) -> None:
        """Read every file: only changes after this moment end a wait."""
        for descriptor in self._files:
            try:
                read(descriptor)
            except OSError as problem:
                if problem.errno != errno.ENODEV:
                    raise

    async def wait(self) -> None:
        """Until a file changed since it was last read; forever when there is no file."""
        if not self._files:
            await trio.sleep_forever()
        await trio.lowlevel.wait_readable(self._epoll.fileno())

    def close(self) -> None:
        """Release the epoll descriptor. Waiters get ClosedResourceError. Idempotent."""
        if not self._epoll.closed:
            trio.lowlevel.notify_closing(self._epoll.fileno())
            self._epoll.close()


async def wait_unpopulated(descriptor: int) -> None:
    """Until the cgroup of this `cgroup.events` has no live process."""
    if not is_populated(descriptor):
        await trio.lowlevel.checkpoint()
        return
    watch = Watch(descriptor)
    try:
        while is_populated(descriptor):
            with trio.move_on_after(RECHECK_SECONDS):
                await watch.wait()
    finally:
        watch.close()
