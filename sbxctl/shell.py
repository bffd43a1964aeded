"""`sbxctl shell`: commands typed line by line, in one environment; or a script for its sh.

There is no terminal inside an environment, so this is no remote shell and does not look like one:
what is typed is read until it is a whole command (`sbxctl.syntax`), and `sh -c` runs it with the
contract of any other. Files and the directory of `cd` stay from command to command; variables,
functions and processes end with theirs, and nothing that is typed while a command runs reaches it.

What comes through a pipe or from a file is not typed: it is one script, which one `sh` reads as its
standard input, and means there what it means to any sh.
"""

import posixpath
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from time import monotonic

import click
import trio

from sbxctl.exits import Exit, of_kill
from sbxctl.naming import find
from sbxctl.options import bound_options, environment_options, raw_option
from sbxctl.report import console, output, prompt, say, tell
from sbxctl.run import ENDED_WITH_THE_ENVIRONMENT, Timings, bounded, destroy, execute_in
from sbxctl.session import run_verb
from sbxctl.specification import LimitOptions, specification
from sbxctl.syntax import is_unfinished
from sbxctl.terminal import Output
from sbxctl.units import EnvironmentName
from sbxd.client.admin import AdminClient
from sbxd.port.command import STDIN_BYTES_MAX, ExecutionCommand, ExecutionResult, KillReason
from sbxd.port.environment import WORKSPACE_ROOT, EnvironmentHandle
from sbxd.port.errors import ExecutionRejected, RejectedCode

ABOUT = """\
Each command is one of its own, by sh -c. Files stay, and so does cd; variables, functions and
background processes end with their command. There is no terminal inside: editors, pagers and
prompts do not work, and a command reads nothing. Ctrl-C cancels the command, Ctrl-D or exit
ends."""
GOES_ON = ">"
_STATUS = re.compile(r"[0-9]{1,3}", re.ASCII)


@click.command("shell")
@environment_options
@bound_options
@click.option("--network", is_flag=True, help="Let the commands use the configured destinations.")
@raw_option
@click.argument("environment_id", required=False, type=EnvironmentName())
@click.pass_obj
def shell(
    socket: str,
    image: str | None,
    asked: LimitOptions,
    timeout: int | None,
    max_output: int,
    network: bool,
    raw: bool,
    environment_id: str | None,
) -> None:
    """Type commands, line by line, in one environment.

    Without ENVIRONMENT_ID in a fresh one, which is destroyed at the end; with it in a live one,
    which stays. What is typed is one command for each line, or for as many as it takes, run by
    sh -c with no terminal and no input: files and the directory of cd stay from command to command,
    variables and processes do not. Ctrl-C cancels the command that runs. From a pipe or a file, all
    of it is one script for one sh. The exit code is that of the last command, as `sbxctl run`
    gives it.
    """
    if environment_id is not None and (image is not None or asked != LimitOptions.nothing()):
        raise click.UsageError("a live environment has its image and its limits already")
    # Before there is a connection, whose heartbeat would wait for it.
    script = None if sys.stdin.isatty() else sys.stdin.buffer.read(STDIN_BYTES_MAX + 1)

    async def use(admin: AdminClient, handle: EnvironmentHandle, longest: int) -> int:
        how = How(
            timeout_seconds=bounded(timeout, longest),
            maximum_output_bytes=max_output,
            network=network,
            live=output(raw=raw),
        )
        return await Loop(admin, handle, how).run(script)

    async def verb(admin: AdminClient) -> int:
        if environment_id is not None:
            info = await find(admin, environment_id)
            return await use(admin, info.handle, info.limits.wall_clock_seconds)
        described = await admin.describe()
        limits = asked.over(described.default_limits, timeout_seconds=timeout)
        wanted = specification(
            described, image=image, limits=limits, environment={}, network=network
        )
        handle = await admin.environments.provision(wanted)
        try:
            return await use(admin, handle, limits.wall_clock_seconds)
        finally:
            with trio.move_on_after(10, shield=True):
                await destroy(admin, handle)

    run_verb(socket, verb)


@dataclass(frozen=True)
class How:
    """What holds of every command."""

    timeout_seconds: int
    maximum_output_bytes: int
    network: bool
    live: Output


