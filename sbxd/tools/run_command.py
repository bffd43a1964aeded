"""sandbox.run_command: one argument vector, in the run's sandbox (S1).

Invariants: the arguments are judged, in S1's order, before anything is touched; the model's
timeout only lowers; the command is sent with four times what goes back, so that a long output
becomes an artifact before OUTPUT_LIMIT ends the command; whether the network is there is the
profile's and the approval's word and no field. Deliberately absent: a field that exports
(`artifact.export` is its own act), stdin, a shell.
"""

from collections.abc import Mapping
from typing import Any

from sbxd.client.channel import chunks_of
from sbxd.port.artifact import (
    ArtifactError,
    ArtifactOrigin,
    ArtifactRef,
    TrustLevel,
)
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.tools import arguments as check
from sbxd.tools import json_forms
from sbxd.tools.context import CallContext
from sbxd.tools.excerpt import as_text, fits, shorten, split_limit
from sbxd.tools.network_use import network_enabled
from sbxd.tools.run_artifacts import RunArtifacts
from sbxd.tools.tool import (
    Category,
    Idempotency,
    Parallelism,
    Risk,
    SideEffect,
    Target,
    ToolName,
    ToolResult,
    ToolSpec,
)

TIMEOUT_SECONDS = 300
OUTPUT_BYTES_MAX = 1_048_576
OUTPUT_BYTES_MIN = 1024
CEILING_FACTOR = 4
FIELDS = ("command", "working_directory", "timeout_seconds", "max_output_bytes")
_OPTIONAL_INTEGER: dict[str, Any] = {"type": ["integer", "null"]}

SPEC = ToolSpec(
    name=ToolName.RUN_COMMAND,
    description=(
        "Run one program in the run's sandbox and wait for its end. `command` is an argument "
        'vector, not a shell line: ["python3", "script.py"]; for a shell, name it: '
        '["bash", "-c", "..."]. Commands of one run share the workspace, which is their working '
        "directory.\n"
        "The command has no network unless network access has been enabled and approved for this "
        "call; without it a connection simply fails, with no message about a permission.\n"
        "The workspace is discarded when the run finishes or pauses. Export a file that the user "
        "is to receive with artifact.export, which attaches it to the reply.\n"
        "Output above the limit is cut to its head and tail, and the full output becomes an "
        "artifact whose identifier is in the result (stdout_artifact, stderr_artifact): there is "
        "no need to run the command again to see the rest."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "command": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "description": "The argument vector. Its first element is an absolute path or a "
                "bare name that is found on the image's PATH.",
            },
            "working_directory": {
                "type": "string",
                "default": ".",
                "description": 'Relative to the workspace; "." is the workspace itself.',
            },
            "timeout_seconds": {
                "type": "integer",
                "minimum": 1,
                "description": f"Lowers the limit of {TIMEOUT_SECONDS} s.",
            },
            "max_output_bytes": {
                "type": "integer",
                "minimum": OUTPUT_BYTES_MIN,
                "maximum": OUTPUT_BYTES_MAX,
                "description": "How much of the output to return, of both streams together. The "
                "rest is an artifact either way.",
            },
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    output_schema={
        "type": "object",
        "properties": {
            "exit_code": {
                **_OPTIONAL_INTEGER,
                "description": "null when the sandbox ended the command (killed_by)",
            },
            "stdout": {"type": "string"},
            "stderr": {"type": "string"},
            "timed_out": {"type": "boolean"},
            "killed_by": {"type": ["string", "null"]},
            "duration_ms": {"type": "integer"},
            "files_changed": {"type": "array", "items": json_forms.CHANGE_SCHEMA},
            "signal": _OPTIONAL_INTEGER,
            "stdout_truncated": {"type": "boolean"},
            "stderr_truncated": {"type": "boolean"},
            "stdout_artifact": json_forms.OPTIONAL_ARTIFACT_SCHEMA,
            "stderr_artifact": json_forms.OPTIONAL_ARTIFACT_SCHEMA,
            "files_changed_truncated": {"type": "boolean"},
            "unenforced_limits": {"type": "array", "items": {"type": "string"}},
        },
        "required": [
            "exit_code", "stdout", "stderr", "timed_out", "killed_by", "duration_ms",
            "files_changed", "signal", "stdout_truncated", "stderr_truncated", "stdout_artifact",
            "stderr_artifact", "files_changed_truncated", "unenforced_limits",
        ],
    },
    category=Category.CODE_EXECUTION,
    risk=Risk.HIGH,
    idempotency=Idempotency.NON_IDEMPOTENT,
    target=Target.SANDBOX,
    scope="sandbox.execute",
    requires=frozenset({SideEffect.CODE_EXECUTION}),
    may_use=frozenset({SideEffect.SANDBOX_NETWORK, SideEffect.PACKAGE_INSTALL}),
    output_trust=TrustLevel.EXTERNAL_UNTRUSTED,
    timeout_seconds=TIMEOUT_SECONDS,
    output_bytes_max=OUTPUT_BYTES_MAX,
    parallelism=Parallelism.FORBIDDEN,
)  # fmt: skip


