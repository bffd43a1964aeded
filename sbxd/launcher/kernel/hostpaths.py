"""Every host path that the launcher uses. No other module of it spells one.

Invariants: an environment id or an image digest is checked against its grammar before it becomes
part of a path; everything that root writes lies below directories that only root may change
(`private_directory` proves it), so that the owner of the image store cannot redirect root.

Layout of the state directory (root, 0755):
    images/    the OCI layout, written by the user `sbxd`, read and verified here
    unpacked/  root, 0700: `<digest hex>/rootfs` and `<digest hex>/complete`
    volumes/   root, 0700: see `sbxd.launcher.kernel.volume`; `erasing/` in it holds what is dead
    uids/      root, 0700: one file `<base>-<environment id>` per block in use
"""

import errno
import os
import re
import stat
import sys
from contextlib import suppress

import sbxd
from sbxd.jail import syscalls
from sbxd.port.ids import ENVIRONMENT_ID_PATTERN

STATE_DIRECTORY = "/var/lib/sbxd"
SHARE_DIRECTORY = "/usr/share/sbxd"
PROFILES_DIRECTORY = "/etc/sbxd/seccomp"
CGROUP_ROOT = "/sys/fs/cgroup"
SLICE = "sbx.slice"
SCOPE_PREFIX = "sbx-"
SCOPE_SUFFIX = ".scope"
LAUNCHER_SOCKET = "/run/sbxd-launcher/launcher.sock"
SYSTEMD_PRIVATE_SOCKET = "/run/systemd/private"
SYSTEM_BUS_SOCKET = "/run/dbus/system_bus_socket"
NULL_DEVICE = "/dev/null"
PROC = "/proc"
SECURITYFS = "/sys/kernel/security"
APPARMOR_PROFILES = f"{SECURITYFS}/apparmor/profiles"
APPARMOR_POLICY = "/etc/apparmor.d"
LOOP_CONTROL = "/dev/loop-control"
PROFILE_BYTES_MAX = 1024 * 1024
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
RUNSC = "/usr/bin/runsc"
GUEST_INIT = "sbx-guest-init"
LIBRARY_DIRECTORY = "/usr/lib/sbxd"

_ENVIRONMENT_ID = re.compile(ENVIRONMENT_ID_PATTERN)
_SCOPE = re.compile(r"^sbx-([0-9a-f]{32})\.scope$")
_DIGEST = re.compile(r"^sha256:([0-9a-f]{64})\Z")
STRICT = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS


def _checked(environment_id: str) -> str:
    if _ENVIRONMENT_ID.fullmatch(environment_id) is None:
        raise ValueError("not an environment id")
    return environment_id


def scope_name(environment_id: str) -> str:
    """The unit of one environment."""
    return f"{SCOPE_PREFIX}{_checked(environment_id)}{SCOPE_SUFFIX}"


def image_scope_name(word: str) -> str:
    """The unit in which an image is unpacked; it names no environment."""
    return f"{SCOPE_PREFIX}image-{word}{SCOPE_SUFFIX}"


def environment_of_scope(name: str) -> str | None:
    """The environment whose unit has this name, or None when it is not one of ours."""
    match = _SCOPE.fullmatch(name)
    return match.group(1) if match else None


def slice_directory() -> str:
    """The cgroup directory that holds all scopes."""
    return f"{CGROUP_ROOT}/{SLICE}"


def scope_directory(environment_id: str) -> str:
    """The cgroup directory of one environment's scope."""
    return f"{CGROUP_ROOT}/{SLICE}/{scope_name(environment_id)}"


def cgroup_path(environment_id: str, leaf: str) -> str:
    """What the third field of /proc/PID/cgroup says of a process in this leaf of the box."""
    return f"/{SLICE}/{scope_name(environment_id)}/box/{leaf}"


def digest_hex(image_digest: str) -> str:
    """The hexadecimal part of `sha256:…`. Raises ValueError for anything else."""
    match = _DIGEST.fullmatch(image_digest)
    if match is None:
        raise ValueError("not an image digest")
    return match.group(1)


