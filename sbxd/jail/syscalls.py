"""One wrapper per system call that the standard library does not offer, under the kernel's names.

Invariants: stdlib only (ctypes); no policy here; every failure is an OSError whose filename is the
name of the call. Numbers are in one table per machine, and other machines are refused at import.
The library is loaded as PyDLL: calls keep the interpreter's lock, which a process with one thread
never misses and which keeps a raw clone3 sound (the child holds the lock that it was born with).

Deliberately absent: fallbacks for old kernels, and any call that the standard library has.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from signal import SIGCHLD, Signals
from typing import Final, NamedTuple

_X86_64: Final = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "setdomainname": 171, "prctl": 157,
    "capget": 125, "capset": 126, "keyctl": 250, "unshare": 272, "setns": 308, "seccomp": 317,
    "signalfd4": 289, "execve": 59, "execveat": 322, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435,
    "close_range": 436, "openat2": 437, "mount_setattr": 442, "landlock_create_ruleset": 444,
    "landlock_add_rule": 445, "rt_sigaction": 13, "syncfs": 306,
}  # fmt: skip
_AARCH64: Final = {
    "mount": 40, "umount2": 39, "pivot_root": 41, "setdomainname": 162, "prctl": 167,
    "capget": 90, "capset": 91, "keyctl": 219, "unshare": 97, "setns": 268, "seccomp": 277,
    "signalfd4": 74, "execve": 221, "execveat": 281, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435,
    "close_range": 436, "openat2": 437, "mount_setattr": 442, "landlock_create_ruleset": 444,
    "landlock_add_rule": 445, "rt_sigaction": 134, "syncfs": 267,
}  # fmt: skip
NUMBERS: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}

if platform.machine() not in NUMBERS:
    raise ImportError(f"sbxd.jail knows x86_64 and aarch64, not {platform.machine()}")

_NUMBER: Final = NUMBERS[platform.machine()]
_LIBC: Final = ctypes.PyDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_LIBC.signal.restype = ctypes.c_void_p
_LIBC.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
CLONE_PIDFD = 0x1000
CLONE_PARENT = 0x8000
CLONE_INTO_CGROUP = 0x2_0000_0000

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

MS_REC = 0x4000
MS_PRIVATE = 0x4_0000
MNT_DETACH = 2
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x04
MOVE_MOUNT_T_EMPTY_PATH = 0x40
FSOPEN_CLOEXEC = 1
FSPICK_CLOEXEC = 1
FSPICK_EMPTY_PATH = 8
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
FSCONFIG_CMD_RECONFIGURE = 7
MOUNT_ATTR_RDONLY = 0x01
MOUNT_ATTR_NOSUID = 0x02
MOUNT_ATTR_NODEV = 0x04
MOUNT_ATTR_NOEXEC = 0x08
MOUNT_ATTR_IDMAP = 0x10_0000

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_IS_SET = 1
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4

SECCOMP_SET_MODE_FILTER = 1
KEYCTL_JOIN_SESSION_KEYRING = 1
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
SFD_NONBLOCK = os.O_NONBLOCK
SFD_CLOEXEC = os.O_CLOEXEC

_CAPABILITY_VERSION_3 = 0x2008_0522


class CloneArgs(ctypes.Structure):
    """struct clone_args, as far as Linux 5.7 defines it."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size",
            "tls", "set_tid", "set_tid_size", "cgroup",
        )
    ]  # fmt: skip


class SockFprog(ctypes.Structure):
    """struct sock_fprog: a classic BPF program."""

    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


class Cloned(NamedTuple):
    """What clone3 answers: pid 0 and pidfd -1 in the child; the parent owns the pidfd."""

    pid: int
    pidfd: int


class Capabilities(NamedTuple):
    """The three capability sets of a thread, as bit masks."""

    effective: int
    permitted: int
    inheritable: int


