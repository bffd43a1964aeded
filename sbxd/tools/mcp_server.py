"""The tools as an MCP server: any MCP client gets a sandbox.

    async with stdio_server() as (read, write):
        await serve(open_session, read, write)

The one module, besides its HTTP door, that knows the MCP SDK. Runs under asyncio and trio.

Invariants: one session is one run: its environment is made by the first call that needs one, and
is destroyed when the session ends, however it ends; a refusal is a result with `isError`, so that
the model reads it; trust travels in `_meta` of everything that a session gives out: results,
errors, links, images and the contents of artifacts; what a model is shown is bounded;
an artifact is given out only to the session that
made it. Deliberately absent: approvals (an MCP client cannot give one: what the profile denies
stays denied) and prompts.
"""

import base64
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import mcp.types as types
from mcp.server import Server
from mcp.server.context import ServerRequestContext

from sbxd.artifacts.opening import Artifacts
from sbxd.port.artifact import ArtifactError, ArtifactId, ArtifactMetadata, ArtifactRef, TrustLevel
from sbxd.port.ids import RunId, TenantId
from sbxd.tools.tool import (
    UNTRUSTED_NOTE,
    Idempotency,
    SideEffect,
    ToolError,
    ToolResult,
    ToolSpec,
)
from sbxd.tools.toolbox import Toolbox

SERVER_NAME = "sbxd"
ARTIFACT_SCHEME = "sbxd-artifact:"
ARTIFACT_BYTES_MAX = 16 * 1024 * 1024
# An image of an export is shown to the model up to this size; a larger one is a link alone.
IMAGE_BYTES_MAX = 1024 * 1024
IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
# The newest artifacts of a session that `resources/list` shows.
LISTED_MAX = 256
TRUST_KEY = "sbxd/trust"
UNTRUSTED = TrustLevel.EXTERNAL_UNTRUSTED
INSTRUCTIONS = (
    "A Linux sandbox of your own for this session: write files to its workspace, run programs on "
    f"them, and export what is to be kept. {UNTRUSTED_NOTE}"
)


@dataclass(frozen=True)
class McpSession:
    """What one session of a client holds. artifacts: None where this host keeps none. listed: the
    newest artifacts that its calls made, by id."""

    tools: Toolbox
    artifacts: Artifacts | None
    tenant_id: TenantId
    run_id: RunId
    listed: OrderedDict[str, ArtifactRef] = field(default_factory=OrderedDict)


OpenSession = Callable[[], AbstractAsyncContextManager[McpSession]]
_Context = ServerRequestContext[McpSession, Any]


class NoSuchArtifact(ValueError):
    """Of this session there is none, or it is too large to be given out here."""


def make_server(open_session: OpenSession) -> Server[McpSession]:
    """A server for one connection: its lifespan is the session's."""

    @asynccontextmanager
    async def lifespan(server: Server[McpSession]) -> AsyncIterator[McpSession]:
        async with open_session() as session:
            yield session

    return Server(
        SERVER_NAME,
        instructions=INSTRUCTIONS,
        lifespan=lifespan,
        on_list_tools=_list_tools,
        on_call_tool=_call_tool,
        on_list_resources=_list_resources,
        on_read_resource=_read_resource,
    )


async def serve(open_session: OpenSession, read: Any, write: Any) -> None:
    """Serve one connection until its client goes away; then the session is over.

    read, write: the SDK's streams, as its transports give them.

    Cancellation: the environment is destroyed all the same (`RunScope`).
    """
    server = make_server(open_session)
    await server.run(read, write, server.create_initialization_options())


async def _list_tools(
    context: _Context, params: types.PaginatedRequestParams | None
) -> types.ListToolsResult:
    specs = context.lifespan_context.tools.specs
    return types.ListToolsResult(tools=[_tool(spec) for spec in specs])


async def _call_tool(
    context: _Context, params: types.CallToolRequestParams
) -> types.CallToolResult:
    session = context.lifespan_context
    try:
        result = await session.tools.call(params.name, params.arguments or {})
    except ToolError as error:
        text = types.TextContent(type="text", text=f"{error.code}: {error.message}")
        return types.CallToolResult.model_validate(
            {"content": [text], "is_error": True, "_meta": {TRUST_KEY: UNTRUSTED.value}}
        )
    for ref in result.artifacts:
        session.listed[ref.artifact_id] = ref
        while len(session.listed) > LISTED_MAX:
            session.listed.popitem(last=False)
    return _result(result, [await _image(session, ref) for ref in result.artifacts])


