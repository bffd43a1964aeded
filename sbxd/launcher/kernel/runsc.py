"""gVisor's `runsc` as the launcher uses it: which program it is, with which flags, from where.

Invariants: the program is root's alone, was hashed when the launcher started, and is the same file
still when it is started; it runs in the environment's leaf from its first instruction on, as root
of a user namespace that maps the environment's own block and nothing else, in a mount namespace
whose root holds nothing of the host but /proc and the null device; all that it writes (its state,
its control socket, its log) lies in that root and is gone with the last of its processes. Each
flag that matters is given, also where it is the default.

Source: decision 0080.
"""

import errno
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final, NoReturn

from sbxd.jail import identity, mounts, syscalls
from sbxd.jail.build import MAPPED
from sbxd.jail.handshake import Gate
from sbxd.jail.plan import IdBlock
from sbxd.jail.syscalls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
)
from sbxd.launcher.kernel import hostpaths, oci_spec, process, trace
from sbxd.launcher.kernel import mounts as kernel_mounts
from sbxd.launcher.kernel.oci_spec import SentrySpec

START_SECONDS: Final = 20.0
_NAMESPACES: Final = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)
ROOT_BYTES: Final = 1024 * 1024
VERSION_SECONDS: Final = 10.0
_LOG_BYTES_MAX: Final = 2000
_CHUNK_BYTES: Final = 1024 * 1024
_FIRST_FREE: Final = 5
# The state of one sandbox is in a root of its own, so its name needs to tell it from no other.
_NAME: Final = "sandbox"
# Not among them: --watchdog-action, which this build hands on to its own processes in a word that
# they refuse; its default, a line in the log, is what we want.
FLAGS: Final = (
    "--root=/state",
    "--log=/log",
    "--platform=systrap",
    "--network=none",
    "--net-raw=false",
    "--ignore-cgroups=true",
    "--systemd-cgroup=false",
    "--rootless=false",
    "--directfs=false",
    "--file-access=exclusive",
    "--file-access-mounts=shared",
    "--overlay2=none",
    "--host-uds=none",
    "--host-fifo=none",
    "--oci-seccomp=false",
    "--allow-flag-override=false",
    "--nvproxy=false",
    "--tpuproxy=false",
    "--iouring=false",
    "--profile=false",
    "--debug=false",
    "--strace=false",
    f"--pod-init-config=/{trace.DOCUMENT}",
)
RUN: Final = ("run", "--detach", "--bundle=/bundle", "--pid-file=/pid", "--pass-fd=3:3")


@dataclass(frozen=True)
class Runsc:
    """The program that the launcher found when it started. `identity` is that of the file."""

    path: str
    sha256: str
    version: str
    identity: tuple[int, ...]


@dataclass(frozen=True)
class Unusable:
    """Why there is no program to start a sandbox with. The other mechanisms do without it."""

    errno: int
    detail: str
    fix: str


NOT_INSTALLED: Final = Unusable(
    errno.ENOENT,
    "runsc was not installed when the launcher started",
    "install the package runsc and restart sbxd-launcher",
)


def find(path: str) -> Runsc | Unusable:
    """The program at this path, hashed and asked for its version."""
    try:
        return _examine(path)
    except FileNotFoundError:
        return NOT_INSTALLED
    except OSError as problem:
        return Unusable(
            problem.errno or errno.EIO,
            f"runsc cannot be used: {problem.strerror}",
            "run `runsc --version` as root, see to what it says, and restart sbxd-launcher",
        )


def _examine(path: str) -> Runsc:
    """Raises OSError when it is not there, is not root's alone, or does not run."""
    descriptor = hostpaths.open_trusted(path)
    digest = hashlib.sha256()
    try:
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            digest.update(chunk)
        identity = _identity(descriptor)
    finally:
        os.close(descriptor)
    try:
        status, answer = process.run([path, "--version"], {}, VERSION_SECONDS, 1)
    except TimeoutError:
        status, answer = 1, b""
    if status != 0:
        raise OSError(errno.ENOEXEC, "runsc does not tell its version")
    version = answer.decode("ascii", "replace").partition("\n")[0].rpartition(" ")[2][:64]
    return Runsc(path, digest.hexdigest(), version, identity)


def open_program(runsc: Runsc | Unusable, sha256: str | None) -> int:
    """Open the program to start it; the caller owns the descriptor.

    Raises OSError: why it is unusable; ESTALE when it is another file than at the start of
    the launcher, EPERM when it has not the wanted digest.
    """
    if isinstance(runsc, Unusable):
        raise OSError(runsc.errno, runsc.detail)
    if sha256 is not None and runsc.sha256 != sha256:
        raise OSError(errno.EPERM, "runsc has not the digest that the configuration names")
    descriptor = hostpaths.open_trusted(runsc.path)
    if _identity(descriptor) != runsc.identity:
        os.close(descriptor)
        raise OSError(errno.ESTALE, "runsc was replaced: restart sbxd-launcher to accept it")
    return descriptor


def _identity(descriptor: int) -> tuple[int, ...]:
    found = os.fstat(descriptor)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class Boot:
    """What one Sentry is started from. Descriptors are borrowed.

    program_fd: runsc. init_fd: the guest's init. leaf_fd: the cgroup. image_fd, workspace_fd:
    detached mounts, id-mapped for the block, used up by this. channel_fd: the guest's end.
    """

    spec: SentrySpec
    ids: IdBlock
    program_fd: int
    init_fd: int
    leaf_fd: int
    image_fd: int
    workspace_fd: int
    channel_fd: int


