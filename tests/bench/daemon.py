"""sbxd's operations, through the worker socket as a worker would.

`FreshSandbox` provisions and executes on the clock and destroys off it. Before each sample from
the reserve it waits until the reserve is full again, so that what is timed is a hand-out and not
a race with the refill. `LiveSandbox` executes in one environment that stays.
"""

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec
import trio

from sbxd.client.admin import AdminClient, connect_admin
from sbxd.client.remote import Hooks, RemoteExecutionEnvironment, connect
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.egress import DENY_ALL
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import PortError
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import MIB, ResourceLimits
from sbxd.wire.messages import OutputStream
from tests.bench.peers import PRINTING, PROGRAMS
from tests.bench.samples import Mark, Marks, OperationFailed
from tests.bench.spawn import elapsed_ms

WORKER_SOCKET = "/run/sbxd/worker.sock"
ADMIN_SOCKET = "/run/sbxd/admin.sock"
CREDENTIAL = Path("/etc/sbxd/service-credential")
IMPORT_CHUNK_BYTES = 256 * 1024
REFILL_SECONDS = 30
REFILL_POLL_SECONDS = 0.02


class Profile(StrEnum):
    """RESERVE: the default limits, which reserve slots are made for. COLD: no slot fits."""

    RESERVE = "sbxd, reserve"
    COLD = "sbxd, cold"


@dataclass
class Daemon:
    """The daemon under test. Made by `daemon_here`."""

    admin: AdminClient
    mechanism: str
    image: str
    limits: ResourceLimits
    refill_ms: list[float] = field(default_factory=list)

    def specification(self, profile: Profile, run: str | None = None) -> EnvironmentSpec:
        """Under a run of its own."""
        limits = self.limits
        if profile is Profile.COLD:
            limits = msgspec.structs.replace(limits, workspace_bytes=96 * MIB, inodes_max=20_000)
        return EnvironmentSpec(
            tenant_id=TenantId("bench"),
            run_id=RunId(run or f"bench-{secrets.token_hex(6)}"),
            lease_epoch=1,
            image_digest=self.image,
            limits=limits,
            egress=DENY_ALL,
            environment={},
            bridge=None,
        )

    async def wait_reserve_full(self) -> None:
        """Until the reserve has as many slots as it should. Raises OperationFailed after 30 s,
        and for a daemon that keeps no reserve."""
        begun_ns = time.perf_counter_ns()
        with trio.move_on_after(REFILL_SECONDS):
            while True:
                described = await self.admin.describe()
                if described.reserve_target == 0:
                    raise OperationFailed("the daemon keeps no reserve: set images.default")
                if described.reserve_ready >= described.reserve_target:
                    self.refill_ms.append(elapsed_ms(begun_ns))
                    return
                await trio.sleep(REFILL_POLL_SECONDS)
        raise OperationFailed(
            f"the reserve has {described.reserve_ready} of {described.reserve_target} slots "
            f"after {REFILL_SECONDS} s"
        )


def command(argv: tuple[str, ...]) -> ExecutionCommand:
    """A command with a generous timeout and no input."""
    return ExecutionCommand(
        argv=argv,
        working_directory=".",
        timeout_seconds=60,
        stdin=None,
        maximum_output_bytes=MIB,
    )


def check(result: ExecutionResult) -> None:
    """Raises OperationFailed unless the command ended by itself with 0."""
    if result.exit_code != 0:
        said = result.stderr[-200:].decode(errors="replace")
        raise OperationFailed(f"exit {result.exit_code}, killed_by {result.killed_by}: {said}")