async def _image(session: McpSession, ref: ArtifactRef) -> types.ImageContent | None:
    """A picture as the model sees it; None for what is none or too large."""
    if ref.media_type not in IMAGE_TYPES or ref.size_bytes > IMAGE_BYTES_MAX:
        return None
    try:
        data, metadata = await _fetch(session, ref.artifact_id)
    except NoSuchArtifact:
        return None  # its link is there all the same
    return types.ImageContent.model_validate(
        {
            "type": "image",
            "data": base64.b64encode(data).decode(),
            "mime_type": ref.media_type,
            "_meta": {TRUST_KEY: metadata.trust.value},
        }
    )


async def _list_resources(
    context: _Context, params: types.PaginatedRequestParams | None
) -> types.ListResourcesResult:
    refs = reversed(context.lifespan_context.listed.values())
    return types.ListResourcesResult.model_validate(
        {"resources": [_resource(ref, UNTRUSTED) for ref in refs]}
    )


async def _read_resource(
    context: _Context, params: types.ReadResourceRequestParams
) -> types.ReadResourceResult:
    session = context.lifespan_context
    artifact_id = ArtifactId(str(params.uri).removeprefix(ARTIFACT_SCHEME))
    data, metadata = await _fetch(session, artifact_id)
    label = {TRUST_KEY: metadata.trust.value}
    return types.ReadResourceResult.model_validate(
        {
            "contents": [
                {
                    "uri": params.uri,
                    "mime_type": metadata.media_type,
                    "blob": base64.b64encode(data).decode(),
                    "_meta": label,
                }
            ],
            "_meta": label,
        }
    )


async def _fetch(session: McpSession, artifact_id: ArtifactId) -> tuple[bytes, ArtifactMetadata]:
    if session.artifacts is None:
        raise NoSuchArtifact("this host keeps no artifacts")
    service = session.artifacts.service
    try:
        metadata = await service.describe(session.tenant_id, artifact_id)
        if metadata.run_id != session.run_id:
            raise NoSuchArtifact("no such artifact")
        if metadata.size_bytes > ARTIFACT_BYTES_MAX:
            raise NoSuchArtifact(f"larger than the {ARTIFACT_BYTES_MAX} bytes that are read here")
        data = bytearray()
        async with service.content(session.tenant_id, artifact_id) as content:
            async for piece in content.chunks:
                data += piece
    except ArtifactError as error:
        raise NoSuchArtifact(error.detail) from None
    return bytes(data), metadata


def _tool(spec: ToolSpec) -> types.Tool:
    writes = not spec.requires <= {SideEffect.WORKSPACE_READ}
    return types.Tool(
        name=spec.function_name,
        title=spec.name.value,
        description=spec.description,
        input_schema=dict(spec.input_schema),
        annotations=types.ToolAnnotations(
            read_only_hint=not writes,
            # Everything that a call can change is the session's own workspace.
            destructive_hint=False,
            idempotent_hint=spec.idempotency is Idempotency.IDEMPOTENT,
            open_world_hint=False,
        ),
    )


def _result(
    result: ToolResult, images: Sequence[types.ImageContent | None]
) -> types.CallToolResult:
    """The value as JSON text, once: clients hand structured content to the model besides."""
    text = types.TextContent(type="text", text=json.dumps(result.value, ensure_ascii=False))
    return types.CallToolResult.model_validate(
        {
            "content": [
                text,
                *(_link(ref, result.trust) for ref in result.artifacts),
                *(image for image in images if image is not None),
            ],
            "_meta": {TRUST_KEY: result.trust.value},
        }
    )


def _link(ref: ArtifactRef, trust: TrustLevel) -> types.ResourceLink:
    return types.ResourceLink.model_validate({"type": "resource_link", **_resource(ref, trust)})


def _resource(ref: ArtifactRef, trust: TrustLevel) -> dict[str, Any]:
    return {
        "uri": f"{ARTIFACT_SCHEME}{ref.artifact_id}",
        "name": ref.artifact_id,
        "mime_type": ref.media_type,
        "size": ref.size_bytes,
        "_meta": {TRUST_KEY: trust.value},
    }
