"""So many hand-outs of the pool with planted canaries: `python3 -m tests.bench --canaries 1000`.

Sound is a run in which no tenant saw a byte of an earlier one, nothing failed, every environment
came from the pool by the audit log's word, and no two were alike where each is to have its own.
"""

import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import trio
from msgspec import Struct

from sbxd.port.environment import EnvironmentSpec
from sbxd.port.errors import PortError
from sbxd.port.ids import RunId, TenantId
from tests.bench.daemon import REFILL_POLL_SECONDS, Daemon, Profile, worker
from tests.bench.samples import OperationFailed
from tests.bench.spawn import elapsed_ms
from tests.redteam.canaries import Canaries, one_tenant, origins

FAILURES_MAX = 20
PROGRESS = 50
AT_ONCE = 3
SLOT_SECONDS = 60


class CanaryRun(Struct, frozen=True, kw_only=True):
    """repeated: by what should be each sandbox's own, how many had another's value."""

    mechanism: str
    wanted: int
    hand_outs: int
    environments: int
    seconds: float
    bytes_looked_at: int
    places: tuple[str, ...]
    origins: dict[str, int]
    repeated: dict[str, int]
    hostnames: tuple[str, ...]
    leaks: tuple[str, ...]
    failures: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return (
            not self.leaks
            and not self.failures
            and self.hand_outs == self.environments == self.wanted
            and self.origins == {"RESERVE": self.wanted}
            and not any(self.repeated.values())
        )


async def canaries(daemon: Daemon, count: int, within_seconds: float) -> CanaryRun:
    """Take so many slots one after the other, a few tenants at a time, or fewer when the time is
    over. Raises OperationFailed when
    the pool does not fill."""
    seen, began_ns = Canaries(), time.perf_counter_ns()
    prefix = f"canary-{secrets.token_hex(4)}"
    turn = trio.Lock()
    ends_at = trio.current_time() + within_seconds
    numbers = iter(range(count))

    async def tenants() -> None:
        async with worker() as remote:
            for number in numbers:
                if len(seen.failures) >= FAILURES_MAX or trio.current_time() >= ends_at:
                    return
                try:
                    async with turn:  # who has seen a slot gets it
                        await _wait_slot(daemon)
                        handle = await remote.provision(_tenant(daemon, prefix, number))
                    await one_tenant(remote, handle, seen)
                except PortError as error:
                    seen.failures.append(str(error))
                if (number + 1) % PROGRESS == 0:
                    print(f"canaries: {number + 1} of {count}", file=sys.stderr, flush=True)

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(tenants)
    return CanaryRun(
        mechanism=daemon.mechanism,
        wanted=count,
        hand_outs=seen.hand_outs,
        environments=len(seen.environment_ids),
        seconds=elapsed_ms(began_ns) / 1000,
        bytes_looked_at=seen.bytes_looked_at,
        places=tuple(sorted(seen.places)),
        origins=dict(Counter(origins(prefix))),
        repeated=seen.repeated(),
        hostnames=tuple(sorted(seen.hostnames)),
        leaks=tuple(seen.leaks[:20]),
        failures=tuple(seen.failures),
    )


def _tenant(daemon: Daemon, prefix: str, number: int) -> EnvironmentSpec:
    like = daemon.specification(Profile.RESERVE)
    return msgspec.structs.replace(
        like, tenant_id=TenantId(f"tenant-{number}"), run_id=RunId(f"{prefix}-{number}")
    )


async def _wait_slot(daemon: Daemon) -> None:
    with trio.move_on_after(SLOT_SECONDS):
        while True:
            if (await daemon.admin.describe()).reserve_ready > 0:
                return
            await trio.sleep(REFILL_POLL_SECONDS)
    raise OperationFailed(f"no slot was ready within {SLOT_SECONDS} s")


def render(found: CanaryRun) -> Iterator[str]:
    """The report."""
    yield f"canaries on {found.mechanism}: {found.hand_outs} of {found.wanted} hand-outs"
    yield f"  {found.seconds:.0f} s; from {found.origins}; {found.environments} environments"
    yield f"  looked at {found.bytes_looked_at / 2**20:.0f} MiB in {', '.join(found.places)}"
    yield f"  bytes of an earlier tenant: {len(found.leaks)}"
    yield f"  the same value twice: {sum(found.repeated.values())} of {', '.join(found.repeated)}"
    yield f"  host names: {', '.join(found.hostnames)} (the same on purpose)"
    yield from (f"  LEAK {each}" for each in found.leaks)
    yield from (f"  FAILED {each}" for each in found.failures)
    yield "sound" if found.sound else "NOT SOUND"
