"""The worker's resolver: the name exactly, every address, bounded time and places."""

import socket
import threading
from collections.abc import Callable, Sequence

import anyio
import pytest

from sbxd.client.resolver import SystemResolver, system_lookup

LONG_SECONDS = 30.0
NO_TIME_SECONDS = 0.02


class Lookup:
    """Answers at once, or when it is let go."""

    def __init__(self, answer: Sequence[str] | OSError = ("8.8.8.8",)) -> None:
        self.answer = answer
        self.asked: list[bytes] = []
        self.go = threading.Event()
        self.go.set()
        self.started = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._at_once = 0
        self.at_once_max = 0

    def __call__(self, name: bytes) -> Sequence[str]:
        with self._lock:
            self.asked.append(name)
            self._at_once += 1
            self.at_once_max = max(self.at_once_max, self._at_once)
        self.started.release()
        assert self.go.wait(LONG_SECONDS)
        with self._lock:
            self._at_once -= 1
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


def resolved(resolver: SystemResolver, backend: str, name: str = "a.example") -> Sequence[str]:
    """By both ways, which must agree."""
    awaited = anyio.run(resolver.resolve, name, backend=backend)
    assert resolver.resolve_blocking(name) == awaited
    return awaited


@pytest.mark.case("EGR-12")
def test_the_name_is_asked_for_exactly_with_search_domains_off(backend: str) -> None:
    lookup = Lookup(("8.8.8.8", "2606:4700::1"))
    assert resolved(SystemResolver(lookup=lookup, timeout_seconds=LONG_SECONDS), backend) == (
        "8.8.8.8",
        "2606:4700::1",
    )
    assert lookup.asked == [b"a.example."] * 2


def test_getaddrinfo_is_called_once_for_both_families_and_all_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def getaddrinfo(*arguments: object, **options: object) -> list[tuple[object, ...]]:
        asked.append((arguments, options))
        return [
            (socket.AF_INET6, 1, 6, "", ("fe80::1%eth0", 0, 0, 2)),
            (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0)),
            (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert system_lookup(b"a.example.") == ("fe80::1%eth0", "10.0.0.1")
    assert asked == [
        ((b"a.example.", None), {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP})
    ]


def test_the_machines_resolver_answers_for_an_address(backend: str) -> None:
    """Control: the real call works (an address needs no server)."""
    assert system_lookup(b"127.0.0.1") == ("127.0.0.1",)


def test_a_failure_is_raised_as_it_is(backend: str) -> None:
    failure = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    resolver = SystemResolver(lookup=Lookup(failure), timeout_seconds=LONG_SECONDS)
    with pytest.raises(socket.gaierror):
        anyio.run(resolver.resolve, "a.example", backend=backend)
    with pytest.raises(socket.gaierror):
        resolver.resolve_blocking("a.example")


def ways(backend: str, resolver: SystemResolver) -> list[Callable[[], Sequence[str]]]:
    return [
        lambda: anyio.run(resolver.resolve, "a.example", backend=backend),
        lambda: resolver.resolve_blocking("a.example"),
    ]


@pytest.mark.parametrize("way", [0, 1], ids=["awaited", "blocking"])
def test_a_silent_name_server_costs_the_time_limit_and_no_more(backend: str, way: int) -> None:
    lookup = Lookup()
    lookup.go.clear()
    resolver = SystemResolver(lookup=lookup, timeout_seconds=NO_TIME_SECONDS)
    with pytest.raises(TimeoutError):
        ways(backend, resolver)[way]()
    lookup.go.set()


@pytest.mark.parametrize("way", [0, 1], ids=["awaited", "blocking"])
def test_lookups_that_nobody_waits_for_are_counted_until_they_end(backend: str, way: int) -> None:
    """getaddrinfo cannot be stopped: a silent name server must not cost a thread for each try."""
    lookup = Lookup()
    lookup.go.clear()
    resolver = SystemResolver(lookup=lookup, timeout_seconds=NO_TIME_SECONDS, lookups_max=2)

    async def awaited() -> None:
        for _ in range(10):
            with pytest.raises(TimeoutError):
                await resolver.resolve("a.example")
        lookup.go.set()  # before the loop ends: it waits for its threads

    if way == 0:
        anyio.run(awaited, backend=backend)
    else:
        for _ in range(10):
            with pytest.raises(TimeoutError):
                resolver.resolve_blocking("a.example")
        lookup.go.set()
    assert lookup.started.acquire(timeout=LONG_SECONDS)  # control: there was one
    assert lookup.at_once_max <= 4


def test_a_cancelled_lookup_does_not_hold_its_caller(backend: str) -> None:
    lookup = Lookup()
    lookup.go.clear()

    async def cancel() -> None:
        resolver = SystemResolver(lookup=lookup, timeout_seconds=LONG_SECONDS)
        async with anyio.create_task_group() as group:
            group.start_soon(resolver.resolve, "a.example")
            await anyio.to_thread.run_sync(lookup.started.acquire)
            group.cancel_scope.cancel()
        assert not lookup.go.is_set()  # it was still looking
        lookup.go.set()

    anyio.run(cancel, backend=backend)
