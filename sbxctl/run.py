"""`sbxctl run`: one command from nothing to nothing; and `sbxctl exec` in a live environment."""

import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import click
import trio

from sbxctl.exits import of_kill
from sbxctl.naming import find
from sbxctl.options import bound_options, environment_options
from sbxctl.report import console, print_json, show_result
from sbxctl.session import run_verb
from sbxctl.specification import LimitOptions, require_mechanism, specification
from sbxctl.transfer import Transfer, get_file, put_file
from sbxctl.units import EnvironmentName
from sbxd.client.admin import AdminClient
from sbxd.client.remote import CancelledHook, Hooks
from sbxd.port.command import ExecutionCommand, ExecutionResult, KillReason
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.settings import SandboxMechanism
from sbxd.wire.messages import OutputStream

_STDIN: click.Path = click.Path(
    exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path
)
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
    """SOURCE[:NAME in the workspace]."""
    source, _, name = value.partition(":")
    path = Path(source)
    if not path.is_file():
        raise click.UsageError(f"--put {value}: {source} is no file")
    return Transfer(host=path, workspace=name or path.name)


def parse_get(value: str) -> Transfer:
    """NAME in the workspace[:DESTINATION]."""
    name, _, destination = value.partition(":")
    return Transfer(host=Path(destination or Path(name).name), workspace=name)


def parse_variables(values: tuple[str, ...]) -> dict[str, str]:
    """NAME=value pairs; the daemon judges the names."""
    variables = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator:
            raise click.UsageError(f"--env {value}: write NAME=value")
        variables[name] = text
    return variables


@dataclass(frozen=True)
class CommandOptions:
    """How one command runs."""

    argv: tuple[str, ...]
    directory: str
    timeout_seconds: int
    maximum_output_bytes: int
    stdin: Path | None
    network: bool

    def command(self) -> ExecutionCommand:
        """The port's command; `--stdin -` reads all of standard input first."""
        data: bytes | None = None
        if self.stdin is not None:
            is_dash = str(self.stdin) == "-"
            data = sys.stdin.buffer.read() if is_dash else self.stdin.read_bytes()
        return ExecutionCommand(
            argv=self.argv,
            working_directory=self.directory,
            timeout_seconds=self.timeout_seconds,
            stdin=data,
            maximum_output_bytes=self.maximum_output_bytes,
            network_enabled=self.network,
        )


async def execute_in(
    admin: AdminClient,
    handle: EnvironmentHandle,
    command: ExecutionCommand,
    timings: Timings,
    *,
    live: bool,
    on_cancelled: CancelledHook | None = None,
) -> ExecutionResult:
    """Run one command; with `live`, its output goes to ours as it comes."""

    async def on_output(stream: OutputStream, data: bytes) -> None:
        if timings.first_byte is None:
            timings.first_byte = monotonic()
        if live:
            sink = sys.stdout if stream is OutputStream.STDOUT else sys.stderr
            sink.buffer.write(data)
            sink.buffer.flush()

    timings.executed = monotonic()
    environments = admin.environments_with(Hooks(on_output=on_output, on_cancelled=on_cancelled))
    return await environments.execute(handle, command)


async def destroy(admin: AdminClient, handle: EnvironmentHandle) -> None:
    """A service that is ending ends every environment itself: no reason to lose a result. That it
    is not proven gone is told beside the result."""
    try:
        await admin.environments.destroy(handle)
    except ExecutionUnavailable as error:
        if error.code is UnavailableCode.SETUP_FAILED:
            click.echo(f"sbxctl: {error}", err=True)
        elif error.code not in (UnavailableCode.SHUTTING_DOWN, UnavailableCode.UNREACHABLE):
            raise


def _finish(
    handle: EnvironmentHandle, result: ExecutionResult, timings: Timings, *, as_json: bool
) -> int:
    if as_json:
        print_json({"environment": handle, "result": result, "timings": timings.document()})
    else:
        show_result(result, out=console())
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
@click.option("--stdin", type=_STDIN, help="A file, or - for standard input.")
@click.option("--directory", default=".", help="Working directory, relative to /workspace.")
@click.option("--network", is_flag=True, help="Let this command use the configured destinations.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("argv", nargs=-1, required=True)
@click.pass_obj
def run(
    socket: str,
    image: str | None,
    asked: LimitOptions,
    mechanism: str | None,
    timeout: int,
    max_output: int,
    put: tuple[str, ...],
    get: tuple[str, ...],
    env: tuple[str, ...],
    stdin: Path | None,
    directory: str,
    network: bool,
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
    options = CommandOptions(argv, directory, timeout, max_output, stdin, network)

    async def verb(admin: AdminClient) -> int:
        command = options.command()
        described = await admin.describe()
        require_mechanism(mechanism, described)
        wanted = specification(
            described,
            image=image,
            limits=asked.over(described.default_limits),
            environment=variables,
            network=network,
        )
        timings = Timings(started=monotonic())
        handle = await admin.environments.provision(wanted)
        try:
            timings.provisioned = monotonic()
            workspace = admin.workspace(handle)
            for transfer in puts:
                await put_file(workspace, transfer)
            result = await execute_in(admin, handle, command, timings, live=not as_json)
            if result.killed_by in ENDED_WITH_THE_ENVIRONMENT:
                if gets:
                    click.echo("sbxctl: the environment has ended: nothing is copied out", err=True)
            else:
                for transfer in gets:
                    await get_file(workspace, transfer)
        finally:
            with trio.move_on_after(10, shield=True):
                await destroy(admin, handle)
        return _finish(handle, result, timings, as_json=as_json)

    run_verb(socket, verb)


@click.command("exec", context_settings=_OWN_OPTIONS_FIRST)
@bound_options
@click.option("--stdin", type=_STDIN, help="A file, or - for standard input.")
@click.option("--directory", default=".", help="Working directory, relative to /workspace.")
@click.option("--network", is_flag=True, help="Let it use the environment's destinations.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("environment_id", type=EnvironmentName())
@click.argument("argv", nargs=-1, required=True)
@click.pass_obj
def execute(
    socket: str,
    timeout: int,
    max_output: int,
    stdin: Path | None,
    directory: str,
    network: bool,
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
    options = CommandOptions(argv, directory, timeout, max_output, stdin, network)

    async def verb(admin: AdminClient) -> int:
        command = options.command()
        info = await find(admin, environment_id)
        timings = Timings(started=monotonic())
        timings.provisioned = timings.started
        result = await execute_in(admin, info.handle, command, timings, live=not as_json)
        return _finish(info.handle, result, timings, as_json=as_json)

    run_verb(socket, verb)
