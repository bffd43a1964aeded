"""A target is met, missed or not measured; the report says which, and counts every failure."""

import pytest
from msgspec.structs import replace

from tests.bench.daemon import Profile
from tests.bench.load import Throughput
from tests.bench.machine import Machine
from tests.bench.memory import IdleMemory, ServiceMemory
from tests.bench.peers import Tool
from tests.bench.report import Detail, render
from tests.bench.results import Group, Results, Target, group_of
from tests.bench.rounds import Outcome
from tests.bench.samples import Mark, Pace
from tests.bench.targets import EXEC, EXEC_EMPTY, EXEC_FULL, START, judge


def outcome(tool: str, program: str, mark: Mark, *values: float) -> Outcome:
    return Outcome(tool, program, {mark: list(values)})


def group(name: str, *outcomes: Outcome) -> Group:
    return group_of(name, outcomes, pace=Pace.SPACED, rounds=1, references=(Tool.BWRAP,))


def met(targets: tuple[Target, ...], word: str) -> bool | None:
    [found] = [each for each in targets if word in each.name]
    return found.met


@pytest.mark.parametrize(("ours", "expected"), [(3.2, True), (3.3, False)])
def test_the_reserve_is_held_against_bwrap_of_the_same_run(ours: float, expected: bool) -> None:
    start = group(
        START,
        outcome(Profile.RESERVE, "true", Mark.REPLY, ours),
        outcome(Tool.BWRAP, "true", Mark.REPLY, 4.0),
    )
    targets = judge([start], [], [], None)
    assert met(targets, "true to reply, spaced, p50") is expected
    assert met(targets, "true to reply, spaced, p99") is True
    assert met(targets, "python3 over bare, spaced") is None
    assert met(targets, "echo to first byte, spaced, p50") is None


@pytest.mark.parametrize(
    ("ours", "crun", "expected"), [(3.9, 5.0, True), (4.1, 9.0, False), (3.9, 4.0, False)]
)
def test_exec_is_held_against_the_smaller_of_both_limits(
    ours: float, crun: float, expected: bool
) -> None:
    second = group(
        EXEC,
        outcome(EXEC_EMPTY, "true", Mark.REPLY, ours),
        outcome(EXEC_FULL, "true", Mark.REPLY, ours + 60.5),
        outcome(Tool.CRUN_EXEC, "true", Mark.REPLY, crun),
    )
    targets = judge([second], [], [], None)
    assert met(targets, "exec true, empty") is expected
    assert met(targets, "10,000 files") is False


def test_rate_and_memory_have_targets() -> None:
    targets = judge([], [rate(39.0)], [idle(pss=2000, kernel=700)], services(61))
    assert [each.met for each in targets] == [False, True, False, False]
    assert judge([], [rate(100.0)], [], None)[0].met is True


@pytest.mark.parametrize(
    ("pooled", "cold", "live", "idle_kib", "expected"),
    [(15, 114, 10, 5000, True), (16, 116, 10.1, 8000, False)],
)
def test_gvisor_is_held_against_runsc_of_the_same_run(
    pooled: float, cold: float, live: float, idle_kib: float, *, expected: bool
) -> None:
    start = group(
        START,
        outcome(Profile.RESERVE, "true", Mark.REPLY, pooled),
        outcome(Profile.COLD, "true", Mark.REPLY, cold),
        outcome(Tool.RUNSC, "true", Mark.REPLY, 100.0),
    )
    second = group(
        EXEC,
        outcome(EXEC_EMPTY, "true", Mark.REPLY, live),
        outcome(Tool.RUNSC_EXEC, "true", Mark.REPLY, 30.0),
    )
    memory = [idle(pss=idle_kib, kernel=100), replace(idle(pss=3000, kernel=0), tool=Tool.RUNSC)]
    targets = judge([start, second], [rate(6.0)], memory, None, "gvisor")
    for words in ("true to reply, p50", "cold", "exec true", "idle"):
        found = [each.met for each in targets if words in each.name and "python" not in each.name]
        assert found[0] is expected, words
    assert met(targets, "10 at a time") is True
    assert met(targets, "python3 -c pass") is None


def test_the_report_shows_every_part_and_counts_failures() -> None:
    start = group(
        START,
        outcome(Profile.RESERVE, "true", Mark.REPLY, 9.0),
        outcome(Tool.BWRAP, "true", Mark.REPLY, 4.0),
        Outcome("crun run", "true", {}, ["exit 1"]),
    )
    results = Results(
        machine=MACHINE,
        mechanism="namespaces",
        seed=1,
        quick=True,
        groups=(start,),
        throughput=(rate(39.0),),
        services=services(50),
        idle=(idle(pss=10, kernel=20),),
        refill=None,
        targets=judge([start], [rate(39.0)], [idle(pss=10, kernel=20)], services(50)),
        broken=("exec: no crun",),
    )
    assert results.failures == 3
    text = render(results, Detail.PROFILE)
    for part in (
        "2.25",
        "CPU 32.5 ms a cycle",
        "MISSED",
        "crun run true: exit 1",
        "exec: no crun",
        "3 operations failed",
    ):
        assert part in text


def rate(per_second: float) -> Throughput:
    return Throughput(
        tool=Profile.RESERVE,
        at_once=10,
        seconds=1.0,
        done=int(per_second),
        per_second=per_second,
        failures=1,
        cycle=None,
        steps={},
        cpu_ms={"daemon": 6.0, "launcher": 26.5},
        reasons=("exit 1",),
    )


def idle(*, pss: float, kernel: float) -> IdleMemory:
    fields = {"Slab": kernel, "SReclaimable": 1.0, "Percpu": 0.0, "KernelStack": 0.0}
    fields["PageTables"] = 0.0
    return IdleMemory(
        tool="sbxd",
        count=20,
        processes=3,
        pss_kib=pss,
        by_role_kib={"box/init": pss},
        kernel_up_kib=fields,
        kernel_down_kib=fields,
    )


def services(daemon_mib: float) -> ServiceMemory:
    return ServiceMemory(
        daemon_kib=daemon_mib * 1024,
        launcher_kib=1.0,
        launcher_processes=1,
        reserve_slots=4,
        reserve_kib=1.0,
    )


MACHINE = Machine(
    processor="a processor",
    cores=2,
    memory_mib=1,
    kernel="6",
    python="3",
    systemd="257",
    lane="container",
    controllers="",
    bwrap="",
    crun="",
    load_at_start=0.0,
)
