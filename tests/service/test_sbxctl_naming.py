"""A live environment is named by its id or by how the id begins."""

import json
from pathlib import Path
from typing import cast

import click
import pytest
from msgspec.structs import replace

from sbxctl.exits import Exit
from sbxctl.naming import find
from sbxd.client.admin import AdminClient
from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.fake.script import Outcome, Script
from sbxd.port.command import Usage
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.ids import EnvironmentId
from sbxd.wire.descriptions import EnvironmentInfo
from tests.service.fake_socket import SocketDaemon, socket_daemon
from tests.service.requests import SPECIFICATION

SCRIPT = Script(by_program={"true": Outcome()})
IDS = ("aaaa" + "0" * 28, "aaaa" + "1" * 28, "bbbb" + "0" * 28)


class Admin:
    """The part of AdminClient that knows environments, over the ids above."""

    def __init__(self, handle: EnvironmentHandle) -> None:
        self._infos = [
            EnvironmentInfo(
                handle=replace(handle, environment_id=EnvironmentId(environment_id)),
                state="READY",
                image_digest=SPECIFICATION.image_digest,
                limits=SPECIFICATION.limits,
                owner_uid=0,
                commands_run=0,
                running_argv=None,
                usage=Usage(),
                scope="",
            )
            for environment_id in IDS
        ]

    async def list(self) -> list[EnvironmentInfo]:
        return self._infos

    async def inspect(self, environment_id: str) -> EnvironmentInfo:
        (found,) = (e for e in self._infos if e.handle.environment_id == environment_id)
        return found


async def _live(daemon: SocketDaemon) -> list[str]:
    listed = await daemon.sbxctl("ls", "--json")
    return [each["handle"]["environment_id"] for each in json.loads(listed.stdout)]


@pytest.mark.parametrize(
    "verb",
    [
        ("inspect", "{}"),
        ("exec", "{}", "true"),
        ("shell", "{}"),
        ("cp", "FILE", "{}:x"),
        ("destroy", "{}"),
    ],
    ids=lambda verb: verb[0],
)
async def test_every_verb_takes_the_first_digits_of_an_id(
    verb: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "FILE").write_text("x")
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
        words = [word.format(handle.environment_id[:4]) for word in verb]
        other = "f" if handle.environment_id[0] != "f" else "e"
        unknown = [word.format(other * 4) for word in verb]
        missed = await daemon.sbxctl(*unknown, directory=tmp_path)
        assert await _live(daemon) == [handle.environment_id]
        ran = await daemon.sbxctl(*words, directory=tmp_path)
        assert ran.code == 0, ran
        assert await _live(daemon) == ([] if verb[0] == "destroy" else [handle.environment_id])
    if verb[0] == "destroy":
        assert missed.stdout == f"{other * 4} gone\n".encode()
    else:
        assert missed.code == Exit.REJECTED
        assert f"begins with {other * 4}" in missed.stderr


async def test_destroy_shows_the_whole_id_that_it_ended(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
        ran = await daemon.sbxctl("destroy", handle.environment_id[:6])
    assert ran.stdout == f"{handle.environment_id} destroyed\n".encode()


@pytest.mark.parametrize("name", ["", "abc", "ABCD", "0" * 33, "xyzw", "sbx-1234"])
async def test_what_cannot_begin_an_id_is_a_wrong_command_line(name: str, tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("inspect", name)
    assert ran.code == Exit.USAGE
    assert "the first 4 or more" in ran.stderr


async def test_digits_that_two_ids_begin_with_are_refused_with_both(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
    admin = cast(AdminClient, Admin(handle))
    with pytest.raises(click.UsageError, match="not unique") as refused:
        await find(admin, "aaaa")
    assert IDS[0] in str(refused.value)
    assert IDS[1] in str(refused.value)
    assert IDS[2] not in str(refused.value)
    assert (await find(admin, "aaaa1")).handle.environment_id == IDS[1]
    assert (await find(admin, "bbbb")).handle.environment_id == IDS[2]
    assert (await find(admin, IDS[0])).handle.environment_id == IDS[0]
