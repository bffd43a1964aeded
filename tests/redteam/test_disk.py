"""A volume's limits hold and are reported as DISK, in a live environment.

Source: gate.sandbox.limits_enforced (disk filler, file-count filler), DESIGN section 3, CASES
RES-04, RES-10, FS-12, decision 0030. In a lane with project quota the volume is a quota directory,
in the other one a loop image: the tests are the same.
"""

import pytest

from sbxd.lifecycle.disk import EXHAUSTED_BYTES
from sbxd.port.command import ChangeKind, ExecutionResult, KillReason
from sbxd.port.errors import WorkspaceCode, WorkspaceError
from sbxd.port.limits import MIB
from tests.redteam.live import LIMITS, live

pytestmark = [pytest.mark.needs("daemon"), pytest.mark.gate("gate.sandbox.limits_enforced")]

# A quota volume (xfs) holds any number of hard links and large attributes; a loop one (ext4) has
# a limit of its own on both.
QUOTA = pytest.mark.needs("daemon", "quota")
LOOP = pytest.mark.needs("daemon", "loop-volumes")
VOLUMES = [pytest.param(None, marks=LOOP, id="loop"), pytest.param(None, marks=QUOTA, id="quota")]
PROMPTLY_MS = 20_000

FILLER = """
import os
print("start", flush=True)
fd = os.open("filler", os.O_WRONLY | os.O_CREAT)
while True:
    try:
        os.write(fd, b"x" * 65536)
    except OSError:
        pass
"""
FILE_FILLER = """
import os
print("start", flush=True)
n = 0
while True:
    try:
        os.close(os.open(f"f{n}", os.O_WRONLY | os.O_CREAT))
        n += 1
    except OSError:
        pass
"""
ATTRIBUTE_FILLER = """
import os
print("start", flush=True)
n = 0
while True:
    try:
        os.close(os.open(f"f{n % 1500}", os.O_WRONLY | os.O_CREAT))
        os.setxattr(f"f{n % 1500}", f"user.a{n // 1500}", b"v" * 60_000)
        n += 1
    except OSError:
        pass
"""
LINK_FILLER = """
import os
print("start", flush=True)
n = 0
while True:
    try:
        if n % 50_000 == 0:
            os.close(os.open(f"f{n}", os.O_WRONLY | os.O_CREAT))
            first = f"f{n}"
        n += 1
        os.link(first, f"{'l' * 240}{n}")
    except OSError:
        pass
"""


def _is_disk(result: ExecutionResult) -> None:
    assert result.killed_by is KillReason.DISK, result
    assert result.exit_code is None
    assert result.stdout == b"start\n"


@pytest.mark.case("RES-04")
@pytest.mark.parametrize("volume", VOLUMES)
async def test_a_disk_filler_is_ended_with_disk_and_its_partial_output(volume: None) -> None:
    async with live() as environment:
        result = await environment.python(FILLER)
    _is_disk(result)
    assert result.evidence.workspace_bytes_left is not None
    assert result.evidence.workspace_bytes_left < EXHAUSTED_BYTES
    peak = result.usage.workspace_bytes_peak
    assert peak is not None
    assert LIMITS.workspace_bytes - MIB < peak < LIMITS.workspace_bytes + MIB
    assert result.duration_ms < PROMPTLY_MS
    assert [change.path for change in result.files_changed] == ["filler"]


@pytest.mark.case("RES-04")
@pytest.mark.parametrize("volume", VOLUMES)
async def test_a_file_count_filler_is_ended_with_disk_and_its_partial_output(volume: None) -> None:
    async with live() as environment:
        result = await environment.python(FILE_FILLER)
    _is_disk(result)
    assert result.evidence.workspace_inodes_left == 0
    assert result.usage.workspace_inodes is not None
    assert result.usage.workspace_inodes <= LIMITS.inodes_max + 20
    assert result.files_changed_truncated


@pytest.mark.case("RES-04")
@QUOTA
async def test_attributes_are_charged_to_the_volume() -> None:
    async with live() as environment:
        result = await environment.python(ATTRIBUTE_FILLER)
    _is_disk(result)


