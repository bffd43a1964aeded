"""`sbxctl shell`: commands typed line by line, in one environment.

There is no terminal inside an environment, so this is no remote shell and does not look like one:
each line is one command (`/bin/sh -c LINE`) with the contract of any other. Files and the
directory of `cd` stay from line to line; variables, functions and processes end with their line,
and nothing that is typed while a command runs reaches it.
"""

import posixpath
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from time import monotonic

import click
import trio

from sbxctl.exits import Exit, of_kill
from sbxctl.naming import find
from sbxctl.options import bound_options, environment_options
from sbxctl.report import console
from sbxctl.run import ENDED_WITH_THE_ENVIRONMENT, Timings, destroy, execute_in
from sbxctl.session import run_verb
from sbxctl.specification import LimitOptions, specification
from sbxctl.units import EnvironmentName
from sbxd.client.admin import AdminClient
from sbxd.port.command import ExecutionCommand, ExecutionResult, KillReason
from sbxd.port.environment import WORKSPACE_ROOT, EnvironmentHandle
from sbxd.port.errors import ExecutionRejected, RejectedCode

ABOUT = """\
Each line is a command of its own: sh -c LINE. Files stay, and so does cd; variables, functions and
background processes end with their line. There is no terminal inside: editors, pagers and prompts
do not work, and a command reads nothing. Ctrl-C cancels the command, Ctrl-D or exit ends."""


@click.command("shell")
@environment_options
@bound_options
@click.option("--network", is_flag=True, help="Let the commands use the configured destinations.")
@click.argument("environment_id", required=False, type=EnvironmentName())
@click.pass_obj
def shell(
    socket: str,
    image: str | None,
    asked: LimitOptions,
    timeout: int,
    max_output: int,
    network: bool,
    environment_id: str | None,
) -> None:
    """Type commands, line by line, in one environment.

    Without ENVIRONMENT_ID in a fresh one, which is destroyed at the end; with it in a live one,
    which stays. Each line is one command, run by sh -c with no terminal and no input: files and
    the directory of cd stay from line to line, variables and processes do not. Ctrl-C cancels the
    command that runs. The exit code is that of the last line, as `sbxctl run` gives it.
    """
    if environment_id is not None and (image is not None or asked != LimitOptions.nothing()):
        raise click.UsageError("a live environment has its image and its limits already")
    how = How(timeout_seconds=timeout, maximum_output_bytes=max_output, network=network)

    async def verb(admin: AdminClient) -> int:
        if environment_id is not None:
            info = await find(admin, environment_id)
            return await Loop(admin, info.handle, how).run()
        described = await admin.describe()
        wanted = specification(
            described,
            image=image,
            limits=asked.over(described.default_limits),
            environment={},
            network=network,
        )
        handle = await admin.environments.provision(wanted)
        try:
            return await Loop(admin, handle, how).run()
        finally:
            with trio.move_on_after(10, shield=True):
                await destroy(admin, handle)

    run_verb(socket, verb)


@dataclass(frozen=True)
class How:
    """What holds of every line."""

    timeout_seconds: int
    maximum_output_bytes: int
    network: bool


class Loop:
    """Reads lines and runs them until the input or the environment ends."""

    def __init__(self, admin: AdminClient, handle: EnvironmentHandle, how: How) -> None:
        self._admin = admin
        self._handle = handle
        self._how = how
        self._directory = "."
        self._running: trio.CancelScope | None = None
        self._code = int(Exit.OK)

    async def run(self) -> int:
        """Returns the last line's exit code.

        Raises the port's errors that end an environment or the connection; a refused line is
        shown, and the loop goes on.
        """
        is_asked = sys.stdin.isatty() and sys.stdout.isatty()
        if is_asked:
            click.echo(f"environment {self._handle.environment_id}\n{ABOUT}", err=True)
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_at_each, signals)
                await self._read(_typed if is_asked else _piped)
                nursery.cancel_scope.cancel()
        return self._code

    async def _cancel_at_each(self, signals: AsyncIterator[int]) -> None:
        async for _ in signals:
            if self._running is not None:
                self._running.cancel()
            else:
                click.echo("\n(Ctrl-D or exit ends)", err=True)

    async def _read(self, read: Callable[[str], str | None]) -> None:
        while True:
            prompt = f"{posixpath.normpath(WORKSPACE_ROOT / self._directory)}$ "
            line = await trio.to_thread.run_sync(read, prompt, abandon_on_cancel=True)
            if line is None:
                return
            word, _, rest = line.strip().partition(" ")
            if word == "exit":
                self._code = int(rest) if rest.strip().isdecimal() else self._code
                return
            if word and not await self._run_line(word, rest.strip(), line):
                return

    async def _run_line(self, word: str, rest: str, line: str) -> bool:
        """False when the environment has ended."""
        try:
            if word == "cd" and not set(rest) & set(";&|$`\"'"):
                await self._change_directory(rest)
                return True
            result = await self._execute(("sh", "-c", line), self._directory)
        except ExecutionRejected as error:
            if error.code in (RejectedCode.ENVIRONMENT_GONE, RejectedCode.STALE_LEASE):
                raise
            click.echo(f"sbxctl: {error.detail}", err=True)
            self._code = int(Exit.REJECTED)
            return True
        return self._show(result)

    def _show(self, result: ExecutionResult | None) -> bool:
        killed_by = KillReason.CANCELLED if result is None else result.killed_by
        if killed_by is not None:
            console().print(f"[red]killed: {killed_by}[/]")
            self._code = int(of_kill(killed_by))
            return killed_by not in ENDED_WITH_THE_ENVIRONMENT
        assert result is not None
        assert result.exit_code is not None
        self._code = result.exit_code
        if self._code and sys.stderr.isatty():
            console().print(f"[yellow]exit code {self._code}[/]")
        return True

    async def _execute(self, argv: tuple[str, ...], directory: str) -> ExecutionResult | None:
        """None when it was cancelled here."""
        command = ExecutionCommand(
            argv=argv,
            working_directory=directory,
            timeout_seconds=self._how.timeout_seconds,
            stdin=None,
            maximum_output_bytes=self._how.maximum_output_bytes,
            network_enabled=self._how.network,
        )
        with trio.CancelScope() as self._running:
            try:
                return await execute_in(
                    self._admin, self._handle, command, Timings(started=monotonic()), live=True
                )
            finally:
                self._running = None
        return None

    async def _change_directory(self, where: str) -> None:
        inside = posixpath.normpath(posixpath.join(WORKSPACE_ROOT, self._directory, where or "."))
        if not where or where == "~":
            inside = str(WORKSPACE_ROOT)
        if not (inside + "/").startswith(f"{WORKSPACE_ROOT}/"):
            raise ExecutionRejected(
                RejectedCode.INVALID_COMMAND, f"cd: {inside} is outside the workspace"
            )
        relative = posixpath.relpath(inside, WORKSPACE_ROOT)
        # Whether a command can stand there is for a command to say.
        if await self._execute(("true",), relative) is not None:
            self._directory = relative
            self._code = int(Exit.OK)


def _typed(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        click.echo(err=True)
        return None


def _piped(prompt: str) -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