def _call(name: str, *arguments: object) -> int:
    result: int = _LIBC.syscall(ctypes.c_long(_NUMBER[name]), *arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def _long(value: int) -> ctypes.c_long:
    return ctypes.c_long(value)


def clone3(flags: int, cgroup_fd: int) -> Cloned:
    """fork into a cgroup and into the namespaces of `flags`; CLONE_PIDFD is always added.

    With CLONE_PARENT the exit signal is the caller's own. The interpreter's fork hooks run, as
    for os.fork. Only for a process with one thread.
    """
    pidfd = ctypes.c_int(-1)
    arguments = CloneArgs(
        flags=flags | CLONE_PIDFD | CLONE_INTO_CGROUP,
        pidfd=ctypes.addressof(pidfd),
        exit_signal=0 if flags & CLONE_PARENT else SIGCHLD,
        cgroup=cgroup_fd,
    )
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _LIBC.syscall(
        ctypes.c_long(_NUMBER["clone3"]), ctypes.byref(arguments), _long(ctypes.sizeof(arguments))
    )
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return Cloned(0, -1)
    number = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid == -1:
        raise OSError(number, os.strerror(number), "clone3")
    return Cloned(pid, pidfd.value)


def unshare(flags: int) -> None:
    """Leave the namespaces of `flags` for new ones."""
    _call("unshare", _long(flags))


def setns(fd: int, flags: int) -> None:
    """Enter the namespaces of `flags` of a pidfd, or the namespace that `fd` names."""
    _call("setns", _long(fd), _long(flags))


def mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int) -> None:
    """The old mount call; used for propagation only."""
    _call("mount", source, target, kind, ctypes.c_ulong(flags), None)


def umount2(target: bytes, flags: int) -> None:
    """Unmount what lies on top at `target`."""
    _call("umount2", target, _long(flags))


def pivot_root(new_root: bytes, put_old: bytes) -> None:
    """Make `new_root` the root of the mount namespace."""
    _call("pivot_root", new_root, put_old)


def open_tree(directory_fd: int, path: bytes, flags: int) -> int:
    """A descriptor of a mount; with OPEN_TREE_CLONE a detached copy of it."""
    return _call("open_tree", _long(directory_fd), path, ctypes.c_uint(flags | OPEN_TREE_CLOEXEC))


def move_mount(mount_fd: int, target_fd: int) -> None:
    """Attach the mount that `mount_fd` names onto the place that `target_fd` names."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    _call("move_mount", _long(mount_fd), b"", _long(target_fd), b"", ctypes.c_uint(flags))


def fsopen(kind: bytes) -> int:
    """A context in which a file system of this kind is configured."""
    return _call("fsopen", kind, ctypes.c_uint(FSOPEN_CLOEXEC))


def fspick(mount_fd: int) -> int:
    """A context in which the file system whose root this descriptor is, is configured anew."""
    flags = ctypes.c_uint(FSPICK_CLOEXEC | FSPICK_EMPTY_PATH)
    return _call("fspick", _long(mount_fd), b"", flags)


def fsconfig(context_fd: int, command: int, key: bytes | None, value: bytes | None) -> None:
    """Set an option of a context, or create its superblock."""
    _call("fsconfig", _long(context_fd), ctypes.c_uint(command), key, value, _long(0))


def fsmount(context_fd: int, attributes: int) -> int:
    """A detached mount of a created context."""
    flags = ctypes.c_uint(FSMOUNT_CLOEXEC)
    return _call("fsmount", _long(context_fd), flags, ctypes.c_uint(attributes))


def mount_setattr(
    mount_fd: int,
    path: bytes,
    flags: int,
    attributes: int,
    userns_fd: int = 0,
    cleared: int = 0,
    propagation: int = 0,
) -> None:
    """Change mount attributes of the mount at `path` below `mount_fd` (b"" and AT_EMPTY_PATH: it):
    add these, take away the cleared ones."""
    raw = struct.pack("QQQQ", attributes, cleared, propagation, userns_fd)
    _call("mount_setattr", _long(mount_fd), path, ctypes.c_uint(flags), raw, _long(len(raw)))


def openat2(directory_fd: int, path: bytes, flags: int, resolve: int) -> int:
    """Open with rules for the resolution; O_CLOEXEC is always added."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, resolve)
    return _call("openat2", _long(directory_fd), path, how, _long(len(how)))


def syncfs(fd: int) -> None:
    """Write all of the file system that `fd` lies on to its disk."""
    _call("syncfs", _long(fd))


def close_range(first: int, last: int) -> None:
    """Close every descriptor from `first` to `last`, both included."""
    _call("close_range", ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(0))


def prctl(option: int, argument: int = 0, third: int = 0) -> int:
    """prctl with number arguments; the rest are zero."""
    return _call("prctl", _long(option), _long(argument), _long(third), _long(0), _long(0))


