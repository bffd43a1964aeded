"""Workspace volumes of both kinds: limited, reserved, owned by the workload, erased."""

import errno
import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sbxd.jail.plan import WORKLOAD_ID
from sbxd.launcher import erase as erase_later
from sbxd.launcher import rest
from sbxd.launcher.kernel import (
    erasure,
    free_space,
    hostpaths,
    inventory,
    loop_image,
    project_quota,
    volume,
)
from sbxd.launcher.requests import Erasing, Inventory, VolumeSize

MIB = 1024 * 1024
FIRST, SECOND = "a" * 32, "b" * 32
SIZE = VolumeSize(workspace_bytes=24 * MIB, inodes_max=100)
MANY = VolumeSize(workspace_bytes=24 * MIB, inodes_max=1000)
# For one volume of SIZE with what ext4 needs beside it, and not for two.
ROOM_BYTES = 32 * MIB
FREE_SECONDS = 20
SERVICE = 64_321  # a uid like the daemon's: none of a workspace's

LOOP = pytest.param(volume.LOOP, marks=pytest.mark.needs("root", "loop"))
QUOTA = pytest.param(volume.QUOTA, marks=pytest.mark.needs("root", "quota"))


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory of the test's own, on the file system of the real one."""
    directory = Path(hostpaths.STATE_DIRECTORY) / "volume-tests"
    directory.mkdir(mode=0o755)
    monkeypatch.setattr(hostpaths, "STATE_DIRECTORY", str(directory))
    yield directory
    for environment_id in (FIRST, SECOND):
        erase(environment_id)
    os.rmdir(directory / "volumes" / "erasing")
    os.rmdir(directory / "volumes")
    directory.rmdir()


def erase(environment_id: str) -> None:
    """Detach the volume and erase all that is dead."""
    volume.detach(environment_id)
    folder = hostpaths.private_directory(hostpaths.erasing_directory())
    try:
        assert erasure.work(folder, 600).is_over
    finally:
        os.close(folder)


def volumes_of(state: Path) -> list[str]:
    return [name for name in os.listdir(state / "volumes") if name != "erasing"]


def dead_of(state: Path) -> list[str]:
    return os.listdir(state / "volumes" / "erasing")


@pytest.fixture
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind under test: a loop image also where there is a quota."""
    if request.param == volume.LOOP:
        monkeypatch.setattr(project_quota, "is_enforced", lambda directory: False)
    return str(request.param)


@contextmanager
def mounted(environment_id: str, size: VolumeSize, kind: str) -> Iterator[int]:
    handle = volume.create(environment_id, size)
    assert handle.kind == kind
    root = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle.mount_fd)
    os.close(handle.mount_fd)
    os.close(handle.numbers_fd)
    try:
        yield root
    finally:
        os.close(root)


@pytest.fixture
def small_state(state: Path) -> Iterator[Path]:
    """The state directory on a file system of its own, with room for one volume and the margin."""
    size = free_space.MARGIN_BYTES + ROOM_BYTES
    options = f"size={size},mode=0755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(state)], check=True)
    yield state
    for environment_id in (FIRST, SECOND):
        erase(environment_id)
    wait_until_devices_are_free()
    subprocess.run(["umount", str(state)], check=True)
    (state / "volumes" / "erasing").mkdir(parents=True)


def loop_devices() -> list[str]:
    """Those on an image of a test's."""
    found = []
    for name in os.listdir("/sys/block"):
        try:
            backing = Path(f"/sys/block/{name}/loop/backing_file").read_text()
        except OSError:  # no loop device, or one that is free
            continue
        if FIRST in backing or SECOND in backing:
            found.append(name)
    return found


def wait_until_devices_are_free() -> None:
    """The kernel drops an image with the last mount of it, and in its own time."""
    deadline = time.monotonic() + FREE_SECONDS
    while loop_devices():
        assert time.monotonic() < deadline
        os.sched_yield()