def open_blobs() -> int:
    """The folder of the image store's blobs, which the user sbxd writes: reached from the state
    directory beneath it and through no link. The caller owns the descriptor.

    Raises UntrustedDirectory when it is neither the store's owner's nor root's, OSError.
    """
    state = os.open(STATE_DIRECTORY, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _require_ours(state)
        store = os.stat("images", dir_fd=state, follow_symlinks=False)
        blobs = syscalls.openat2(state, b"images/blobs/sha256", os.O_DIRECTORY, STRICT)
    finally:
        os.close(state)
    if os.fstat(blobs).st_uid not in (0, store.st_uid):
        os.close(blobs)
        raise UntrustedDirectory(errno.EPERM, "the image store's blobs are another user's")
    return blobs


def open_blob(blobs: int, image_digest: str) -> int:
    """A blob of the store, for reading; the caller owns the descriptor. What lies there may be
    anything: it is opened only as a regular file with one name, of the store's owner or of root.

    Raises ValueError for anything else, OSError.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
    blob = syscalls.openat2(blobs, digest_hex(image_digest).encode(), flags, STRICT)
    found, owners = os.fstat(blob), (0, os.fstat(blobs).st_uid)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid in owners:
        return blob
    os.close(blob)
    raise ValueError("a blob is not a regular file with one name, of the image store's owner")


def unpacked_directory() -> str:
    """Where unpacked images live."""
    return f"{STATE_DIRECTORY}/unpacked"


def volumes_directory() -> str:
    """Where volumes live."""
    return f"{STATE_DIRECTORY}/volumes"


def erasing_directory() -> str:
    """Where volumes lie that are to be erased: on their own file system, so that they are moved."""
    return f"{volumes_directory()}/erasing"


def volume_name(environment_id: str) -> str:
    """What the entries of one environment in the volumes directory start with."""
    return _checked(environment_id)


def loop_device(number: int) -> str:
    """The node of a loop device."""
    return f"/dev/loop{number:d}"


def descriptor_path(descriptor: int) -> str:
    """A path that opens what this descriptor of the calling process names."""
    return f"{PROC}/self/fd/{descriptor:d}"


def uids_directory() -> str:
    """Where the uid blocks in use are recorded."""
    return f"{STATE_DIRECTORY}/uids"


def below_descriptor(directory: int, name: str) -> str:
    """A name in an open directory, for calls that take no descriptor."""
    return f"{PROC}/self/fd/{directory:d}/{name}"


def process_file(pid: int, name: str) -> str:
    """A file of a process as the launcher's own /proc shows it."""
    return f"{PROC}/{pid:d}/{name}"


def boot_id() -> str:
    """The kernel's id of this boot."""
    with open(f"{PROC}/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


class UntrustedDirectory(OSError):
    """A directory that root is to write below can be changed by somebody else."""


def private_directory(path: str) -> int:
    """Open `path`, making it (root, 0700) when it is missing; the caller owns the descriptor.

    Raises UntrustedDirectory when the directory or its parent is a link, is not root's or may be
    written by others.
    """
    parent = os.open(os.path.dirname(path), os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _require_ours(parent)
        name = os.path.basename(path)
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        directory = os.open(name, os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        _require_ours(directory)
    except OSError:
        os.close(directory)
        raise
    return directory


def _require_ours(directory: int) -> None:
    status = os.fstat(directory)
    if status.st_uid != 0 or stat.S_IMODE(status.st_mode) & 0o022:
        raise UntrustedDirectory(
            1, "a directory or file of the launcher is not root's alone: chown root, chmod go-w"
        )


def loop_backing_files() -> list[tuple[int, str]]:
    """The number of each loop device in use, and the path of the image that it is on."""
    block = "/sys/block"
    found = []
    for name in os.listdir(block) if os.path.isdir(block) else []:
        number = name.removeprefix("loop")
        if number == name or not number.isdigit():
            continue
        with (
            suppress(OSError),  # the device is free, or was released while we looked
            open(f"{block}/{name}/loop/backing_file", errors="surrogateescape") as file,
        ):
            found.append((int(number), file.read().rstrip("\n")))
    return found


def seccomp_profile(name: str) -> str:
    """The file of a shipped syscall profile: of the checkout, else of the installation's prefix,
    else of the distribution's package. Raises FileNotFoundError."""
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(sbxd.__file__)))
    for directory in (checkout, f"{sys.prefix}/share/sbxd", SHARE_DIRECTORY):
        path = f"{directory}/seccomp/{name}.json"
        if os.path.isfile(path):
            return path
    raise FileNotFoundError(errno.ENOENT, "the syscall profile is not installed", name)


def guest_init() -> str:
    """The compiled process 1 of a sandbox with a kernel of its own: of the distribution's package,
    of the installation's prefix, else of the checkout. Raises FileNotFoundError."""
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(sbxd.__file__)))
    for directory in (LIBRARY_DIRECTORY, f"{sys.prefix}/lib/sbxd", f"{checkout}/build"):
        path = f"{directory}/{GUEST_INIT}"
        if os.path.isfile(path):
            return path
    raise FileNotFoundError(errno.ENOENT, "guest/init.c is not compiled (make guest)", GUEST_INIT)


