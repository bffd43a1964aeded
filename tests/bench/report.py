"""The results as plain text, 100 columns wide."""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from tests.bench.load import Throughput
from tests.bench.memory import COUNTED_FIELDS, IdleMemory
from tests.bench.results import Group, Results, Row
from tests.bench.samples import PROFILE_MARKS, Mark, Summary

# Destroying is off the clock of a request, and a caller waits for it all the same.
RESULT_MARKS = (Mark.FIRST_BYTE, Mark.REPLY, Mark.DESTROY, Mark.EMPTY)


class Detail(StrEnum):
    """PROFILE: also the steps of each operation of ours."""

    RESULTS = "results"
    PROFILE = "profile"


def render(results: Results, detail: Detail) -> str:
    """The whole report."""
    lines = [*_machine(results)]
    for group in results.groups:
        lines += ["", *_group(group)]
    if detail is Detail.PROFILE:
        for group in results.groups:
            lines += _profile(group)
    lines += _throughput(results.throughput)
    lines += _memory(results)
    lines += _targets(results)
    lines += _failures(results)
    return "\n".join(lines) + "\n"


def _machine(results: Results) -> Iterator[str]:
    m = results.machine
    yield f"{m.cores} cores of {m.processor}, {m.memory_mib} MiB, kernel {m.kernel}"
    yield (
        f"lane {m.lane} (controllers: {m.controllers or 'none'}), Python {m.python}, "
        f"systemd {m.systemd}, bwrap {m.bwrap}, crun {m.crun}, load {m.load_at_start}"
    )
    mode = "quick" if results.quick else "full"
    yield f"{mode}, random order from seed {results.seed}; times in ms; ratios of p50"
    if results.mechanism is not None:
        yield f"sbxd's mechanism: {results.mechanism}"
    if results.refill is not None:
        yield (
            f"the reserve was full again before each sample: waited p50 {results.refill.p50:.0f}, "
            f"p99 {results.refill.p99:.0f}"
        )


def _group(group: Group) -> Iterator[str]:
    spacing = "60 ms of rest before each" if group.pace == "spaced" else "back to back"
    yield f"{group.name}: {spacing}, {group.rounds} rounds"
    heads = "".join(f"{'x ' + each:>12}" for each in group.references)
    yield (
        f"  {'tool':<24}{'program':<9}{'to':<11}{'n':>5}{'fail':>5}"
        f"{'p50':>8}{'p95':>8}{'p99':>8}{heads}"
    )
    for row in group.rows:
        if not row.marks:
            yield f"  {row.tool:<24}{row.program:<9}{'':<11}{0:>5}{row.failures:>5}"
        for mark in RESULT_MARKS:
            summary = row.marks.get(mark)
            if summary is not None:
                ratios = "".join(_ratio(group, row, mark, each) for each in group.references)
                yield (
                    f"  {row.tool:<24}{row.program:<9}{mark:<11}{_numbers(row.failures, summary)}"
                    f"{ratios}"
                )


def _numbers(failures: int, summary: Summary) -> str:
    return f"{summary.n:>5}{failures:>5}{summary.p50:>8.2f}{summary.p95:>8.2f}{summary.p99:>8.2f}"


def _ratio(group: Group, row: Row, mark: Mark, tool: str) -> str:
    theirs = group.find(tool, row.program, mark)
    if theirs is None:
        return f"{'-':>12}"
    return f"{row.marks[mark].p50 / theirs.p50:>12.2f}"


def _profile(group: Group) -> Iterator[str]:
    rows = [row for row in group.rows if any(mark in row.marks for mark in PROFILE_MARKS)]
    if not rows:
        return
    yield ""
    yield f"where the time goes, {group.name}, {group.pace} (p50 / p95 / p99)"
    for row in rows:
        yield f"  {row.tool}, {row.program}"
        for mark in PROFILE_MARKS:
            summary = row.marks.get(mark)
            if summary is not None:
                yield f"    {mark:<32}{summary.p50:>8.2f}{summary.p95:>8.2f}{summary.p99:>8.2f}"


