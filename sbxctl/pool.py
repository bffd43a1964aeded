"""`sbxctl pool`: the slots that are prepared ahead of need."""

import click

from sbxctl.exits import Exit
from sbxctl.report import print_json, show_pairs
from sbxctl.session import run_verb
from sbxctl.units import human_bytes, human_duration
from sbxd.client.admin import AdminClient
from sbxd.wire.observing import PoolInfo


@click.group("pool")
def pool() -> None:
    """The slots that are prepared ahead of need, so that a hand-out takes milliseconds."""


@pool.command("show")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def show(socket: str, as_json: bool) -> None:
    """Show how many are ready, how old they are, and how often there was one."""

    async def verb(admin: AdminClient) -> int:
        found = (await admin.meters()).pool
        if as_json:
            print_json(found)
        else:
            show_pairs(pairs(found))
        return Exit.OK

    run_verb(socket, verb)


def pairs(pool: PoolInfo) -> list[tuple[str, str]]:
    """The lines of the page."""
    ages = ", ".join(human_duration(each) for each in pool.ages_ms[:16])
    return [
        ("ready", f"{pool.ready} of {pool.target}"),
        ("being built", str(pool.building)),
        ("ages", ages or "-"),
        ("memory", "not counted" if pool.memory_bytes is None else human_bytes(pool.memory_bytes)),
        ("hand-outs", rate(pool.hits, pool.misses)),
        ("lately", rate(pool.recent_hits, pool.recent_misses)),
    ]


def rate(hits: int, misses: int) -> str:
    """`12 of 15 from the pool (80 %)`."""
    if not hits + misses:
        return "none"
    share = 100 * hits / (hits + misses)
    return f"{hits} of {hits + misses} from the pool ({share:.0f} %)"
