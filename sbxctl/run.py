"""`sbxctl run`: one command from nothing to nothing; and `sbxctl exec` in a live environment."""

import os
import re
import signal
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import click
import trio

from sbxctl.exits import Exit, of_kill
from sbxctl.naming import find
from sbxctl.options import bound_options, environment_options, raw_option
from sbxctl.report import console, output, print_json, say, show_result
from sbxctl.session import run_verb
from sbxctl.specification import LimitOptions, require_mechanism, specification
from sbxctl.terminal import Output
from sbxctl.transfer import Transfer, get_file, put_file
from sbxctl.units import EnvironmentName
from sbxd.client.admin import AdminClient
from sbxd.client.remote import CancelledHook, Hooks
from sbxd.client.workspace import RemoteWorkspace
from sbxd.port.command import STDIN_BYTES_MAX, ExecutionCommand, ExecutionResult, KillReason
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
    UnavailableCode,
    WorkspaceError,
    WorkspaceEscape,
)
from sbxd.settings import SandboxMechanism
from sbxd.wire.messages import OutputStream

_STDIN: click.Path = click.Path(
    exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path
)
_COLON = re.compile(r"(?<!\\):")
_MECHANISMS = click.Choice([each.value for each in SandboxMechanism])
ENDED_WITH_THE_ENVIRONMENT = frozenset({KillReason.EXPIRED, KillReason.SERVICE_SHUTDOWN})
# What follows the first argument is the command's own, also when it looks like an option.
_OWN_OPTIONS_FIRST = {"allow_interspersed_args": False}


@dataclass
class Timings:
    """When things happened, in seconds of the monotonic clock."""

    started: float
    provisioned: float = 0.0
    executed: float = 0.0
    first_byte: float | None = None

    def document(self) -> dict[str, float | None]:
        """Milliseconds since the request for an environment."""
        first = None if self.first_byte is None else (self.first_byte - self.started) * 1000
        return {
            "provision_ms": round((self.provisioned - self.started) * 1000, 1),
            "execute_started_ms": round((self.executed - self.started) * 1000, 1),
            "first_byte_ms": None if first is None else round(first, 1),
            "first_byte_after_execute_ms": None
            if self.first_byte is None
            else round((self.first_byte - self.executed) * 1000, 1),
        }


def parse_put(value: str) -> Transfer:
    """SOURCE[:NAME in the workspace]. A colon of a name is written `\\:`."""
    source, name = _two_names(value)
    path = Path(source)
    if not path.is_file():
        raise click.UsageError(
            f"--put {value}: {source} is no file; a colon of a name is written \\:"
        )
    return Transfer(host=path, workspace=name or path.name)


def parse_get(value: str) -> Transfer:
    """NAME in the workspace[:DESTINATION]. A colon of a name is written `\\:`."""
    name, destination = _two_names(value)
    return Transfer(host=Path(destination or Path(name).name), workspace=name)


def _two_names(value: str) -> tuple[str, str]:
    """What is left and right of the first colon that no backslash precedes."""
    left, _, right = _COLON.sub("\0", value, count=1).partition("\0")
    return left.replace("\\:", ":"), right.replace("\\:", ":")


def parse_variables(values: tuple[str, ...]) -> dict[str, str]:
    """NAME=value pairs; the daemon judges the names."""
    variables = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator:
            raise click.UsageError(f"--env {value}: write NAME=value")
        variables[name] = text
    return variables


def read_stdin(asked: Path | None) -> bytes | None:
    """What the command reads: the file; all of standard input for `-`, and where nothing was said
    and it is a pipe or a file; else nothing. One byte more than may be is read at most."""
    if asked is not None and str(asked) != "-":
        with asked.open("rb") as file:
            return file.read(STDIN_BYTES_MAX + 1)
    if asked is None and not is_redirected():
        return None
    return sys.stdin.buffer.read(STDIN_BYTES_MAX + 1)


