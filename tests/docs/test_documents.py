"""Every block of the documents is marked, and is what it says; every link leads somewhere."""

import ast
import json
import re
import tomllib
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.config import decode
from tests.docs.blocks import COMMANDS, Block, blocks_of, documents, problems
from tests.lab.host import REPOSITORY

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
BLOCKS = [block for file in documents() for block in blocks_of(file)]


def test_every_block_has_a_language_and_every_command_is_run_or_has_a_reason() -> None:
    assert {str(block): found for block in BLOCKS if (found := problems(block))} == {}


def test_every_kind_of_place_has_a_block() -> None:
    places = {block.place for block in BLOCKS if block.place}
    assert {"lane", "package", "package as alice"} <= places
    assert len([block for block in BLOCKS if block.language in COMMANDS and block.place]) > 10


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```\nls\n```", "no language"),
        ("```sh\nls\n```", "neither run"),
        ("<!-- run: nowhere -->\n```sh\nls\n```", "nobody runs"),
        ("<!-- shown: no -->\n```sh\nls\n```", "says nothing"),
        ("<!-- run: lane -->\n```console\nls\n```", "no command"),
        ("<!-- run: lane -->\n\n```sh\nls\n```", "neither run"),
    ],
)
def test_control_a_block_that_is_marked_wrongly_is_found(text: str, found: str) -> None:
    (block,) = blocks_of(REPOSITORY / "planted.md", text)
    assert found in problems(block)[0]


def test_a_console_is_read_by_its_prompts() -> None:
    (block,) = blocks_of(REPOSITORY / "x.md", "```console\n$ a \\\n   b\nout\n$ c\n$d\n```")
    assert block.script == "a \\\n   b\nc\n"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_is_python_and_imports_what_there_is(block: Block) -> None:
    tree = ast.parse(f"async def shown():\n{_indented(block.text)}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sbxd"):
            names = ", ".join(each.name for each in node.names)
            module = REPOSITORY / f"{(node.module or '').replace('.', '/')}.py"
            source = ast.parse(module.read_text())
            defined = set(_defined(source))
            assert {each.name for each in node.names} <= defined, names


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines()) or "    pass\n"


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Assign():
                yield from (each.id for each in node.targets if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.ImportFrom() | ast.Import():
                yield from (each.asname or each.name for each in node.names)
            case _:
                pass


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=str)
def test_a_configuration_is_one(block: Block) -> None:
    tree = tomllib.loads(block.text)
    if not {"artifacts", "mcp", "context"} & tree.keys():  # those are the worker tier's
        decode(block.text.encode())


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=str)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


def anchor(heading: str) -> str:
    """As mkdocs and code hosts make it of a heading."""
    plain = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def dead_links(file: Path, text: str) -> Iterator[str]:
    """The links of a document that lead to no file, or to no heading of one."""
    for target in LINK.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        if not there.exists():
            yield target
        elif heading:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.M)
            if heading not in {anchor(each) for each in headings}:
                yield target


@pytest.mark.parametrize("file", documents(), ids=lambda file: file.name)
def test_every_link_leads_somewhere(file: Path) -> None:
    assert list(dead_links(file, file.read_text())) == []


def test_control_a_dead_link_is_found() -> None:
    text = "[a](none.md) [b](#none) [c](install.md#none) [d](install.md) [e](https://example.org)"
    file = REPOSITORY / "docs" / "planted.md"
    planted = text.replace("[b](#none) ", "")
    assert list(dead_links(file, planted)) == ["none.md", "install.md#none"]


def test_every_page_is_in_the_site_and_within_reach_of_the_readme() -> None:
    pages = {path.name for path in (REPOSITORY / "docs").glob("*.md")}
    listed = set(re.findall(r"([a-z-]+\.md)", (REPOSITORY / "mkdocs.yml").read_text()))
    assert pages == listed
    seen, waiting = set(), [REPOSITORY / "README.md"]
    while waiting:
        file = waiting.pop()
        if file not in seen and file.suffix == ".md" and file.exists():
            seen.add(file)
            for target in LINK.findall(file.read_text()):
                if not re.match(r"[a-z]+:", target):
                    waiting.append((file.parent / target.partition("#")[0]).resolve())
    assert pages <= {path.name for path in seen}