def open_trusted(path: str) -> int:
    """Open a regular file that only root may change; the caller owns the descriptor.

    Raises UntrustedDirectory, and OSError for what is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_ours(descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "a program of the launcher is not a regular file")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def operator_profiles() -> dict[str, bytes]:
    """The operator's own syscall profiles by name: each `NAME.json` of a directory that, like
    the files in it, is root's alone; none where there is no directory.

    Raises UntrustedDirectory, and OSError for a file that is not a small regular one.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    found = {}
    try:
        directory = os.open(PROFILES_DIRECTORY, flags | os.O_DIRECTORY)
    except FileNotFoundError:
        return {}
    try:
        _require_ours(directory)
        for entry in sorted(os.listdir(directory)):
            name = entry.removesuffix(".json")
            if name == entry:
                continue
            with os.fdopen(os.open(entry, flags, dir_fd=directory), "rb") as file:
                _require_ours(file.fileno())
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > PROFILE_BYTES_MAX:
                    raise OSError(errno.EINVAL, f"seccomp profile {name!a} is not a small file")
                found[name] = file.read(PROFILE_BYTES_MAX)
    finally:
        os.close(directory)
    return found


_FLAG_FILES = {
    "apparmor": "/sys/module/apparmor/parameters/enabled",
    "seccomp": f"{PROC}/sys/kernel/seccomp/actions_avail",
    "selinux": "/sys/fs/selinux/enforce",
    "swaps": f"{PROC}/swaps",
}


def flag_file(name: str) -> str:
    """The text of a known one-line file of the kernel, "" where it does not exist."""
    try:
        with open(_FLAG_FILES[name], encoding="ascii") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def apparmor_profiles() -> str:
    """The kernel's list of loaded profiles. Raises OSError where securityfs is not mounted."""
    with open(APPARMOR_PROFILES, encoding="utf-8", errors="replace") as file:
        return file.read()


def swap_lines() -> list[str]:
    """The swap devices in use."""
    return flag_file("swaps").splitlines()[1:]


def state_disk() -> str | None:
    """The whole disk below the state directory as "MAJ:MIN"; None where there is none (a file
    system in memory or on the network, or on several disks)."""
    device = os.stat(STATE_DIRECTORY).st_dev
    entry = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    whole = f"{entry}/../dev" if os.path.exists(f"{entry}/partition") else f"{entry}/dev"
    try:
        with open(whole, encoding="ascii") as file:
            return file.read(32).strip()
    except FileNotFoundError:
        return None
