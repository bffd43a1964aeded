"""Counters are parsed strictly, and a wait for the kernel's word ends when it comes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from sbxd.launcher.requests import LEAF_DESCRIPTORS
from sbxd.mechanism import kernel_events
from sbxd.mechanism.kernel_events import (
    BadCounter,
    Watch,
    parse_bytes_written,
    parse_flat_keyed,
    parse_single,
)
from sbxd.mechanism.leaf import Leaf
from sbxd.mechanism.protocol import Counters, MechanismError

CGROUP = Path("/sys/fs/cgroup/sbxd-test")


@given(st.dictionaries(st.from_regex(r"\A[a-z_.]{1,20}\Z"), st.integers(0, 2**64 - 1)))
def test_a_flat_keyed_file_is_read_as_written(values: dict[str, int]) -> None:
    raw = "".join(f"{key} {value}\n" for key, value in values.items()).encode()
    assert parse_flat_keyed(raw) == values


@given(st.binary(max_size=200))
def test_no_bytes_whatever_raise_anything_but_bad_counter(raw: bytes) -> None:
    for parse in (parse_flat_keyed, parse_single, parse_bytes_written):
        try:
            parse(raw)
        except BadCounter:
            continue


@pytest.mark.parametrize(
    ("raw", "written"),
    [
        (b"", 0),
        (b"98:0\n", 0),
        (b"98:0 rbytes=9 wbytes=4096 rios=1 wios=1 dbytes=0 dios=0\n", 4096),
        # a volume on a loop device, whose writes are those of the disk below it again
        (b"7:0 rbytes=0 wbytes=8192 rios=0\n8:0 rbytes=0 wbytes=4096 cost.usage=1.25\n", 8192),
    ],
)
def test_the_bytes_that_were_sent_to_a_disk_are_counted_once(raw: bytes, written: int) -> None:
    assert parse_bytes_written(raw) == written


@pytest.mark.parametrize(
    "raw", [b"max", b"max x\n", b"max -1\n", b"max 1 2\n", b" 1\n", b"a 1\na 2\n", b"a \xb2\n"]
)
def test_a_keyed_file_of_another_form_is_refused(raw: bytes) -> None:
    with pytest.raises(BadCounter):
        parse_flat_keyed(raw)


@pytest.mark.parametrize("raw", [b"", b"1", b"x\n", b"-1\n", b"1\n2\n", b"max\n"])
def test_a_single_number_of_another_form_is_refused(raw: bytes) -> None:
    assert parse_single(b"42\n") == 42
    with pytest.raises(BadCounter):
        parse_single(raw)


def leaf_of(files: dict[str, int]) -> Leaf:
    return Leaf(
        1, [files.get(name) or os.open("/dev/null", os.O_RDWR) for name in LEAF_DESCRIPTORS]
    )


def file_with(path: Path, raw: bytes) -> int:
    path.write_bytes(raw)
    return os.open(path, os.O_RDONLY)


def test_a_counter_that_the_host_lacks_is_none_and_not_zero(tmp_path: Path) -> None:
    leaf = leaf_of({"leaf_cpu_stat": file_with(tmp_path / "cpu", b"usage_usec 7\nuser_usec 3\n")})
    assert leaf.counters() == Counters(cpu_usage_us=7)
    leaf.close()
    leaf.close()
    assert leaf.counters() == Counters()


def test_every_counter_is_read_from_its_own_file(tmp_path: Path) -> None:
    memory = b"low 0\nhigh 0\nmax 9\noom 1\noom_kill 2\noom_group_kill 3\n"
    leaf = leaf_of(
        {
            "leaf_memory_events": file_with(tmp_path / "a", memory),
            "leaf_memory_peak": file_with(tmp_path / "b", b"4\n"),
            "leaf_pids_events": file_with(tmp_path / "c", b"max 5\n"),
            "leaf_pids_peak": file_with(tmp_path / "d", b"6\n"),
        }
    )
    assert leaf.counters() == Counters(
        oom_kill=2,
        oom_group_kill=3,
        memory_peak_bytes=4,
        pids_max_events=5,
        pids_peak=6,
    )
    leaf.close()


def test_a_counter_of_another_form_is_an_error_and_not_a_guess(tmp_path: Path) -> None:
    leaf = leaf_of({"leaf_pids_peak": file_with(tmp_path / "pids", b"many\n")})
    with pytest.raises(MechanismError):
        leaf.counters()
    leaf.close()


def test_a_leaf_of_another_number_of_descriptors_is_refused_and_closed() -> None:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(MechanismError):
        Leaf(1, [descriptor])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


async def test_a_wait_on_counters_that_the_host_lacks_never_ends(
    autojump_clock: trio.abc.Clock,
) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    watch = Watch(null)
    with trio.move_on_after(3600) as scope:
        await watch.wait()
    assert scope.cancelled_caught
    watch.close()
    watch.close()
    os.close(null)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    CGROUP.mkdir()
    yield CGROUP
    (CGROUP / "cgroup.kill").write_text("1")
    while "populated 1" in (CGROUP / "cgroup.events").read_text():
        os.sched_yield()
    CGROUP.rmdir()


def process_in(cgroup: Path) -> int:
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    (cgroup / "cgroup.procs").write_text(str(pid))
    return pid


def reap(pid: int) -> int:
    """The wait status of a child that has ended."""
    return os.waitpid(pid, 0)[1]


@pytest.mark.needs("cgroup2", "root")
async def test_emptiness_is_seen_when_the_last_process_dies(cgroup: Path) -> None:
    pid = process_in(cgroup)
    events = os.open(cgroup / "cgroup.events", os.O_RDONLY)
    assert kernel_events.is_populated(events)

    async def kill() -> None:
        await trio.testing.wait_all_tasks_blocked()
        os.kill(pid, signal.SIGKILL)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            await kernel_events.wait_unpopulated(events)
    assert not kernel_events.is_populated(events)
    with trio.fail_after(60):
        await kernel_events.wait_unpopulated(events)
    assert reap(pid) == signal.SIGKILL
    os.close(events)


@pytest.mark.needs("cgroup2", "root")
async def test_a_removed_cgroup_is_empty(cgroup: Path) -> None:
    child = cgroup / "child"
    child.mkdir()
    events = os.open(child / "cgroup.events", os.O_RDONLY)
    child.rmdir()
    assert not kernel_events.is_populated(events)
    with trio.fail_after(60):
        await kernel_events.wait_unpopulated(events)
    os.close(events)


@pytest.mark.needs("cgroup2", "root")
async def test_emptiness_is_seen_when_the_cgroup_is_removed_before_the_kernel_tells(
    cgroup: Path,
) -> None:
    for _ in range(20):
        child = cgroup / "child"
        child.mkdir()
        pid = process_in(child)  # the file has just changed: the next word comes by a timer
        events = os.open(child / "cgroup.events", os.O_RDONLY)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kernel_events.wait_unpopulated, events)
                await trio.testing.wait_all_tasks_blocked()
                os.kill(pid, signal.SIGKILL)
                assert reap(pid) == signal.SIGKILL
                os.rmdir(child)
        os.close(events)


@pytest.mark.needs("cgroup2", "root", "limits")
async def test_a_refused_fork_ends_the_wait(cgroup: Path) -> None:
    (cgroup / "pids.max").write_text("1")
    descriptor = os.open(cgroup / "pids.events", os.O_RDONLY)
    watch = Watch(descriptor)
    pid = os.fork()
    if pid == 0:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        try:
            os.fork()
        except OSError:
            os._exit(0)
        os._exit(1)
    with trio.fail_after(60):
        await watch.wait()
    assert parse_flat_keyed(kernel_events.read(descriptor)) == {"max": 1}
    assert reap(pid) == 0
    watch.close()
    os.close(descriptor)