def is_redirected() -> bool:
    """Whether somebody has connected standard input: it is a pipe, a socket or a file."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def bounded(asked: int | None, wall_clock_seconds: int) -> int:
    """The seconds that a command of a live environment may take.

    Raises ExecutionRejected when more was asked for than a command has there.
    """
    if asked is not None and asked > wall_clock_seconds:
        raise ExecutionRejected(
            RejectedCode.LIMIT_ABOVE_CEILING,
            f"--timeout {asked}: a command of this environment has {wall_clock_seconds} s at most; "
            "an environment is given its longest when it is made",
            field="timeout_seconds",
        )
    return asked or wall_clock_seconds


async def execute_in(
    admin: AdminClient,
    handle: EnvironmentHandle,
    command: ExecutionCommand,
    timings: Timings,
    *,
    live: Output | None,
    on_cancelled: CancelledHook | None = None,
) -> ExecutionResult:
    """Run one command; its output goes to `live` as it comes, and what we say after it begins on a
    line of its own, however it ends."""

    async def on_output(stream: OutputStream, data: bytes) -> None:
        if timings.first_byte is None:
            timings.first_byte = monotonic()
        if live is not None:
            live.write(stream, data)

    timings.executed = monotonic()
    environments = admin.environments_with(Hooks(on_output=on_output, on_cancelled=on_cancelled))
    try:
        return await environments.execute(handle, command)
    finally:
        if live is not None:
            live.end()


async def execute_until_interrupted(
    admin: AdminClient,
    handle: EnvironmentHandle,
    command: ExecutionCommand,
    timings: Timings,
    *,
    live: Output | None,
) -> tuple[ExecutionResult | None, bool]:
    """As `execute_in`, and Ctrl-C cancels the command.

    Returns the result, of a cancelled command too, and whether it was cancelled here. The result
    is None when the service did not say in time what came of it.
    """
    results: list[ExecutionResult] = []
    problems: list[PortError] = []
    is_interrupted = False

    async def execute(scope: trio.CancelScope) -> None:
        try:
            results.append(
                await execute_in(
                    admin, handle, command, timings, live=live, on_cancelled=results.append
                )
            )
        except PortError as problem:
            problems.append(problem)
        scope.cancel()

    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(execute, nursery.cancel_scope)
            async for _ in signals:
                is_interrupted = True
                nursery.cancel_scope.cancel()
    if problems:
        raise problems[0]
    return (results[0] if results else None), is_interrupted


async def destroy(admin: AdminClient, handle: EnvironmentHandle) -> None:
    """A service that is ending ends every environment itself: no reason to lose a result.
    An environment that is not yet proven gone is reported on stderr."""
    try:
        await admin.environments.destroy(handle)
    except ExecutionUnavailable as error:
        if error.code is UnavailableCode.SETUP_FAILED:
            click.echo(f"sbxctl: {error}", err=True)
        elif error.code not in (UnavailableCode.SHUTTING_DOWN, UnavailableCode.UNREACHABLE):
            raise


@dataclass(frozen=True)
class NotFetched:
    """What `--get` did not copy out. name: in the workspace. file: where it was to go."""

    name: str
    file: str
    reason: str


async def _fetch(
    workspace: RemoteWorkspace, result: ExecutionResult, gets: Sequence[Transfer]
) -> list[NotFetched]:
    """Copy each file out; name those that fail, and try the next."""
    failed = []
    for transfer in gets:
        reason = "the environment has ended"
        if result.killed_by not in ENDED_WITH_THE_ENVIRONMENT:
            try:
                await get_file(workspace, transfer)
                continue
            except click.ClickException as error:
                reason = error.message
            except (PortError, WorkspaceError, WorkspaceEscape) as error:
                reason = str(error)
        failed.append(NotFetched(transfer.workspace, str(transfer.host), reason))
    return failed


def _document(
    handle: EnvironmentHandle,
    result: ExecutionResult,
    timings: Timings,
    not_fetched: Sequence[NotFetched],
) -> dict[str, object]:
    return {
        "environment": handle,
        "result": result,
        "timings": timings.document(),
        "not_fetched": [asdict(each) for each in not_fetched],
    }


def _code(result: ExecutionResult) -> int:
    """The exit code of what ran: its own, or that of its kill."""
    if result.killed_by is not None:
        return of_kill(result.killed_by)
    assert result.exit_code is not None
    return result.exit_code


@click.command("run", context_settings=_OWN_OPTIONS_FIRST)
@environment_options
@click.option("--mechanism", type=_MECHANISMS, help="Run only if the daemon has this mechanism.")
@bound_options
@click.option("--put", multiple=True, metavar="FILE[:NAME]", help="Copy a file in first.")
@click.option("--get", multiple=True, metavar="NAME[:FILE]", help="Copy a file out afterwards.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable (operator's names).")
@click.option(
    "--stdin", type=_STDIN, help="A file, or - for standard input; a pipe is taken by itself."
)
@click.option("--directory", default=".", help="Working directory, relative to /workspace.")
@click.option("--network", is_flag=True, help="Let this command use the configured destinations.")
@raw_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("argv", nargs=-1, required=True)
@click.pass_obj
def run(
    socket: str,
    image: str | None,
    asked: LimitOptions,
    mechanism: str | None,
    timeout: int | None,
    max_output: int,
    put: tuple[str, ...],
    get: tuple[str, ...],
    env: tuple[str, ...],
    stdin: Path | None,
    directory: str,
    network: bool,
    raw: bool,
    as_json: bool,
    argv: tuple[str, ...],
) -> None:
    """Run one command in a fresh environment, show everything, and leave nothing behind.

    The command's own exit code is passed through; a kill and a refusal have codes of their own
    (see sbxctl(1)). Put -- before the command: sbxctl run --memory 256M -- python3 -c 'print(1)'
    """
    puts = [parse_put(value) for value in put]
    gets = [parse_get(value) for value in get]
    variables = parse_variables(env)
    data = read_stdin(stdin)

    async def verb(admin: AdminClient) -> int:
        described = await admin.describe()
        require_mechanism(mechanism, described)
        limits = asked.over(described.default_limits, timeout_seconds=timeout)
        wanted = specification(
            described, image=image, limits=limits, environment=variables, network=network
        )
        command = ExecutionCommand(
            argv=argv,
            working_directory=directory,
            timeout_seconds=timeout or limits.wall_clock_seconds,
            stdin=data,
            maximum_output_bytes=max_output,
            network_enabled=network,
        )
        timings = Timings(started=monotonic())
        handle = await admin.environments.provision(wanted)
        try:
            timings.provisioned = monotonic()
            workspace = admin.workspace(handle)
            for transfer in puts:
                await put_file(workspace, transfer)
            result, is_interrupted = await execute_until_interrupted(
                admin, handle, command, timings, live=None if as_json else output(raw=raw)
            )
            if result is None:
                return Exit.INTERRUPTED
            if not as_json:
                show_result(result, out=console())
            not_fetched = await _fetch(workspace, result, gets)
        finally:
            with trio.move_on_after(10, shield=True):
                await destroy(admin, handle)
        if as_json:
            print_json(_document(handle, result, timings, not_fetched))
        for each in not_fetched:
            say(f"--get {each.name}: {each.reason}")
        if is_interrupted:
            return Exit.INTERRUPTED
        return _code(result) or (Exit.WORKSPACE if not_fetched else Exit.OK)

    run_verb(socket, verb)


@click.command("exec", context_settings=_OWN_OPTIONS_FIRST)
@bound_options
@click.option(
    "--stdin", type=_STDIN, help="A file, or - for standard input; a pipe is taken by itself."
)
@click.option("--directory", default=".", help="Working directory, relative to /workspace.")
@click.option("--network", is_flag=True, help="Let it use the environment's destinations.")
@raw_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("environment_id", type=EnvironmentName())
@click.argument("argv", nargs=-1, required=True)
@click.pass_obj
def execute(
    socket: str,
    timeout: int | None,
    max_output: int,
    stdin: Path | None,
    directory: str,
    network: bool,
    raw: bool,
    as_json: bool,
    environment_id: str,
    argv: tuple[str, ...],
) -> None:
    """Run one more command in a live environment (one at a time).

    Options come before the id: what follows it is the command, with or without -- between them.
    """
    argv = argv[1:] if argv[0] == "--" else argv
    if not argv:
        raise click.UsageError("name a command after --")
    data = read_stdin(stdin)

    async def verb(admin: AdminClient) -> int:
        info = await find(admin, environment_id)
        command = ExecutionCommand(
            argv=argv,
            working_directory=directory,
            timeout_seconds=bounded(timeout, info.limits.wall_clock_seconds),
            stdin=data,
            maximum_output_bytes=max_output,
            network_enabled=network,
        )
        timings = Timings(started=monotonic())
        timings.provisioned = timings.started
        result, is_interrupted = await execute_until_interrupted(
            admin, info.handle, command, timings, live=None if as_json else output(raw=raw)
        )
        if result is None:
            return Exit.INTERRUPTED
        if as_json:
            print_json(_document(info.handle, result, timings, []))
        else:
            show_result(result, out=console())
        return Exit.INTERRUPTED if is_interrupted else _code(result)

    run_verb(socket, verb)
