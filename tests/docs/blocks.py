"""The fenced blocks of the documents, and where each one's commands are run.

A block of commands (`sh`, `console`) has one line of HTML comment above it:

    <!-- run: lane -->      in a lane of its own, by `test_commands.py`
    <!-- run: package -->   by `tests/package/test_newcomer.py`, on a host that had nothing
    <!-- run: package as alice -->  the same, as a member of the group
    <!-- shown: REASON -->  by nobody, and why

Every other block says what it is: python and json and toml are read by their parsers, text is not.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lab.host import REPOSITORY

COMMANDS = frozenset({"sh", "console"})
LANGUAGES = COMMANDS | {"python", "toml", "json", "yaml", "hcl", "text"}
PLACES = frozenset({"lane", "package", "package as alice"})
_MARKER = re.compile(r"<!-- (run|shown): (.+) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block. place: where it is run; reason: why it is not; one of the two, or neither
    for what is no command."""

    file: Path
    line: int
    language: str
    text: str
    place: str | None
    reason: str | None

    def __str__(self) -> str:
        return f"{self.file.relative_to(REPOSITORY)}:{self.line}"

    @property
    def script(self) -> str:
        """What is typed: of a console, the lines after the prompt and those that they go on in."""
        if self.language != "console":
            return self.text
        typed: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                typed.append(line[2:])
            elif typed and typed[-1].endswith("\\"):
                typed.append(line)
        return "".join(f"{line}\n" for line in typed)


def documents() -> list[Path]:
    """README and every page."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def blocks_of(file: Path, text: str | None = None) -> Iterator[Block]:
    """The blocks of one document, in order. text: instead of what is in the file."""
    lines = (file.read_text() if text is None else text).splitlines()
    above, start, inside = "", 0, False
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            if not inside:
                start, language = number, line[3:].strip()
                marker = _MARKER.fullmatch(above)
            else:
                kind, value = marker.groups() if marker else ("", None)
                yield Block(
                    file=file,
                    line=start,
                    language=language,
                    text="".join(f"{each}\n" for each in lines[start : number - 1]),
                    place=value if kind == "run" else None,
                    reason=value if kind == "shown" else None,
                )
            inside = not inside
        above = line.strip()


def problems(block: Block) -> list[str]:
    """What is wrong with how a block is marked; empty when nothing is."""
    found = []
    if block.language not in LANGUAGES:
        found.append(f"no language of {sorted(LANGUAGES)}")
    elif block.language in COMMANDS:
        if block.place is None and block.reason is None:
            found.append("commands, and neither run anywhere nor a reason why not")
        if block.place is not None and block.place not in PLACES:
            found.append(f"nobody runs what is for {block.place!r}")
        if block.reason is not None and len(block.reason) < 10:
            found.append("a reason that says nothing")
        if not block.script.strip():
            found.append("no command in it")
    return found