def boot(what: Boot) -> tuple[int, int, socket.socket]:
    """Start a Sentry and its gofer; pid and pidfd of the Sentry, and where it tells of forks (the
    caller owns pidfd and socket).

    Both processes become children of the caller's subreaper. Raises OSError; what was started is
    then for the caller to kill with its cgroup.
    """
    with ExitStack() as held:
        attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC
        root = mounts.tmpfs(ROOT_BYTES, 0o755, attributes)
        held.callback(os.close, root)
        _furnish(root, what)
        listener = held.enter_context(trace.furnish(root, what.ids.outer(0)))
        # runsc starts itself again by the path that it has in the small root.
        flags = syscalls.OPEN_TREE_CLONE | syscalls.AT_EMPTY_PATH
        program = syscalls.open_tree(what.program_fd, b"", flags)
        held.callback(os.close, program)
        mounts.restrict(program, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_RDONLY)
        ours, theirs = Gate.pair()
        held.callback(ours.close)
        pid, pidfd = syscalls.clone3(_NAMESPACES, what.leaf_fd)
        if pid == 0:
            _child(what, theirs, root, program)
        held.callback(os.close, pidfd)
        theirs.close()
        kernel_mounts.write_maps(pid, what.ids.map_lines())
        ours.send(MAPPED)
        forks = trace.accept(listener, pidfd, START_SECONDS)
        if forks is not None:
            held.enter_context(forks)
        status = _await(pidfd)
        if status != 0 or forks is None:
            _tell(root)
            raise OSError(errno.EIO, f"runsc ended with status {status}")
        with open("pid", encoding="ascii", opener=_below(root)) as file:
            sentry = int(file.read())  # `verify_sentry` finds it in the leaf, with the pidfd open
        return sentry, os.pidfd_open(sentry), forks.dup()


def _furnish(root: int, what: Boot) -> None:
    """The places of the small root, which are its root's, and the specification, which is not."""
    owner = what.ids.outer(0)
    os.chown(".", owner, owner, dir_fd=root)
    for name in ("proc", "dev", "image", "workspace", "tmp", "bundle", "state"):
        os.mkdir(name, 0o755, dir_fd=root)
        os.chown(name, owner, owner, dir_fd=root)
    document = json.dumps(oci_spec.build(what.spec)).encode()
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    file = os.open("bundle/config.json", flags, 0o644, dir_fd=root)
    try:
        os.fchmod(file, 0o644)
        os.write(file, document)
    finally:
        os.close(file)


def _child(what: Boot, gate: Gate, root: int, program: int) -> NoReturn:
    """From a copy of the helper to runsc. Its own words go to the launcher's journal."""
    journal = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    try:
        if gate.receive()[0] != MAPPED:
            raise OSError(errno.EPROTO, "not the word that the maps are written")
        identity.become(0)
        os.setsid()
        os.umask(0o022)
        mounts.make_private()
        null = mounts.device("null")
        proc = syscalls.open_tree(
            syscalls.AT_FDCWD,
            hostpaths.PROC.encode(),
            syscalls.OPEN_TREE_CLONE | syscalls.AT_RECURSIVE,
        )
        mounts.put_on_root(root)
        mounts.attach(proc, root, "proc")
        mounts.attach(what.image_fd, root, "image")
        mounts.attach(what.workspace_fd, root, "workspace")
        device = os.open("dev", os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
        mounts.attach_node(null, device, "null")
        mounts.attach_node(program, root, "runsc")
        mounts.pivot_into(root)
        _arrange(what, journal)
        os.execve(  # noqa: S606
            "/runsc",
            ["runsc", *FLAGS, *RUN, "--exec-fd=4", _NAME],
            {"PATH": "/", "TMPDIR": "/tmp"},  # noqa: S108  (of the small root)
        )
    except BaseException as problem:
        with suppress(OSError):
            os.dup2(journal, 2)
            process.say(process.ERROR, f"before runsc: {type(problem).__name__}: {problem}")
        os._exit(1)


def _arrange(what: Boot, journal: int) -> None:
    """The null device on 0, 1 and 2; channel and init on 3 and 4; nothing else."""
    wanted = {3: what.channel_fd, 4: what.init_fd}
    null = os.open("/dev/null", os.O_RDWR)
    moved = {
        target: fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
        for target, descriptor in wanted.items()
    }
    for target in range(3):
        os.dup2(null, target)
    for target, descriptor in moved.items():
        os.dup2(descriptor, target, inheritable=True)
    process.close_all_but(*wanted, journal)


def _await(pidfd: int) -> int:
    """The exit status of runsc, which ends once the sandbox runs. Raises TimeoutError."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(START_SECONDS * 1000):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        raise TimeoutError(errno.ETIMEDOUT, "runsc did not start the sandbox in time")
    ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    return ended.si_status if ended is not None else -1


def _tell(root: int) -> None:
    """What runsc said goes to the launcher's journal, never into a reply."""
    with suppress(OSError), open("log", "rb", opener=_below(root)) as file:
        text = file.read()[-_LOG_BYTES_MAX:].decode("utf-8", "replace")
        process.say(process.ERROR, f"runsc: {text!a}")


def _below(root: int) -> Callable[[str, int], int]:
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=root)

    return opener
