"""artifact.export: one file of the workspace, or text that the model wrote, for the user to keep.

Invariants: it takes a path or a text and never the result of a command; what the service said of
the bytes that it read is compared with what the store received, and a mismatch stores nothing;
the same bytes exported twice under the same name in one run are one artifact. Everything exported
is EXTERNAL_UNTRUSTED. Deliberately absent: directories, globs, and running anything.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sbxd.client.channel import chunks_of
from sbxd.port.artifact import (
    ArtifactOrigin,
    ArtifactRef,
    ContentDigest,
    ContentFlag,
    ContentRule,
    TrustLevel,
)
from sbxd.port.workspace import ContentStream, StreamingWorkspace
from sbxd.tools import arguments as check
from sbxd.tools import json_forms
from sbxd.tools.context import CallContext
from sbxd.tools.run_artifacts import RunArtifacts
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
    ToolValidationError,
)

EXPORT_BYTES_MAX = 512 * 1024 * 1024
TEXT_BYTES_MAX = 1_048_576
NAME_BYTES_MAX = 1024
KEPT_MAX = 1024
TIMEOUT_SECONDS = 300
FIELDS = ("path", "text", "filename", "media_type")
MEDIA_TYPES = {
    "csv": "text/csv", "gif": "image/gif", "html": "text/html", "jpeg": "image/jpeg",
    "jpg": "image/jpeg", "json": "application/json", "md": "text/markdown",
    "pdf": "application/pdf", "png": "image/png", "svg": "image/svg+xml", "txt": "text/plain",
    "zip": "application/zip",
}  # fmt: skip

SPEC = ToolSpec(
    name=ToolName.EXPORT,
    description=(
        "Keep one file of the workspace, or a text, as an artifact that is attached to the reply. "
        "Give `path` for a file, or `text` and `filename` for a text. Exporting the same thing "
        "again gives the same artifact. The workspace itself is discarded when the run finishes "
        "or pauses."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "A file, relative to the workspace."},
            "text": {"type": "string", "description": "What the artifact is to hold."},
            "filename": {
                "type": "string",
                "description": "What a download is called; by default the file's own name.",
            },
            "media_type": {
                "type": "string",
                "description": "Such as text/csv; by default after the name's ending.",
            },
        },
        "additionalProperties": False,
    },
    output_schema={
        **json_forms.ARTIFACT_SCHEMA,
        "properties": {
            **json_forms.ARTIFACT_SCHEMA["properties"],
            "flags": {"type": "array", "items": {"enum": [flag.value for flag in ContentFlag]}},
        },
        "required": [*json_forms.ARTIFACT_SCHEMA["required"], "flags"],
    },
    category=Category.ARTIFACT,
    risk=Risk.MEDIUM,
    idempotency=Idempotency.IDEMPOTENT,
    target=Target.IN_PROCESS,
    scope="artifact.write",
    requires=frozenset({SideEffect.WORKSPACE_READ, SideEffect.ARTIFACT_WRITE}),
    output_trust=TrustLevel.EXTERNAL_UNTRUSTED,
    timeout_seconds=TIMEOUT_SECONDS,
    output_bytes_max=4096,
    parallelism=Parallelism.FORBIDDEN,
)


@dataclass(frozen=True)
class _Source:
    """What is exported, but for its bytes."""

    origin: ArtifactOrigin
    path: str
    filename: str
    media_type: str


@dataclass
class Exported:
    """What this run has exported, so that a repeated call finds it; the last KEPT_MAX."""

    known: dict[_Source, dict[str, ArtifactRef]] = field(default_factory=dict)

    def of(self, source: _Source) -> Mapping[str, ArtifactRef]:
        """By digest."""
        return self.known.get(source, {})

    def keep(self, source: _Source, ref: ArtifactRef) -> None:
        self.known.setdefault(source, {})[ref.sha256] = ref
        while len(self.known) > KEPT_MAX:
            del self.known[next(iter(self.known))]


async def export(
    context: CallContext, exported: Exported, arguments: Mapping[str, object]
) -> ToolResult:
    """Store it. Raises ToolValidationError, ToolRefused, the errors of workspace and store."""
    check.check_names(arguments, FIELDS)
    if ("path" in arguments) == ("text" in arguments):
        raise ToolValidationError(
            'give either path (a file of the workspace) or text (with a filename): {"path": '
            '"output.csv"}'
        )
    artifacts = context.artifacts
    if "path" in arguments:
        path = check.file_path(arguments["path"], "path")
        source = _source(arguments, ArtifactOrigin.SANDBOX_EXPORT, path, check.base_name(path))
        if artifacts is None:
            raise _no_store()
        ref = await _export_file(artifacts, exported, context.files(), source)
    else:
        text = check.text(arguments["text"], "text", bytes_max=TEXT_BYTES_MAX)
        if "filename" not in arguments:
            raise ToolValidationError("filename: name the text", field="filename")
        source = _source(arguments, ArtifactOrigin.MODEL_OUTPUT, "", "")
        if artifacts is None:
            raise _no_store()
        ref = await _export_text(artifacts, exported, text.encode(), source)
    return await _result(artifacts, ref)


async def _export_file(
    artifacts: RunArtifacts, exported: Exported, workspace: StreamingWorkspace, source: _Source
) -> ArtifactRef:
    known = exported.of(source)
    if known:
        async with workspace.read_stream(source.path, maximum_bytes=EXPORT_BYTES_MAX) as content:
            found = known.get((await _digest(content)).sha256)
        if found is not None:
            return found
    async with workspace.read_stream(source.path, maximum_bytes=EXPORT_BYTES_MAX) as content:
        ref = await artifacts.create(
            source.origin,
            aiter(content),
            filename=source.filename,
            media_type=source.media_type,
            expected=content.digest,
        )
    exported.keep(source, ref)
    return ref


async def _export_text(
    artifacts: RunArtifacts, exported: Exported, data: bytes, source: _Source
) -> ArtifactRef:
    said = ContentDigest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    found = exported.of(source).get(said.sha256)
    if found is not None:
        return found
    ref = await artifacts.create(
        source.origin,
        chunks_of(data),
        filename=source.filename,
        media_type=source.media_type,
        expected=lambda: said,
        rule=ContentRule.TEXT,
    )
    exported.keep(source, ref)
    return ref


async def _result(artifacts: RunArtifacts, ref: ArtifactRef) -> ToolResult:
    metadata = await artifacts.describe(ref)
    value: dict[str, Any] = {
        **json_forms.artifact(ref),
        "flags": sorted(flag.value for flag in metadata.flags),
    }
    return ToolResult(value=value, trust=metadata.trust, artifacts=(ref,))


def _source(
    arguments: Mapping[str, object], origin: ArtifactOrigin, path: str, name: str
) -> _Source:
    filename = check.text(arguments.get("filename", name), "filename", bytes_max=NAME_BYTES_MAX)
    if not filename:
        raise ToolValidationError("filename is empty: name the artifact", field="filename")
    ending = filename.rpartition(".")[2].lower()
    usual = "text/plain" if origin is ArtifactOrigin.MODEL_OUTPUT else "application/octet-stream"
    media_type = check.text(
        arguments.get("media_type", MEDIA_TYPES.get(ending, usual)), "media_type", bytes_max=256
    )
    return _Source(origin, path, filename, media_type)


def _no_store() -> ToolRefused:
    return ToolRefused("this deployment keeps no artifacts: nothing can be exported")


async def _digest(content: ContentStream) -> ContentDigest:
    async for _ in content:
        pass
    return content.digest()
