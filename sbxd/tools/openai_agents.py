"""The tools for the OpenAI Agents SDK.

    async with RunScope(...) as scope:
        agent = Agent(name="analyst", tools=function_tools(Toolbox(scope, artifacts)))
        await Runner.run(agent, "…")

The one module that knows the SDK's function tools. Its loop is asyncio's.

Invariants: the schemas and texts are the specifications' own; a refusal is text for the model and
ends no run, except when nothing more can be done in this run (ToolRunEnded). Deliberately absent:
the SDK's own approvals (`needs_approval`: the caller may set it on what this gives) and its
sandbox sessions (`openai_sandbox`).
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from agents import FunctionTool
from agents.tool_context import ToolContext

from sbxd.port.artifact import TrustLevel
from sbxd.tools.tool import (
    ToolError,
    ToolRunEnded,
    ToolSpec,
    ToolValidationError,
)
from sbxd.tools.toolbox import Toolbox


def function_tools(tools: Toolbox) -> list[FunctionTool]:
    """Every tool that the toolbox offers, as the SDK takes them."""
    return [_function_tool(tools, spec) for spec in tools.specs]


def _function_tool(tools: Toolbox, spec: ToolSpec) -> FunctionTool:
    return FunctionTool(
        name=spec.function_name,
        description=spec.description,
        params_json_schema=dict(spec.input_schema),
        on_invoke_tool=partial(_invoke, tools, spec),
        # Strict schemas have no optional field; ours have.
        strict_json_schema=False,
    )


async def _invoke(tools: Toolbox, spec: ToolSpec, context: ToolContext[Any], text: str) -> str:
    try:
        result = await tools.call(spec.name, _arguments(text))
    except ToolRunEnded:
        raise
    except ToolError as error:
        trust = TrustLevel.EXTERNAL_UNTRUSTED  # it may name what is in the workspace
        return _told({"trust": trust.value, "error": error.code.value, "message": error.message})
    return _told({"trust": result.trust.value, "result": dict(result.value)})


def _arguments(text: str) -> Mapping[str, object]:
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as problem:
        raise ToolValidationError(f"the arguments are no JSON: {problem.msg}") from None
    if not isinstance(arguments, dict):
        raise ToolValidationError("the arguments are to be one JSON object")
    return arguments


def _told(value: Mapping[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False)
