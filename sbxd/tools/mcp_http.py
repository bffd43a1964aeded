"""The MCP server over streamable HTTP, on the loopback of one host.

    async with http_door(open_session, token) as app:
        await uvicorn.Server(uvicorn.Config(app, ...)).serve(sockets=[listening])

Invariants: every request proves the token before anything else is looked at, because every user
of a host reaches its loopback; Host and Origin must be the loopback's (DNS rebinding); a session
is one environment, ended by DELETE, by an idle time, or with the door. Protocol versions without
sessions are refused by name, so that a client falls back to one that has them: without a session
no environment could be held from one call to the next.
"""

import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup, TaskStatus
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER, StreamableHTTPServerTransport
from mcp.server.transport_security import RequestBodyLimitMiddleware, TransportSecuritySettings
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp.types import ErrorData, JSONRPCError, UnsupportedProtocolVersionErrorData
from mcp_types import UNSUPPORTED_PROTOCOL_VERSION
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sbxd.port.errors import PortError
from sbxd.tools.mcp_server import OpenSession, serve

PATH = "/mcp"
BODY_BYTES_MAX = 4 * 1024 * 1024
SESSIONS_MAX = 64
IDLE_SECONDS = 600.0
END_SECONDS = 5.0
TOKEN_BYTES_MIN = 16
SECURITY = TransportSecuritySettings(
    allowed_hosts=["127.0.0.1:*", "localhost:*", "[::1]:*"],
    allowed_origins=["http://127.0.0.1:*", "http://localhost:*", "http://[::1]:*"],
)

_LOG = logging.getLogger("sbxd.tools")


@asynccontextmanager
async def http_door(
    open_session: OpenSession,
    token: str,
    *,
    idle_seconds: float = IDLE_SECONDS,
    sessions_max: int = SESSIONS_MAX,
) -> AsyncIterator[ASGIApp]:
    """An ASGI application; its sessions end with the block.

    Args:
        token: what clients send as `Authorization: Bearer`; at least 16 characters.
        idle_seconds: a session without a request for so long ends.

    Raises: ValueError for a shorter token.
    """
    if len(token) < TOKEN_BYTES_MIN:
        raise ValueError(f"the token is shorter than {TOKEN_BYTES_MIN} characters")
    async with anyio.create_task_group() as tasks:
        door = _Door(open_session, token, tasks, idle_seconds, sessions_max)
        try:
            yield RequestBodyLimitMiddleware(door, BODY_BYTES_MAX)
        finally:
            tasks.cancel_scope.cancel()


@final
class _Door:
    def __init__(
        self,
        open_session: OpenSession,
        token: str,
        tasks: TaskGroup,
        idle_seconds: float,
        sessions_max: int,
    ) -> None:
        self._open_session = open_session
        self._authorization = f"Bearer {token}".encode()
        self._tasks = tasks
        self._idle_seconds = idle_seconds
        self._sessions_max = sessions_max
        self._transports: dict[str, StreamableHTTPServerTransport] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        refused = self._refusal(scope["path"], headers)
        if refused is not None:
            await refused(scope, receive, send)
            return
        session_id = headers.get(MCP_SESSION_ID_HEADER)
        if session_id is None:
            await self._begin(scope, receive, send)
        elif session_id in self._transports:
            await self._transports[session_id].handle_request(scope, receive, send)
        else:
            await _error(404, "no such session")(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        given = headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, self._authorization):
            return Response(status_code=401, headers={"WWW-Authenticate": "Bearer"})
        if path != PATH:
            return Response(status_code=404)
        version = headers.get(MCP_PROTOCOL_VERSION_HEADER)
        if version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS:
            return _without_sessions(version)
        return None

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._transports) >= self._sessions_max:
            await _error(503, "too many sessions are open")(scope, receive, send)
            return
        session_id = uuid4().hex
        transport = StreamableHTTPServerTransport(
            session_id, security_settings=SECURITY, idle_timeout=self._idle_seconds
        )
        self._transports[session_id] = transport
        established = False

        async def watched(message: Message) -> None:
            nonlocal established
            if message["type"] == "http.response.start":
                established = message["status"] < 400
            await send(message)

        try:
            await self._tasks.start(self._run, session_id, transport)
            await transport.handle_request(scope, receive, watched)
        finally:
            if not established:
                await _end(transport)

    async def _run(
        self,
        session_id: str,
        transport: StreamableHTTPServerTransport,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            async with transport.connect() as (read, write):
                task_status.started()
                with transport.idle_scope or anyio.CancelScope():
                    await serve(self._open_session, read, write)
        except* (PortError, OSError, anyio.ClosedResourceError, anyio.BrokenResourceError) as group:
            # One session's daemon or client is not there: the others go on.
            _LOG.warning("a session ended: %s", group.exceptions)
        finally:
            self._transports.pop(session_id, None)
            await _end(transport)


async def _end(transport: StreamableHTTPServerTransport) -> None:
    if not transport.is_terminated:
        with anyio.move_on_after(END_SECONDS, shield=True):
            await transport.terminate()


def _error(status: int, message: str) -> Response:
    return Response(message, status_code=status, media_type="text/plain")


def _without_sessions(version: str) -> Response:
    data = UnsupportedProtocolVersionErrorData(
        supported=list(HANDSHAKE_PROTOCOL_VERSIONS), requested=version[:64]
    )
    body = JSONRPCError(
        jsonrpc="2.0",
        id=None,
        error=ErrorData(
            code=UNSUPPORTED_PROTOCOL_VERSION,
            message="this version has no sessions, and an environment is a session's",
            data=data.model_dump(by_alias=True),
        ),
    )
    return Response(
        body.model_dump_json(by_alias=True, exclude_unset=True),
        status_code=400,
        media_type="application/json",
    )