@LOOP
async def test_a_loop_volume_takes_no_attribute_beyond_what_an_inode_holds() -> None:
    async with live() as environment:
        result = await environment.python(ATTRIBUTE_FILLER, timeout_seconds=3)
    assert result.killed_by is KillReason.TIMEOUT
    assert result.usage.workspace_bytes is not None
    assert result.usage.workspace_bytes < MIB


@pytest.mark.case("RES-04")
@pytest.mark.parametrize("volume", VOLUMES)
async def test_names_of_one_file_are_charged_to_the_volume(volume: None) -> None:
    async with live() as environment:
        result = await environment.python(LINK_FILLER, timeout_seconds=110)
    _is_disk(result)
    assert result.evidence.workspace_inodes_left is not None
    assert result.evidence.workspace_inodes_left > 0, "it was the bytes that ran out"


@pytest.mark.parametrize("volume", VOLUMES)
async def test_a_sparse_file_costs_what_it_holds(volume: None) -> None:
    source = """
import os, time
fd = os.open("sparse", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 2**40)
os.pwrite(fd, b"x", 2**39)
time.sleep(2)
print(os.fstat(fd).st_size, os.fstat(fd).st_blocks * 512 < 2**20)
"""
    async with live() as environment:
        result = await environment.python(source)
        assert result.killed_by is None, result
        assert result.stdout == b"1099511627776 True\n"
        (change,) = result.files_changed
        assert change.size_bytes == 2**40
        with pytest.raises(WorkspaceError) as caught:
            await environment.workspace.read("sparse")
        assert caught.value.code is WorkspaceCode.TOO_LARGE
        filled = await environment.python("print('start', flush=True)\n" + _FILL_SPARSE)
    _is_disk(filled)


_FILL_SPARSE = """
import os
fd = os.open("sparse", os.O_RDWR)
at = 0
while True:
    try:
        os.pwrite(fd, b"x" * 4096, at)
    except OSError:
        pass
    at += 65536
"""


@pytest.mark.parametrize("volume", VOLUMES)
async def test_a_program_that_copes_with_a_full_volume_is_left_alone(volume: None) -> None:
    source = """
import os
fd, n = os.open("tmp", os.O_WRONLY | os.O_CREAT), 0
try:
    while True:
        n += os.write(fd, b"x" * 2**20)
except OSError as error:
    os.unlink("tmp")
    print(error.errno, n > 2**24)
"""
    async with live() as environment:
        result = await environment.python(source)
    assert result.killed_by is None, result
    assert result.exit_code == 0
    assert result.stdout == b"28 True\n"


@pytest.mark.parametrize("volume", VOLUMES)
async def test_one_that_fails_for_want_of_room_is_disk_however_quick_it_was(volume: None) -> None:
    async with live() as environment:
        result = await environment.run("sh", "-c", "echo start; exec head -c 64M /dev/zero > f")
    _is_disk(result)


@pytest.mark.parametrize("volume", VOLUMES)
async def test_a_full_workspace_refuses_a_write_and_can_be_cleaned_up(volume: None) -> None:
    async with live() as environment:
        _is_disk(await environment.python(FILLER))
        with pytest.raises(WorkspaceError) as caught:
            await environment.workspace.write("more", b"y" * MIB)
        assert caught.value.code is WorkspaceCode.NO_SPACE
        looked = await environment.run("sh", "-c", "ls; sleep 1; exit 3")
        assert looked.exit_code == 3, "what was full before is not this command's doing"
        cleaned = await environment.run("sh", "-c", "sleep 1; rm filler")
        assert cleaned.exit_code == 0
        assert [change.change for change in cleaned.files_changed] == [ChangeKind.DELETED]
        await environment.workspace.write("more", b"y" * MIB)
        assert await environment.workspace.read("more") == b"y" * MIB
        _is_disk(await environment.python(FILLER))


@pytest.mark.parametrize("volume", VOLUMES)
async def test_the_workspace_port_meets_the_same_limits(volume: None) -> None:
    async with live() as environment:
        with pytest.raises(WorkspaceError) as caught:
            await environment.workspace.write("big", b"y" * (LIMITS.workspace_bytes + 4 * MIB))
        assert caught.value.code is WorkspaceCode.NO_SPACE
        result = await environment.run("ls", "-A")
    assert result.stdout == b"", "nothing is left of a write that was refused"
