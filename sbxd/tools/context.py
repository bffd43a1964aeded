"""What a tool is handed for the calls of one run, and how its refusals reach the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sbxd.client.run_scope import HoldExceeded, RunScope, ScopeEnded
from sbxd.port.artifact import (
    ArtifactIntegrityError,
    ArtifactNotFound,
    ArtifactRejected,
    ArtifactUnavailable,
)
from sbxd.port.errors import (
    BudgetExhausted,
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    SandboxEscapeSuspected,
    StaleLease,
    UnavailableCode,
    WorkspaceCode,
    WorkspaceError,
    WorkspaceEscape,
)
from sbxd.port.workspace import StreamingWorkspace
from sbxd.tools.run_artifacts import RunArtifacts
from sbxd.tools.tool import (
    Disposition,
    Profile,
    SideEffect,
    ToolRefused,
    ToolRunEnded,
    ToolSpec,
    ToolUnavailable,
    ToolValidationError,
)

GONE = (
    "the environment is gone and its workspace with it: the next command begins in an empty "
    "workspace"
)


@dataclass(frozen=True)
class CallContext:
    """One call's surroundings. artifacts: None where this deployment keeps none. output_bytes: how
    much of a command's output goes back where the call does not say."""

    scope: RunScope
    artifacts: RunArtifacts | None
    profile: Profile
    output_bytes: int

    def allows(self, effect: SideEffect) -> bool:
        return self.profile.decide(effect) is Disposition.ALLOW

    def files(self) -> StreamingWorkspace:
        """The files of the environment that lives. Nothing is provisioned to look at what cannot
        be there.

        Raises: WorkspaceError(NOT_FOUND) where none lives; the errors of the scope.
        """
        workspace = self.scope.existing_workspace()
        if workspace is None:
            raise WorkspaceError(WorkspaceCode.NOT_FOUND, "the workspace is empty: no such file")
        return workspace


@contextmanager
def told_to_the_model(tool: ToolSpec) -> Iterator[None]:
    """Turns the errors of the ports into those of tools, with what to do next."""
    try:
        yield
    except WorkspaceEscape as error:
        raise ToolValidationError(error.detail, field="path") from None
    except WorkspaceError as error:
        raise ToolRefused(_workspace_text(error)) from None
    except (BudgetExhausted, StaleLease, SandboxEscapeSuspected) as error:
        raise ToolRunEnded(f"{tool.name}: {error.detail}") from error
    except (ScopeEnded, HoldExceeded) as error:
        raise ToolRunEnded(f"{tool.name}: {error}") from error
    except ExecutionRejected as error:
        if error.code is RejectedCode.ENVIRONMENT_GONE:
            raise ToolRefused(GONE) from error
        if error.code is RejectedCode.RUN_BUDGET_TOO_LOW:
            raise ToolRunEnded(error.detail) from error
        raise ToolRefused(_command_text(error)) from error
    except ExecutionUnavailable as error:
        if error.code is UnavailableCode.ENVIRONMENT_LOST:
            raise ToolRefused(GONE) from error
        if error.code in (UnavailableCode.UNREACHABLE, UnavailableCode.SHUTTING_DOWN):
            raise ToolUnavailable(
                f"{error.code}: {error.detail}. Call again later: {GONE}"
            ) from error
        raise ToolUnavailable(f"{error.code}: {error.detail}") from error
    except ArtifactIntegrityError as error:
        raise ToolUnavailable(f"nothing was stored: {error.detail}") from error
    except (ArtifactRejected, ArtifactNotFound) as error:
        raise ToolRefused(str(error)) from error
    except ArtifactUnavailable as error:
        raise ToolUnavailable(str(error)) from error


def _workspace_text(error: WorkspaceError) -> str:
    if error.code is WorkspaceCode.NOT_FOUND:
        return (
            f"{error.detail}. The workspace is discarded when the run pauses: what was there "
            "before is gone"
        )
    return f"{error.code}: {error.detail}"


def _command_text(error: ExecutionRejected) -> str:
    detail = error.detail.replace("argv", "command")
    if error.code is RejectedCode.COMMAND_NOT_FOUND:
        return detail
    return f"{error.code}: {detail}"
