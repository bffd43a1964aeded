"""What is written to cgroups and told to PID 1, as text; and what is read back, strictly."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.jail.plan import IdBlock
from sbxd.launcher import verify
from sbxd.launcher.kernel import cgroup, hostpaths, inventory, mounts, systemd, uids
from sbxd.launcher.requests import CgroupLimits, Kernel
from sbxd.launcher.verify import NotConfined, Process
from sbxd.port.limits import IoCeilings

ALL = frozenset(cgroup.CONTROLLERS)
LIMITS = CgroupLimits(cpu_millicores=1500, memory_bytes=64 << 20, pids_max=32)
ENVIRONMENT = "0123456789abcdef" * 2

limits_strategy = st.builds(
    CgroupLimits,
    cpu_millicores=st.integers(10, 1_024_000),
    memory_bytes=st.integers(8 << 20, 2**50),
    pids_max=st.integers(1, 4_194_304),
)


@pytest.mark.case("RES-08", "RES-16")
def test_a_leaf_gets_exactly_the_limits_of_the_specification() -> None:
    assert cgroup.limit_files(LIMITS, ALL) == [
        ("memory.swap.max", "0"),
        ("memory.high", str(67108864 * 19 // 20 + 1)),
        ("memory.max", "67108864"),
        ("pids.max", "32"),
        ("cpu.max", "150000 100000"),
    ]


def test_a_sentry_is_not_slowed_down_before_its_limit() -> None:
    """There is nothing of a guest's to reclaim: it would only be slow on its way to MEMORY."""
    theirs = dict(cgroup.limit_files(LIMITS, ALL, Kernel.SENTRY))
    assert theirs == {**dict(cgroup.limit_files(LIMITS, ALL)), "memory.high": "max"}


def test_a_missing_controller_is_not_written_and_is_told() -> None:
    for missing in ("cpu", "memory", "pids"):
        rest = ALL - {missing}
        assert not any(name.startswith(missing) for name, _ in cgroup.limit_files(LIMITS, rest))
        assert cgroup.unenforced(rest) == (missing,)
    assert cgroup.unenforced(ALL) == ()
    assert cgroup.unenforced(frozenset()) == ("memory", "pids", "cpu")


@given(limits_strategy)
def test_the_box_is_never_smaller_than_its_leaf(limits: CgroupLimits) -> None:
    box = cgroup.box_limits(limits)
    assert box.memory_bytes >= limits.memory_bytes
    assert box.pids_max >= limits.pids_max
    assert box.cpu_millicores >= limits.cpu_millicores


@given(limits_strategy)
def test_reclaim_begins_below_the_limit_and_near_it(limits: CgroupLimits) -> None:
    below = limits.memory_bytes - cgroup.memory_high_bytes(limits.memory_bytes)
    assert 0 < below <= cgroup.HIGH_MARGIN_BYTES_MAX
    assert below <= limits.memory_bytes / 20


def test_a_ceiling_on_the_disk_is_one_line_and_none_is_no_line() -> None:
    both = IoCeilings(write_bytes=1 << 20, read_operations=50)
    assert cgroup.io_max("98:0", both) == "98:0 wbps=1048576 riops=50"
    every = IoCeilings(read_bytes=4096, write_bytes=5000, read_operations=1, write_operations=2)
    assert cgroup.io_max("8:16", every) == "8:16 rbps=4096 wbps=5000 riops=1 wiops=2"
    assert cgroup.io_max("8:16", IoCeilings()) == ""


@pytest.mark.parametrize(
    ("device", "controllers", "left", "written"),
    [
        ("98:0", ALL, (), b"98:0 wbps=5000"),
        (None, ALL, ("io",), b""),
        ("98:0", ALL - {"io"}, ("io",), b""),
    ],
)
def test_a_ceiling_that_cannot_be_set_is_told_and_one_that_can_is_written(
    tmp_path: Path,
    device: str | None,
    controllers: frozenset[str],
    left: tuple[str, ...],
    written: bytes,
) -> None:
    (tmp_path / "io.max").touch()
    directory = cgroup.open_directory(str(tmp_path))
    try:
        ceilings = IoCeilings(write_bytes=5000)
        assert cgroup.limit_io(directory, ceilings, device, controllers) == left
        assert cgroup.limit_io(directory, IoCeilings(), None, frozenset()) == ()
    finally:
        os.close(directory)
    assert (tmp_path / "io.max").read_bytes() == written


@given(limits_strategy)
def test_a_cpu_quota_is_never_below_what_the_kernel_takes(limits: CgroupLimits) -> None:
    quota, period = dict(cgroup.limit_files(limits, ALL))["cpu.max"].split()
    assert int(quota) >= 1000
    assert int(period) == cgroup.PERIOD_US


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(b"populated 1\nfrozen 0\n", True), (b"populated 0\nfrozen 0\n", False)],
)
def test_populated_is_read(raw: bytes, expected: object) -> None:
    assert cgroup.parse_populated(raw) is expected


@pytest.mark.parametrize("raw", [b"", b"frozen 0\n", b"populated\n", b"populated 2\n"])
def test_an_events_file_without_the_word_is_an_error_and_not_empty(raw: bytes) -> None:
    with pytest.raises(ValueError, match="populated"):
        cgroup.parse_populated(raw)


