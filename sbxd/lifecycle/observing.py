"""What the lifecycle shows of itself without changing: places, the pool, each environment's use.

Invariants: reading blocks on nobody but the kernel's own counters; a counter that cannot be read
is None, never 0 and never a failure of the question.
"""

from collections import Counter
from collections.abc import Callable

import trio

from sbxd.lifecycle.environments import Census, PoolCensus
from sbxd.lifecycle.machine import State
from sbxd.lifecycle.registry import Registry
from sbxd.lifecycle.supervisor import Supervisor
from sbxd.port.ids import EnvironmentId
from sbxd.wire.observing import PROGRAM_BYTES_MAX, EnvironmentMeter

# So many environments are read between two checkpoints.
READ_AT_ONCE = 16


def census(registry: Registry, *, waiting: int) -> Census:
    """Count what is there."""
    now = trio.current_time()
    everything = list(registry.supervisors)
    slots = [each for each in everything if each.tenant is None]
    ready = [each for each in slots if each.state is State.READY]
    held = [each.sandbox.memory_bytes() for each in ready]
    states = Counter(each.state.value for each in everything if each.tenant is not None)
    return Census(
        states=dict(states),
        waiting=waiting,
        pool=PoolCensus(
            building=sum(1 for each in slots if each.state is State.PREPARING),
            target=registry.reserve.target,
            ages_seconds=tuple(now - each.created_at for each in ready),
            memory_bytes=_sum_of_all(held),
        ),
    )


def _sum_of_all(values: list[int | None]) -> int | None:
    known = [each for each in values if each is not None]
    return sum(known) if len(known) == len(values) else None


async def meters(
    registry: Registry, denials_of: Callable[[EnvironmentId], int]
) -> tuple[EnvironmentMeter, ...]:
    """Read what every environment uses that was handed out and is not gone, oldest first."""
    found = []
    for number, each in enumerate(registry.handed_out()):
        if number % READ_AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
        found.append(_meter(each, denials_of(each.environment_id)))
    return tuple(found)


def _meter(supervisor: Supervisor, denials: int) -> EnvironmentMeter:
    assert supervisor.tenant is not None
    limits = supervisor.specification.limits
    running, argv = supervisor.execution, supervisor.running_argv
    spent = [supervisor.cpu_ms, None if running is None else running.cpu_ms()]
    known = [each for each in spent if each is not None]
    return EnvironmentMeter(
        environment_id=supervisor.environment_id,
        tenant_id=supervisor.tenancy.tenant_id,
        run_id=supervisor.tenancy.run_id,
        state=supervisor.state.value,
        age_ms=round((trio.current_time() - supervisor.tenant.taken_at) * 1000),
        commands_run=supervisor.commands_run,
        cpu_ms=sum(known) if known else None,
        cpu_millicores=limits.cpu_millicores,
        memory_bytes=supervisor.sandbox.memory_bytes(),
        memory_max_bytes=limits.memory_bytes,
        denials=denials,
        program=None if argv is None else argv[0][:PROGRAM_BYTES_MAX],
    )