def set_process_name(name: bytes) -> None:
    """PR_SET_NAME: at most 15 bytes."""
    _call("prctl", _long(PR_SET_NAME), name, _long(0), _long(0), _long(0))


def capget() -> Capabilities:
    """The caller's own sets."""
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    _call("capget", header, data)
    low = struct.unpack("6I", data.raw)
    return Capabilities(*(low[index] | low[index + 3] << 32 for index in range(3)))


def capset(sets: Capabilities) -> None:
    """Set the caller's own sets."""
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    data = struct.pack("6I", *(s & 0xFFFF_FFFF for s in sets), *(s >> 32 for s in sets))
    _call("capset", header, data)


def seccomp_set_mode_filter(program: bytes) -> None:
    """Install a BPF program (struct sock_filter[]) for the caller."""
    prog = SockFprog(len=len(program) // 8, filter=program)
    _call("seccomp", ctypes.c_uint(SECCOMP_SET_MODE_FILTER), ctypes.c_uint(0), ctypes.byref(prog))


def keyctl_join_session_keyring() -> int:
    """Leave the session keyring for a new anonymous one; answers its serial number."""
    return _call("keyctl", _long(KEYCTL_JOIN_SESSION_KEYRING), None, _long(0), _long(0), _long(0))


def signalfd(signals: Sequence[Signals]) -> int:
    """A non-blocking descriptor on which these (blocked) signals are read."""
    mask = struct.pack("Q", sum(1 << (number - 1) for number in signals))
    flags = ctypes.c_uint(SFD_NONBLOCK | SFD_CLOEXEC)
    return _call("signalfd4", _long(-1), mask, _long(len(mask)), flags)


def signal_default(number: int) -> None:
    """signal(number, SIG_DFL), by the C library, which knows each machine's struct sigaction."""
    if _LIBC.signal(number, None) == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "signal")


def rt_sigaction_default(number: int) -> None:
    """SIG_DFL for a signal that the C library keeps to itself: a zeroed struct sigaction."""
    _call("rt_sigaction", _long(number), bytes(32), None, ctypes.c_size_t(8))


def setdomainname(name: bytes) -> None:
    """Set the NIS domain name of the UTS namespace."""
    _call("setdomainname", name, _long(len(name)))


def execve(path: bytes, argv: Sequence[bytes], environment: Sequence[bytes]) -> None:
    """Replace the process; returns only by an OSError. The environment is taken as it is."""
    _call(
        "execve",
        path,
        (ctypes.c_char_p * (len(argv) + 1))(*argv, None),
        (ctypes.c_char_p * (len(environment) + 1))(*environment, None),
    )


def execveat(program_fd: int, argv: Sequence[bytes], environment: Sequence[bytes]) -> None:
    """As execve, of the file that `program_fd` is open on."""
    _call(
        "execveat",
        _long(program_fd),
        b"",
        (ctypes.c_char_p * (len(argv) + 1))(*argv, None),
        (ctypes.c_char_p * (len(environment) + 1))(*environment, None),
        _long(AT_EMPTY_PATH),
    )


def landlock_version() -> int:
    """The version of the kernel's Landlock interface; 0 where it has none or it is off."""
    flags = ctypes.c_uint(LANDLOCK_CREATE_RULESET_VERSION)
    try:
        return _call("landlock_create_ruleset", None, ctypes.c_size_t(0), flags)
    except OSError:
        return 0


def landlock_create_ruleset(files: int, network: int, scoped: int) -> int:
    """A ruleset that handles these rights; the descriptor is close-on-exec. An older kernel
    takes zeros for what it does not know."""
    raw = struct.pack("QQQ", files, network, scoped)
    size = ctypes.c_size_t(len(raw))
    return _call("landlock_create_ruleset", raw, size, ctypes.c_uint(0))


def landlock_add_path(ruleset_fd: int, path_fd: int, rights: int) -> None:
    """Allow these rights at and below what `path_fd` is open on."""
    raw = struct.pack("=Qi", rights, path_fd)
    kind = ctypes.c_uint(LANDLOCK_RULE_PATH_BENEATH)
    _call("landlock_add_rule", _long(ruleset_fd), kind, raw, ctypes.c_uint(0))
