"""How values of the port look in a tool's result: plain JSON that any encoder takes.

Invariants: no lone surrogate leaves here (most encoders refuse one): a name that is not UTF-8 is
shown with U+FFFD and given exactly, as base64, beside it; every schema here describes what its
function gives.
"""

import base64
from typing import Any

from sbxd.port.artifact import ArtifactRef
from sbxd.port.command import FileChange

_SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}

ARTIFACT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "artifact_id": {"type": "string"},
        "sha256": _SHA256,
        "size_bytes": {"type": "integer"},
        "media_type": {"type": "string"},
    },
    "required": ["artifact_id", "sha256", "size_bytes", "media_type"],
}
OPTIONAL_ARTIFACT_SCHEMA: dict[str, Any] = {"anyOf": [ARTIFACT_SCHEMA, {"type": "null"}]}
CHANGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "path_base64": {"type": "string"},
        "change": {"enum": ["CREATED", "MODIFIED", "DELETED"]},
        "size_bytes": {"type": "integer"},
        "sha256": {"anyOf": [_SHA256, {"type": "null"}]},
    },
    "required": ["path", "change", "size_bytes", "sha256"],
}
ENTRY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "path_base64": {"type": "string"},
        "size_bytes": {"type": "integer"},
        "sha256": {"anyOf": [_SHA256, {"type": "null"}]},
    },
    "required": ["path", "size_bytes", "sha256"],
}


def artifact(ref: ArtifactRef) -> dict[str, Any]:
    """A reference: an opaque id and three facts about bytes."""
    return {
        "artifact_id": ref.artifact_id,
        "sha256": ref.sha256,
        "size_bytes": ref.size_bytes,
        "media_type": ref.media_type,
    }


def change(found: FileChange) -> dict[str, Any]:
    """One entry of files_changed."""
    return {**entry(found), "change": found.change.value}


def entry(found: FileChange) -> dict[str, Any]:
    """One entry of a listing."""
    return {
        **name(found.path),
        "size_bytes": found.size_bytes,
        "sha256": found.sha256,
    }


def name(path: str) -> dict[str, str]:
    """A path, and its bytes beside it when they are no UTF-8."""
    raw = path.encode("utf-8", "surrogateescape")
    shown = raw.decode("utf-8", "replace")
    if shown.encode() == raw:
        return {"path": shown}
    return {"path": shown, "path_base64": base64.b64encode(raw).decode()}
