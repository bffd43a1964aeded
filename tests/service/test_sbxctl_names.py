"""No verb shows a name as it is that a sandbox, an image, a worker or the journal has chosen.

Every text of every answer is hostile here, also those that the protocol holds to a pattern: what
the command line shows does not rest on who answers.
"""

import enum
import json
import types
import typing
import unicodedata
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from sbxctl.__main__ import cli, main
from sbxd.client.admin import AdminClient
from sbxd.client.remote import Hooks
from sbxd.port.artifact import ContentDigest
from sbxd.port.command import ChangeKind, ExecutionResult, FileChange
from sbxd.port.egress import EgressMode
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.limits import ResourceLimits
from sbxd.wire.messages import OutputStream
from tests.service.requests import SPECIFICATION

HOSTILE = "n\x1b[2Ja\x07m\x9be\u202e\u2028\x7f\r\n[bold]\\"
ID = "0" * 32
IMAGE = "sha256:" + "a" * 64


def hostile(kind: Any, name: str = "") -> Any:
    """A value of the type in which every text and every byte string is hostile."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return hostile(next(each for each in arguments if each is not type(None)), name)
    if origin is typing.Annotated:
        return hostile(arguments[0], name)
    if origin is tuple:
        return () if name == "addresses" else (hostile(arguments[0]),)
    if origin in (dict, typing.get_origin(typing.Mapping[str, str])):
        return {hostile(arguments[0]): hostile(arguments[1])}
    if origin is typing.Literal:
        return arguments[0]
    if isinstance(kind, typing.NewType):
        return hostile(kind.__supertype__, name)
    if kind is ResourceLimits:
        return SPECIFICATION.limits
    if kind is EgressMode:
        return EgressMode.ALLOWLIST
    if name == "reason":
        return "host_not_listed"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = {each: hints[each] for each in kind.__struct_fields__}
        return kind(**{each: hostile(of, each) for each, of in fields.items()})
    return {
        str: HOSTILE, bytes: HOSTILE.encode(), int: 1, float: 1.0, bool: False,
        datetime: datetime(2026, 3, 1, tzinfo=UTC),
    }[kind]  # fmt: skip


CHANGE = FileChange(path="x", change=ChangeKind.CREATED, size_bytes=1, sha256="0" * 64)
RESULT = ExecutionResult(
    exit_code=0,
    signal=None,
    killed_by=None,
    timed_out=False,
    stdout=HOSTILE.encode(),
    stderr=b"",
    stdout_truncated=False,
    stderr_truncated=False,
    duration_ms=1,
    files_changed=(msgspec.structs.replace(CHANGE, path=HOSTILE),),
    files_changed_truncated=False,
)


class Environments:
    def __init__(self, hooks: Hooks | None = None) -> None:
        self.hooks = hooks

    async def provision(self, _: object) -> EnvironmentHandle:
        return typing.cast("EnvironmentHandle", hostile(EnvironmentHandle))

    async def execute(self, *_: object) -> ExecutionResult:
        if self.hooks is not None and self.hooks.on_output is not None:
            await self.hooks.on_output(OutputStream.STDERR, b"")
        return RESULT

    async def destroy(self, _: object) -> None: ...


class Content:
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"x"

    def digest(self) -> ContentDigest:
        return ContentDigest(sha256=HOSTILE, size_bytes=1)


class Workspace:
    @asynccontextmanager
    async def read_stream(self, *_: object, **__: object) -> AsyncIterator[Content]:
        yield Content()

    async def write_stream(self, *_: object, **__: object) -> None: ...


class Hostile(AdminClient):
    """A daemon every text of which is hostile."""

    def __init__(self) -> None: ...

    @property
    def environments(self) -> Any:
        return Environments()

    def environments_with(self, hooks: Hooks) -> Any:
        return Environments(hooks)

    def workspace(self, handle: EnvironmentHandle) -> Any:
        return Workspace()

    async def _ask(self, make: object, expected: type, *, upload: Any = None) -> Any:
        if upload is not None:
            async for _ in upload:
                pass
        return hostile(expected)


@asynccontextmanager
async def _connected(_: str) -> AsyncIterator[AdminClient]:
    yield Hostile()


_TEXTS = (
    "MESSAGE MESSAGE_ID SBX_EVENT SBX_TENANT_ID SBX_RUN_ID SBX_REASON SBX_HOST SBX_AUDIT_BOOT_ID "
    "SBX_AUDIT_INSTANCE _SYSTEMD_UNIT UNIT"
)
RECORD = {
    **dict.fromkeys(_TEXTS.split(), HOSTILE),
    "__REALTIME_TIMESTAMP": "1",
    "PRIORITY": "3",
    "SBX_AUDIT_SEQUENCE": "1",
    "SBX_PORT": "443",
}

# Every verb, with what it is given. {file}: a file of ours with a hostile name.
VERBS: dict[str, list[str]] = {
    "run": ["--image", IMAGE, "--put", "{file}", "--get", "x:{target}", "--", "x"],
    "exec": [ID, "x"],
    "shell": ["--image", IMAGE],
    "cp": [f"{ID}:x", "{target}"],
    "ls": [],
    "inspect": [ID],
    "destroy": [ID],
    "image import": ["{tar}"],
    "image ls": [],
    "image rm": [IMAGE],
    "image prune": ["--yes"],
    "reap": [],
    "reconcile": [],
    "quarantine ls": [],
    "quarantine clear": ["sbx-1", "--proven"],
    "egress show": [],
    "egress check": ["--explain", "x:443"],
    "egress learn": [],
    "doctor": [],
    "status": [],
    "top": ["--once"],
    "pool show": [],
    "metrics": [],
    "audit": [],
    "audit verify": [],
    "logs": [],
}
# What shows nothing that anybody else has named, or asks another host before it does.
OURS_ALONE = {
    "image build",
    "image pull",
    "seccomp dump",
    "config check",
    "config show",
    "egress test",
}


def verbs(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every verb by its words; a group that does something itself is one."""
    if isinstance(command, click.Group):
        if command.invoke_without_command:
            yield path, command
        for name, below in command.commands.items():
            yield from verbs(below, f"{path} {name}".strip())
    else:
        yield path, command


