"""The workspace port: access to the files of one environment and to nothing else.

Separate from ExecutionEnvironment on purpose: who may read a file may not thereby run code.
The rules for paths are `sbxd.policy.containment`; the containment against the real file system
is the steward's.
"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Protocol

from sbxd.port.command import FileChange


class WorkspaceProvenance(StrEnum):
    UNKNOWN = "unknown"
    TOOL_WRITTEN = "tool_written"
    SANDBOX_WRITTEN = "sandbox_written"


class WorkspaceHandle(Protocol):
    """S1's narrow port. Paths are relative to /workspace.

    Each method raises WorkspaceEscape for a path that leaves the workspace or breaks the lexical
    rules, and WorkspaceError (with a closed code) for what the file system refuses.
    """

    @property
    def root(self) -> PurePosixPath: ...

    def resolve(self, path: str | PurePosixPath) -> PurePosixPath: ...

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def listdir(self, path: str) -> Sequence[FileChange]: ...

    async def provenance(self, path: str) -> WorkspaceProvenance: ...
