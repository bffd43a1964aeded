"""What sbxctl shows: for people on stderr with rich, for programs as one JSON document on stdout.

Bytes from a sandbox (names, output) are never interpreted: in the report for people they are
escaped, so that a file name cannot move the cursor of the terminal that shows it. On a terminal our
own lines beside a program's output have a style, which the program's cannot have
(`sbxctl.terminal`).
"""

import base64
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sbxctl.terminal import Output, visible
from sbxctl.units import human_bytes
from sbxd.port.command import ExecutionResult, FileChange, Usage
from sbxd.wire.descriptions import EnvironmentInfo, ImageInfo, PostureItem

_MARKS = {"ok": "[green]ok[/]", "degraded": "[yellow]degraded[/]", "missing": "[red]missing[/]"}


def console() -> Console:
    """Where the report for people goes."""
    width = None if sys.stderr.isatty() else 400
    return Console(stderr=True, highlight=False, soft_wrap=True, width=width)


def page() -> Console:
    """Stdout for people; where it is no terminal nothing is cut to a width."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 400)


def output(*, raw: bool) -> Output:
    """Where the output of programs goes. raw: as it is, also to a terminal."""
    return Output(raw=raw, styled=_is_styled())


def _is_styled() -> bool:
    """Whether our own lines have a style: where stderr is a terminal that has any."""
    return console().color_system is not None


def say(text: str) -> None:
    """One sentence of sbxctl's own, on stderr."""
    console().print(Text.assemble(("sbxctl:", "bold reverse"), f" {visible(text)}"))


