"""A volume as a directory under a project quota, by descriptor and without any tool.

Invariants: a project id belongs to one directory of the volumes directory and is written on it, so
that the disk alone says which ids are taken; limits are hard ones; the sum of what is promised and
not yet used never exceeds what the file system has free. Callers hold the volumes directory's lock
around `create` and `resize`.
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from sbxd.jail.plan import WORKLOAD_ID
from sbxd.launcher.kernel import free_space, mounts
from sbxd.launcher.requests import VolumeSize

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_SYS_QUOTACTL_FD = 443  # the same number on every machine

_PRJQUOTA = 2
_Q_GETQUOTA = 0x800007
_Q_SETQUOTA = 0x800008
_Q_XGETQSTATV = (ord("X") << 8) + 8
_QSTATV_BYTES = 256
_QSTATV_HEAD = struct.Struct("=bBH")  # version, padding, flags
_PROJECT_ACCOUNTED, _PROJECT_ENFORCED = 0x10, 0x20
_QUOTA_BLOCK = struct.Struct("=8QII")  # struct if_dqblk
_QIF_LIMITS = 5
_BLOCK = 1024

_FSGETXATTR = 0x801C581F
_FSSETXATTR = 0x401C5820
_XATTR = struct.Struct("=5I8s")  # struct fsxattr
_PROJECT_INHERIT = 0x200

_FIRST_ID = 0x5342_0000
_LAST_ID = 0x5342_FFFF
WORKSPACE = b"workspace"  # the one entry of a volume's directory
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Used:
    """What a project uses and may use."""

    bytes_used: int
    inodes_used: int
    bytes_max: int
    inodes_max: int


def is_enforced(directory: int) -> bool:
    """Whether the file system counts project quotas and holds writers to them."""
    raw = bytearray(_QSTATV_BYTES)
    _QSTATV_HEAD.pack_into(raw, 0, 1, 0, 0)
    try:
        _quotactl(directory, _Q_XGETQSTATV, 0, raw)
        _project(directory)
    except OSError as problem:
        none = (errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EOPNOTSUPP, errno.ESRCH)
        if problem.errno in none:
            return False
        raise
    flags = _QSTATV_HEAD.unpack_from(raw)[2]
    wanted = _PROJECT_ACCOUNTED | _PROJECT_ENFORCED
    return bool(flags & wanted == wanted)


def create(directory: int, name: str, size: VolumeSize) -> tuple[int, int]:
    """Make the directory with its limits, and the workspace in it; detached mounts of the
    workspace and of the directory, which root alone may enter. The caller owns both.

    Raises OSError; `detach` removes what is left then.
    """
    volumes = dict(_volumes(directory))
    if name in volumes:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    _require_room(directory, size, volumes.values())
    project = _free_project(directory, set(volumes.values()))
    os.mkdir(name, 0o700, dir_fd=directory)
    volume = os.open(name, _OPEN_DIRECTORY, dir_fd=directory)
    try:
        _set_project(volume, project)
        _limit(directory, project, size)
        os.mkdir(WORKSPACE, dir_fd=volume)
        workspace = os.open(WORKSPACE, _OPEN_DIRECTORY, dir_fd=volume)
        try:
            os.fchown(workspace, WORKLOAD_ID, WORKLOAD_ID)
            os.fchmod(workspace, 0o755)
            return mounts.clone_tree(workspace), mounts.clone_tree(volume)
        finally:
            os.close(workspace)
    finally:
        os.close(volume)


def resize(directory: int, name: str, size: VolumeSize) -> None:
    """Set other limits. Raises OSError."""
    volumes = dict(_volumes(directory))
    if name not in volumes:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    others = [project for volume, project in volumes.items() if volume != name]
    own = _used(directory, volumes[name])
    _require_room(directory, size, others, own)
    _limit(directory, volumes[name], size)


def used(directory: int, name: str) -> Used:
    """What the volume holds and may hold. Raises OSError."""
    volume = os.open(name, _OPEN_DIRECTORY, dir_fd=directory)
    try:
        return _used(directory, _project(volume))
    finally:
        os.close(volume)


def detach(directory: int, name: str, erasing: int, target: str) -> Used | None:
    """Move the volume into the folder `erasing` as `target` and forget its limits: nothing is
    promised to it any more, and what it holds is counted for its project until it is erased.

    Returns what it holds; None when there is none. Raises OSError.
    """
    try:
        volume = os.open(name, _OPEN_DIRECTORY, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        project = _project(volume)
    finally:
        os.close(volume)
    held = _used(directory, project) if _is_ours(project) else Used(0, 0, 0, 0)
    if _is_ours(project):
        _write_limits(directory, project, 0, 0)
    os.rename(name, target, src_dir_fd=directory, dst_dir_fd=erasing)
    return held


def held(directory: int) -> tuple[int, int]:
    """How many volumes lie in a folder, and the bytes that they use. Raises OSError."""
    used_bytes = sum(_used(directory, project).bytes_used for _, project in _volumes(directory))
    return len(os.listdir(directory)), used_bytes


def _is_ours(project: int) -> bool:
    return _FIRST_ID <= project <= _LAST_ID


def _volumes(directory: int) -> Iterator[tuple[str, int]]:
    """Name and project id of every quota directory."""
    for entry in os.listdir(directory):
        with suppress(NotADirectoryError, FileNotFoundError):
            volume = os.open(entry, _OPEN_DIRECTORY, dir_fd=directory)
            try:
                if _is_ours(project := _project(volume)):
                    yield entry, project
            finally:
                os.close(volume)


def _require_room(
    directory: int, size: VolumeSize, others: Iterable[int], own: Used | None = None
) -> None:
    """Raises ENOSPC when the size is more than what is free and promised to nobody."""
    free_bytes, free_inodes = free_space.free(directory)
    for project in others:
        promise = _used(directory, project)
        free_bytes -= max(promise.bytes_max - promise.bytes_used, 0)
        free_inodes -= max(promise.inodes_max - promise.inodes_used, 0)
    wanted_bytes = size.workspace_bytes - (own.bytes_used if own else 0)
    wanted_inodes = size.inodes_max - (own.inodes_used if own else 0)
    if wanted_bytes > free_bytes or wanted_inodes > free_inodes:
        raise OSError(errno.ENOSPC, "the volume is larger than what is free and not promised")


def _free_project(directory: int, taken: set[int]) -> int:
    """One that no volume has and for which nothing is counted: what is being erased still is."""
    for project in range(_FIRST_ID, _LAST_ID + 1):
        if project not in taken and _used(directory, project).inodes_used == 0:
            return project
    raise OSError(errno.ENOSPC, "no project id is free")


def _project(directory: int) -> int:
    raw = fcntl.ioctl(directory, _FSGETXATTR, bytes(_XATTR.size))
    return int(_XATTR.unpack(raw)[3])


def _set_project(directory: int, project: int) -> None:
    raw = fcntl.ioctl(directory, _FSGETXATTR, bytes(_XATTR.size))
    flags, extent_size, _, _, cow_size, padding = _XATTR.unpack(raw)
    raw = _XATTR.pack(flags | _PROJECT_INHERIT, extent_size, 0, project, cow_size, padding)
    fcntl.ioctl(directory, _FSSETXATTR, raw)


def _used(directory: int, project: int) -> Used:
    raw = bytearray(_QUOTA_BLOCK.size)
    try:
        _quotactl(directory, _Q_GETQUOTA, project, raw)
    except OSError as problem:
        if problem.errno != errno.ENOENT:  # nothing was ever counted for it
            raise
        return Used(0, 0, 0, 0)
    blocks_max, _, space, inodes_max, _, inodes, _, _, _, _ = _QUOTA_BLOCK.unpack(raw)
    return Used(space, inodes, blocks_max * _BLOCK, inodes_max)


def _limit(directory: int, project: int, size: VolumeSize) -> None:
    """The volume's own directory and the workspace's root are two inodes more."""
    inodes = size.inodes_max + 2
    _write_limits(directory, project, -(-size.workspace_bytes // _BLOCK), inodes)
    read = _used(directory, project)
    if read.bytes_max < size.workspace_bytes or read.inodes_max != inodes:
        raise OSError(errno.EIO, "the limits read back are not those that were written")


def _write_limits(directory: int, project: int, blocks: int, inodes: int) -> None:
    raw = bytearray(_QUOTA_BLOCK.pack(blocks, blocks, 0, inodes, inodes, 0, 0, 0, _QIF_LIMITS, 0))
    _quotactl(directory, _Q_SETQUOTA, project, raw)


def _quotactl(directory: int, command: int, project: int, raw: bytearray) -> None:
    result = _LIBC.syscall(
        ctypes.c_long(_SYS_QUOTACTL_FD),
        ctypes.c_long(directory),
        ctypes.c_uint(command << 8 | _PRJQUOTA),
        ctypes.c_uint(project),
        (ctypes.c_char * len(raw)).from_buffer(raw),
    )
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "quotactl_fd")
