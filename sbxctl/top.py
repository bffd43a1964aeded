"""`sbxctl top`: the live environments and what they use, again and again."""

import signal
import sys
from collections.abc import Callable
from enum import StrEnum

import click
import trio

from sbxctl.exits import Exit
from sbxctl.meters import Row, Use, used
from sbxctl.pool import rate
from sbxctl.report import Screen, Sheet, print_json, show_sheet
from sbxctl.session import run_verb
from sbxctl.units import Seconds, human_bytes, human_duration
from sbxd.client.admin import AdminClient
from sbxd.wire.observing import MetersAre

# Between the two readings that a shared processor's use is taken from, where there is one answer.
ONCE_SECONDS = 0.5
# Lines of a terminal that are not environments.
_FRAME_LINES = 4


class Order(StrEnum):
    CPU = "cpu"
    MEMORY = "memory"
    DENIALS = "denials"
    AGE = "age"
    TENANT = "tenant"


_KEYS: dict[Order, Callable[[Row], tuple[float | str, ...]]] = {
    Order.CPU: lambda row: (-(row.cpu_share or 0.0), -(row.meter.cpu_ms or 0)),
    Order.MEMORY: lambda row: (-(row.meter.memory_bytes or 0),),
    Order.DENIALS: lambda row: (-row.meter.denials,),
    Order.AGE: lambda row: (-row.meter.age_ms,),
    Order.TENANT: lambda row: (row.meter.tenant_id, row.meter.run_id),
}


@click.command("top")
@click.option("--once", is_flag=True, help="One answer; as without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, once.")
@click.option(
    "--sort",
    "order",
    type=click.Choice([each.value for each in Order]),
    default=Order.CPU.value,
    show_default=True,
    help="What comes first.",
)
@click.option(
    "--interval",
    type=Seconds(0.5, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two answers.",
)
@click.pass_obj
def top(socket: str, once: bool, as_json: bool, order: str, interval: float) -> None:
    """Show the live environments: processors, memory, denials, age; and the pool.

    On a terminal it goes on until Ctrl-C; in a pipe, with --once or --json there is one answer.
    """
    goes_on = sys.stdout.isatty() and not once and not as_json

    async def verb(admin: AdminClient) -> int:
        if goes_on:
            return await _live(admin, Order(order), interval)
        before = await admin.meters()
        await trio.sleep(ONCE_SECONDS)
        use = used(before, await admin.meters())
        use = Use(rows=_sorted(use, Order(order)), now=use.now)
        if as_json:
            print_json(use.document())
        else:
            show_sheet(sheet(use))
        return Exit.OK

    run_verb(socket, verb)


async def _live(admin: AdminClient, order: Order, interval: float) -> int:
    """Until a signal, which is how one leaves it."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals, Screen() as screen:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_refresh, admin, screen, order, interval)
            async for _number in signals:
                break
            nursery.cancel_scope.cancel()
    return Exit.OK


async def _refresh(admin: AdminClient, screen: Screen, order: Order, interval: float) -> None:
    before: MetersAre | None = None
    while True:
        now = await admin.meters()
        rows = _sorted(used(before, now), order)
        screen.show(sheet(Use(rows=rows, now=now), rows_max=screen.height - _FRAME_LINES))
        # The first answer has no rate: the second comes soon.
        await trio.sleep(ONCE_SECONDS if before is None else interval)
        before = now


def _sorted(use: Use, order: Order) -> tuple[Row, ...]:
    return tuple(sorted(use.rows, key=_KEYS[order]))


def sheet(use: Use, *, rows_max: int | None = None) -> Sheet:
    """The page: a headline, and a table of as many rows as there is room for."""
    shown = use.rows if rows_max is None else use.rows[: max(1, rows_max)]
    return Sheet(
        headline=_headline(use, left_out=len(use.rows) - len(shown)),
        headings=(
            *("ENVIRONMENT", "TENANT", "STATE", "CPU %", "MEMORY", "DENIALS", "AGE"),
            *("CPU TIME", "COMMANDS", "RUN", "PROGRAM"),
        ),
        right=frozenset({"CPU %", "CPU TIME", "MEMORY", "DENIALS", "AGE", "COMMANDS"}),
        rows=tuple(_cells(row) for row in shown),
    )


def _headline(use: Use, *, left_out: int) -> str:
    pool = use.now.pool
    parts = [f"{len(use.rows)} sandbox{'' if len(use.rows) == 1 else 'es'}"]
    shares = [row.cpu_share for row in use.rows if row.cpu_share is not None]
    if shares:
        parts.append(f"{sum(shares) * 100:.0f} % of a processor")
    held = [each for row in use.rows if (each := row.meter.memory_bytes) is not None]
    if held:
        parts.append(human_bytes(sum(held)))
    if left_out:
        parts.append(f"{left_out} not shown")
    lately = rate(pool.recent_hits, pool.recent_misses)
    return f"{', '.join(parts)}; pool {pool.ready} of {pool.target} ready, {lately} lately"


def _cells(row: Row) -> tuple[str, ...]:
    meter = row.meter
    return (
        meter.environment_id[:12],
        meter.tenant_id,
        meter.state.lower(),
        "-" if row.cpu_share is None else f"{row.cpu_share * 100:.0f}",
        "-" if meter.memory_bytes is None else human_bytes(meter.memory_bytes),
        str(meter.denials),
        human_duration(meter.age_ms),
        "-" if meter.cpu_ms is None else human_duration(meter.cpu_ms),
        str(meter.commands_run),
        meter.run_id,
        "" if meter.program is None else meter.program.decode("utf-8", "backslashreplace"),
    )