def test_the_scope_is_made_of_these_properties() -> None:
    properties = systemd.scope_properties(f"environment {ENVIRONMENT}", 4711, LIMITS, 3600)
    assert [(name.decode(), kind.decode(), value) for name, kind, value in properties] == [
        ("Description", "s", f"sbxd environment {ENVIRONMENT}".encode()),
        ("Slice", "s", b"sbx.slice"),
        ("PIDs", "au", [4711]),
        ("Delegate", "b", True),
        ("CollectMode", "s", b"inactive-or-failed"),
        ("KillSignal", "i", 9),
        ("SendSIGHUP", "b", False),
        ("TimeoutStopUSec", "t", 1_000_000),
        ("RuntimeMaxUSec", "t", 3_600_000_000),
        ("OOMPolicy", "s", b"continue"),
        ("MemoryMax", "t", LIMITS.memory_bytes + cgroup.HEADROOM.memory_bytes),
        ("MemorySwapMax", "t", 0),
        ("TasksMax", "t", LIMITS.pids_max + cgroup.HEADROOM.pids),
        ("CPUQuotaPerSecUSec", "t", (1500 + cgroup.HEADROOM.cpu_millicores) * 1000),
        ("CPUWeight", "t", 10_000),
    ]


@pytest.mark.parametrize(
    "bad", ["", "..", "a/b", ENVIRONMENT.upper(), ENVIRONMENT + "0", ENVIRONMENT + "\n"]
)
def test_no_text_but_an_environment_id_becomes_part_of_a_path(bad: str) -> None:
    assert hostpaths.scope_name(ENVIRONMENT) == f"sbx-{ENVIRONMENT}.scope"
    for function in (hostpaths.scope_name, hostpaths.scope_directory):
        with pytest.raises(ValueError, match="environment id"):
            function(bad)


@pytest.mark.parametrize("bad", ["", "sha256:", "sha256:" + "g" * 64, "md5:" + "0" * 64, "0" * 64])
def test_no_text_but_a_digest_becomes_part_of_a_path(bad: str) -> None:
    assert hostpaths.digest_hex("sha256:" + "0" * 64) == "0" * 64
    with pytest.raises(ValueError, match="digest"):
        hostpaths.digest_hex(bad)


def test_only_a_scope_of_ours_names_an_environment() -> None:
    assert (
        inventory.scope_in_cgroup(f"0::/sbx.slice/sbx-{ENVIRONMENT}.scope/box/init") == ENVIRONMENT
    )
    assert inventory.scope_in_cgroup(f"0::/sbx.slice/sbx-{ENVIRONMENT}.scope") == ENVIRONMENT
    for other in (
        "0::/system.slice/sbxd.service",
        f"0::/sbx.slice/sbx-{ENVIRONMENT}.scopes/box",
        f"0::/sbx.slice/sbx-{ENVIRONMENT}.scope/box/init (deleted)",
        f"0::/sbx.slice/xsbx-{ENVIRONMENT}.scope",
        f"0::/sbx.slice/sbx-{ENVIRONMENT[:-1]}.scope",
    ):
        assert inventory.scope_in_cgroup(other) is None


@given(st.integers(0, (uids.RANGE_LAST - uids.RANGE_FIRST - uids.IMAGE_BLOCK_SIZE) // 3 - 1))
def test_every_uid_block_lies_in_the_range_and_outside_the_images(slot: int) -> None:
    base = uids.slot_base(slot)
    block = IdBlock(base)
    assert base >= uids.IMAGE_BASE + uids.IMAGE_BLOCK_SIZE
    assert block.outer(20002) <= uids.RANGE_LAST


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_two_slots_share_no_uid(first: int, second: int) -> None:
    ours, theirs = IdBlock(uids.slot_base(first)), IdBlock(uids.slot_base(second))
    shared = {ours.outer(i) for i in (0, 10001, 20002)} & {
        theirs.outer(i) for i in (0, 10001, 20002)
    }
    assert bool(shared) == (first == second)


def test_a_map_is_written_as_the_kernel_reads_it() -> None:
    assert mounts.map_text([(0, 100, 1), (10001, 101, 1)]) == "0 100 1\n10001 101 1\n"


CONFINED = {
    "Uid": "1900000000\t1900000000\t1900000000\t1900000000",
    "Gid": "1900000000\t1900000000\t1900000000\t1900000000",
    "NoNewPrivs": "1",
    "Seccomp": "2",
}


@pytest.mark.parametrize("process", list(Process))
def test_a_confined_process_passes(process: Process) -> None:
    verify.check_status(CONFINED, IdBlock(1_900_000_000), process)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Seccomp", "0"),
        ("Seccomp", "1"),
        ("Uid", "0\t0\t0\t0"),
        ("Uid", "1900000000\t0\t1900000000\t1900000000"),
        ("Gid", "1900000003\t1900000000\t1900000000\t1900000000"),
        ("NoNewPrivs", "0"),
    ],
)
def test_a_process_that_is_not_confined_is_refused(field: str, value: str) -> None:
    with pytest.raises(NotConfined):
        verify.check_status(CONFINED | {field: value}, IdBlock(1_900_000_000), Process.STEWARD)
    missing = {name: text for name, text in CONFINED.items() if name != field}
    with pytest.raises(NotConfined):
        verify.check_status(missing, IdBlock(1_900_000_000), Process.STEWARD)