class Loop:
    """Reads commands and runs them until the input or the environment ends."""

    def __init__(self, admin: AdminClient, handle: EnvironmentHandle, how: How) -> None:
        self._admin = admin
        self._handle = handle
        self._how = how
        self._directory = "."
        self._running: trio.CancelScope | None = None
        self._code = int(Exit.OK)
        self._typed_text = ""  # lines of a command that is not whole yet

    async def run(self, script: bytes | None) -> int:
        """Returns the last command's exit code. script: for one sh; None, and commands are typed.

        Raises the port's errors that end an environment or the connection; a refused command is
        shown, and the loop goes on.
        """
        if script is None and sys.stdout.isatty():
            tell(f"environment {self._handle.environment_id}\n{ABOUT}", err=True)
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_at_each, signals)
                if script is None:
                    await self._read(_typed if sys.stdout.isatty() else _quietly_typed)
                elif script.strip():
                    self._show(await self._execute(("sh",), ".", script))
                nursery.cancel_scope.cancel()
        return self._code

    async def _cancel_at_each(self, signals: AsyncIterator[int]) -> None:
        async for _ in signals:
            if self._running is not None:
                self._running.cancel()
            else:
                self._typed_text = ""
                tell("\n(Ctrl-D or exit ends)", err=True)

    async def _read(self, read: Callable[[str], str | None]) -> None:
        while True:
            asked = f"{posixpath.normpath(WORKSPACE_ROOT / self._directory)}$"
            shown = prompt(GOES_ON if self._typed_text else asked)
            line = await trio.to_thread.run_sync(read, shown, abandon_on_cancel=True)
            if line is None and not self._typed_text:
                return
            self._typed_text += "" if line is None else f"{line}\n"
            # At the end of the input sh says what is missing.
            if line is not None and is_unfinished(self._typed_text):
                continue
            text, self._typed_text = self._typed_text.removesuffix("\n"), ""
            word, _, rest = text.strip().partition(" ")
            if word == "exit":
                self._code = int(rest) if _STATUS.fullmatch(rest.strip()) else self._code
                return
            if word and not await self._run_text(word, rest.strip(), text):
                return

    async def _run_text(self, word: str, rest: str, text: str) -> bool:
        """False when the environment has ended."""
        try:
            if word == "cd" and not set(rest) & set(";&|$`\"'\n"):
                await self._change_directory(rest)
                return True
            result = await self._execute(("sh", "-c", text), self._directory)
        except ExecutionRejected as error:
            if error.code in (RejectedCode.ENVIRONMENT_GONE, RejectedCode.STALE_LEASE):
                raise
            say(error.detail)
            self._code = int(Exit.REJECTED)
            return True
        return self._show(result)

    def _show(self, result: ExecutionResult | None) -> bool:
        killed_by = KillReason.CANCELLED if result is None else result.killed_by
        if killed_by is not None:
            console().print(f"[red reverse]killed: {killed_by}[/]")
            self._code = int(of_kill(killed_by))
            return killed_by not in ENDED_WITH_THE_ENVIRONMENT
        assert result is not None
        assert result.exit_code is not None
        self._code = result.exit_code
        if self._code and sys.stderr.isatty():
            console().print(f"[yellow reverse]exit code {self._code}[/]")
        return True

    async def _execute(
        self, argv: tuple[str, ...], directory: str, stdin: bytes | None = None
    ) -> ExecutionResult | None:
        """None when it was cancelled here."""
        command = ExecutionCommand(
            argv=argv,
            working_directory=directory,
            timeout_seconds=self._how.timeout_seconds,
            stdin=stdin,
            maximum_output_bytes=self._how.maximum_output_bytes,
            network_enabled=self._how.network,
        )
        with trio.CancelScope() as self._running:
            try:
                return await execute_in(
                    self._admin,
                    self._handle,
                    command,
                    Timings(started=monotonic()),
                    live=self._how.live,
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


def _typed(asked: str) -> str | None:
    try:
        return input(asked)
    except EOFError:
        tell(err=True)
        return None


def _quietly_typed(_asked: str) -> str | None:
    """Without a prompt, which would be in the pipe that reads our output."""
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
