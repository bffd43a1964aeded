"""What sbxctl shows: for people on stderr with rich, for programs as one JSON document on stdout.

Bytes from a sandbox (names, output) are never interpreted: in the report for people they are
escaped, so that a file name cannot move the cursor of the terminal that shows it.
"""

import base64
import json
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sbxctl.units import human_bytes
from sbxd.port.command import ExecutionResult, FileChange, Usage
from sbxd.wire.descriptions import EnvironmentInfo, ImageInfo, PostureItem

_MARKS = {"ok": "[green]ok[/]", "degraded": "[yellow]degraded[/]", "missing": "[red]missing[/]"}


def console() -> Console:
    """Where the report for people goes."""
    width = None if sys.stderr.isatty() else 400
    return Console(stderr=True, highlight=False, soft_wrap=True, width=width)


def _page() -> Console:
    """Stdout for people; where it is no terminal nothing is cut to a width."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 400)


def print_json(document: object) -> None:
    """One JSON document and a newline on stdout."""
    raw = msgspec.to_builtins(document, enc_hook=_encode, builtin_types=(bytes,))
    sys.stdout.write(json.dumps(raw, indent=2, default=_encode, ensure_ascii=True) + "\n")


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
    return escape("".join(c if c.isprintable() and c != "\\" else ascii(c)[1:-1] for c in text))


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
    out.print(f"── {verdict} in {result.duration_ms} ms{note} ──")
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
        table.add_row(change.change.lower(), printable(change.path), size, digest)
    out.print(table)


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
        table.add_row(
            each.handle.environment_id,
            printable(each.handle.tenant_id),
            printable(each.handle.run_id),
            each.state,
            str(each.owner_uid),
            str(each.commands_run),
            each.handle.expires_at.strftime("%Y-%m-%d %H:%M:%SZ"),
        )
    _page().print(table)


def show_environment(info: EnvironmentInfo) -> None:
    """The page of `sbxctl inspect`, on stdout."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    limits = info.limits
    argv = " ".join(a.decode("utf-8", "replace") for a in info.running_argv or ())
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
        table.add_row(name, printable(value))
    _page().print(table)


def show_images(images: Sequence[ImageInfo]) -> None:
    """The table of `sbxctl image ls`, on stdout."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("DIGEST", "LABEL", "ALIASES", "SIZE", "IN USE", "IMPORTED"):
        table.add_column(heading, no_wrap=True)
    for image in images:
        table.add_row(
            image.digest,
            printable(image.label) or "-",
            ", ".join(image.aliases) or "-",
            human_bytes(image.size_bytes),
            str(image.in_use),
            image.imported_at.strftime("%Y-%m-%d %H:%M:%SZ"),
        )
    _page().print(table)


def show_posture(items: Sequence[PostureItem]) -> None:
    """The table of `sbxctl doctor`, on stdout; every line that is not ok has its fix."""
    out = _page()
    for item in items:
        mark = _MARKS.get(item.state, item.state.replace("_", " "))
        out.print(f"{mark:>20}  [bold]{escape(item.name)}[/]  {printable(item.detail)}")
        if item.fix and item.state != "ok":
            out.print(f"          fix: {printable(item.fix)}")