def command_of(arguments: Mapping[str, object], *, network_enabled: bool) -> ExecutionCommand:
    """The command that the arguments ask for. Pure.

    Raises: ToolValidationError for the first field, in S1's order, that is wrong.
    """
    command = ExecutionCommand(
        argv=check.command_vector(arguments.get("command")),
        working_directory=check.workspace_path(
            arguments.get("working_directory", "."), "working_directory"
        ),
        timeout_seconds=check.timeout(
            arguments.get("timeout_seconds"), declared_seconds=TIMEOUT_SECONDS
        ),
        stdin=None,
        maximum_output_bytes=CEILING_FACTOR * OUTPUT_BYTES_MAX,
        network_enabled=network_enabled,
    )
    check.check_names(arguments, FIELDS)
    return command


async def run_command(context: CallContext, arguments: Mapping[str, object]) -> ToolResult:
    """Run it. A command that fails is a result, not an error.

    Raises: ToolValidationError; PackageInstallDenied; the errors of the scope and its port.
    """
    network = network_enabled(context.profile, context.scope.specification.egress)
    command = command_of(arguments, network_enabled=network)
    shown = check.whole_number(
        arguments.get("max_output_bytes", context.output_bytes),
        "max_output_bytes",
        least=OUTPUT_BYTES_MIN,
        most=OUTPUT_BYTES_MAX,
    )
    return await _result(context.artifacts, await context.scope.execute(command), shown)


async def _result(
    artifacts: RunArtifacts | None, result: ExecutionResult, shown_bytes: int
) -> ToolResult:
    out, err = as_text(result.stdout), as_text(result.stderr)
    room = split_limit(len(out.encode()), len(err.encode()), shown_bytes)
    stdout, stdout_ref = await _shown(artifacts, "stdout", result.stdout, out, room[0])
    stderr, stderr_ref = await _shown(artifacts, "stderr", result.stderr, err, room[1])
    value = {
        "exit_code": result.exit_code,
        "stdout": stdout,
        "stderr": stderr,
        "timed_out": result.timed_out,
        "killed_by": None if result.killed_by is None else result.killed_by.value,
        "duration_ms": result.duration_ms,
        "files_changed": [json_forms.change(each) for each in result.files_changed],
        "signal": result.signal,
        "stdout_truncated": result.stdout_truncated or stdout is not out,
        "stderr_truncated": result.stderr_truncated or stderr is not err,
        "stdout_artifact": None if stdout_ref is None else json_forms.artifact(stdout_ref),
        "stderr_artifact": None if stderr_ref is None else json_forms.artifact(stderr_ref),
        "files_changed_truncated": result.files_changed_truncated,
        "unenforced_limits": list(result.unenforced_limits),
    }
    stored = tuple(ref for ref in (stdout_ref, stderr_ref) if ref is not None)
    return ToolResult(value=value, trust=TrustLevel.EXTERNAL_UNTRUSTED, artifacts=stored)


async def _shown(
    artifacts: RunArtifacts | None, stream: str, data: bytes, text: str, limit_bytes: int
) -> tuple[str, ArtifactRef | None]:
    """What the model sees of one stream, and where all of it is."""
    if fits(text, limit_bytes):
        return text, None
    if artifacts is None:
        return shorten(text, limit_bytes, where="no artifact store keeps the full output"), None
    try:
        ref = await artifacts.create(
            ArtifactOrigin.TOOL_OUTPUT,
            chunks_of(data),
            filename=f"{stream}.txt",
            media_type="text/plain",
        )
    except ArtifactError:
        # The command has run and must not run again: its result goes out, and says what failed.
        where = "the artifact store did not take the full output"
        return shorten(text, limit_bytes, where=where), None
    return shorten(text, limit_bytes, where=f"all of it is artifact {ref.artifact_id}"), ref
