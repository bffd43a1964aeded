"""The numbers to aim at with gVisor, beside runsc used directly in the same run. Pure."""

from collections.abc import Iterable, Iterator

from tests.bench.daemon import Profile
from tests.bench.load import Throughput
from tests.bench.memory import IdleMemory
from tests.bench.peers import Tool
from tests.bench.results import Group, Target
from tests.bench.samples import Mark, Summary

HAND_OUT_P50_MS_MAX = 15.0
HAND_OUT_P99_MS_MAX = 40.0
EXEC_MS_MAX = 10.0
EXEC_RATIO_MAX = 1 / 3
PYTHON_RATIO_MAX = 1.2
COLD_RATIO_MAX = 1.15
PER_SECOND_MIN = 6.0
IDLE_MORE_KIB_MAX = 3.0 * 1024


def judge_gvisor(
    start: Group | None,
    second: Group | None,
    throughput: Iterable[Throughput],
    idle: Iterable[IdleMemory],
    exec_tool: str,
) -> Iterator[Target]:
    """start, second: fresh sandboxes and second commands in one pace. exec_tool: ours of those."""
    pooled = _find(start, Profile.RESERVE, "true")
    yield _at_most("from the pool, true to reply, p50", _p(pooled, "p50"), HAND_OUT_P50_MS_MAX)
    yield _at_most("from the pool, true to reply, p99", _p(pooled, "p99"), HAND_OUT_P99_MS_MAX)
    yield _ratio(
        "cold, true to reply, p50",
        _p(_find(start, Profile.COLD, "true"), "p50"),
        _p(_find(start, Tool.RUNSC, "true"), "p50"),
        COLD_RATIO_MAX,
        "runsc run",
    )
    theirs = _p(_find(second, Tool.RUNSC_EXEC, "true"), "p50")
    ours = _p(_find(second, exec_tool, "true"), "p50")
    yield _at_most("exec true, p50", ours, EXEC_MS_MAX)
    yield _ratio("exec true, p50", ours, theirs, EXEC_RATIO_MAX, "runsc exec")
    yield _ratio(
        "from the pool, python3 -c pass to reply, p50",
        _p(_find(start, Profile.RESERVE, "python3"), "p50"),
        _p(_find(second, Tool.RUNSC_EXEC, "python3"), "p50"),
        PYTHON_RATIO_MAX,
        "runsc exec",
    )
    for each in throughput:
        if each.tool == Profile.RESERVE:
            yield Target(
                name=f"create, run, destroy, {each.at_once} at a time",
                wanted=f">= {PER_SECOND_MIN:g} a second",
                measured=f"{each.per_second:.1f} a second",
                met=each.per_second >= PER_SECOND_MIN,
            )
    found = {each.tool: each.pss_kib + each.kernel_kib for each in idle}
    name, wanted = "idle sandbox, beyond runsc's own", f"<= {IDLE_MORE_KIB_MAX / 1024:g} MiB"
    if "sbxd" in found and Tool.RUNSC in found:
        more = found["sbxd"] - found[Tool.RUNSC]
        yield Target(
            name=name,
            wanted=wanted,
            measured=f"{more / 1024:.1f} MiB ({found['sbxd'] / 1024:.1f} in all)",
            met=more <= IDLE_MORE_KIB_MAX,
        )
    else:
        yield Target(name=name, wanted=wanted, measured="not measured", met=None)


def _find(group: Group | None, tool: str, program: str) -> Summary | None:
    return None if group is None else group.find(tool, program, Mark.REPLY)


def _p(summary: Summary | None, field: str) -> float | None:
    return None if summary is None else float(getattr(summary, field))


def _at_most(name: str, value_ms: float | None, limit_ms: float) -> Target:
    wanted = f"<= {limit_ms:g} ms"
    if value_ms is None:
        return Target(name=name, wanted=wanted, measured="not measured", met=None)
    return Target(name=name, wanted=wanted, measured=f"{value_ms:.1f} ms", met=value_ms <= limit_ms)


def _ratio(name: str, ours: float | None, theirs: float | None, limit: float, peer: str) -> Target:
    wanted = f"<= {limit:.2f} x {peer}"
    if ours is None or theirs is None:
        return Target(name=name, wanted=wanted, measured="not measured", met=None)
    return Target(
        name=name,
        wanted=wanted,
        measured=f"{ours / theirs:.2f} x {peer} ({ours:.1f} ms)",
        met=ours <= limit * theirs,
    )