def test_the_table_has_every_verb() -> None:
    assert {path for path, _ in verbs(cli)} == {*VERBS, *OURS_ALONE}


@pytest.mark.case("TTY-04")
@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "json"])
@pytest.mark.parametrize("path", VERBS)
def test_a_verb_shows_no_name_as_it_is(
    path: str,
    as_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = dict(verbs(cli))[path]
    if as_json and not any(each.name == "as_json" for each in command.params):
        return
    here = tmp_path / "n\x1b[2J\u202e"
    here.write_bytes(b"x")
    tar = tmp_path / "n\x1b[2J.tar"
    tar.write_bytes(bytes(10240))
    journalctl = tmp_path / "journalctl"
    (tmp_path / "lines").write_text(json.dumps(RECORD) + "\n")
    journalctl.write_text(f"#!/bin/sh\ncat {tmp_path}/lines\n")
    journalctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("sbxctl.session.connect_admin", _connected)
    monkeypatch.setattr("sbxctl.doctor.connect_admin", _connected, raising=False)
    names = {"{file}": str(here), "{target}": str(tmp_path / "t\x1b]0;x"), "{tar}": str(tar)}
    given = [path.split(), ["--json"] if as_json else [], VERBS[path]]
    words = [word for part in given for word in part]
    for name, value in names.items():
        words = [word.replace(name, value) for word in words]
    monkeypatch.setattr("sys.argv", ["sbxctl", *words])
    with (tmp_path / "lines").open() as stdin, suppress(SystemExit):
        monkeypatch.setattr("sys.stdin", stdin)
        main()
    shown = capsys.readouterr()
    assert "unexpected" not in shown.err, shown.err
    for char in shown.out + shown.err:
        assert char in "\n\t" or char.isprintable(), (unicodedata.name(char, ascii(char)), shown)
    if as_json and path != "metrics":
        assert shown.out.isascii()
        assert shown.out
    lines = (shown.out + shown.err).splitlines()
    if path != "metrics":  # one text of the daemon's, of many lines
        assert not any(line.startswith("[bold]") for line in lines), "a name makes no line"
