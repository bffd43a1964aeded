"""Names to addresses, by the platform's resolver, off the event loop.

Theory: getaddrinfo(3) cannot be stopped, so each lookup has a thread and a lookup that is given up
leaves its thread to end by itself (the resolver of the C library gives up after its own timeouts).
Such a thread keeps its place until it has ended: the number of threads is bounded for the daemon,
and each environment has a share of it, so a name server that does not answer costs the environment
that asks it and not the others. The threads do not keep the process from ending.

Invariants: one question is asked per call, for the name with a dot at its end, so that no search
list applies; the order of the answers is kept; each address appears once; more addresses than can
be judged are a failure, never a part of them.

Deliberately absent: timeouts (the caller's), a cache (an answer is judged when it is used), any
judgement of an address (`sbxd.policy.egress`).
"""

import socket
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, cast

import trio

ADDRESSES_MAX = 64
THREADS_MAX = 32
THREADS_PER_ENVIRONMENT_MAX = 8

GetAddrInfo = Callable[..., Sequence[tuple[Any, Any, Any, Any, Any]]]

# What says that the name is not there or has no address; the others may pass.
_ABSENT = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


class ResolutionProblem(StrEnum):
    NOT_FOUND = "NOT_FOUND"
    FAILED = "FAILED"
    TOO_MANY_ADDRESSES = "TOO_MANY_ADDRESSES"
    TOO_LATE = "TOO_LATE"


class ResolutionFailed(Exception):
    """There are no addresses to judge."""

    def __init__(self, problem: ResolutionProblem) -> None:
        super().__init__(problem.value)
        self.problem = problem


class Resolver:
    """The platform's resolver for one daemon; `share` makes what an environment uses."""

    def __init__(
        self,
        *,
        threads_max: int = THREADS_MAX,
        threads_per_environment_max: int = THREADS_PER_ENVIRONMENT_MAX,
        addresses_max: int = ADDRESSES_MAX,
        getaddrinfo: GetAddrInfo = socket.getaddrinfo,
    ) -> None:
        self._threads = trio.CapacityLimiter(threads_max)
        self._share = threads_per_environment_max
        self._addresses_max = addresses_max
        self._getaddrinfo = getaddrinfo

    @property
    def threads(self) -> int:
        """How many lookups have a thread, those included that were given up."""
        return self._threads.borrowed_tokens

    def share(self) -> "ResolverShare":
        """A resolver for one environment."""
        return ResolverShare(
            _Both(trio.CapacityLimiter(self._share), self._threads),
            addresses_max=self._addresses_max,
            getaddrinfo=self._getaddrinfo,
        )


class ResolverShare:
    """What one environment resolves with. Made by `Resolver.share`."""

    def __init__(self, places: "_Both", *, addresses_max: int, getaddrinfo: GetAddrInfo) -> None:
        self._places = places
        self._addresses_max = addresses_max
        self._getaddrinfo = getaddrinfo

    async def resolve(self, host: str) -> tuple[str, ...]:
        """The addresses of a canonical host, as text, in the resolver's order; at least one.

        Raises:
            ResolutionFailed: the name has none, or more than can be judged, or the resolver failed.

        Cancellation: the lookup is given up; its thread keeps its place until it has ended.
        """
        try:
            found = await trio.to_thread.run_sync(
                self._ask,
                host,
                abandon_on_cancel=True,
                # Trio asks of a limiter no more than `_Both` has.
                limiter=cast(trio.CapacityLimiter, self._places),
            )
        except socket.gaierror as problem:
            absent = problem.errno in _ABSENT
            raise ResolutionFailed(
                ResolutionProblem.NOT_FOUND if absent else ResolutionProblem.FAILED
            ) from None
        except (OSError, UnicodeError):
            raise ResolutionFailed(ResolutionProblem.FAILED) from None
        addresses = tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
        if not addresses:
            raise ResolutionFailed(ResolutionProblem.NOT_FOUND)
        if len(addresses) > self._addresses_max:
            raise ResolutionFailed(ResolutionProblem.TOO_MANY_ADDRESSES)
        return addresses

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


class _Both:
    """A limiter that is two: a place is one of the share and one of the whole."""

    def __init__(self, share: trio.CapacityLimiter, whole: trio.CapacityLimiter) -> None:
        self._share = share
        self._whole = whole

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self._share.acquire_on_behalf_of(borrower)
        try:
            await self._whole.acquire_on_behalf_of(borrower)
        except BaseException:
            self._share.release_on_behalf_of(borrower)
            raise

    def release_on_behalf_of(self, borrower: object) -> None:
        self._whole.release_on_behalf_of(borrower)
        self._share.release_on_behalf_of(borrower)
