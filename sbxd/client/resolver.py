"""Looking a name up with the machine's own resolver, off the event loop and in bounded time.

Invariants: the name is asked for exactly as it is (a trailing dot switches search domains off);
every address of the answer is returned, of both families, in the resolver's order; the number of
lookups that run at once is bounded, also by those that nobody waits for any more. Deliberately
absent: a cache, a choice among addresses, a judgement: `sbxd.policy.egress` judges, also what
/etc/hosts says.
"""

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import anyio.to_thread

TIMEOUT_SECONDS = 5.0
LOOKUPS_MAX = 8

Lookup = Callable[[bytes], Sequence[str]]
"""Blocks; raises OSError."""


class Resolver(Protocol):
    """What the guard looks names up with: the same lookup, awaited or blocking.

    Each raises TimeoutError when it took too long, another OSError when it failed.
    """

    async def resolve(self, name: str) -> Sequence[str]: ...

    def resolve_blocking(self, name: str) -> Sequence[str]: ...


def system_lookup(name: bytes) -> Sequence[str]:
    """getaddrinfo: every address of a name, each once. Blocks. Raises: OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return tuple(dict.fromkeys(str(sockaddr[0]) for _, _, _, _, sockaddr in found))


class SystemResolver:
    """The machine's resolver (resolv.conf, /etc/hosts, as nsswitch.conf orders them).

    timeout_seconds: of one lookup, including its wait for a free place. lookups_max: that are
    waited for at once. As many again may still run though nobody waits for them (getaddrinfo
    cannot be stopped); while all of these hang, a lookup fails at once as timed out. Use one
    resolver per event loop.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        lookups_max: int = LOOKUPS_MAX,
        lookup: Lookup = system_lookup,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._lookups_max = lookups_max
        self._lookup = lookup
        self._limiter: anyio.CapacityLimiter | None = None
        # The limiter counts callers: anyio frees a caller's place under asyncio as soon as it is
        # cancelled, though its thread runs on. This counts threads.
        self._threads = threading.BoundedSemaphore(2 * lookups_max)

    async def resolve(self, name: str) -> Sequence[str]:
        """Every address of a name.

        Raises: TimeoutError; OSError.

        Cancellation: the lookup's thread ends by itself, and is counted until then.
        """
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self._lookups_max)
        with anyio.fail_after(self._timeout_seconds):
            return await anyio.to_thread.run_sync(
                self._look, _absolute(name), abandon_on_cancel=True, limiter=self._limiter
            )

    def _look(self, name: bytes) -> Sequence[str]:
        if not self._threads.acquire(blocking=False):
            raise TimeoutError
        try:
            return self._lookup(name)
        finally:
            self._threads.release()

    def resolve_blocking(self, name: str) -> Sequence[str]:
        """As `resolve`, for a thread that may block."""
        if not self._threads.acquire(timeout=self._timeout_seconds):
            raise TimeoutError
        answers: queue.SimpleQueue[Sequence[str] | OSError] = queue.SimpleQueue()

        def look() -> None:
            try:
                answers.put(self._lookup(_absolute(name)))
            except OSError as error:
                answers.put(error)
            finally:
                self._threads.release()

        # A daemon thread: a name server that does not answer holds up no program's end.
        thread = threading.Thread(target=look, name="sbxd-lookup", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._threads.release()
            raise OSError("no thread can be started for a lookup") from None
        try:
            answer = answers.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(answer, OSError):
            raise answer
        return answer


def _absolute(name: str) -> bytes:
    return name.encode("ascii") + b"."
