"""The product's source as syntax trees, for the structural gates. Reads files, imports nothing."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("sbxd", "sbxctl")


@dataclass(frozen=True)
class Module:
    """One source file. name: dotted; a package is named without `__init__`."""

    name: str
    path: Path
    tree: ast.Module
    is_package: bool
    lines: int


def load(root: Path = REPOSITORY, packages: tuple[str, ...] = PACKAGES) -> dict[str, Module]:
    """Every module of the packages below `root`, by name."""
    modules = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            text = path.read_text(encoding="utf-8")
            modules[name] = Module(
                name=name,
                path=path,
                tree=ast.parse(text, str(path)),
                is_package=is_package,
                lines=text.count("\n"),
            )
    return modules


def docstrings(tree: ast.Module) -> set[ast.Constant]:
    """The constants that are docstrings (or bare strings, which document a name above them)."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string or bytes literal that is not a docstring; the pieces of an
    f-string come one by one."""
    excluded = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in excluded:
            if isinstance(node.value, str):
                yield node.lineno, node.value
            elif isinstance(node.value, bytes):
                yield node.lineno, node.value.decode("latin-1")


def dotted(node: ast.expr) -> str:
    """The dotted text of a name or an attribute of a name, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def aliases(tree: ast.Module) -> Mapping[str, str]:
    """What each imported name stands for: {"sp": "subprocess", "run": "subprocess.run"}."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def called(node: ast.Call, names: Mapping[str, str]) -> str:
    """The full dotted name of what a call calls, through the module's imports."""
    text = dotted(node.func)
    head, dot, rest = text.partition(".")
    return names.get(head, head) + dot + rest


def suite_files(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every file of the tests, but what the lab builds and caches."""
    for path in sorted((root / "tests").rglob("*.py")):
        if ".cache" not in path.parts:
            yield path, ast.parse(path.read_text(encoding="utf-8"), str(path))