@dataclass
class FreshSandbox:
    """provision, execute; then destroy off the clock. An Operation."""

    daemon: Daemon
    remote: RemoteExecutionEnvironment
    profile: Profile
    program: str
    handle: EnvironmentHandle | None = None

    @property
    def tool(self) -> str:
        return self.profile

    async def ready(self) -> None:
        if self.profile is Profile.RESERVE:
            await self.daemon.wait_reserve_full()

    async def run(self) -> Marks:
        marks: Marks = {}
        begun_ns = time.perf_counter_ns()

        async def on_output(stream: OutputStream, data: bytes) -> None:
            marks.setdefault(Mark.FIRST_BYTE, elapsed_ms(begun_ns))

        try:
            self.handle = await self.remote.provision(self.daemon.specification(self.profile))
            provisioned = elapsed_ms(begun_ns)
            result = await self.remote.with_hooks(Hooks(on_output=on_output)).execute(
                self.handle, command(PROGRAMS[self.program])
            )
        except PortError as error:
            raise OperationFailed(str(error)) from None
        marks[Mark.REPLY] = elapsed_ms(begun_ns)
        check(result)
        marks[Mark.PROVISION] = provisioned
        marks[Mark.EXECUTE] = marks[Mark.REPLY] - provisioned
        marks[Mark.DAEMON] = float(result.duration_ms)
        if self.program in PRINTING:
            if Mark.FIRST_BYTE not in marks:
                raise OperationFailed("the command printed nothing")
            marks[Mark.TO_OUTPUT] = marks[Mark.FIRST_BYTE] - provisioned
            marks[Mark.AFTER_OUTPUT] = marks[Mark.REPLY] - marks[Mark.FIRST_BYTE]
        return marks

    async def clean(self) -> Marks:
        handle, self.handle = self.handle, None
        if handle is None:
            return {}
        begun_ns = time.perf_counter_ns()
        try:
            await self.remote.destroy(handle)
        except PortError as error:
            raise OperationFailed(f"destroy: {error}") from None
        return {Mark.DESTROY: elapsed_ms(begun_ns)}


@dataclass
class LiveSandbox:
    """execute in an environment that stays, with files_changed in the reply. An Operation."""

    remote: RemoteExecutionEnvironment
    handle: EnvironmentHandle
    tool: str
    program: str

    async def ready(self) -> None:
        """The environment is there; init parks the next command's child by itself."""

    async def run(self) -> Marks:
        begun_ns = time.perf_counter_ns()
        try:
            result = await self.remote.execute(self.handle, command(PROGRAMS[self.program]))
        except PortError as error:
            raise OperationFailed(str(error)) from None
        marks = {Mark.REPLY: elapsed_ms(begun_ns), Mark.DAEMON: float(result.duration_ms)}
        check(result)
        return marks

    async def clean(self) -> Marks:
        return {}

    async def fill(self, files: int) -> None:
        """Put small files into the workspace, 100 in each directory."""
        source = (
            "import os\n"
            f"for n in range({files}):\n"
            "    os.makedirs(str(n // 100), exist_ok=True)\n"
            "    open(f'{n // 100}/{n}', 'w').write('x' * 100)\n"
        )
        try:
            check(await self.remote.execute(self.handle, command(("python3", "-c", source))))
        except PortError as error:
            raise OperationFailed(str(error)) from None


def credential() -> bytes | None:
    """The service credential of this machine; None where there is none to read."""
    try:
        return CREDENTIAL.read_bytes().strip()
    except OSError:
        return None


@asynccontextmanager
async def worker() -> AsyncIterator[RemoteExecutionEnvironment]:
    """A worker's connection of its own. Raises the errors of the port."""
    async with connect(WORKER_SOCKET, credential=credential(), client_name="bench") as remote:
        yield remote


@asynccontextmanager
async def daemon_here(image_tar: Path | None) -> AsyncIterator[Daemon]:
    """The daemon of this machine; an image is imported into it when it has no default one.

    Raises: the errors of the port; OperationFailed when there is no image at all.
    """
    async with connect_admin(ADMIN_SOCKET, client_name="bench") as admin:
        described = await admin.describe()
        image = described.default_image
        if image is None:
            image = await _import(admin, image_tar)
            described = await admin.describe()
        yield Daemon(
            admin,
            described.mechanism,
            described.default_image or image,
            described.default_limits,
        )


async def _import(admin: AdminClient, image_tar: Path | None) -> str:
    if image_tar is None:
        raise OperationFailed("the daemon has no default image, and there is none to import")

    async def chunks() -> AsyncIterator[bytes]:
        async with await trio.open_file(image_tar, "rb") as file:
            while piece := await file.read(IMPORT_CHUNK_BYTES):
                yield piece

    size = (await trio.Path(image_tar).stat()).st_size
    return (await admin.image_import(chunks(), size, label="bench")).digest


@asynccontextmanager
async def live_sandbox(
    daemon: Daemon, remote: RemoteExecutionEnvironment, tool: str, *, files: int = 0
) -> AsyncIterator[LiveSandbox]:
    """An environment for many commands, destroyed afterwards. Raises OperationFailed.

    A warm-up command runs after the files are made, since entries younger than two ticks of the
    kernel's clock are compared by their contents.
    """
    try:
        handle = await remote.provision(daemon.specification(Profile.COLD))
    except PortError as error:
        raise OperationFailed(str(error)) from None
    try:
        sandbox = LiveSandbox(remote, handle, tool, "true")
        if files:
            await sandbox.fill(files)
        await sandbox.run()
        yield sandbox
    finally:
        await remote.destroy(handle)