def _throughput(found: Sequence[Throughput]) -> Iterator[str]:
    if not found:
        return
    yield ""
    yield "create, run, destroy of true, so many at a time"
    yield (
        f"  {'tool':<24}{'at once':>8}{'seconds':>8}{'done':>7}{'fail':>5}{'a second':>10}"
        f"{'p50':>8}{'p95':>8}{'p99':>8}"
    )
    for each in found:
        times = ""
        if each.cycle is not None:
            times = f"{each.cycle.p50:>8.1f}{each.cycle.p95:>8.1f}{each.cycle.p99:>8.1f}"
        yield (
            f"  {each.tool:<24}{each.at_once:>8}{each.seconds:>8.1f}{each.done:>7}"
            f"{each.failures:>5}{each.per_second:>10.1f}{times}"
        )
    for each in found:
        if each.cpu_ms:
            shares = ", ".join(f"{name} {used:.1f}" for name, used in each.cpu_ms.items())
            total = sum(each.cpu_ms.values())
            yield f"    {each.tool}, {each.at_once}: CPU {total:.1f} ms a cycle ({shares})"
        for mark in (Mark.PROVISION, Mark.EXECUTE, Mark.DESTROY):
            summary = each.steps.get(mark)
            if summary is not None:
                yield (
                    f"    {each.tool}, {each.at_once}: {mark:<12} p50 {summary.p50:.1f}, "
                    f"p95 {summary.p95:.1f}, p99 {summary.p99:.1f}"
                )


def _memory(results: Results) -> Iterator[str]:
    if results.services is not None:
        s = results.services
        yield ""
        yield "memory with no environment (PSS)"
        yield f"  daemon {s.daemon_kib / 1024:.1f} MiB"
        yield f"  launcher {s.launcher_kib / 1024:.1f} MiB in {s.launcher_processes} processes"
        yield f"  {s.reserve_slots} reserve slots {s.reserve_kib / 1024:.1f} MiB"
    for each in results.idle:
        yield ""
        yield from _idle(each)


def _idle(each: IdleMemory) -> Iterator[str]:
    yield f"memory of an idle sandbox, {each.tool}, mean of {each.count} (KiB)"
    yield f"  our processes: {each.pss_kib:.0f} in {each.processes:.1f} processes"
    for role, kib in each.by_role_kib.items():
        yield f"    {role:<20}{kib:>8.0f}"
    if each.daemon_growth_kib is not None and each.launcher_growth_kib is not None:
        yield (
            f"  growth of the daemon {each.daemon_growth_kib:.0f}, "
            f"of the launcher {each.launcher_growth_kib:.0f}"
        )
    yield f"  kernel: {each.kernel_kib:.0f} (coming / going of each)"
    for name in each.kernel_up_kib:
        note = "" if name in COUNTED_FIELDS else "  (within Slab)"
        up, down = each.kernel_up_kib[name], each.kernel_down_kib[name]
        yield f"    {name:<20}{up:>8.0f}{down:>8.0f}{note}"


def _targets(results: Results) -> Iterator[str]:
    if not results.targets:
        return
    words = {True: "met", False: "MISSED", None: "-"}
    yield ""
    yield "targets (nothing fails on them)"
    for each in results.targets:
        yield f"  {words[each.met]:<8}{each.name:<56}{each.wanted:<18}{each.measured}"


def _failures(results: Results) -> Iterator[str]:
    if not results.failures:
        return
    yield ""
    yield f"{results.failures} operations failed"
    for reason in results.broken:
        yield f"  {reason}"
    for group in results.groups:
        for row in group.rows:
            for reason in row.reasons:
                yield f"  {group.name}, {group.pace}: {row.tool} {row.program}: {reason}"
    for each in results.throughput:
        for reason in each.reasons:
            yield f"  {each.tool}, {each.at_once} at a time: {reason}"
