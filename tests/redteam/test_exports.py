"""artifact.export over a real volume: what is no plain file of the workspace is not exported, and
what is being changed is exported whole or not at all.

Source: CASES EXP-01 to EXP-04, EXP-06, FS-05. The tools, the client and the store are those that a
worker has; a command inside does what an attacker would. The control is that the same tools export
an honest file.
"""

import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import trio

from sbxd.artifacts.opening import Artifacts, ArtifactSettings, open_artifacts
from sbxd.client.remote import connect
from sbxd.client.run_scope import RunScope, remote_workspaces
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.ids import RunId
from sbxd.port.workspace import StreamingWorkspace
from sbxd.tools.run_artifacts import StoreOfRun
from sbxd.tools.tool import ToolError, ToolName, ToolResult
from sbxd.tools.toolbox import Toolbox
from tests.artifacts.world import fetched
from tests.pacing import next_look
from tests.redteam.live import WORKER_SOCKET, default_image, specification

pytestmark = [pytest.mark.needs("daemon"), pytest.mark.also("gvisor")]

HONEST = b"honest\n"


@dataclass
class Exporting:
    """A run of the installed daemon, with its tools and a store."""

    scope: RunScope
    tools: Toolbox
    artifacts: Artifacts
    store: Path

    async def python(self, source: str) -> dict[str, object]:
        """Run a program with the run's own tool."""
        result = await self.tools.call(
            ToolName.RUN_COMMAND, {"command": ["python3", "-c", source], "timeout_seconds": 60}
        )
        return dict(result.value)

    async def export(self, path: str) -> ToolResult:
        return await self.tools.call(ToolName.EXPORT, {"path": path})

    async def refused(self, path: str) -> str:
        """What a refused export says; nothing of it is stored."""
        before = self.stored()
        with pytest.raises(ToolError) as caught:
            await self.export(path)
        assert self.stored() == before
        return caught.value.message

    async def bytes_of(self, result: ToolResult) -> bytes:
        tenant_id = self.scope.specification.tenant_id
        return await fetched(self.artifacts, tenant_id, result.artifacts[0].artifact_id)

    def stored(self) -> list[Path]:
        """Every file that holds bytes of an artifact, whole or not."""
        return sorted(
            path
            for place in ("objects", "incoming")
            for path in (self.store / place).rglob("*")
            if path.is_file()
        )


@asynccontextmanager
async def exporting(tmp_path: Path) -> AsyncIterator[Exporting]:
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    wanted = msgspec.structs.replace(
        specification(await default_image()), run_id=RunId(f"run-{secrets.token_hex(6)}")
    )
    async with (
        open_artifacts(ArtifactSettings(directory=str(store))) as artifacts,
        connect(WORKER_SOCKET, client_name="tests") as remote,
        RunScope(remote, wanted, remote_workspaces(remote)) as scope,
    ):
        kept = StoreOfRun(artifacts, wanted.tenant_id, wanted.run_id)
        yield Exporting(scope, Toolbox(scope, kept), artifacts, store)


PLANT = """
import os, socket
open("honest.txt", "w").write("honest\\n")
os.mkdir("folder")
open("folder/inner.txt", "w").write("inner")
os.symlink("/etc/passwd", "absolute")
os.symlink("honest.txt", "near")
os.symlink("../etc/passwd", "upward")
os.symlink("folder", "way")
os.symlink("/etc", "etc")
os.mkfifo("fifo")
socket.socket(socket.AF_UNIX).bind("socket")
open("first", "w").write("two names\\n")
os.link("first", "second")
open("copied", "w").write(open("second").read())
try:
    os.link("/etc/passwd", "image")
    print("linked")
except OSError:
    print("refused")
try:
    os.mknod("device", 0o20666, os.makedev(1, 5))
    print("made")
except OSError:
    print("refused")
"""


@pytest.mark.case("EXP-01", "EXP-02", "EXP-03", "FS-05")
async def test_what_is_no_plain_file_of_the_volume_is_not_exported(tmp_path: Path) -> None:
    async with exporting(tmp_path) as run:
        planted = await run.python(PLANT)
        assert planted["exit_code"] == 0, planted
        # Neither a name for a file of the image nor a device can be made.
        assert planted["stdout"] == "refused\nrefused\n"
        with trio.fail_after(60):  # nothing of it is opened and waited for
            for path in ("absolute", "near", "upward", "way/inner.txt", "etc/passwd", "way"):
                assert "root:" not in await run.refused(path)
            for path in ("fifo", "socket", "folder", ".", "missing", "honest.txt/x"):
                await run.refused(path)
            for path in ("first", "second"):
                assert "second name" in await run.refused(path)
        honest = await run.export("honest.txt")
        assert await run.bytes_of(honest) == HONEST
        # The control: a copy has one name, and so has what has lost its other one.
        assert await run.bytes_of(await run.export("copied")) == b"two names\n"
        await run.python("import os; os.unlink('first')")
        assert await run.bytes_of(await run.export("second")) == b"two names\n"
        assert (await run.bytes_of(await run.export("folder/inner.txt"))) == b"inner"


