"""`sbxd-worker mcp`: a sandbox for an MCP client, over its pipe or on the loopback.

Invariants: what a session gets is the operator's configuration and nothing that the client says;
each session is a run of its own; HTTP is served on 127.0.0.1 alone and asks for a token that is
read from a file of this user.
"""

import secrets
import socket
import stat
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import click

from sbxd.artifacts.opening import Artifacts, open_artifacts
from sbxd.client.reconnecting import reconnecting
from sbxd.client.remote import RemoteExecutionEnvironment, connect
from sbxd.client.run_scope import RunScope
from sbxd.policy.child_environment import OperatorNamesRefused
from sbxd.port.artifact import ArtifactUnavailable
from sbxd.port.environment import EnvironmentSpec
from sbxd.port.errors import PortError
from sbxd.port.ids import RunId
from sbxd.tools.run_artifacts import StoreOfRun
from sbxd.tools.tool import Profile
from sbxd.tools.toolbox import Toolbox
from sbxd.worker_cli.config import ConfigUnreadable, McpSettings, WorkerSettings, load
from sbxd.worker_cli.tier_one import tier_one

if TYPE_CHECKING:
    from sbxd.tools.mcp_server import McpSession

LOOPBACK = "127.0.0.1"
Environment = Mapping[str, str]


@click.command()
@click.option("--http", "port", type=click.IntRange(0, 65535), help="Serve HTTP on this port.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="For --http: holds the token that clients send as a bearer; of this user alone.",
)
@click.pass_obj
def mcp(config: Path, port: int | None, token_file: Path | None) -> None:
    """Serve MCP on standard input and output, or on the loopback with --http.

    One client's session is one sandbox: made when it is first needed, destroyed when the session
    ends.
    """
    try:
        settings = load(config)
        if settings.mcp is None:
            raise click.UsageError(f"{config} has no table [mcp]")
        environment = tier_one(settings.mcp)
        credential = _credential(settings.mcp)
        token = None if port is None else _token(token_file)
    except (ConfigUnreadable, OperatorNamesRefused) as problem:
        raise click.UsageError(str(problem)) from None
    try:
        if port is None or token is None:
            anyio.run(_stdio, settings, environment, credential)
        else:
            anyio.run(_http, settings, environment, credential, port, token)
    except (PortError, ArtifactUnavailable) as problem:
        raise click.ClickException(str(problem)) from None
    except ImportError as problem:
        raise click.ClickException(f"the extra `mcp` is not installed: {problem.name}") from None


def specification_of(settings: McpSettings, environment: Environment) -> EnvironmentSpec:
    """What one session provisions, as a run of its own. environment: of `tier_one`."""
    return EnvironmentSpec(
        tenant_id=settings.tenant_id,
        run_id=RunId(f"mcp-{secrets.token_hex(12)}"),
        lease_epoch=1,
        image_digest=settings.image_digest,
        limits=settings.limits,
        egress=settings.egress,
        environment=environment,
        bridge=None,
    )


async def _stdio(
    settings: WorkerSettings, environment: Environment, credential: bytes | None
) -> None:
    from mcp.server.stdio import stdio_server

    from sbxd.tools.mcp_server import serve

    async with (
        _opened_artifacts(settings) as artifacts,
        stdio_server() as (read, write),
    ):
        await serve(_Sessions(settings, environment, credential, artifacts), read, write)


async def _http(
    settings: WorkerSettings,
    environment: Environment,
    credential: bytes | None,
    port: int,
    token: str,
) -> None:
    import uvicorn

    from sbxd.tools.mcp_http import PATH, http_door

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((LOOPBACK, port))
        listening.listen()  # before the address is said
        bound = listening.getsockname()[1]
        async with (
            _opened_artifacts(settings) as artifacts,
            http_door(_Sessions(settings, environment, credential, artifacts), token) as app,
        ):
            click.echo(f"http://{LOOPBACK}:{bound}{PATH}")
            served = uvicorn.Config(app, lifespan="off", log_level="warning")
            await uvicorn.Server(served).serve(sockets=[listening])


class _Sessions:
    """Opens a session: a connection to the daemon, a run, its tools."""

    def __init__(
        self,
        settings: WorkerSettings,
        environment: Environment,
        credential: bytes | None,
        artifacts: Artifacts | None,
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._credential = credential
        self._artifacts = artifacts

    @asynccontextmanager
    async def __call__(self) -> "AsyncIterator[McpSession]":
        settings = self._settings.mcp
        assert settings is not None
        specification = specification_of(settings, self._environment)

        def connection() -> AbstractAsyncContextManager[RemoteExecutionEnvironment]:
            return connect(
                settings.socket, credential=self._credential, client_name="sbxd-worker mcp"
            )

        async with (
            reconnecting(connection) as environments,
            RunScope(environments, specification, environments.workspace) as scope,
        ):
            profile = Profile(settings.allowed, settings.package_registries)
            yield session_of(scope, self._artifacts, profile, settings.output_bytes)


def session_of(
    scope: RunScope, artifacts: Artifacts | None, profile: Profile, output_bytes: int
) -> "McpSession":
    """A session over a run's scope. output_bytes: as `Toolbox`."""
    from sbxd.tools.mcp_server import McpSession

    tenant_id = scope.specification.tenant_id
    run_id = scope.specification.run_id
    store = None if artifacts is None else StoreOfRun(artifacts, tenant_id, run_id)
    return McpSession(
        Toolbox(scope, store, profile=profile, output_bytes=output_bytes),
        artifacts,
        tenant_id,
        run_id,
    )


@asynccontextmanager
async def _opened_artifacts(settings: WorkerSettings) -> AsyncIterator[Artifacts | None]:
    async with AsyncExitStack() as stack:
        if settings.artifacts is None:
            yield None
        else:
            yield await stack.enter_async_context(open_artifacts(settings.artifacts))


def _credential(settings: McpSettings) -> bytes | None:
    if not settings.credential_file:
        return None
    try:
        return Path(settings.credential_file).read_bytes().strip()
    except OSError as problem:
        raise click.UsageError(f"credential_file: {problem.strerror}") from None


def _token(path: Path | None) -> str:
    """The token of a file that nobody else can read."""
    if path is None:
        raise click.UsageError(
            "--http needs --token-file: every user of this host reaches its loopback"
        )
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise click.UsageError(f"{path} is open to other users: chmod 600")
        token = path.read_text("ascii").strip()
    except OSError as problem:
        raise click.UsageError(f"{path}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise click.UsageError(f"{path}: the token is not ASCII") from None
    if len(token) < 16:
        raise click.UsageError(f"{path}: the token is shorter than 16 characters")
    return token
