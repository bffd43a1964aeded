"""What a path in the workspace may look like: the lexical half of containment.

Invariants: a pure function of its input, the same on both sides of the wire; a component is
refused, never normalised; whatever is returned is `/workspace` or below it. The other half, that
no symbolic link leads outward, needs the file system and belongs to the steward
(`openat2` with RESOLVE_BENEATH).

File names are bytes. Text stands for bytes as UTF-8 with surrogateescape, so every name that a
Linux file system can hold has a text form and returns to the same bytes.
"""

from pathlib import PurePosixPath

from sbxd.port.environment import WORKSPACE_ROOT
from sbxd.port.errors import WorkspaceEscape

COMPONENT_BYTES_MAX = 255
PATH_BYTES_MAX = 4096

_ROOT_BYTES = str(WORKSPACE_ROOT).encode()
_DOTS = (b".", b"..")


def resolve(path: str | bytes | PurePosixPath) -> PurePosixPath:
    """The absolute path inside the environment that a workspace path names.

    Args:
        path: relative to /workspace; "." alone is the root itself. A PurePosixPath has lost its
            "." components and doubled slashes before it comes here; its ".." are kept.

    Returns:
        /workspace, or a path below it of at most 4096 bytes.

    Raises:
        WorkspaceEscape: empty, absolute or with a NUL byte; a component that is empty, ".", ".."
            or longer than 255 bytes; a result longer than 4096 bytes; text that stands for no
            bytes.
    """
    relative = relative_bytes(path)
    if relative == b".":
        return WORKSPACE_ROOT
    return WORKSPACE_ROOT / relative.decode("utf-8", "surrogateescape")


def relative_bytes(path: str | bytes | PurePosixPath) -> bytes:
    """The same check as `resolve`, giving the bytes relative to /workspace (b"." for the root).

    Raises:
        WorkspaceEscape: as `resolve`.
    """
    raw = _to_bytes(path)
    if raw == b".":
        return raw
    if not raw:
        raise WorkspaceEscape('the path is empty: use "." for the workspace itself')
    if b"\0" in raw:
        raise WorkspaceEscape("the path holds a NUL byte")
    if raw.startswith(b"/"):
        raise WorkspaceEscape("the path is absolute: give it relative to /workspace")
    size = len(_ROOT_BYTES) + 1 + len(raw)
    if size > PATH_BYTES_MAX:
        raise WorkspaceEscape(
            f"the path is {size} bytes long under /workspace and the longest is {PATH_BYTES_MAX}"
        )
    for position, component in enumerate(raw.split(b"/"), start=1):
        if not component:
            raise WorkspaceEscape(f"component {position} is empty: remove the extra slash")
        if component in _DOTS:
            raise WorkspaceEscape(
                f'component {position} is "{component.decode()}": dot components are refused'
            )
        if len(component) > COMPONENT_BYTES_MAX:
            raise WorkspaceEscape(
                f"component {position} is {len(component)} bytes long and the longest is "
                f"{COMPONENT_BYTES_MAX}"
            )
    return raw


def _to_bytes(path: str | bytes | PurePosixPath) -> bytes:
    if isinstance(path, bytes):
        return path
    if not isinstance(path, str | PurePosixPath):
        raise WorkspaceEscape(f"a path is text or bytes, not {type(path).__name__}")
    try:
        return str(path).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise WorkspaceEscape("the path holds a character that stands for no bytes") from None