def tell(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Lines of ours, on stdout, or with err on stderr. A name in them is escaped, but for its
    newlines: `printable` is for names that may have some."""
    click.echo(visible(text).replace("\r", "\\r"), err=err, nl=nl)


def prompt(text: str) -> str:
    """What a person is asked to type after; its style sets it apart from a program's output."""
    return f"\x1b[1;7m{visible(text)}\x1b[0m " if _is_styled() else f"{visible(text)} "


def print_json(document: object) -> None:
    """One JSON document and a newline on stdout."""
    raw = msgspec.to_builtins(document, enc_hook=_encode, builtin_types=(bytes,))
    sys.stdout.write(_ascii(json.dumps(raw, indent=2, default=_encode)) + "\n")


def json_line(document: object) -> bytes:
    """One JSON document of its own line."""
    return _ascii(json.dumps(msgspec.to_builtins(document))).encode() + b"\n"


def _ascii(document: str) -> str:
    """JSON as `dumps` makes it, without the one control character that it leaves."""
    return document.replace("\x7f", "\\u007f")


def _encode(value: object) -> Any:
    if isinstance(value, bytes):
        return bytes_field(value)
    return str(value)


def bytes_field(raw: bytes) -> dict[str, str]:
    """Bytes in JSON: as text where they are UTF-8, else in base64."""
    try:
        return {"text": raw.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def printable(text: str) -> str:
    """The text with everything that a terminal might act on escaped."""
    return escape(_visible(text))


def show_result(result: ExecutionResult, *, out: Console) -> None:
    """One line of verdict, then the changed files, then the usage."""
    if result.killed_by is not None:
        evidence = result.evidence
        why = {
            "MEMORY": f"{evidence.oom_kill} processes killed for memory",
            "PIDS": f"{evidence.pids_max_events} forks refused",
            "TIMEOUT": f"limit {evidence.effective_timeout_ms / 1000:g} s",
        }.get(result.killed_by.name, "")
        verdict = f"[bold red]killed: {result.killed_by}[/]" + (f" ({why})" if why else "")
    elif result.signal is not None:
        verdict = f"[bold yellow]died of signal {result.signal}[/] (exit code {result.exit_code})"
    else:
        colour = "green" if result.exit_code == 0 else "yellow"
        verdict = f"[bold {colour}]exit code {result.exit_code}[/]"
    truncated = [n for n in ("stdout", "stderr") if getattr(result, f"{n}_truncated")]
    note = f", {' and '.join(truncated)} truncated" if truncated else ""
    out.print(f"[reverse]── {verdict} in {result.duration_ms} ms{note} ──[/]")
    show_changes(result.files_changed, out=out)
    if result.files_changed_truncated:
        out.print("   … and more: the list is truncated")
    show_usage(result.usage, out=out)
    if result.unenforced_limits:
        out.print(f"[yellow]not enforced on this host: {', '.join(result.unenforced_limits)}[/]")


def show_changes(changes: Sequence[FileChange], *, out: Console) -> None:
    """One line per changed file."""
    if not changes:
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for change in changes:
        digest = change.sha256 or "-"
        size = "-" if change.sha256 is None else human_bytes(change.size_bytes)
        add_row(table, change.change.lower(), change.path, size, digest)
    out.print(table)


def add_row(table: Table, *cells: str) -> None:
    """A row of a table, with everything in it escaped."""
    table.add_row(*(Text(_visible(cell)) for cell in cells))


def show_usage(usage: Usage, *, out: Console) -> None:
    """What the command used, as far as this host measures it."""
    parts = []
    if usage.cpu_ms is not None:
        parts.append(f"cpu {usage.cpu_ms} ms")
    if usage.memory_peak_bytes is not None:
        parts.append(f"memory peak {human_bytes(usage.memory_peak_bytes)}")
    if usage.pids_peak is not None:
        parts.append(f"pids peak {usage.pids_peak}")
    if usage.workspace_bytes is not None:
        parts.append(f"workspace {human_bytes(usage.workspace_bytes)}")
    if usage.disk_written_bytes is not None:
        parts.append(f"written to disk {human_bytes(usage.disk_written_bytes)}")
    if parts:
        out.print("   " + ", ".join(parts))


def show_environments(environments: Sequence[EnvironmentInfo]) -> None:
    """The table of `sbxctl ls`, on stdout."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("ENVIRONMENT", "TENANT", "RUN", "STATE", "OWNER", "COMMANDS", "EXPIRES"):
        table.add_column(heading, no_wrap=True)
    for each in environments:
        add_row(
            table,
            each.handle.environment_id,
            each.handle.tenant_id,
            each.handle.run_id,
            each.state,
            str(each.owner_uid),
            str(each.commands_run),
            each.handle.expires_at.strftime("%Y-%m-%d %H:%M:%SZ"),
        )
    page().print(table)


def show_environment(info: EnvironmentInfo) -> None:
    """The page of `sbxctl inspect`, on stdout."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    limits = info.limits
    argv = " ".join(a.decode("utf-8", "replace") for a in info.running_argv or ())
    if info.running_argv_truncated:
        argv += " …"
    for name, value in (
        ("environment", info.handle.environment_id),
        ("tenant", info.handle.tenant_id),
        ("run", f"{info.handle.run_id}, lease epoch {info.handle.lease_epoch}"),
        ("state", info.state),
        ("running", argv or "-"),
        ("owner", f"uid {info.owner_uid}"),
        ("image", info.image_digest),
        ("memory", human_bytes(limits.memory_bytes)),
        ("cpu", f"{limits.cpu_millicores / 1000:g} cores"),
        ("pids", str(limits.pids_max)),
        ("workspace", f"{human_bytes(limits.workspace_bytes)}, {limits.inodes_max} inodes"),
        ("wall clock", f"{limits.wall_clock_seconds} s a command"),
        ("scope", info.scope),
        ("created", info.handle.created_at.isoformat()),
        ("expires", info.handle.expires_at.isoformat()),
    ):
        add_row(table, name, value)
    page().print(table)


def show_images(images: Sequence[ImageInfo]) -> None:
    """The table of `sbxctl image ls`, on stdout."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in (
        "DIGEST",
        "LABEL",
        "ALIASES",
        "SIZE",
        "ALONE",
        "LAYERS",
        "HELD BY",
        "IN USE",
        "IMPORTED",
    ):
        table.add_column(heading, no_wrap=True)
    for image in images:
        add_row(
            table,
            image.digest,
            image.label or "-",
            ", ".join(image.aliases) or "-",
            human_bytes(image.size_bytes),
            human_bytes(image.unshared_bytes),
            str(image.layers),
            ", ".join(hold.lower() for hold in image.held_by) or "-",
            str(image.in_use),
            image.imported_at.strftime("%Y-%m-%d %H:%M:%SZ"),
        )
    page().print(table)
    count, total = len(images), sum(image.unshared_bytes for image in images)
    console().print(f"{count} images, {human_bytes(total)} not shared with another")


def show_posture(items: Sequence[PostureItem]) -> None:
    """The table of `sbxctl doctor`, on stdout; every line that is not ok has its fix."""
    out = page()
    for item in items:
        mark = _MARKS.get(item.state, printable(item.state.replace("_", " ")))
        out.print(f"{mark:>20}  [bold]{printable(item.name)}[/]  {printable(item.detail)}")
        if item.fix and item.state != "ok":
            out.print(f"          fix: {printable(item.fix)}")


# --- pages that are made elsewhere ----------------------------------------------------------------


class Tone(StrEnum):
    """What a line is to look like on a terminal."""

    PLAIN = ""
    GOOD = "green"
    DOUBTFUL = "yellow"
    BAD = "bold red"


@dataclass(frozen=True)
class Line:
    """One line of a page of names and values. The value is shown with everything escaped."""

    name: str
    value: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Sheet:
    """A headline and a table. right: headings whose columns are numbers. What matters least is on
    the right: where a terminal is too narrow, it is left out."""

    headline: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: Collection[str] = ()


def show_lines(lines: Sequence[Line]) -> None:
    """On stdout."""
    out, width = page(), max(len(each.name) for each in lines)
    for each in lines:
        text = Text(f"{each.name:>{width}}  ", style="bold")
        text.append(_visible(each.value), style=f"not bold {each.tone}".rstrip())
        out.print(text)


def show_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """On stdout."""
    show_lines([Line(name, value) for name, value in pairs])


def show_sheet(sheet: Sheet) -> None:
    """On stdout."""
    out = page()
    out.print(_rendered(sheet, out.width))


class Screen:
    """A sheet that takes the terminal and is replaced, until the block is left."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def __enter__(self) -> "Screen":
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    @property
    def height(self) -> int:
        """Lines of the terminal now."""
        return self._console.height

    def show(self, sheet: Sheet) -> None:
        """Replace what is shown."""
        self._live.update(_rendered(sheet, self._console.width), refresh=True)


def _rendered(sheet: Sheet, width: int) -> Group:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold reverse")
    shown = fitting(sheet, width)
    for heading in sheet.headings[:shown]:
        table.add_column(
            heading, no_wrap=True, justify="right" if heading in sheet.right else "left"
        )
    for row in sheet.rows:
        add_row(table, *row[:shown])
    return Group(Text(_visible(sheet.headline), style="bold"), Text(""), table)


def fitting(sheet: Sheet, width: int) -> int:
    """How many columns, from the left, are shown whole in so many characters; at least one."""
    left = width
    for place, heading in enumerate(sheet.headings):
        left -= max(len(heading), *(len(_visible(row[place])) for row in sheet.rows), 0) + 2
        if left < 0:
            return max(1, place)
    return len(sheet.headings)


def _visible(text: str) -> str:
    """As `printable`, for what is not read as markup."""
    return "".join(c if c.isprintable() and c != "\\" else ascii(c)[1:-1] for c in text)
