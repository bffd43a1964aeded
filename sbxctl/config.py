"""`sbxctl config`: what a configuration file comes to, and whether the daemon would start with it.

Judged by the daemon's own functions, on this host's file; nothing is asked of a running daemon,
which reads its file once, at start. What only a start can tell (whether this host has the limits,
runsc and the sockets) is `sbxctl doctor`'s business.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from sbxctl.exits import Exit
from sbxctl.report import print_json, tell
from sbxd.config import (
    BUILT_MECHANISMS,
    ConfigError,
    CredentialState,
    StartupRefusal,
    load,
    startup_refusals,
)
from sbxd.settings import CONFIGURATION_FILE, Settings

CREDENTIAL_NAME = "service-credential"

_FILE: click.Path = click.Path(dir_okay=False, path_type=Path)


@click.group("config")
def config() -> None:
    """Check the configuration, and show what it comes to."""


@config.command("check")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("file", type=_FILE, default=CONFIGURATION_FILE)
def check(as_json: bool, file: Path) -> None:
    """Say whether the daemon would start with FILE, and every reason why not.

    Do it before `systemctl restart sbxd`: a restart ends every sandbox. Exit code 0 when it would
    start, 244 when it would not. The credential is looked for beside FILE.
    """
    problems = problems_of(file)
    if as_json:
        print_json({"file": str(file), "ok": not problems, "problems": problems})
    elif not problems:
        tell(f"{file}: ok")
    else:
        for problem in problems:
            tell(f"{file}: {problem}")
    sys.exit(Exit.CONFIGURATION if problems else Exit.OK)


@config.command("show")
@click.option("--changed", is_flag=True, help="Only what is not the default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("file", type=_FILE, default=CONFIGURATION_FILE)
def show(changed: bool, as_json: bool, file: Path) -> None:
    """Show every setting of FILE with its value, defaults included.

    The output is a configuration file itself, one key a line; a line that ends with "# default"
    is what the file leaves out or sets to the same. Credentials are in no configuration.
    """
    try:
        settings = load(file)
    except ConfigError as error:
        tell(f"sbxctl: {file}: {error}", err=True)
        sys.exit(Exit.CONFIGURATION)
    defaults = dict(_flat(msgspec.to_builtins(Settings())))
    found = dict(_flat(msgspec.to_builtins(settings)))
    shown = {key: value for key, value in found.items() if not changed or defaults[key] != value}
    if as_json:
        print_json({k: {"value": v, "is_default": defaults[k] == v} for k, v in shown.items()})
        return
    for key, value in shown.items():
        mark = "  # default" if defaults[key] == value else ""
        tell(f"# {key} has no value{mark}" if value is None else f"{key} = {_toml(value)}{mark}")


def problems_of(file: Path) -> tuple[StartupRefusal, ...]:
    """Why the daemon would not start with this file; empty when it would."""
    try:
        settings = load(file)
    except ConfigError as error:
        named = ((error.key, "?"),) if error.key else ()
        return (StartupRefusal(settings=named, detail=error.detail, fix="Correct the file"),)
    beside = file.with_name(CREDENTIAL_NAME)
    there = beside.is_file() and beside.stat().st_size > 0
    return startup_refusals(
        settings,
        credential=CredentialState.PRESENT if there else CredentialState.ABSENT,
        available_mechanisms=BUILT_MECHANISMS,
    )


def _flat(tree: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys; a table whose names are the operator's own stays whole."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if (
            isinstance(value, dict)
            and value
            and key not in ("images.aliases", "leases.authorities")
        ):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _toml(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            inner = ", ".join(f"{_toml(name)} = {_toml(each)}" for name, each in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case list() | tuple():
            return f"[{', '.join(_toml(each) for each in value)}]"
        case _:
            # JSON's numbers and strings are TOML's.
            return msgspec.json.encode(value).decode()
