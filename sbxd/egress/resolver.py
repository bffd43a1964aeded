"""Names to addresses, by the platform's resolver, off the event loop.

Theory: getaddrinfo(3) cannot be stopped, so each lookup has a thread and a lookup that is given up
leaves its thread to end by itself (the resolver of the C library gives up after its own timeouts).
Such a thread keeps its place until it has ended: the number of threads is bounded for the daemon,
each environment has a share of it, and a tenant gets a further one only while it has fewer than
are free (so the first takes half, the next half of the rest, and a tenant that has none finds one
unless there are as many others as threads). A name server that does not answer costs the
environment and the tenant that ask it and not the others. The threads do not keep the process from
ending.

Invariants: one question is asked per call, for the name with a dot at its end, so that no search
list applies; every address is returned, in the order of the answers, each once; no call takes
longer than its bound.

Deliberately absent: a cache (an answer is judged when it is used), any judgement of an address or
of their number (`sbxd.policy.egress`).
"""

import socket
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import trio

THREADS_MAX = 32
THREADS_PER_ENVIRONMENT_MAX = 8

GetAddrInfo = Callable[..., Sequence[tuple[Any, Any, Any, Any, Any]]]


class ResolutionFailed(OSError):
    """The platform's resolver gave no address; `strerror` is what it says about that."""


class Resolver:
    """The platform's resolver for one daemon; `share` makes what an environment uses."""

    def __init__(
        self,
        *,
        seconds: float,
        threads_max: int = THREADS_MAX,
        threads_per_environment_max: int = THREADS_PER_ENVIRONMENT_MAX,
        getaddrinfo: GetAddrInfo = socket.getaddrinfo,
    ) -> None:
        self._threads = _Fair(threads_max)
        self._share = threads_per_environment_max
        self._seconds = seconds
        self._getaddrinfo = getaddrinfo

    @property
    def threads(self) -> int:
        """How many lookups have a thread, those included that were given up."""
        return self._threads.taken

    def share(self, tenant: Hashable = None) -> "ResolverShare":
        """A resolver for one environment of this tenant; None: of the operator's own."""
        return ResolverShare(
            _Both(trio.CapacityLimiter(self._share), self._threads, tenant),
            seconds=self._seconds,
            getaddrinfo=self._getaddrinfo,
        )


class ResolverShare:
    """What one environment resolves with. Made by `Resolver.share`."""

    def __init__(self, places: "_Both", *, seconds: float, getaddrinfo: GetAddrInfo) -> None:
        self._places = places
        self._seconds = seconds
        self._getaddrinfo = getaddrinfo

    async def resolve(self, host: str) -> tuple[str, ...]:
        """The addresses of a canonical host, as text; at least one (`policy.egress.Resolve`).

        Raises:
            TimeoutError: no answer within the bound, a wait for a thread included.
            ResolutionFailed: the name has no address, or the resolver failed.

        Cancellation: the lookup is given up; its thread keeps its place until it has ended.
        """
        try:
            with trio.fail_after(self._seconds):
                found = await trio.to_thread.run_sync(
                    self._ask,
                    host,
                    abandon_on_cancel=True,
                    # Trio asks of a limiter no more than `_Both` has.
                    limiter=cast(trio.CapacityLimiter, self._places),
                )
        except trio.TooSlowError:
            raise TimeoutError from None
        except (OSError, UnicodeError) as problem:
            cause = getattr(problem, "strerror", None) or type(problem).__name__
            raise ResolutionFailed(0, cause) from None
        return tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))

    def _ask(self, host: str) -> Sequence[tuple[Any, Any, Any, Any, Any]]:
        # Bytes, since Python's own encoding of names rewrites what is not plain. No port and no
        # AI_ADDRCONFIG: every address that the name has is to be judged.
        return self._getaddrinfo(
            host.encode("ascii") + b".",
            None,
            family=socket.AF_UNSPEC,
            type=socket.SOCK_STREAM,
            proto=socket.IPPROTO_TCP,
        )


class _Fair:
    """Places, of which a party gets a further one while it has fewer than are free."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken: Counter[Hashable] = Counter()
        self._released = trio.Event()

    @property
    def taken(self) -> int:
        return self._taken.total()

    async def acquire(self, party: Hashable) -> None:
        """Wait for a place. Cancellation: none is taken."""
        await trio.lowlevel.checkpoint()
        while self._taken[party] >= self._total - self.taken:
            await self._released.wait()
        self._taken[party] += 1

    def release(self, party: Hashable) -> None:
        self._taken[party] -= 1
        if not self._taken[party]:
            del self._taken[party]
        self._released.set()
        self._released = trio.Event()


class _Both:
    """A limiter that is two: a place is one of the share and one of the whole."""

    def __init__(self, share: trio.CapacityLimiter, whole: _Fair, tenant: Hashable) -> None:
        self._share = share
        self._whole = whole
        self._tenant = tenant

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self._share.acquire_on_behalf_of(borrower)
        try:
            await self._whole.acquire(self._tenant)
        except BaseException:
            self._share.release_on_behalf_of(borrower)
            raise

    def release_on_behalf_of(self, borrower: object) -> None:
        self._whole.release(self._tenant)
        self._share.release_on_behalf_of(borrower)
