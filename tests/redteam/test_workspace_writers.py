"""No process of the initial user namespace writes to a workspace.

Why: a process there that has CAP_SYS_RESOURCE writes through a project quota (the controls below);
one without it, and whoever is root of a sandbox's user namespace alone, is held to it. Source:
DESIGN sections 1 and 4.
"""

import ctypes
import errno
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from sbxd.jail import identity
from sbxd.jail.identity import Capability
from sbxd.launcher.kernel import project_quota
from sbxd.launcher.requests import VolumeSize
from sbxd.port.command import KillReason
from sbxd.port.errors import WorkspaceCode, WorkspaceError
from sbxd.port.limits import MIB
from tests.pacing import next_look
from tests.redteam.live import LIMITS, live

_LIBC = ctypes.CDLL(None, use_errno=True)
_FAN_MODIFY, _FAN_CLOSE_WRITE = 0x2, 0x8
_FAN_NONBLOCK = 0x2
_FAN_MARK_ADD, _FAN_MARK_FILESYSTEM = 0x1, 0x100
_EVENT = struct.Struct("=IBBHQii")  # struct fanotify_event_metadata
STATE = Path("/var/lib/sbxd")
VOLUMES = STATE / "volumes"
# The daemon's own books and the launcher's, on the same file system. The pool builds its next slot
# whenever it likes.
BOOKS = (f"{STATE}/audit/", f"{STATE}/journal/", f"{STATE}/uids/")
CAP_SYS_RESOURCE = 24
CAPABILITIES = 41
SIZE = VolumeSize(workspace_bytes=16 * MIB, inodes_max=100)


class Writers:
    """Who modifies a file of the volumes' file system, as the kernel tells it; but for the books
    of the daemon and the launcher."""

    def __init__(self) -> None:
        self._fanotify = _LIBC.fanotify_init(_FAN_NONBLOCK, os.O_RDONLY | os.O_CLOEXEC)
        if self._fanotify < 0:
            raise OSError(ctypes.get_errno(), "fanotify_init")
        mask = ctypes.c_uint64(_FAN_MODIFY | _FAN_CLOSE_WRITE)
        flags = _FAN_MARK_ADD | _FAN_MARK_FILESYSTEM
        if _LIBC.fanotify_mark(self._fanotify, flags, mask, -100, bytes(VOLUMES)) < 0:
            raise OSError(ctypes.get_errno(), "fanotify_mark")

    def take(self) -> set[tuple[int, int]]:
        """(pid, inode) of each modification since the last call."""
        found: set[tuple[int, int]] = set()
        while True:
            try:
                raw = os.read(self._fanotify, 64 * 1024)
            except BlockingIOError:
                return found
            while raw:
                length, _, _, _, _, descriptor, pid = _EVENT.unpack_from(raw)
                raw = raw[length:]
                if descriptor >= 0:
                    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(BOOKS):
                        found.add((pid, os.fstat(descriptor).st_ino))
                    os.close(descriptor)

    def close(self) -> None:
        os.close(self._fanotify)


@contextmanager
def writers() -> Iterator[Writers]:
    watch = Writers()
    try:
        yield watch
    finally:
        watch.close()


def _steward(box: str) -> tuple[int, int]:
    """Its pid and its effective capabilities."""
    (pid,) = Path(box, "steward/cgroup.procs").read_text().split()
    status = Path(f"/proc/{pid}/status").read_text()
    return int(pid), int(status.partition("CapEff:")[2].split()[0], 16)


