"""Audit events under load: `python3 -m tests.bench --audit 100000` as root in a lane.

Callers run commands, each in a sandbox of its own, while others make and destroy sandboxes. A
command has two records, its start and its end. Two proofs are made afterwards that know nothing of
each other: every record is in the journal exactly once and in its caller's order, and `sbxctl audit
verify` finds the numbers whole. Refusals are no load for this: beyond a rate they are counted.
Meanwhile the journal limits the rate of every unit that does not forbid it, and a unit that does
not loses records: so what is not lost was not spared by chance.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import trio
from msgspec import Struct

from sbxctl import journal
from sbxctl.journal import Query, number, text
from tests.bench.daemon import Daemon, check, command, worker
from tests.bench.daemon import Profile as SlotProfile
from tests.bench.samples import OperationFailed, percentile
from tests.redteam.faults import main_pid

CALLERS = 8
RUNNERS = 2
LIMITED = Path("/run/systemd/journald.conf.d/zz-sbxd-audit-bench.conf")
BURST = 1000
# Of the control: more than the burst, whatever the free space makes of it (journald.conf(5)).
CONTROL_RECORDS = 20_000
_CONTROL = (
    "import socket\n"
    "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "s.connect('/run/systemd/journal/socket')\n"
    f"for n in range({CONTROL_RECORDS}):\n"
    "    s.send(b'MESSAGE=control\\nSBX_CONTROL=%s\\n' % MARK)\n"
)
_FIELDS = (
    *("SBX_AUDIT_TIME", "SBX_COMMAND_NUMBER", "SBX_ENVIRONMENT_ID", "SBX_EVENT"),
    "__REALTIME_TIMESTAMP",
)
_STEPS = {"CommandStarted": 0, "CommandFinished": 1}
_TICKS = os.sysconf("SC_CLK_TCK")


class Audited(Struct, frozen=True, kw_only=True):
    """asked: records that the callers' commands are to have. recorded: of them in the journal,
    once and in their callers' order. others: records of other work meanwhile. lag: from the
    decision to the journal's receipt. cpu: of the daemon and of the journal, per record.
    control_lost: records of a unit whose rate is limited. sound: what `sbxctl audit verify` says.
    """

    asked: int
    recorded: int
    repeated: int
    reordered: int
    others: int
    commands: int
    seconds: float
    lag_ms_p50: float
    lag_ms_p99: float
    lag_ms_max: float
    daemon_cpu_us: float
    journal_cpu_us: float
    control_sent: int
    control_lost: int
    sound: bool
    verified: dict[str, object]

    @property
    def holds(self) -> bool:
        return (
            self.sound
            and self.recorded == self.asked
            and not (self.repeated or self.reordered)
            and self.control_lost > 0
        )


async def audited(daemon: Daemon, count: int) -> Audited:
    """So many records under load (an even number), and the proofs. Raises OperationFailed, the
    port's errors."""
    with rate_limited():
        control = _control(secrets.token_hex(8))
        began_at = time.time()
        pids = (main_pid(journal.UNIT), main_pid("systemd-journald.service"))
        cpu = [_cpu_seconds(pid) for pid in pids]
        begun = time.perf_counter()
        commands, callers = await _load(daemon, count // len(_STEPS))
        seconds = time.perf_counter() - begun
        journal.synchronize()
        cpu = [_cpu_seconds(pid) - before for pid, before in zip(pids, cpu, strict=True)]
        verified = _verify(datetime.fromtimestamp(began_at, UTC).isoformat())
        read = _Read(callers)
        query = Query(matches=(journal.unit(),), since=f"@{int(began_at)}", only=_FIELDS)
        with closing(journal.records(query.argv())) as records:
            for record in records:
                read.take(record)
    everything = len(read.seen) + read.repeated + read.others
    lags = sorted(read.lags_ms) or [0.0]
    return Audited(
        asked=count,
        recorded=len(read.seen),
        repeated=read.repeated,
        reordered=read.reordered,
        others=read.others,
        commands=commands,
        seconds=round(seconds, 1),
        lag_ms_p50=percentile(lags, 50),
        lag_ms_p99=percentile(lags, 99),
        lag_ms_max=lags[-1],
        daemon_cpu_us=round(cpu[0] / max(everything, 1) * 1e6),
        journal_cpu_us=round(cpu[1] / max(everything, 1) * 1e6),
        control_sent=CONTROL_RECORDS,
        control_lost=CONTROL_RECORDS - control,
        sound=bool(verified["sound"]),
        verified=verified,
    )


def render(found: Audited) -> list[str]:
    """The report."""
    return [
        f"audit: {found.recorded} of {found.asked} decisions recorded in {found.seconds} s "
        f"({found.asked / found.seconds:.0f} a second), {found.repeated} repeated, "
        f"{found.reordered} out of order; beside {found.others} records of "
        f"{found.commands} commands",
        f"  from the decision to the journal: p50 {found.lag_ms_p50:.2f} ms, "
        f"p99 {found.lag_ms_p99:.2f} ms, max {found.lag_ms_max:.1f} ms",
        f"  CPU for each record: daemon {found.daemon_cpu_us:.0f} µs (the whole request), "
        f"journal {found.journal_cpu_us:.0f} µs",
        f"  sequence: {'sound' if found.sound else 'NOT SOUND'}, "
        f"{found.verified['records']} records verified",
        f"  control: of {found.control_sent} records of a unit whose rate is limited "
        f"{found.control_lost} were lost",
        "holds" if found.holds else "DOES NOT HOLD",
    ]


class _Read:
    """What the journal has of the callers' commands, by their environments' ids."""

    def __init__(self, callers: frozenset[str]) -> None:
        self._callers = callers
        self._last: dict[str, int] = {}
        self.seen: set[tuple[str, int]] = set()
        self.repeated = self.reordered = self.others = 0
        self.lags_ms: list[float] = []

    def take(self, record: journal.JournalRecord) -> None:
        if "SBX_EVENT" not in record:
            return
        received, decided = number(record, "__REALTIME_TIMESTAMP"), number(record, "SBX_AUDIT_TIME")
        if received is not None and decided is not None:
            self.lags_ms.append((received - decided) / 1000)
        caller = text(record, "SBX_ENVIRONMENT_ID") or ""
        step = _STEPS.get(text(record, "SBX_EVENT") or "")
        command_number = number(record, "SBX_COMMAND_NUMBER")
        if caller not in self._callers or step is None or command_number is None:
            self.others += 1
            return
        turn = command_number * len(_STEPS) + step
        if (caller, turn) in self.seen:
            self.repeated += 1
            return
        self.seen.add((caller, turn))
        self.reordered += turn <= self._last.get(caller, -1)
        self._last[caller] = turn


async def _load(daemon: Daemon, count: int) -> tuple[int, frozenset[str]]:
    """So many commands of the callers, and others for as long as they last; returns how many
    others ran, and the ids of the callers' environments."""
    commands = 0
    callers_environments = set[str]()

    async def ask(caller: int) -> None:
        async with worker() as remote:
            handle = await remote.provision(daemon.specification(SlotProfile.RESERVE))
            callers_environments.add(handle.environment_id)
            for _ in range(caller, count, CALLERS):
                check(await remote.execute(handle, command(("true",))))
            await remote.destroy(handle)

    async def run() -> None:
        nonlocal commands
        async with worker() as remote:
            while True:
                handle = await remote.provision(daemon.specification(SlotProfile.RESERVE))
                check(await remote.execute(handle, command(("true",))))
                await remote.destroy(handle)
                commands += 1

    async with trio.open_nursery() as runners:
        for _ in range(RUNNERS):
            runners.start_soon(run)
        async with trio.open_nursery() as callers:
            for caller in range(CALLERS):
                callers.start_soon(ask, caller)
        runners.cancel_scope.cancel()
    return commands, frozenset(callers_environments)


@contextmanager
def rate_limited() -> Iterator[None]:
    """The journal of this machine limits the rate of units, unless they say otherwise."""
    LIMITED.parent.mkdir(parents=True, exist_ok=True)
    LIMITED.write_text(f"[Journal]\nRateLimitIntervalSec=60s\nRateLimitBurst={BURST}\n")
    try:
        _restart_journal()
        yield
    finally:
        LIMITED.unlink()
        _restart_journal()


def _restart_journal() -> None:
    subprocess.run(
        ["systemctl", "restart", "systemd-journald.service"], check=True, capture_output=True
    )


def _control(mark: str) -> int:
    """How many records of an ordinary unit the journal kept."""
    subprocess.run(
        [
            *("systemd-run", "--quiet", "--wait", "--collect", "--service-type=exec"),
            *(sys.executable, "-c", _CONTROL.replace("MARK", repr(mark.encode()))),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    journal.synchronize()
    argv = Query(matches=(f"SBX_CONTROL={mark}",), only=("MESSAGE",)).argv()
    with closing(journal.records(argv)) as records:
        return sum(1 for _ in records)


def _verify(since: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "sbxctl", "audit", "verify", "--json", "--since", since],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if not done.stdout:
        raise OperationFailed(f"sbxctl audit verify: {done.stderr}")
    verdict: dict[str, object] = json.loads(done.stdout)
    return verdict


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
