"""`sbxd-worker leases` (the tier's lease authority) and `sbxd-worker fence` (its supervisor's
word)."""

import os
import signal

import anyio
import click

from sbxd.client.authority import GRACE_SECONDS, Admitted, LeaseAuthority
from sbxd.client.leases import LeaseRegistrar
from sbxd.closing import allow_interrupts
from sbxd.port.errors import ExecutionUnavailable, StaleLease
from sbxd.port.ids import RunId, TenantId

UID = click.IntRange(0, 2**32 - 2)


@click.command("leases")
@click.option("--socket", required=True, help="Where to listen.")
@click.option(
    "--worker-uid",
    "worker_uids",
    multiple=True,
    type=UID,
    help="Whose workers may hold leases; repeatable. Default: the own uid.",
)
@click.option(
    "--daemon-uid",
    "daemon_uids",
    multiple=True,
    type=UID,
    help="Who may ask, besides root; repeatable.",
)
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(0, 3600),
    default=GRACE_SECONDS,
    show_default=True,
    help="Seconds that a lease outlives its holder's connection.",
)
def leases(
    socket: str,
    worker_uids: tuple[int, ...],
    daemon_uids: tuple[int, ...],
    grace_seconds: float,
) -> None:
    """Serve the lease authority of this worker tier until SIGTERM or SIGINT."""
    admitted = Admitted(
        holder_uids=frozenset(worker_uids or (os.getuid(),)), asker_uids=frozenset(daemon_uids)
    )
    authority = LeaseAuthority(admitted, grace_seconds=grace_seconds)

    async def serve() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            failure: ExecutionUnavailable | None = None
            async with anyio.create_task_group() as tasks:

                async def listen() -> None:
                    nonlocal failure
                    try:
                        await authority.serve(socket)
                    except ExecutionUnavailable as problem:
                        failure = problem
                        tasks.cancel_scope.cancel()

                tasks.start_soon(listen)
                async for _number in signals:
                    break
                tasks.cancel_scope.cancel()
            if failure is not None:
                raise click.ClickException(failure.detail)

    allow_interrupts()
    anyio.run(serve)


@click.command("fence")
@click.option("--socket", required=True, help="Where the authority listens.")
@click.argument("tenant_id")
@click.argument("run_id")
@click.argument("lease_epoch", type=click.IntRange(0, 2**53))
def fence(socket: str, tenant_id: str, run_id: str, lease_epoch: int) -> None:
    """End every lease of a run whose epoch is below LEASE_EPOCH: its environments are destroyed
    within one interval of the reaper."""

    async def tell() -> str | None:
        registrar = LeaseRegistrar(socket)
        problem = None
        async with anyio.create_task_group() as tasks:
            await tasks.start(registrar.run)
            try:
                await registrar.fence(TenantId(tenant_id), RunId(run_id), lease_epoch)
            except (StaleLease, ExecutionUnavailable) as error:
                problem = error.detail
            tasks.cancel_scope.cancel()
        return problem

    problem = anyio.run(tell)
    if problem is not None:
        raise click.ClickException(problem)
