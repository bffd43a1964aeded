"""The numbers to aim at, and whether this run has met them. Pure; nothing fails on them."""

from collections.abc import Iterable, Iterator

from tests.bench.daemon import Profile
from tests.bench.gvisor_targets import judge_gvisor
from tests.bench.load import Throughput
from tests.bench.memory import IdleMemory, ServiceMemory
from tests.bench.peers import Tool
from tests.bench.results import Group, Target
from tests.bench.samples import Mark, Pace, Summary

EXEC_EMPTY = "sbxd exec, empty"
EXEC_FULL = "sbxd exec, 10,000 files"
START = "fresh sandbox"
EXEC = "second command"

GVISOR = "gvisor"

RESERVE_P50_RATIO_MAX = 0.8
RESERVE_P99_RATIO_MAX = 1.5
PYTHON_MORE_MS_MAX = 4.0
EXEC_MS_MAX = 4.0
EXEC_RATIO_MAX = 0.8
FILES_MS_MAX = 60.0
PER_SECOND_MIN = 100.0
IDLE_PSS_KIB_MAX = 2.0 * 1024
IDLE_KERNEL_KIB_MAX = 0.6 * 1024
DAEMON_KIB_MAX = 60.0 * 1024


def judge(
    groups: Iterable[Group],
    throughput: Iterable[Throughput],
    idle: Iterable[IdleMemory],
    services: ServiceMemory | None,
    mechanism: str | None = None,
) -> tuple[Target, ...]:
    """Every target of this mechanism, met or not, or not measured."""
    if mechanism == GVISOR:
        of_name = {(group.name, group.pace): group for group in groups}
        start, second = (of_name.get((name, Pace.SPACED)) for name in (START, EXEC))
        return tuple(judge_gvisor(start, second, throughput, idle, EXEC_EMPTY))
    found: list[Target] = []
    for group in groups:
        if group.name == START:
            found += _start(group)
        elif group.name == EXEC:
            found += _exec(group)
    found += [_rate(each) for each in throughput if each.tool == Profile.RESERVE]
    for each in idle:
        if each.tool == "sbxd":
            found.append(_most("idle sandbox, our processes", each.pss_kib, IDLE_PSS_KIB_MAX))
            found.append(_most("idle sandbox, kernel", each.kernel_kib, IDLE_KERNEL_KIB_MAX))
    if services is not None:
        found.append(_most("daemon with no sandbox", services.daemon_kib, DAEMON_KIB_MAX))
    return tuple(found)


def _start(group: Group) -> Iterator[Target]:
    for program, mark in (("echo", Mark.FIRST_BYTE), ("true", Mark.REPLY)):
        ours = group.find(Profile.RESERVE, program, mark)
        theirs = group.find(Tool.BWRAP, program, mark)
        name = f"from the reserve, {program} to {mark}, {group.pace}"
        yield _ratio(f"{name}, p50", ours, theirs, "p50", RESERVE_P50_RATIO_MAX)
        yield _ratio(f"{name}, p99", ours, theirs, "p99", RESERVE_P99_RATIO_MAX)
    yield _more_than_bare(
        f"from the reserve, python3 over bare, {group.pace}, p50",
        group.find(Profile.RESERVE, "python3", Mark.REPLY),
        group.find(Tool.BARE, "python3", Mark.REPLY),
    )


def _more_than_bare(name: str, ours: Summary | None, bare: Summary | None) -> Target:
    wanted = f"<= {PYTHON_MORE_MS_MAX:g} ms more"
    if ours is None or bare is None:
        return Target(name=name, wanted=wanted, measured="not measured", met=None)
    more = ours.p50 - bare.p50
    measured = f"{more:.1f} ms more ({ours.p50:.1f} ms)"
    return Target(name=name, wanted=wanted, measured=measured, met=more <= PYTHON_MORE_MS_MAX)


def _ratio(
    name: str, ours: Summary | None, theirs: Summary | None, field: str, limit: float
) -> Target:
    wanted = f"<= {limit:g} x bwrap"
    if ours is None or theirs is None:
        return Target(name=name, wanted=wanted, measured="not measured", met=None)
    ratio = getattr(ours, field) / getattr(theirs, field)
    measured = f"{ratio:.2f} x bwrap ({getattr(ours, field):.1f} ms)"
    return Target(name=name, wanted=wanted, measured=measured, met=ratio <= limit)


def _exec(group: Group) -> Iterator[Target]:
    empty = group.find(EXEC_EMPTY, "true", Mark.REPLY)
    full = group.find(EXEC_FULL, "true", Mark.REPLY)
    crun = group.find(Tool.CRUN_EXEC, "true", Mark.REPLY)
    name = f"exec true, empty workspace, {group.pace}, p50"
    if empty is None or crun is None:
        yield Target(name=name, wanted="<= 4 ms", measured="not measured", met=None)
    else:
        limit = min(EXEC_MS_MAX, EXEC_RATIO_MAX * crun.p50)
        yield Target(
            name=name,
            wanted=f"<= {limit:.1f} ms",
            measured=f"{empty.p50:.1f} ms ({empty.p50 / crun.p50:.2f} x crun exec)",
            met=empty.p50 <= limit,
        )
    name = f"10,000 files over an empty workspace, {group.pace}, p50"
    wanted = f"<= {FILES_MS_MAX:g} ms more"
    if empty is None or full is None:
        yield Target(name=name, wanted=wanted, measured="not measured", met=None)
    else:
        more = full.p50 - empty.p50
        yield Target(
            name=name, wanted=wanted, measured=f"{more:.1f} ms more", met=more <= FILES_MS_MAX
        )


def _rate(each: Throughput) -> Target:
    return Target(
        name=f"create, run, destroy, {each.at_once} at a time",
        wanted=f">= {PER_SECOND_MIN:g} a second",
        measured=f"{each.per_second:.1f} a second",
        met=each.per_second >= PER_SECOND_MIN,
    )


def _most(name: str, kib: float, limit_kib: float) -> Target:
    return Target(
        name=name,
        wanted=f"<= {limit_kib / 1024:.1f} MiB",
        measured=f"{kib / 1024:.2f} MiB",
        met=kib <= limit_kib,
    )
