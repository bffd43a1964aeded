"""workspace.read_text, workspace.write_text, workspace.list: small text files of the run.

Invariants: what is read is INTERNAL_TOOL only when a tool of this run wrote the file last
(`WorkspaceHandle.provenance`), and EXTERNAL_UNTRUSTED in every other case, also when nothing is
known; a listing's names were chosen by whoever made the files and are always untrusted. Reading
and listing provision nothing: where no environment lives the workspace is empty.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sbxd.port.artifact import TrustLevel
from sbxd.port.workspace import Listing, StreamingWorkspace, WorkspaceProvenance
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
_STRING: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}


def _spec(
    name: ToolName,
    description: str,
    *,
    takes: Mapping[str, Any],
    required: Sequence[str],
    gives: Mapping[str, Any],
    effect: SideEffect,
    trust: TrustLevel | None,
    output_bytes_max: int = TEXT_BYTES_MAX,
    timeout_seconds: int = TIMEOUT_SECONDS,
) -> ToolSpec:
    """What the three have in common: harmless, repeatable, in this process, one effect each."""
    return ToolSpec(
        name=name,
        description=description,
        input_schema={
            "type": "object",
            "properties": dict(takes),
            "required": list(required),
            "additionalProperties": False,
        },
        output_schema={"type": "object", "properties": dict(gives), "required": list(gives)},
        category=Category.WORKSPACE,
        risk=Risk.LOW,
        idempotency=Idempotency.IDEMPOTENT,
        target=Target.IN_PROCESS,
        scope="workspace.read" if effect is SideEffect.WORKSPACE_READ else "workspace.write",
        requires=frozenset({effect}),
        output_trust=trust,
        timeout_seconds=timeout_seconds,
        output_bytes_max=output_bytes_max,
        parallelism=Parallelism.FORBIDDEN,
    )


READ_SPEC = _spec(
    ToolName.READ_TEXT,
    f"Read a UTF-8 text file of the workspace, of at most {TEXT_BYTES_MAX} bytes. For a larger "
    "file, run a program on it that shows a part. The workspace is discarded when the run "
    "finishes or pauses.",
    takes={"path": _PATH},
    required=("path",),
    gives={"text": _STRING, "size_bytes": _INTEGER},
    effect=SideEffect.WORKSPACE_READ,
    trust=None,  # by the file's provenance
)
WRITE_SPEC = _spec(
    ToolName.WRITE_TEXT,
    "Write a text file to the workspace, where commands of this run find it. An existing file is "
    "replaced, and missing directories are made. The workspace is discarded when the run finishes "
    "or pauses; artifact.export keeps a file.",
    takes={"path": _PATH, "text": _STRING},
    required=("path", "text"),
    gives={"path": _STRING, "size_bytes": _INTEGER},
    effect=SideEffect.WORKSPACE_WRITE,
    trust=TrustLevel.INTERNAL_TOOL,
    output_bytes_max=8192,
    timeout_seconds=2 * TIMEOUT_SECONDS,  # it may have to make the environment
)
LIST_SPEC = _spec(
    ToolName.LIST,
    f"List one directory of the workspace, at most {ENTRIES_MAX} entries. The workspace is empty "
    "before the run has put something into it, and after a pause.",
    takes={"path": {**_PATH, "default": "."}},
    required=(),
    gives={
        "entries": {"type": "array", "items": json_forms.ENTRY_SCHEMA},
        "truncated": {"type": "boolean"},
    },
    effect=SideEffect.WORKSPACE_READ,
    trust=TrustLevel.EXTERNAL_UNTRUSTED,
)


def _file(spec: ToolSpec, arguments: Mapping[str, object]) -> str:
    """The file that a call names, when it has no field besides its tool's own."""
    check.check_names(arguments, tuple(spec.input_schema["properties"]))
    return check.file_path(arguments.get("path"), "path")


async def read_text(context: CallContext, arguments: Mapping[str, object]) -> ToolResult:
    """Raises ToolValidationError, ToolRefused (too large, no text), the workspace's errors."""
    path = _file(READ_SPEC, arguments)
    workspace = context.files()
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
    path = _file(WRITE_SPEC, arguments)
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
    empty = path == "." and context.scope.existing_workspace() is None
    found = Listing() if empty else await context.files().listdir(path)
    return ToolResult(
        value={
            "entries": [json_forms.entry(each) for each in found[:ENTRIES_MAX]],
            "truncated": found.truncated or len(found) > ENTRIES_MAX,
        },
        trust=TrustLevel.EXTERNAL_UNTRUSTED,
    )


async def _read(workspace: StreamingWorkspace, path: str) -> bytes:
    data = bytearray()
    async with workspace.read_stream(path, maximum_bytes=TEXT_BYTES_MAX) as content:
        async for piece in content:
            data += piece
    return bytes(data)