SIZES = """
import os
with open("sparse", "wb") as file:
    file.truncate(2 ** 30)
with open("caf\u00e9.csv", "w") as file:
    file.write("a")
with open("Data.csv", "w") as file:
    file.write("b")
"""


@pytest.mark.case("EXP-06")
async def test_what_is_too_large_or_has_another_name_is_refused_and_nothing_is_guessed(
    tmp_path: Path,
) -> None:
    async with exporting(tmp_path) as run:
        planted = await run.python(SIZES)
        assert planted["exit_code"] == 0, planted
        with trio.fail_after(60):  # holes are not read to find that they are too many
            assert "TOO_LARGE" in await run.refused("sparse")
        for path in ("data.csv", "DATA.CSV", "Data.csv ", "cafe\u0301.csv", "Data.csv.", "*.csv"):
            assert "no such file" in await run.refused(path)
        assert await run.bytes_of(await run.export("Data.csv")) == b"b"
        assert await run.bytes_of(await run.export("caf\u00e9.csv")) == b"a"


SWAP = """
import os, time
for name in ("good", "next"):
    with open(name, "w") as file:
        file.write("good " * 200_000)
os.rename("next", "target")
os.symlink("/etc/passwd", "next")
end, rounds = time.monotonic() + 8, 0
while time.monotonic() < end and not os.path.exists("stop"):
    for one, other in (("target", "away"), ("next", "target"), ("target", "next"),
                       ("away", "target")):
        os.rename(one, other)
    rounds += 1
    if rounds == 11:
        open("busy", "w").close()
print(rounds)
"""
GROW = """
import os, time
block = b"0123456789" * 10_000
end, rounds = time.monotonic() + 8, 0
with open("log", "wb") as file:
    file.write(block)
    file.flush()
    open("ready", "w").close()
    while time.monotonic() < end and not os.path.exists("stop"):
        file.write(block)
        file.flush()
        rounds += 1
        if rounds == 11:
            open("busy", "w").close()
        if file.tell() > 4_000_000:
            file.seek(0)
            file.truncate()
    file.write(block)  # what is there at rest
print(rounds)
"""


EXPORTS = 30


async def is_there(workspace: StreamingWorkspace, name: str) -> bool:
    return name in {entry.path for entry in await workspace.listdir(".")}


def _command(program: str) -> ExecutionCommand:
    return ExecutionCommand(
        argv=("python3", "-c", program),
        working_directory=".",
        timeout_seconds=60,
        stdin=None,
        maximum_output_bytes=65_536,
    )


@pytest.mark.case("EXP-04", "EXP-06")
@pytest.mark.parametrize(("program", "path"), [(SWAP, "target"), (GROW, "log")])
async def test_what_is_swapped_or_changed_meanwhile_is_whole_or_refused(
    tmp_path: Path, program: str, path: str
) -> None:
    good = b"good " * 200_000
    async with exporting(tmp_path) as run, trio.open_nursery() as nursery:
        ended: list[ExecutionResult] = []
        over = trio.Event()

        async def attack() -> None:
            # Not through the tools, which take turns: an export never meets a command of theirs.
            ended.append(await run.scope.execute(_command(program)))
            over.set()

        nursery.start_soon(attack)
        workspace = await run.scope.workspace()
        with trio.fail_after(60):
            while not await is_there(workspace, path):
                await next_look()
        said: list[str] = []
        exports = 0
        # On a busy machine the first exports may be over before the attacker has begun in earnest.
        while exports < EXPORTS or not (over.is_set() or await is_there(workspace, "busy")):
            exports += 1
            try:
                exported = await run.export(path)
            except ToolError as refusal:
                said.append(refusal.message)
                continue
            data = await run.bytes_of(exported)
            assert hashlib.sha256(data).hexdigest() == exported.artifacts[0].sha256
            assert b"root:" not in data
            if path == "target":
                assert data == good
            else:
                # Blocks of the writer's, and so never half of one before and half of one after.
                assert set(data) <= set(b"0123456789")
        await workspace.write("stop", b"")
        await over.wait()
        honest = await run.export("good" if path == "target" else "log")
        assert await run.bytes_of(honest), "the control: at rest it is exported"
    assert not any("root:" in each for each in said)
    assert ended[0].exit_code == 0, ended
    assert int(ended[0].stdout) > 10, "the control: it was being changed all the while"
    assert not list((run.store / "incoming").iterdir())
