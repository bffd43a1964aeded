"""workspace.read_text, workspace.write_text, workspace.list: small text files of the run.

Invariants: what is read is INTERNAL_TOOL only when a tool of this run wrote the file last
(`WorkspaceHandle.provenance`), and EXTERNAL_UNTRUSTED in every other case, also when nothing is
known; a listing's names were chosen by whoever made the files and are always untrusted. Reading
and listing provision nothing: where no environment lives the workspace is empty.
"""

from collections.abc import Mapping
from typing import Any

from sbxd.port.artifact import TrustLevel
from sbxd.port.errors import WorkspaceCode, WorkspaceError
from sbxd.port.workspace import StreamingWorkspace, WorkspaceProvenance
from sbxd.tools import arguments as check
from sbxd.tools import json_forms
from sbxd.tools.context import CallContext
from sbxd.tools.tool import (
    Category,
    Idempotency,
    Parallelism,
    Risk,
    SideEffect,
    Target,
    ToolName,
    ToolRefused,
    ToolResult,
    ToolSpec,
)

TEXT_BYTES_MAX = 1_048_576
ENTRIES_MAX = 1000
TIMEOUT_SECONDS = 60
_PATH: dict[str, Any] = {"type": "string", "description": "Relative to the workspace."}

READ_SPEC = ToolSpec(
    name=ToolName.READ_TEXT,
    description=(
        f"Read a UTF-8 text file of the workspace, of at most {TEXT_BYTES_MAX} bytes. For a "
        "larger file, run a program on it that shows a part. The workspace is discarded when the "
        "run finishes or pauses."
    ),
    input_schema={
        "type": "object",
        "properties": {"path": _PATH},
        "required": ["path"],
        "additionalProperties": False,
    },
    output_schema={
        "type": "object",
        "properties": {"text": {"type": "string"}, "size_bytes": {"type": "integer"}},
        "required": ["text", "size_bytes"],
    },
    category=Category.WORKSPACE,
    risk=Risk.LOW,
    idempotency=Idempotency.IDEMPOTENT,
    target=Target.IN_PROCESS,
    scope="workspace.read",
    requires=frozenset({SideEffect.WORKSPACE_READ}),
    output_trust=None,
    timeout_seconds=TIMEOUT_SECONDS,
    output_bytes_max=TEXT_BYTES_MAX,
    parallelism=Parallelism.FORBIDDEN,
)
WRITE_SPEC = ToolSpec(
    name=ToolName.WRITE_TEXT,
    description=(
        "Write a text file to the workspace, where commands of this run find it. An existing file "
        "is replaced, and missing directories are made. The workspace is discarded when the run "
        "finishes or pauses; artifact.export keeps a file."
    ),
    input_schema={
        "type": "object",
        "properties": {"path": _PATH, "text": {"type": "string"}},
        "required": ["path", "text"],
        "additionalProperties": False,
    },
    output_schema={
        "type": "object",
        "properties": {"path": {"type": "string"}, "size_bytes": {"type": "integer"}},
        "required": ["path", "size_bytes"],
    },
    category=Category.WORKSPACE,
    risk=Risk.LOW,
    idempotency=Idempotency.IDEMPOTENT,
    target=Target.IN_PROCESS,
    scope="workspace.write",
    requires=frozenset({SideEffect.WORKSPACE_WRITE}),
    output_trust=TrustLevel.INTERNAL_TOOL,
    timeout_seconds=2 * TIMEOUT_SECONDS,  # it may have to make the environment
    output_bytes_max=8192,
    parallelism=Parallelism.FORBIDDEN,
)
LIST_SPEC = ToolSpec(
    name=ToolName.LIST,
    description=(
        f"List one directory of the workspace, at most {ENTRIES_MAX} entries. The workspace is "
        "empty before the run has put something into it, and after a pause."
    ),
    input_schema={
        "type": "object",
        "properties": {"path": {**_PATH, "default": "."}},
        "additionalProperties": False,
    },
    output_schema={
        "type": "object",
        "properties": {
            "entries": {"type": "array", "items": json_forms.ENTRY_SCHEMA},
            "truncated": {"type": "boolean"},
        },
        "required": ["entries", "truncated"],
    },
    category=Category.WORKSPACE,
    risk=Risk.LOW,
    idempotency=Idempotency.IDEMPOTENT,
    target=Target.IN_PROCESS,
    scope="workspace.read",
    requires=frozenset({SideEffect.WORKSPACE_READ}),
    output_trust=TrustLevel.EXTERNAL_UNTRUSTED,
    timeout_seconds=TIMEOUT_SECONDS,
    output_bytes_max=TEXT_BYTES_MAX,
    parallelism=Parallelism.FORBIDDEN,
)


async def read_text(context: CallContext, arguments: Mapping[str, object]) -> ToolResult:
    """Raises ToolValidationError, ToolRefused (too large, no text), the workspace's errors."""
    check.check_names(arguments, ("path",))
    path = check.file_path(arguments.get("path"), "path")
    workspace = context.scope.existing_workspace()
    if workspace is None:
        raise WorkspaceError(WorkspaceCode.NOT_FOUND, "there is no such file")
    data = await _read(workspace, path)
    try:
        text = data.decode()
    except UnicodeDecodeError as problem:
        raise ToolRefused(
            f"no UTF-8 text (byte {problem.start}): use a program to look at it"
        ) from None
    by_a_tool = await workspace.provenance(path) is WorkspaceProvenance.TOOL_WRITTEN
    return ToolResult(
        value={"text": text, "size_bytes": len(data)},
        trust=TrustLevel.INTERNAL_TOOL if by_a_tool else TrustLevel.EXTERNAL_UNTRUSTED,
    )


async def write_text(context: CallContext, arguments: Mapping[str, object]) -> ToolResult:
    """Raises ToolValidationError, the errors of the scope and of the workspace."""
    check.check_names(arguments, ("path", "text"))
    path = check.file_path(arguments.get("path"), "path")
    data = check.text(arguments.get("text"), "text", bytes_max=TEXT_BYTES_MAX).encode()
    await (await context.scope.workspace()).write(path, data)
    return ToolResult(
        value={"path": json_forms.name(path)["path"], "size_bytes": len(data)},
        trust=TrustLevel.INTERNAL_TOOL,
    )


async def list_directory(context: CallContext, arguments: Mapping[str, object]) -> ToolResult:
    """Raises ToolValidationError, the workspace's errors."""
    check.check_names(arguments, ("path",))
    path = check.workspace_path(arguments.get("path", "."), "path")
    workspace = context.scope.existing_workspace()
    if workspace is None and path != ".":
        raise WorkspaceError(WorkspaceCode.NOT_FOUND, "there is no such directory")
    found = [] if workspace is None else list(await workspace.listdir(path))
    return ToolResult(
        value={
            "entries": [json_forms.entry(each) for each in found[:ENTRIES_MAX]],
            "truncated": len(found) > ENTRIES_MAX,
        },
        trust=TrustLevel.EXTERNAL_UNTRUSTED,
    )


async def _read(workspace: StreamingWorkspace, path: str) -> bytes:
    data = bytearray()
    async with workspace.read_stream(path, maximum_bytes=TEXT_BYTES_MAX) as content:
        async for piece in content:
            data += piece
    return bytes(data)
