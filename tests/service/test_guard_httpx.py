"""httpx over the guard, with streams that the test plays: which address is dialled under which
name. Over real sockets and TLS: test_guard_dials.py."""

import ssl
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import httpcore
import httpx
import pytest

from sbxd.client.guard import EgressDenied, Guard
from sbxd.client.guard_httpx import AsyncGuardedTransport, GuardedTransport
from sbxd.policy.egress import EgressRefusal
from tests.service.guard_parts import Names, guard_over

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


def redirect_to(url: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {url}\r\nContent-Length: 0\r\n\r\n".encode()


class Network:
    """What is dialled, and what each address answers to one connection after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: list[bytes]) -> None:
        self.answers = {key.lstrip("a").replace("_", "."): value for key, value in answers.items()}
        self.peers: dict[str, str] = {}
        self.dialled: list[tuple[str, int]] = []
        self.server_names: list[str | None] = []
        self.written = b""
        monkeypatch.setattr(httpcore, "AnyIOBackend", lambda: AsyncPlayed(self))
        monkeypatch.setattr(httpcore, "SyncBackend", lambda: Played(self))

    def dial(self, address: str, port: int) -> tuple[list[bytes], str]:
        self.dialled.append((address, port))
        if address not in self.answers:
            raise httpcore.ConnectError("Connection refused")
        return list(self.answers[address]), self.peers.get(address, address)


class AsyncPlayed(httpcore.AsyncNetworkBackend):
    def __init__(self, network: Network) -> None:
        self.network = network

    async def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> Any:
        answers, peer = self.network.dial(host, port)
        return AsyncStream(self.network, answers, peer)


class Played(httpcore.NetworkBackend):
    def __init__(self, network: Network) -> None:
        self.network = network

    def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> Any:
        answers, peer = self.network.dial(host, port)
        return Stream(self.network, answers, peer)


class Stream(httpcore.MockStream):
    def __init__(self, network: Network, answers: list[bytes], peer: str) -> None:
        super().__init__(answers)
        self.network, self.peer = network, peer

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.network.written += buffer

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, *_: Any, **__: Any
    ) -> httpcore.NetworkStream:
        assert ssl_context.check_hostname
        self.network.server_names.append(server_hostname)
        return self

    def get_extra_info(self, info: str) -> Any:
        return (self.peer, 443) if info == "server_addr" else None


class AsyncStream(httpcore.AsyncMockStream):
    def __init__(self, network: Network, answers: list[bytes], peer: str) -> None:
        super().__init__(answers)
        self.network, self.peer = network, peer

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.network.written += buffer

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, *_: Any, **__: Any
    ) -> httpcore.AsyncNetworkStream:
        assert ssl_context.check_hostname
        self.network.server_names.append(server_hostname)
        return self

    def get_extra_info(self, info: str) -> Any:
        return (self.peer, 443) if info == "server_addr" else None


Fetch = Callable[..., list[httpx.Response]]


@pytest.fixture(params=["asyncio", "trio", "blocking"])
def fetch(request: pytest.FixtureRequest) -> Fetch:
    """GET each URL over one client that follows redirects."""

    def blocking(guard: Guard, urls: Iterable[str], **options: Any) -> list[httpx.Response]:
        with httpx.Client(transport=GuardedTransport(guard), follow_redirects=True) as client:
            return [client.get(url, **options) for url in urls]

    async def awaited(guard: Guard, urls: Iterable[str], **options: Any) -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=AsyncGuardedTransport(guard), follow_redirects=True
        ) as client:
            return [await client.get(url, **options) for url in urls]

    def run(guard: Guard, *urls: str, **options: Any) -> list[httpx.Response]:
        if request.param == "blocking":
            return blocking(guard, urls, **options)
        return anyio.run(lambda: awaited(guard, urls, **options), backend=request.param)

    return run


def names() -> Names:
    return Names(
        a_example_com=[["8.8.8.8"], ["127.0.0.1"]],
        b_example_org=[["8.8.8.8"], ["127.0.0.1"]],
        inside_example_org=[["10.0.0.1"]],
        two_example_org=[["9.9.9.9", "8.8.8.8"]],
    )


def test_the_checked_address_is_dialled_under_the_urls_name(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(monkeypatch, a8_8_8_8=[OK])
    asked = names()
    (response,) = fetch(guard_over(asked), "https://A.example.com/x?y=1")
    assert (response.status_code, response.text) == (200, "hello")
    assert network.dialled == [("8.8.8.8", 443)]
    assert network.server_names == ["a.example.com"]
    assert b"GET /x?y=1 HTTP/1.1\r\nHost: a.example.com\r\n" in network.written
    assert asked.asked == ["a.example.com"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://elsewhere.example.net/", EgressRefusal.HOST_NOT_LISTED),
        ("https://a.example.com:8443/", EgressRefusal.PORT_NOT_LISTED),
        ("https://inside.example.org/", EgressRefusal.ADDRESS_REFUSED),
        ("http://169.254.169.254/latest/meta-data/", EgressRefusal.HOST_MALFORMED),
        ("http://[::ffff:169.254.169.254]/", EgressRefusal.HOST_MALFORMED),
        ("http://2852039166/", EgressRefusal.HOST_MALFORMED),
        ("http://0xa9fea9fe/", EgressRefusal.HOST_MALFORMED),
        ("http://localhost/", EgressRefusal.HOST_NOT_LISTED),
        ("https://a.example.com./", EgressRefusal.HOST_MALFORMED),
    ],
)
def test_a_url_and_a_redirect_are_refused_alike(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch, url: str, reason: EgressRefusal
) -> None:
    network = Network(monkeypatch, a8_8_8_8=[redirect_to(url)])
    with pytest.raises(EgressDenied) as denied:
        fetch(guard_over(names()), url)
    assert denied.value.refused.reason is reason
    assert network.dialled == []
    with pytest.raises(EgressDenied) as denied:
        fetch(guard_over(names()), "https://a.example.com/")
    assert denied.value.refused.reason is reason
    assert network.dialled == [("8.8.8.8", 443)]  # control: the first was


def test_a_redirect_to_a_listed_host_is_judged_and_dialled_anew(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(monkeypatch, a8_8_8_8=[redirect_to("https://two.example.org/"), OK])
    asked = names()
    network.answers["9.9.9.9"] = [OK]
    (response,) = fetch(guard_over(asked), "https://a.example.com/")
    assert response.text == "hello"
    assert asked.asked == ["a.example.com", "two.example.org"]
    assert network.dialled == [("8.8.8.8", 443), ("9.9.9.9", 443)]
    assert network.server_names == ["a.example.com", "two.example.org"]


def test_two_names_at_one_address_have_connections_of_their_own(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate of one says nothing about the other."""
    network = Network(monkeypatch, a8_8_8_8=[OK, OK])
    asked = names()
    fetch(
        guard_over(asked),
        "https://a.example.com/",
        "https://b.example.org/",
        "https://a.example.com/again",
    )
    assert network.server_names == ["a.example.com", "b.example.org"]
    assert asked.asked == ["a.example.com", "b.example.org"]  # the third took the first connection


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"])
def test_proxies_of_the_process_environment_are_not_used(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in (variable, variable.lower()):
        monkeypatch.setenv(name, "http://7.7.7.7:3128")
    network = Network(monkeypatch, a8_8_8_8=[OK])
    for scheme, port in (("http", 80), ("https", 443)):
        fetch(guard_over(names()), f"{scheme}://a.example.com/")
        assert network.dialled.pop() == ("8.8.8.8", port)
    assert network.dialled == []


def test_control_a_client_without_the_transport_would_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://7.7.7.7:3128")
    with httpx.Client() as client:
        assert client._transport_for_url(httpx.URL("https://a.example.com/")) is not (
            client._transport
        )


def test_the_host_header_and_the_server_name_cannot_be_another(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(monkeypatch, a8_8_8_8=[OK])
    with pytest.raises(httpx.LocalProtocolError, match="Host header"):
        fetch(guard_over(names()), "https://a.example.com/", headers={"Host": "b.example.org"})
    assert network.dialled == []
    fetch(
        guard_over(names()),
        "https://a.example.com/",
        extensions={"sni_hostname": "b.example.org"},
    )
    assert network.server_names == ["a.example.com"]


def test_the_next_address_is_tried_and_a_name_that_does_not_answer_is_httpxs_error(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(monkeypatch, a8_8_8_8=[OK])
    assert fetch(guard_over(names()), "http://two.example.org/")[0].text == "hello"
    assert network.dialled == [("9.9.9.9", 80), ("8.8.8.8", 80)]
    network.answers.clear()
    with pytest.raises(httpx.ConnectError):
        fetch(guard_over(names()), "http://two.example.org/")


@pytest.mark.case("EGR-07")
def test_a_peer_that_is_another_address_is_an_error(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(monkeypatch, a8_8_8_8=[OK])
    network.peers["8.8.8.8"] = "127.0.0.1"
    with pytest.raises(httpx.ConnectError, match="peer"):
        fetch(guard_over(names()), "http://a.example.com/")
    assert network.written == b""


def test_a_broken_answer_is_httpxs_error(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    Network(monkeypatch, a8_8_8_8=[b"SSH-2.0-x\r\n\r\n"])
    with pytest.raises(httpx.RemoteProtocolError):
        fetch(guard_over(names()), "http://a.example.com/")


def test_a_body_that_breaks_off_is_httpxs_error(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    Network(monkeypatch, a8_8_8_8=[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", b""])
    with pytest.raises(httpx.RemoteProtocolError):
        fetch(guard_over(names()), "http://a.example.com/")


def test_no_unix_socket_is_dialled() -> None:
    transport = GuardedTransport(guard_over(names()))
    with pytest.raises(httpcore.UnsupportedProtocol):
        transport._pool._network_backend.connect_unix_socket("/run/x.sock")
    transport.close()
