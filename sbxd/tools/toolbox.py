"""The tools of one run, ready to be called by any agent framework.

    async with RunScope(...) as scope:
        tools = Toolbox(scope, artifacts)
        result = await tools.call("sandbox.run_command", {"command": ["python3", "a.py"]})

Invariants: no call without every effect that the tool requires; every call is bounded in time;
calls of one run take turns, so two commands never share a workspace at once and a file is labelled
as it was read; credentials are resolved by nobody for a tool whose target is the sandbox.
Deliberately absent: asking for approvals.
"""

from collections.abc import Mapping
from types import MappingProxyType

import anyio
from msgspec import structs

from sbxd.client.run_scope import RunScope
from sbxd.policy.network import network_shape
from sbxd.port.credentials import CredentialResolver, NoCredentials
from sbxd.port.egress import DENY_ALL, EgressPolicy
from sbxd.port.errors import PortError
from sbxd.port.network import NetworkShape
from sbxd.tools import export, run_command, workspace_tools
from sbxd.tools.context import CallContext, told_to_the_model
from sbxd.tools.run_artifacts import RunArtifacts
from sbxd.tools.tool import (
    Disposition,
    Profile,
    SideEffect,
    Target,
    ToolDenied,
    ToolName,
    ToolResult,
    ToolSpec,
    ToolUnavailable,
    ToolValidationError,
)

# Besides a tool's own time: the service ends a command, and an environment may have to be made.
SLACK_SECONDS: Mapping[Target, int] = MappingProxyType({Target.SANDBOX: 120, Target.IN_PROCESS: 0})
SPECS: Mapping[ToolName, ToolSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            run_command.SPEC,
            export.SPEC,
            workspace_tools.READ_SPEC,
            workspace_tools.WRITE_SPEC,
            workspace_tools.LIST_SPEC,
        )
    }
)


class Toolbox:
    """Made for one run, within the block of its scope."""

    def __init__(
        self,
        scope: RunScope,
        artifacts: RunArtifacts | None,
        *,
        profile: Profile | None = None,
        output_bytes: int = run_command.OUTPUT_BYTES_MAX,
    ) -> None:
        """artifacts: None where this deployment keeps none; artifact.export then refuses.
        profile: None for the default one. output_bytes: how much of a command's output goes back
        where the call does not say, `run_command.OUTPUT_BYTES_MIN` to `OUTPUT_BYTES_MAX`."""
        if not run_command.OUTPUT_BYTES_MIN <= output_bytes <= run_command.OUTPUT_BYTES_MAX:
            raise ValueError("output_bytes is out of its range")
        self._output_bytes = output_bytes
        self._scope = scope
        self._artifacts = artifacts
        self._profile = profile or Profile()
        self._exported = export.Exported()
        self._turn = anyio.Lock()

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """Every tool that the profile lets be called at all."""
        return tuple(
            spec
            for spec in SPECS.values()
            if all(self._profile.decide(each) is Disposition.ALLOW for each in spec.requires)
        )

    @property
    def profile(self) -> Profile:
        return self._profile

    @property
    def network_grant(self) -> EgressPolicy:
        """What approving SANDBOX_NETWORK for one call grants, for the prompt that asks to show:
        the destinations that this run's environment was specified with; `deny`, hence nothing,
        where it has none. No approval widens it. Where it lists a package registry
        (`sbxd.policy.registries`), PACKAGE_INSTALL has to be approved with it."""
        egress = self._scope.specification.egress
        return DENY_ALL if network_shape(egress) is NetworkShape.NONE else egress

    def credentials(self, tool: ToolName) -> CredentialResolver:
        """What a tool's credentials are resolved with: for every tool here, by nobody."""
        assert tool in SPECS
        return NoCredentials()

    async def call(
        self,
        name: str,
        arguments: Mapping[str, object],
        *,
        approved: frozenset[SideEffect] = frozenset(),
    ) -> ToolResult:
        """Call one tool.

        Args:
            name: as `ToolName` has it, or as a specification's `function_name`.
            arguments: as the model wrote them, decoded.
            approved: effects that were approved for this one call, by whoever may approve;
                never anything that a model says. The second yes for the network comes this way
                or by the profile, and grants `network_grant`.

        Raises: a ToolError.

        Cancellation: a running command is killed (CANCELLED); the environment lives on.
        """
        spec = _spec(name)
        profile = structs.replace(self._profile, allowed=self._profile.allowed | approved)
        for effect in sorted(spec.requires):
            if profile.decide(effect) is Disposition.DENY:
                raise ToolDenied(spec.name, effect)
        context = CallContext(self._scope, self._artifacts, profile, self._output_bytes)
        async with self._turn:
            seconds = spec.timeout_seconds + SLACK_SECONDS[spec.target]
            with told_to_the_model(spec), anyio.move_on_after(seconds):
                try:
                    return await self._call(spec.name, context, arguments)
                except PortError as error:
                    await self._scope.forget_if_gone(error)
                    raise
        raise ToolUnavailable(f"{spec.name} was given up after {seconds} s")

    async def _call(
        self, name: ToolName, context: CallContext, arguments: Mapping[str, object]
    ) -> ToolResult:
        match name:
            case ToolName.RUN_COMMAND:
                return await run_command.run_command(context, arguments)
            case ToolName.EXPORT:
                return await export.export(context, self._exported, arguments)
            case ToolName.READ_TEXT:
                return await workspace_tools.read_text(context, arguments)
            case ToolName.WRITE_TEXT:
                return await workspace_tools.write_text(context, arguments)
            case ToolName.LIST:
                return await workspace_tools.list_directory(context, arguments)


def _spec(name: str) -> ToolSpec:
    for spec in SPECS.values():
        if name in (spec.name, spec.function_name):
            return spec
    raise ToolValidationError(f"no tool {name!a}: there are {', '.join(SPECS)}")
