"""The tables of the documents that the code knows, written between their marks.

After a change of what they are made of: `python -m tests.docs.tables`, and read the difference.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from sbxctl.exits import Exit
from sbxd.config import HIGHEST_CEILINGS
from sbxd.port.limits import GIB, MIB, ResourceLimits
from sbxd.settings import DEFAULT_CEILINGS, DEFAULT_LIMITS, LimitSettings, ServiceSettings
from tests.lab.host import REPOSITORY

DOCS = REPOSITORY / "docs"
_MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

WHAT = {
    "cpu_millicores": "CPU rate; 1000 is one core",
    "memory_bytes": "memory, without swap",
    "pids_max": "processes and threads of one command",
    "workspace_bytes": "bytes of the workspace",
    "inodes_max": "files and directories of the workspace",
    "wall_clock_seconds": "the longest that one command may run",
}
EXITS = {
    Exit.OK: "done",
    Exit.INTERRUPTED: "interrupted by Ctrl-C",
    Exit.INTERNAL: "a fault of sbxctl itself; `--debug` shows where",
    Exit.REJECTED: "the request was rejected",
    Exit.UNAVAILABLE: "the service is unavailable",
    Exit.ESCAPE_SUSPECTED: "an escape is suspected; the environment was destroyed",
    Exit.WORKSPACE: "a workspace operation failed",
    Exit.CONFIGURATION: "`config`: the daemon would not start with this file",
    Exit.USAGE: "the command line is wrong",
    Exit.HOST_DEGRADED: "`doctor`: this host lacks something",
    Exit.EGRESS_REFUSED: "`egress check`: it would be refused",
    Exit.EGRESS_NOT_CONFORMING: "`egress test`: a probe failed, or proved nothing",
    Exit.ALERTING: "`status`: an alert stands",
    Exit.AUDIT_INCOMPLETE: "`audit verify`: a record is missing, out of turn or forged",
    Exit.AUDIT_NOT_KEPT: "`audit verify`: none is missing, but older ones are not kept",
}


def amount(value: object, name: str) -> str:
    """A value with its unit, as people write it."""
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value // GIB} GiB" if value % GIB == 0 else f"{value / MIB:g} MiB"
    return str(value)


def limits() -> Iterator[tuple[str, ...]]:
    yield "limit", "what", "default", "ceiling", "highest ceiling"
    for name in ResourceLimits.__struct_fields__:
        yield (
            f"`{name}`",
            WHAT[name],
            amount(getattr(DEFAULT_LIMITS, name), name),
            amount(getattr(DEFAULT_CEILINGS, name), name),
            amount(HIGHEST_CEILINGS.get(name, "yours"), name),
        )


def settings() -> Iterator[tuple[str, ...]]:
    yield "setting", "default"
    for prefix, kind in (("limits", LimitSettings), ("service", ServiceSettings)):
        for field in msgspec.structs.fields(kind):
            if isinstance(field.default, int):
                value = amount(field.default, field.name)
                yield f"`{prefix}.{field.name}`", value


def exits() -> Iterator[tuple[str, ...]]:
    yield "code", "name", "meaning"
    for code in sorted(Exit):
        kill = "the command was killed: see above" if 230 <= code <= 237 else EXITS.get(code, "")
        yield str(int(code)), f"`{code.name}`", kill


TABLES: Mapping[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "limits": limits,
    "settings": settings,
    "exits": exits,
}


def table(name: str) -> str:
    """One table in Markdown."""
    heading, *rows = TABLES[name]()
    lines = [heading, ("---",) * len(heading), *rows]
    return (
        "".join(f"| {' | '.join(row)} |\n" for row in lines)
        .replace("| --- ", "|---")
        .replace("|--- |", "|---|")
    )


def filled(text: str) -> str:
    """A document with its tables as the code has them."""
    return _MARK.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", text)


def marked() -> list[Path]:
    """The documents with such a table."""
    return [file for file in sorted(DOCS.glob("*.md")) if _MARK.search(file.read_text())]


if __name__ == "__main__":
    for file in marked():
        file.write_text(filled(file.read_text()))
