"""Building a root out of detached mounts, by descriptors.

Invariants: a mount point below an image is found with openat2 that follows no link and leaves no
mount, since image content is shaped by others; file systems are made with fsopen, so their kind
is a fact and not something found at a path; a device node is used only if its number is right.
"""

import errno
import os
import stat

from sbxd.jail import syscalls
from sbxd.jail.syscalls import (
    AT_EMPTY_PATH,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
)

PAGE_BYTES = 4096
_LAST = "sys"
INODES_MIN = 1024
INODES_MAX = 1 << 20
# major and minor of what /dev offers
DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
}
_POINT = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_STRICT = (
    syscalls.RESOLVE_BENEATH
    | syscalls.RESOLVE_NO_SYMLINKS
    | syscalls.RESOLVE_NO_MAGICLINKS
    | syscalls.RESOLVE_NO_XDEV
)


def make_private() -> None:
    """Nothing mounted here propagates to where this namespace was copied from, or back."""
    syscalls.mount(None, b"/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)


def filesystem(kind: bytes, options: dict[str, str], attributes: int) -> int:
    """A detached mount of a new file system; the caller owns the descriptor."""
    context = syscalls.fsopen(kind)
    try:
        for key, value in options.items():
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, key.encode(), value.encode())
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None)
        return syscalls.fsmount(context, attributes)
    finally:
        os.close(context)


def tmpfs(size_bytes: int, mode: int, attributes: int) -> int:
    """A detached tmpfs of at most this size, with one inode per page within fixed bounds.

    Raises OSError(EINVAL) below one page: to the kernel a size of zero means no limit.
    """
    return filesystem(b"tmpfs", {**_bounds(size_bytes), "mode": f"{mode:o}"}, attributes)


def resize_tmpfs(root_fd: int, name: str, size_bytes: int) -> None:
    """Give the tmpfs that is attached at this directory of the root another size, with `tmpfs`'
    inodes. No link is followed. Raises OSError: EINVAL where more is in it, or none is there."""
    place = syscalls.openat2(root_fd, name.encode(), _POINT, syscalls.RESOLVE_NO_SYMLINKS)
    try:
        context = syscalls.fspick(place)
    finally:
        os.close(place)
    try:
        for key, value in _bounds(size_bytes).items():
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, key.encode(), value.encode())
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_RECONFIGURE, None, None)
    finally:
        os.close(context)


def _bounds(size_bytes: int) -> dict[str, str]:
    if size_bytes < PAGE_BYTES:
        raise OSError(errno.EINVAL, f"a tmpfs of {size_bytes} bytes", "fsconfig")
    inodes = max(INODES_MIN, min(INODES_MAX, size_bytes // PAGE_BYTES))
    return {"size": str(size_bytes), "nr_inodes": str(inodes)}


def restrict(mount_fd: int, attributes: int, flags: int = 0) -> None:
    """Add attributes to a mount; with AT_RECURSIVE in flags, to everything below it too."""
    syscalls.mount_setattr(mount_fd, b"", AT_EMPTY_PATH | flags, attributes)


def attach(mount_fd: int, root_fd: int, name: str) -> None:
    """Attach a detached mount onto a directory of the root; no link is followed."""
    point = syscalls.openat2(root_fd, name.encode(), _POINT, _STRICT)
    try:
        syscalls.move_mount(mount_fd, point)
    finally:
        os.close(point)


def attach_node(mount_fd: int, directory_fd: int, name: str) -> None:
    """Attach a detached mount of a node onto an empty file made for it."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    os.close(os.open(name, flags, 0o444, dir_fd=directory_fd))
    point = syscalls.openat2(directory_fd, name.encode(), os.O_PATH, _STRICT)
    try:
        syscalls.move_mount(mount_fd, point)
    finally:
        os.close(point)


def device(name: str) -> int:
    """A detached mount of one of DEVICES. Raises OSError(ENODEV) when the node is another one."""
    node = syscalls.open_tree(syscalls.AT_FDCWD, b"/dev/" + name.encode(), syscalls.OPEN_TREE_CLONE)
    try:
        found = os.fstat(node)
        if not stat.S_ISCHR(found.st_mode) or found.st_rdev != os.makedev(*DEVICES[name]):
            raise OSError(errno.ENODEV, f"/dev/{name} is not the device of that name", "open_tree")
        restrict(node, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC | MOUNT_ATTR_RDONLY)
    except OSError:
        os.close(node)
        raise
    return node


def fill_dev(dev_fd: int, nodes: dict[str, int]) -> None:
    """Put into an attached, writable /dev: DEVICES, the links to /proc/self/fd, a place for shm."""
    os.mkdir("shm", 0o755, dir_fd=dev_fd)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", name, dir_fd=dev_fd)
    for name, node in nodes.items():
        attach_node(node, dev_fd, name)


def cover_all_but(shown: frozenset[str], proc_fd: int) -> None:
    """Cover every entry of an attached proc that is not of a process and not in `shown`.

    A file is covered by one that nobody may open, a directory by an empty one; links (they lead
    to /proc/self) stay. Only what is attached can be copied, so the covers lie on `sys` until all
    but that is covered.
    """
    covers = tmpfs(PAGE_BYTES, 0o555, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC)
    listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)
    with os.scandir(listed) as entries:
        kinds = {
            entry.name: b"directory" if entry.is_dir(follow_symlinks=False) else b"file"
            for entry in entries
            if not (entry.name.isdecimal() or entry.name in shown or entry.is_symlink())
        }
    os.close(listed)
    attach(covers, proc_fd, _LAST)
    os.mkdir("directory", 0o555, dir_fd=covers)
    os.close(os.open("file", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0, dir_fd=covers))
    restrict(covers, MOUNT_ATTR_RDONLY)
    last = syscalls.open_tree(covers, kinds.pop(_LAST), syscalls.OPEN_TREE_CLONE)
    for name, kind in kinds.items():
        copy = syscalls.open_tree(covers, kind, syscalls.OPEN_TREE_CLONE)
        _cover(copy, proc_fd, name)
    detach(covers)
    os.close(covers)
    _cover(last, proc_fd, _LAST)


def _cover(cover_fd: int, proc_fd: int, name: str) -> None:
    point = syscalls.openat2(proc_fd, name.encode(), os.O_PATH | os.O_NOFOLLOW, _STRICT)
    try:
        syscalls.move_mount(cover_fd, point)
    finally:
        os.close(cover_fd)
        os.close(point)


def put_on_root(mount_fd: int) -> None:
    """Attach a detached mount over the root of this namespace, to be pivoted into later."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        syscalls.move_mount(mount_fd, root)
    finally:
        os.close(root)


def detach(mount_fd: int) -> None:
    """Detach an attached mount from its place."""
    os.fchdir(mount_fd)
    syscalls.umount2(b".", syscalls.MNT_DETACH)
    os.chdir("/")


def pivot_into(mount_fd: int) -> None:
    """Make this mount, which lies over the root, the root; detach the old one with all below."""
    os.fchdir(mount_fd)
    syscalls.pivot_root(b".", b".")
    syscalls.umount2(b".", syscalls.MNT_DETACH)
    os.chdir("/")
    here, wanted = os.stat("/"), os.fstat(mount_fd)
    if (here.st_dev, here.st_ino) != (wanted.st_dev, wanted.st_ino):
        raise OSError(errno.EXDEV, "the root is not the mount that was to become it", "pivot_root")
