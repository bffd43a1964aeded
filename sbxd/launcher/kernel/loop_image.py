"""A volume as an ext4 image on a loop device that frees itself with the last mount.

Invariants: the image's blocks are allocated before it is formatted (a sandbox can never meet a
full host where it was promised space); the device is cleared by the kernel, not by us; the mount
is detached. The file system has no journal, no lost+found and no reserved blocks: it dies with
its environment and is never checked or mounted a second time.
"""

import errno
import fcntl
import os
import stat
import struct
from contextlib import suppress

from sbxd.jail import syscalls
from sbxd.jail.plan import WORKLOAD_ID
from sbxd.launcher.kernel import free_space, hostpaths, process
from sbxd.launcher.requests import VolumeSize

_SUFFIX = ".img"
_BLOCK = 4096
_GROUP_BLOCKS = 8 * _BLOCK
_INODE = 256
_RESERVED_INODES = 11  # ten of ext4's own, and lost+found, then the one without a name
_FIXED_BLOCKS = 4
_MKFS_SECONDS = 60
_FEATURES = (
    "none,extent,filetype,dir_index,flex_bg,sparse_super,large_file,huge_file,dir_nlink,"
    "extra_isize,metadata_csum,64bit"
)

_LOOP_MAJOR = 7
_MISC_MAJOR, _LOOP_CONTROL_MINOR = 10, 237
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_LO_FLAGS_DIRECT_IO = 16
_LOOP_CONFIG = struct.Struct("=II232s64s")  # struct loop_config
_LOOP_INFO64 = struct.Struct("=QQQQQIIII64s64s32s16s")
_FREE_TRIES = 64


def exists(directory: int, name: str) -> bool:
    """Whether this environment has an image."""
    try:
        os.stat(name + _SUFFIX, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def create(directory: int, name: str, size: VolumeSize) -> tuple[int, int]:
    """Make and mount the image; the detached mount, and a file on it that has no name and that
    nobody may open, for the numbers. The caller owns both.

    Raises OSError; then no image is left.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    image = os.open(name + _SUFFIX, flags, 0o600, dir_fd=directory)
    try:
        _allocate(directory, image, _image_bytes(size))
        _format(image, size)
        device, path = _attach(directory, name, image)
        try:
            mount = _mount(device, path)
        finally:
            os.close(device)
    except BaseException:
        erase(directory, name)
        raise
    finally:
        os.close(image)
    os.rmdir("lost+found", dir_fd=mount)
    nameless = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0, dir_fd=mount)
    try:
        numbers = os.open(hostpaths.descriptor_path(nameless), os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(nameless)
    return mount, numbers


def erase(directory: int, name: str) -> None:
    """Remove the image. Idempotent."""
    with suppress(FileNotFoundError):
        os.unlink(name + _SUFFIX, dir_fd=directory)


def _allocate(directory: int, image: int, size: int) -> None:
    """Not by trying: the attempt itself would leave nobody any room until it is given up."""
    with free_space.exclusive(directory):
        if size > free_space.free(directory)[0]:
            raise OSError(errno.ENOSPC, "the volume is larger than what is free")
        os.posix_fallocate(image, 0, size)


def _image_bytes(size: VolumeSize) -> int:
    """The bytes asked for, and what ext4 itself needs beside them."""
    blocks = -(-size.workspace_bytes // _BLOCK)
    inode_blocks = -(-(size.inodes_max + _RESERVED_INODES + 16) * _INODE // _BLOCK)
    blocks += inode_blocks + _FIXED_BLOCKS
    groups = -(-blocks // _GROUP_BLOCKS)
    blocks += 4 * groups
    # ext4 keeps 2 % (at most 4096 clusters) to itself for splitting extents on a full volume
    return (blocks + min(blocks // 49 + 1, 4096)) * _BLOCK


def _format(image: int, size: VolumeSize) -> None:
    owner = f"{WORKLOAD_ID}:{WORKLOAD_ID}"
    command = [
        *(_mkfs(), "-F", "-q", "-b", str(_BLOCK), "-I", str(_INODE), "-m", "0"),
        *("-N", str(size.inodes_max + _RESERVED_INODES), "-O", _FEATURES),
        *("-E", f"lazy_itable_init=1,nodiscard,root_owner={owner}"),
        hostpaths.descriptor_path(image),
    ]
    environment = {"PATH": hostpaths.SYSTEM_PATH, "LC_ALL": "C"}
    status, said = process.run(command, environment, _MKFS_SECONDS, 2, image)
    if status != 0:
        text = said.decode("ascii", "replace").strip().rpartition("\n")[2]
        raise OSError(errno.EIO, f"mkfs.ext4: {text[:200]}")


def _mkfs() -> str:
    found = [f"{each}/mkfs.ext4" for each in hostpaths.SYSTEM_PATH.split(":")]
    return next((each for each in found if os.access(each, os.X_OK)), found[0])


def _attach(directory: int, name: str, image: int) -> tuple[int, str]:
    """A free loop device on the image, and a path that opens it."""
    control = _node(
        directory,
        name,
        hostpaths.LOOP_CONTROL,
        stat.S_IFCHR,
        os.makedev(_MISC_MAJOR, _LOOP_CONTROL_MINOR),
    )
    try:
        for _ in range(_FREE_TRIES):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            path = hostpaths.loop_device(number)
            device = _node(directory, name, path, stat.S_IFBLK, os.makedev(_LOOP_MAJOR, number))
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, _configuration(image))
            except OSError as problem:
                os.close(device)
                if problem.errno != errno.EBUSY:  # another took it between the two calls
                    raise
            else:
                return device, hostpaths.descriptor_path(device)
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no loop device stays free long enough")


def _configuration(image: int) -> bytes:
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
    info = _LOOP_INFO64.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, b"", b"", b"", b"")
    return _LOOP_CONFIG.pack(image, _BLOCK, info, b"")


def _node(directory: int, name: str, path: str, kind: int, device: int) -> int:
    """Open a device node; where nothing makes nodes, through one of our own that is gone again."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        node = f"{name}.node"
        os.mknod(node, kind | 0o600, device, dir_fd=directory)
        try:
            return os.open(node, flags | os.O_NOFOLLOW, dir_fd=directory)
        finally:
            os.unlink(node, dir_fd=directory)


def _mount(device: int, path: str) -> int:
    context = syscalls.fsopen(b"ext4")
    try:
        syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, b"source", path.encode())
        for option in (b"noinit_itable", b"nobarrier"):
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_FLAG, option, None)
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None)
        return syscalls.fsmount(context, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV)
    finally:
        os.close(context)