def used_of(state: Path, environment_id: str) -> project_quota.Used:
    """What a quota volume holds now, its own root directory included."""
    volumes = os.open(state / "volumes", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return project_quota.used(volumes, environment_id)
    finally:
        os.close(volumes)


@contextmanager
def refused(*numbers: int) -> Iterator[None]:
    """The block fails with one of these errnos."""
    with pytest.raises(OSError, match=r"^\[Errno") as raised:
        yield
    assert raised.value.errno in numbers


def some_files(root: int, count: int) -> None:
    for number in range(count):
        os.close(os.open(f"n{number}", os.O_CREAT | os.O_WRONLY, dir_fd=root))


def dead_used(state: Path, name: str) -> project_quota.Used:
    return used_of(state, f"erasing/{name}")


def project_of(place: Path) -> int:
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        raw = fcntl.ioctl(directory, 0x801C581F, bytes(28))  # FS_IOC_FSGETXATTR
    finally:
        os.close(directory)
    return int(struct.unpack("=5I8s", raw)[3])


def as_workload(root: int, work: str) -> tuple[int, str]:
    """Do `files` or `bytes` as the workload's uid until it is refused: how much, and why."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        done, why = 0, "?"
        try:
            os.setgroups([])
            os.setresgid(WORKLOAD_ID, WORKLOAD_ID, WORKLOAD_ID)
            os.setresuid(WORKLOAD_ID, WORKLOAD_ID, WORKLOAD_ID)
            flags = os.O_CREAT | os.O_WRONLY
            if work == "bytes":
                file = os.open("bytes", flags, 0o600, dir_fd=root)
                while True:
                    done += os.write(file, bytes(65536))
            while True:
                os.close(os.open(f"f{done}", flags, 0o600, dir_fd=root))
                done += 1
        except OSError as problem:
            why = errno.errorcode[problem.errno or 0]
        finally:
            os.write(there, f"{done} {why}".encode())
            os._exit(0)
    os.close(there)
    with os.fdopen(here) as pipe:
        done_text, why = pipe.read().split()
    os.waitpid(pid, 0)
    return int(done_text), why


@pytest.mark.parametrize("kind", [LOOP, QUOTA], indirect=True)
def test_a_volume_starts_empty_and_belongs_to_the_workload(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind) as root:
        assert os.listdir(root) == []
        status = os.fstat(root)
        assert (status.st_uid, status.st_gid) == (WORKLOAD_ID, WORKLOAD_ID)
        assert status.st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("kind", [LOOP, QUOTA], indirect=True)
def test_bytes_are_limited_for_the_workload(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind) as root:
        written, why = as_workload(root, "bytes")
        assert why in ("ENOSPC", "EDQUOT")
        assert SIZE.workspace_bytes * 0.98 <= written <= SIZE.workspace_bytes * 1.05


@pytest.mark.parametrize("kind", [LOOP, QUOTA], indirect=True)
def test_inodes_are_limited_for_the_workload(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind) as root:
        made, why = as_workload(root, "files")
        assert why in ("ENOSPC", "EDQUOT")
        assert SIZE.inodes_max <= made <= SIZE.inodes_max + 32


@pytest.mark.parametrize("kind", [LOOP, QUOTA], indirect=True)
def test_what_one_volume_holds_is_not_in_the_next(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind) as root:
        as_workload(root, "bytes")
    erase(FIRST)
    with mounted(FIRST, SIZE, kind) as root:
        assert os.listdir(root) == []
        assert as_workload(root, "bytes")[0] >= SIZE.workspace_bytes * 0.98


@pytest.mark.parametrize("kind", [LOOP, QUOTA], indirect=True)
def test_erasing_is_idempotent_and_leaves_nothing(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind):
        assert len(volumes_of(state)) == 1
    assert volume.detach(FIRST) is False, "what is empty is erased on the spot"
    assert volume.detach(FIRST) is False
    assert volumes_of(state) == []
    assert dead_of(state) == []


@pytest.mark.parametrize("kind", [LOOP, QUOTA], indirect=True)
def test_an_environment_has_one_volume(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind), pytest.raises(FileExistsError):
        volume.create(FIRST, SIZE)
    assert len(volumes_of(state)) == 1


@pytest.mark.parametrize("kind", [LOOP, QUOTA], indirect=True)
def test_space_that_is_not_there_is_not_promised(state: Path, kind: str) -> None:
    with refused(errno.ENOSPC, errno.EFBIG):
        volume.create(FIRST, VolumeSize(workspace_bytes=2**46, inodes_max=100))
    assert volumes_of(state) == []


@pytest.mark.parametrize("kind", [LOOP], indirect=True)
def test_volumes_leave_the_margin_to_what_else_is_written_there(
    small_state: Path, kind: str
) -> None:
    larger = VolumeSize(workspace_bytes=ROOM_BYTES + MIB, inodes_max=100)
    with refused(errno.ENOSPC):
        volume.create(FIRST, larger)
    with mounted(FIRST, SIZE, kind):  # the control: what there is room for is given
        with refused(errno.ENOSPC):
            volume.create(SECOND, SIZE)
        status = os.statvfs(small_state)
        assert status.f_bavail * status.f_frsize >= free_space.MARGIN_BYTES
        assert volumes_of(small_state) == [f"{FIRST}.img"]


@pytest.mark.parametrize("kind", [LOOP], indirect=True)
def test_no_attempt_at_an_image_takes_what_is_not_there(
    small_state: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[int] = []

    def allocate(image: int, offset: int, size: int) -> None:
        allocated.append(size)
        other = os.open(small_state / "volumes", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with pytest.raises(BlockingIOError):  # nobody counts while this is being taken
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)
        real(image, offset, size)

    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with refused(errno.ENOSPC):
        volume.create(FIRST, VolumeSize(workspace_bytes=ROOM_BYTES + MIB, inodes_max=100))
    assert allocated == []
    with mounted(FIRST, SIZE, kind):
        assert len(allocated) == 1  # the control


@pytest.mark.parametrize("kind", [LOOP], indirect=True)
def test_a_loop_image_is_allocated_before_it_is_used(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind):
        status = (state / "volumes" / f"{FIRST}.img").stat()
        assert status.st_blocks * 512 >= status.st_size >= SIZE.workspace_bytes


@pytest.mark.parametrize("kind", [LOOP], indirect=True)
def test_a_loop_device_is_free_once_its_mount_is_gone(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind):
        assert len(loop_devices()) == 1  # the positive control
    wait_until_devices_are_free()


@pytest.mark.parametrize("kind", [LOOP], indirect=True)
def test_a_failed_format_leaves_no_image(
    state: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_image, "_FEATURES", "no_such_feature")
    with pytest.raises(OSError, match=r"mkfs.ext4") as refused:
        volume.create(FIRST, SIZE)
    assert refused.value.errno == errno.EIO
    assert volumes_of(state) == []


@pytest.mark.parametrize("kind", [LOOP], indirect=True)
def test_a_loop_volume_is_not_resized(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind), refused(errno.EOPNOTSUPP):
        volume.resize(FIRST, SIZE)


@pytest.mark.parametrize("kind", [QUOTA], indirect=True)
def test_a_quota_follows_a_resize(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind) as root:
        volume.resize(FIRST, VolumeSize(workspace_bytes=SIZE.workspace_bytes, inodes_max=16))
        assert as_workload(root, "files")[0] == 16
        volume.resize(FIRST, VolumeSize(workspace_bytes=4 * MIB, inodes_max=17))
        assert 3 * MIB < as_workload(root, "bytes")[0] <= 4 * MIB
        used = used_of(state, FIRST)
        assert 3 * MIB < used.bytes_used <= 4 * MIB
        assert used.inodes_used == 19  # with the workspace's root and the directory around it


@pytest.mark.parametrize("kind", [QUOTA], indirect=True)
def test_one_volume_does_not_eat_anothers_promise(state: Path, kind: str) -> None:
    free = os.statvfs(state)
    most = free.f_bavail * free.f_frsize * 2 // 3
    large = VolumeSize(workspace_bytes=most, inodes_max=100)
    with mounted(FIRST, large, kind):
        with refused(errno.ENOSPC):
            volume.create(SECOND, large)
        volume.resize(FIRST, SIZE)
        with mounted(SECOND, large, kind), refused(errno.ENOSPC):
            volume.resize(FIRST, large)


@pytest.mark.parametrize("kind", [QUOTA], indirect=True)
def test_volumes_are_projects_of_their_own(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind) as first, mounted(SECOND, SIZE, kind) as second:
        as_workload(first, "bytes")
        assert used_of(state, SECOND).bytes_used < MIB
        assert as_workload(second, "bytes")[0] >= SIZE.workspace_bytes * 0.98


@pytest.mark.case("PEER-30")
@pytest.mark.parametrize("kind", [QUOTA], indirect=True)
def test_a_volume_is_detached_without_being_erased_and_goes_on_being_counted(
    state: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(FIRST, MANY, kind) as root:
        some_files(root, 500)
        as_workload(root, "bytes")
        held = used_of(state, FIRST)
        unlinked: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "unlink", lambda name, **_: unlinked.append(name))
            assert volume.detach(FIRST, party=7) is True
        assert len(unlinked) <= 1 + volume.AT_ONCE_ENTRIES
        assert volumes_of(state) == []
        (name,) = dead_of(state)
        assert name.startswith(f"00000007-{FIRST}-")
        monkeypatch.setattr(inventory, "take", lambda: ("boot", {}))
        assert rest.inventory(Inventory(ticket=1)).report.is_erasing
        assert erase_later.erasing(Erasing(ticket=1)).report.is_erasing
        count, used_bytes = volume.held_by_erasing()
        assert (count, used_bytes) == (1, held.bytes_used)
        # Its project goes on counting, so nobody else gets it, and its promise is given back.
        assert dead_used(state, name) == project_quota.Used(held.bytes_used, held.inodes_used, 0, 0)
        with mounted(SECOND, SIZE, kind):
            assert project_of(state / "volumes" / SECOND) != project_of(
                state / "volumes" / "erasing" / name
            )
    erase(FIRST)
    assert dead_of(state) == []
    assert volume.held_by_erasing() == (0, 0)
    assert not rest.inventory(Inventory(ticket=1)).report.is_erasing
    assert not erase_later.erasing(Erasing(ticket=1)).report.is_erasing


@pytest.mark.case("PEER-30")
@pytest.mark.parametrize("kind", [QUOTA], indirect=True)
def test_a_file_with_many_names_is_not_erased_where_it_is_detached(state: Path, kind: str) -> None:
    with mounted(FIRST, SIZE, kind) as root:
        some_files(root, 1)
        for number in range(200):
            os.link("n0", f"link{number}", src_dir_fd=root, dst_dir_fd=root)
        assert used_of(state, FIRST).inodes_used == 3
    assert volume.detach(FIRST)
    assert len(dead_of(state)) == 1


@pytest.mark.parametrize("kind", [QUOTA], indirect=True)
def test_what_cannot_be_erased_is_detached_all_the_same(
    state: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, **_: int) -> None:
        raise OSError(errno.EIO, name)

    with mounted(FIRST, SIZE, kind) as root:
        some_files(root, 1)
    with monkeypatch.context() as patch:
        patch.setattr(loop_image, "erase", lambda *_: None)
        patch.setattr(os, "unlink", refuse)
        assert volume.detach(FIRST)
    assert volumes_of(state) == []
    assert len(dead_of(state)) == 1


@pytest.mark.parametrize("kind", [QUOTA], indirect=True)
def test_an_id_that_is_used_twice_can_be_detached_twice(state: Path, kind: str) -> None:
    for _ in range(2):
        with mounted(FIRST, MANY, kind) as root:
            some_files(root, 100)
        assert volume.detach(FIRST)
    assert len(dead_of(state)) == 2


@pytest.mark.parametrize("kind", [QUOTA], indirect=True)
def test_the_promise_of_the_dead_is_free_and_what_they_hold_is_not(state: Path, kind: str) -> None:
    free = os.statvfs(state)
    large = VolumeSize(workspace_bytes=free.f_bavail * free.f_frsize * 2 // 3, inodes_max=1000)
    with mounted(FIRST, large, kind) as root:
        some_files(root, 100)
        with refused(errno.ENOSPC):
            volume.create(SECOND, large)  # the control
    assert volume.detach(FIRST)
    assert len(dead_of(state)) == 1
    with mounted(SECOND, large, kind):
        pass


@pytest.mark.case("DMN-16")
@pytest.mark.parametrize("kind", [LOOP, QUOTA], indirect=True)
@pytest.mark.parametrize("given", ["daemon", "control"])
def test_the_daemons_descriptor_opens_no_file_of_a_workspace(
    state: Path, kind: str, given: str
) -> None:
    handle = volume.create(FIRST, SIZE)
    root = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle.mount_fd)
    os.close(os.open("public", os.O_CREAT | os.O_WRONLY, 0o666, dir_fd=root))
    os.fchmod(root, 0o777)
    os.chmod("public", 0o666, dir_fd=root)
    descriptor = handle.numbers_fd if given == "daemon" else handle.mount_fd
    try:
        reached = as_service(descriptor)
        status, whole = os.fstatvfs(descriptor), os.fstatvfs(root)
        assert (status.f_blocks, status.f_files) == (whole.f_blocks, whole.f_files)
        assert whole.f_blocks * whole.f_frsize < 2 * SIZE.workspace_bytes
    finally:
        for each in (root, handle.mount_fd, handle.numbers_fd):
            os.close(each)
    assert reached == ([] if given == "daemon" else ["public", "list", "reopen", "make", "enter"])


def as_service(descriptor: int) -> list[str]:
    """What a process with no right of root's gets at through this descriptor."""
    attempts: dict[str, Callable[[], object]] = {
        "public": lambda: os.open("public", os.O_RDONLY, dir_fd=descriptor),
        "inside": lambda: os.open("workspace/public", os.O_RDONLY, dir_fd=descriptor),
        "list": lambda: os.open(".", os.O_RDONLY, dir_fd=descriptor),
        "reopen": lambda: os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY),
        "make": lambda: os.open("made", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=descriptor),
        "enter": lambda: os.fchdir(descriptor),
        "beyond": lambda: os.open("../erasing", os.O_PATH, dir_fd=descriptor),
    }
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(SERVICE, SERVICE, SERVICE)
            os.setresuid(SERVICE, SERVICE, SERVICE)
            for name, attempt in attempts.items():
                try:
                    attempt()
                except OSError:
                    continue
                os.write(there, f"{name} ".encode())
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here) as pipe:
        reached = pipe.read().split()
    os.waitpid(pid, 0)
    return reached
