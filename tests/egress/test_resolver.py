"""The platform's resolver: one question, no search list, bounded threads and time."""

import socket
import threading
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from sbxd.egress.resolver import (
    THREADS_MAX,
    THREADS_PER_ENVIRONMENT_MAX,
    ResolutionFailed,
    Resolver,
    ResolverShare,
)


def answering(*addresses: str) -> Any:
    return lambda *_, **__: [(0, 0, 0, "", (address, 0)) for address in addresses]


@pytest.mark.case("EGR-12")
async def test_the_question_is_the_full_name_as_bytes_and_for_every_family() -> None:
    asked: list[Any] = []

    def getaddrinfo(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return answering("192.0.2.1")()

    await Resolver(seconds=1, getaddrinfo=getaddrinfo).share().resolve("a.example")
    ((host, service), options), *rest = asked
    assert (host, service, rest) == (b"a.example.", None, [])
    assert options["family"] == socket.AF_UNSPEC
    assert "flags" not in options


async def test_addresses_keep_their_order_and_come_once() -> None:
    resolver = Resolver(seconds=1, getaddrinfo=answering("::2", "10.0.0.1", "::2", "::1"))
    assert await resolver.share().resolve("a.example") == ("::2", "10.0.0.1", "::1")


async def test_the_platforms_resolver_takes_a_literal_as_a_name() -> None:
    # The control that the real function is called, without a question on any network: with a dot
    # at its end an address is a name, and one that no server is asked for is an error or none.
    with pytest.raises(ResolutionFailed):
        await Resolver(seconds=5).share().resolve("a..b")


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "Temporary failure"),
        (OSError(24, "Too many open files"), "Too many open files"),
        (UnicodeError("label too long"), "UnicodeError"),
    ],
)
async def test_what_the_resolver_says_is_the_failures_text(problem: Exception, text: str) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise problem

    with pytest.raises(ResolutionFailed) as failed:
        await Resolver(seconds=1, getaddrinfo=fail).share().resolve("a.example")
    assert text in (failed.value.strerror or "")


async def test_a_server_that_does_not_answer_costs_its_environment_its_share_and_no_other(
    mock_clock: MockClock,
) -> None:
    go_on = threading.Event()

    def hang(host: bytes, *_: object, **__: object) -> Any:
        if host.startswith(b"hang"):
            go_on.wait()
        return answering("192.0.2.1")()

    resolver = Resolver(seconds=10, threads_max=3, threads_per_environment_max=2, getaddrinfo=hang)
    first, second = resolver.share("one"), resolver.share("another")
    late = 0

    async def ask() -> None:
        nonlocal late
        with pytest.raises(TimeoutError):
            await first.resolve("hang.example")
        late += 1

    try:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert resolver.threads == 2
            mock_clock.jump(11)
        # Everyone has been told, and the two threads hang on.
        assert (late, resolver.threads) == (20, 2)
        assert await second.resolve("a.example") == ("192.0.2.1",)
        with trio.move_on_after(1) as cancelled:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(first.resolve, "a.example")
                await trio.testing.wait_all_tasks_blocked()
                mock_clock.jump(1)
        assert cancelled.cancelled_caught
    finally:
        go_on.set()
    while resolver.threads:
        await trio.lowlevel.checkpoint()
    assert await first.resolve("a.example") == ("192.0.2.1",)


async def test_however_many_environments_of_tenants_hang_another_tenant_is_served(
    mock_clock: MockClock,
) -> None:
    """With the numbers of the daemon: as many environments as would fill every thread."""
    go_on = threading.Event()

    def hang(host: bytes, *_: object, **__: object) -> Any:
        if host.startswith(b"hang"):
            go_on.wait()
        return answering("192.0.2.1")()

    resolver = Resolver(seconds=10, getaddrinfo=hang)
    taken = []

    async def ask(share: ResolverShare) -> None:
        with pytest.raises(TimeoutError):
            await share.resolve("hang.example")

    try:
        async with trio.open_nursery() as nursery:
            for tenant in ("greedy", "second", "third"):
                for _ in range(THREADS_MAX // THREADS_PER_ENVIRONMENT_MAX):
                    share = resolver.share(tenant)
                    for _ in range(THREADS_PER_ENVIRONMENT_MAX):
                        nursery.start_soon(ask, share)
                await trio.testing.wait_all_tasks_blocked()
                taken.append(resolver.threads)
            # Each took half of what was free, and nobody more.
            assert taken == [16, 24, 28]
            assert await resolver.share("modest").resolve("a.example") == ("192.0.2.1",)
            mock_clock.jump(11)
        with trio.move_on_after(1) as waits:  # who holds half still waits for its own
            async with trio.open_nursery() as nursery:
                nursery.start_soon(resolver.share("greedy").resolve, "a.example")
                await trio.testing.wait_all_tasks_blocked()
                mock_clock.jump(1)
        assert waits.cancelled_caught
    finally:
        go_on.set()
    while resolver.threads:
        await trio.lowlevel.checkpoint()
    assert await resolver.share("greedy").resolve("a.example") == ("192.0.2.1",)