def user_namespace(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/user").st_ino


@pytest.mark.needs("daemon", "quota", "root")
async def test_every_writer_of_a_workspace_is_in_the_sandboxs_user_namespace() -> None:
    source = """
import os, sys
open("by-command", "w").write("x" * 100_000)
print(os.stat("by-command").st_ino, flush=True)
sys.stdout.flush()
import time
time.sleep(3600)
"""
    inside: list[int] = []
    async with live() as environment:
        with writers() as watch:
            await environment.workspace.write("by-worker", b"y" * 100_000)
            by_worker = watch.take()
            namespaces = {pid: user_namespace(pid) for pid, _ in by_worker}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(environment.python, source)
                with trio.fail_after(60):
                    while not inside:
                        await next_look()
                        for pid, inode in watch.take():
                            by_worker.add((pid, inode))
                            namespaces[pid] = user_namespace(pid)
                            inside.append(pid)
                nursery.cancel_scope.cancel()
        # Control: a write by this process, of the initial namespace, is seen as such.
        with writers() as watch:
            control = VOLUMES / "control"
            control.write_bytes(b"z")
            seen = {pid for pid, inode in watch.take() if inode == control.stat().st_ino}
            control.unlink()
    assert os.getpid() in seen
    assert len(namespaces) >= 2, "the steward and the command"
    assert user_namespace(os.getpid()) not in namespaces.values()
    assert len(set(namespaces.values())) == 1


@pytest.mark.needs("daemon", "quota", "root")
async def test_the_steward_has_nothing_that_writes_through_a_quota() -> None:
    async with live() as environment:
        box = f"/sys/fs/cgroup/sbx.slice/sbx-{environment.handle.environment_id}.scope/box"
        pid, effective = _steward(box)
        assert effective & identity.mask(Capability.DAC_OVERRIDE)
        assert not effective >> CAP_SYS_RESOURCE & 1
        assert user_namespace(pid) != user_namespace(os.getpid())
        with pytest.raises(WorkspaceError) as caught:
            await environment.workspace.write("big", b"y" * (LIMITS.workspace_bytes + MIB))
        assert caught.value.code is WorkspaceCode.NO_SPACE
        filled = await environment.run("sh", "-c", "head -c 64M /dev/zero > f")
        assert filled.killed_by is KillReason.DISK
        # Blocks that the file system had set aside for the file are free again after the kill.
        written = (await environment.run("stat", "-c", "%s", "f")).stdout
        room = (LIMITS.workspace_bytes - int(written)) // MIB
        refusals = []
        for number in range(room + 1):
            try:
                await environment.workspace.write(f"small-{number}", b"y" * MIB)
            except WorkspaceError as refused:
                refusals.append(refused.code)
        assert set(refusals) == {WorkspaceCode.NO_SPACE}


@contextmanager
def ext4_with_project_quota(place: Path) -> Iterator[int]:
    """A file system whose quota a privileged writer passes (XFS's holds for it as well)."""
    image, at = place / "image", place / "at"
    at.mkdir()
    with image.open("wb") as file:
        file.truncate(192 * MIB)
    make = ("mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota", str(image))
    subprocess.run(make, check=True)
    subprocess.run(("mount", "-o", "loop,prjquota", str(image), str(at)), check=True)
    directory = os.open(at, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)
        subprocess.run(("umount", "-l", str(at)), check=True)


def _fill(root: int, name: str) -> tuple[int, int]:
    """Write up to twice the limit: how much was taken, and the errno of the refusal or 0."""
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=root)
    taken = 0
    try:
        while taken < 2 * SIZE.workspace_bytes:
            taken += os.write(descriptor, b"x" * 65536)
    except OSError as problem:
        return taken, problem.errno or -1
    finally:
        os.close(descriptor)
    return taken, 0


def _fill_without(root: int, capability: int) -> int:
    """The errno that root meets in a child that has given this up; 0 for none."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            os.unlink("filler", dir_fd=root)
            identity.keep_capabilities(((1 << CAPABILITIES) - 1) & ~(1 << capability))
            code = _fill(root, "filler")[1]
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.needs("root", "quota", "loop")
def test_control_the_hosts_root_writes_through_a_quota_with_one_capability(tmp_path: Path) -> None:
    with ext4_with_project_quota(tmp_path) as directory:
        assert project_quota.is_enforced(directory)
        for each in project_quota.create(directory, "v", SIZE):
            os.close(each)
        root = os.open("v/workspace", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
        taken, number = _fill(root, "filler")
        assert number == 0, errno.errorcode[number]
        assert taken == 2 * SIZE.workspace_bytes
        assert project_quota.used(directory, "v").bytes_used > SIZE.workspace_bytes
        assert _fill_without(root, CAP_SYS_RESOURCE) in (errno.EDQUOT, errno.ENOSPC)
        os.close(root)
