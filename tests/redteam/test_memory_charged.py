"""Memory that is no heap is charged to the command and bounded by its limit, too.

Source: DESIGN section 2, CASES RES-09, RES-15. Each filler runs with 128 MiB of memory; it ends in
a refusal (its own bound) or with MEMORY, and the host never gives more than the limit. The control
is that the same command may use the same resource in a small amount.
"""

import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
import trio

from sbxd.launcher.prepare import TMP_BYTES_MIN, tmpfs_bytes
from sbxd.launcher.requests import CgroupLimits
from sbxd.port.command import KillReason
from sbxd.port.limits import MIB
from tests.redteam.live import LIMITS, live

pytestmark = [
    pytest.mark.needs("daemon", "limits"),
    pytest.mark.gate("gate.sandbox.limits_enforced"),
]

# Each yields bytes that it holds; `left` of them in all.
HOLDERS = {
    "tmp": """
fd = os.open("/tmp/f", os.O_WRONLY | os.O_CREAT)
def hold():
    return os.write(fd, b"x" * 2**20)
""",
    "shm": """
fd = os.open("/dev/shm/f", os.O_WRONLY | os.O_CREAT)
def hold():
    return os.write(fd, b"x" * 2**20)
""",
    "memfd": """
fd = os.memfd_create("f")
def hold():
    return os.write(fd, b"x" * 2**20)
""",
    "anonymous": """
kept = []
def hold():
    kept.append(mmap.mmap(-1, 2**20))
    kept[-1].write(b"x" * 2**20)
    return 2**20
""",
    "shared": """
kept = []
def hold():
    kept.append(mmap.mmap(-1, 2**20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
    kept[-1].write(b"x" * 2**20)
    return 2**20
""",
    "sysv": """
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
def hold():
    segment = libc.shmget(0, 2**20, 0o1600)
    if segment < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    at = libc.shmat(segment, None, 0)
    if at == 2**64 - 1:
        raise OSError(ctypes.get_errno(), "shmat")
    ctypes.memset(at, 120, 2**20)
    return 2**20
""",
    "pipes": """
kept = []
def hold():
    reader, writer = os.pipe()
    kept.append((reader, writer))
    os.set_blocking(writer, False)
    size = 0
    try:
        while True:
            size += os.write(writer, b"x" * 4096)
    except BlockingIOError:
        return size
""",
    "sockets": """
kept = []
def hold():
    one, other = socket.socketpair()
    kept.append((one, other))
    one.setblocking(False)
    size = 0
    try:
        while True:
            size += one.send(b"x" * 4096)
    except BlockingIOError:
        return size
""",
}
PROGRAM = """
import ctypes, errno, mmap, os, socket, sys
{holder}
held, most = 0, int(sys.argv[1])
try:
    while held < most:
        held += hold()
        if held % (4 * 2**20) < 2**20:
            print(held, flush=True)
except OSError as error:
    print(held, errno.errorcode[error.errno], flush=True)
else:
    print(held, "all", flush=True)
"""
# What bounds a resource before the memory limit does; None: the limit itself.
BOUND = {
    "tmp": "ENOSPC",
    "shm": "ENOSPC",
    "pipes": "EMFILE",
    "sockets": "EMFILE",
}


@pytest.mark.case("RES-15")
@pytest.mark.parametrize("kind", HOLDERS)
async def test_what_is_no_heap_is_charged_and_bounded(kind: str) -> None:
    program = PROGRAM.format(holder=HOLDERS[kind])
    async with live() as environment:
        little = await environment.run("python3", "-c", program, str(4 * MIB))
        assert little.exit_code == 0, little
        assert little.stdout.endswith(b" all\n"), little
        much = await environment.run("python3", "-c", program, str(1024 * MIB))
    peak = much.usage.memory_peak_bytes
    assert peak is not None
    assert peak <= LIMITS.memory_bytes
    held = int(much.stdout.splitlines()[-1].split()[0])
    assert held <= LIMITS.memory_bytes
    if much.killed_by is None:
        assert much.stdout.split()[-1].decode() == BOUND[kind], much
    else:
        assert much.killed_by is KillReason.MEMORY, much
    assert peak >= held * 3 // 4, f"{held} bytes were held, and {peak} charged at most"


async def test_tmp_and_shm_together_stay_below_the_memory_limit() -> None:
    limits = CgroupLimits(cpu_millicores=1000, memory_bytes=LIMITS.memory_bytes, pids_max=16)
    assert TMP_BYTES_MIN <= tmpfs_bytes(limits) == LIMITS.memory_bytes // 4
    async with live() as environment:
        sizes = await environment.look(
            "answer([os.statvfs(p).f_blocks * os.statvfs(p).f_frsize for p in"
            " ('/tmp', '/dev/shm')])"
        )
    assert sizes == [LIMITS.memory_bytes // 4] * 2


async def test_what_one_command_left_in_tmp_is_charged_to_the_environment_alone() -> None:
    """A leaf is removed with its command; its pages stay charged above it, in the box."""
    fill = "open('/tmp/f', 'wb').write(b'x' * 24 * 2**20)"
    async with live() as environment:
        assert (await environment.python(fill)).exit_code == 0
        seen = await environment.python("import os; print(os.stat('/tmp/f').st_size)")
        heap = await environment.python("x = bytearray(64 * 2**20); print(len(x))")
    assert seen.stdout == b"25165824\n"
    assert heap.exit_code == 0


async def test_memory_high_is_below_memory_max_where_both_are() -> None:
    async with live() as environment:
        root = f"/sys/fs/cgroup/sbx.slice/sbx-{environment.handle.environment_id}.scope/box"
        maximum = int((Path(root) / "exec-1/memory.max").read_text())
        high = int((Path(root) / "exec-1/memory.high").read_text())
        weight = (Path(root).parent / "cpu.weight").read_text()
    assert maximum == LIMITS.memory_bytes
    assert maximum * 94 // 100 <= high < maximum
    assert weight == "10000\n"


# Names that do not exist are remembered by the kernel, in some 450 bytes each.
NAMES = """
import os, sys
folder, count = sys.argv[1], int(sys.argv[2])
pad = "x" * 230
for number in range(count):
    try:
        os.stat(f"{folder}/{pad}{number}")
    except FileNotFoundError:
        pass
print("done", flush=True)
"""
NAMES_COUNT = 150_000


def _reclaimable_slab() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("SReclaimable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel counts no reclaimable slab")


@pytest.mark.case("RES-15")
async def test_names_that_the_kernel_remembers_are_charged_and_bounded() -> None:
    limit = 40 * MIB
    limits = msgspec.structs.replace(LIMITS, memory_bytes=limit)
    async with live(limits) as environment:
        before = _reclaimable_slab()
        result = await environment.run("python3", "-c", NAMES, "/workspace", str(NAMES_COUNT))
        inside = _reclaimable_slab() - before
    assert result.stdout == b"done\n", result
    peak = result.usage.memory_peak_bytes
    assert peak is not None
    assert limit * 3 // 4 <= peak <= limit, "they were not charged, or not bounded"
    assert inside <= limit
    with tempfile.TemporaryDirectory(dir="/var/lib/sbxd") as folder:
        before = _reclaimable_slab()
        command = [sys.executable, "-c", NAMES, folder, str(NAMES_COUNT)]
        await trio.run_process(command, capture_stdout=True)
        outside = _reclaimable_slab() - before
    assert outside > limit, "the control: where nothing bounds them they are more than that"
