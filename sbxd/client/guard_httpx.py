"""httpx transports that dial through the outbound guard (extra `httpx`).

    async with httpx.AsyncClient(transport=AsyncGuardedTransport(guard)) as client: ...
    with httpx.Client(transport=GuardedTransport(guard)) as client: ...

Invariants: every new connection is judged under the URL's own host and port, so a redirect is
judged like a first request; the address that was judged is dialled while the certificate is
verified for the name, and connections are pooled by name; SNI and the Host header are the URL's
host; no proxy, Unix socket or other bypass exists, whatever the process environment says (httpx
reads no proxy from it for a client that is given a transport). A refusal is `EgressDenied`, raised
through httpx as it is; every other failure is httpx's own. Deliberately absent: HTTP/2.
"""

import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import httpcore
import httpx

from sbxd.client.guard import Guard, require_peer

MAX_CONNECTIONS = 100
_LIMITS = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=20)
# What a request may carry through to the pool. `sni_hostname` is not among it.
_EXTENSIONS = ("timeout", "trace")


class AsyncGuardedTransport(httpx.AsyncBaseTransport):
    """For httpx.AsyncClient, under asyncio and trio."""

    def __init__(
        self,
        guard: Guard,
        *,
        ssl_context: ssl.SSLContext | None = None,
        limits: httpx.Limits = _LIMITS,
    ) -> None:
        """
        Args:
            ssl_context: how certificates are verified; httpx's own default when None.
        """
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context or httpx.create_ssl_context(trust_env=False),
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_AsyncBackend(guard),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises: EgressDenied; httpx.TransportError."""
        sent = _request(request)
        with _as_httpx():
            response = await self._pool.handle_async_request(sent)
        assert isinstance(response.stream, AsyncIterable)
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_AsyncBody(response.stream),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class GuardedTransport(httpx.BaseTransport):
    """For httpx.Client."""

    def __init__(
        self,
        guard: Guard,
        *,
        ssl_context: ssl.SSLContext | None = None,
        limits: httpx.Limits = _LIMITS,
    ) -> None:
        """As AsyncGuardedTransport."""
        self._pool = httpcore.ConnectionPool(
            ssl_context=ssl_context or httpx.create_ssl_context(trust_env=False),
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_Backend(guard),
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises: EgressDenied; httpx.TransportError."""
        sent = _request(request)
        with _as_httpx():
            response = self._pool.handle_request(sent)
        assert isinstance(response.stream, Iterable)
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(response.stream),
            extensions=response.extensions,
        )

    def close(self) -> None:
        self._pool.close()


class _Attempts:
    """The time that is left for the addresses of one name."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.failure: Exception = httpcore.ConnectTimeout("no address answered in time")

    def left(self) -> float:
        """Seconds; raises the last failure when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.failure
        return left


@contextmanager
def _as_connect_error() -> Iterator[None]:
    """The guard's OSError as httpcore's failure to connect."""
    try:
        yield
    except OSError as error:
        raise httpcore.ConnectError(str(error)) from error


class _AsyncBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._inner = cast(httpcore.AsyncNetworkBackend, httpcore.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        allowed = await self._guard.check(host, port)
        attempts = _Attempts(timeout or self._guard.connect_seconds)
        for address in allowed.addresses:
            try:
                with _as_connect_error():
                    self._guard.require(allowed, address)
                stream = await self._inner.connect_tcp(address, port, attempts.left())
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                attempts.failure = error
                continue
            try:
                with _as_connect_error():
                    require_peer(host, stream.get_extra_info("server_addr")[0], address)
                    self._guard.require(allowed, address, stream.get_extra_info("client_addr"))
            except BaseException:
                await stream.aclose()
                raise
            return stream
        raise attempts.failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.UnsupportedProtocol("the guard dials names only")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class _Backend(httpcore.NetworkBackend):
    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        allowed = self._guard.check_blocking(host, port)
        attempts = _Attempts(timeout or self._guard.connect_seconds)
        for address in allowed.addresses:
            try:
                with _as_connect_error():
                    self._guard.require(allowed, address)
                stream = self._inner.connect_tcp(address, port, attempts.left())
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                attempts.failure = error
                continue
            try:
                with _as_connect_error():
                    require_peer(host, stream.get_extra_info("server_addr")[0], address)
                    self._guard.require(allowed, address, stream.get_extra_info("client_addr"))
            except BaseException:
                stream.close()
                raise
            return stream
        raise attempts.failure

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        raise httpcore.UnsupportedProtocol("the guard dials names only")

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, stream: AsyncIterable[bytes]) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_httpx():
            async for part in self._stream:
                yield part

    async def aclose(self) -> None:
        aclose = getattr(self._stream, "aclose", None)
        if aclose is not None:
            await aclose()


class _Body(httpx.SyncByteStream):
    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        with _as_httpx():
            yield from self._stream

    def close(self) -> None:
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()


def _request(request: httpx.Request) -> httpcore.Request:
    """Raises: httpx.LocalProtocolError when the Host header is not the URL's host."""
    hosts = [host.lower() for host in request.headers.get_list("host")]
    if hosts != [request.url.netloc.decode("ascii").lower()]:
        raise httpx.LocalProtocolError(
            "the Host header is not the host of the URL, which is what was judged", request=request
        )
    return httpcore.Request(
        method=request.method,
        url=httpcore.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        ),
        headers=request.headers.raw,
        content=request.stream,
        extensions={
            key: request.extensions[key] for key in _EXTENSIONS if key in request.extensions
        },
    )


@contextmanager
def _as_httpx() -> Iterator[None]:
    """httpcore's failures as the httpx exceptions of the same names."""
    try:
        yield
    except (
        httpcore.TimeoutException,
        httpcore.NetworkError,
        httpcore.ProtocolError,
        httpcore.UnsupportedProtocol,
    ) as error:
        named: type[httpx.TransportError] = getattr(httpx, type(error).__name__)
        raise named(str(error)) from error
