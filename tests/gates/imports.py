"""Who imports whom, as facts: every import statement wherever it stands, and dynamic ones."""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.gates.source import Module, aliases, called

DYNAMIC = frozenset({"importlib.import_module", "__import__", "builtins.__import__"})
COMPUTED = "(computed)"


@dataclass(frozen=True)
class Import:
    """`importer` names `target` at `line`. A computed target is `COMPUTED`."""

    importer: str
    target: str
    line: int


def imports_of(module: Module, known: Mapping[str, object]) -> Iterator[Import]:
    """Every import of a module: at its top, inside functions, under TYPE_CHECKING, relative, and
    through importlib or __import__."""
    names = aliases(module.tree)
    for node in ast.walk(module.tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(module.name, alias.name, node.lineno)
            case ast.ImportFrom():
                base = _base(module, node)
                for alias in node.names:
                    submodule = f"{base}.{alias.name}"
                    target = submodule if submodule in known else base
                    yield Import(module.name, target, node.lineno)
            case ast.Call() if called(node, names) in DYNAMIC:
                yield Import(module.name, _dynamic_target(node), node.lineno)


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    if not module.is_package:
        parts = parts[:-1]
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, node.module] if node.module else parts)


def _dynamic_target(node: ast.Call) -> str:
    argument = node.args[0] if node.args else None
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    return COMPUTED


def graph(modules: Mapping[str, Module]) -> dict[str, list[Import]]:
    """Each module's imports, with what a package's own import brings: its parents."""
    return {name: list(imports_of(module, modules)) for name, module in modules.items()}


def parents(name: str) -> Iterator[str]:
    """The packages that importing `name` imports first."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])


def reachable(edges: Mapping[str, list[Import]], start: str) -> dict[str, tuple[Import, ...]]:
    """Everything that importing `start` may import, with the chain of imports that leads there."""
    found: dict[str, tuple[Import, ...]] = {start: ()}
    waiting = [start]
    while waiting:
        current = waiting.pop()
        steps = list(edges.get(current, []))
        steps += [Import(current, parent, 1) for parent in parents(current)]
        for step in steps:
            if step.target not in found:
                found[step.target] = (*found[current], step)
                waiting.append(step.target)
    return found


def within(name: str, prefixes: tuple[str, ...] | frozenset[str]) -> bool:
    """Whether `name` is one of these modules or below one of them."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def is_stdlib(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names
