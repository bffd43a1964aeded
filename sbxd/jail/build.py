"""What init does before it serves: from a process born into new namespaces to process 1.

Invariants: nothing but the helper's word is waited for; the host's root is out of reach before any
command exists; what init keeps is what it needs to make commands, and nothing else.

INIT_STEPS
 1. close_inherited_descriptors
 2. wait_for_maps
 3. become_root_of_the_namespace
 4. make_mounts_private
 5. collect_devices
 6. make_proc
 7. put_image_over_root
 8. mount_proc
 9. mount_dev
10. mount_tmp
11. mount_workspace
12. forbid_new_namespaces
13. pivot_into_image
14. leave_the_standard_streams
15. raise_loopback
16. bind_the_proxy_port
17. name_the_host
18. join_a_new_keyring
19. make_a_ruleset
20. confine_system_calls
21. drop_capabilities
22. hide

Why these and not others:
- /proc shows processes (hidepid=invisible) and PROC_SHOWN; every other entry that this kernel has
  is covered, by what is listed at construction and not by a list of known dangers that grows old.
  `subset=pid` would be simpler and closer, but then `ps`, `free`, psutil, Node's os.cpus() and
  what else sizes itself by /proc/meminfo, stat or cpuinfo fails in ways that nobody expects. What
  PROC_SHOWN tells about the host's load, sysinfo(2) and timing tell too. An entry that the kernel
  adds later (a module) is not covered; those of interest are readable by the host's root alone.
- /tmp may execute (compilers and package builds need it; a memfd would defeat the flag anyway);
  /dev/shm may not.
- make_proc makes two instances, before the host's proc is out of sight: a user namespace may mount
  proc only while it sees a whole one. The second is never attached; it reaches /proc/sys for
  forbid_new_namespaces, which comes after the last mount, since a detached mount counts as a mount
  namespace.
- confine_system_calls is without no_new_privs, which CAP_SYS_ADMIN allows until it is dropped, so
  that a label on exec stays possible; each command sets no_new_privs itself. Commands inherit the
  filter: it has to allow what the workload's allows, and what the steps of `workload` need.
- bind_the_proxy_port makes the socket here, where its network is, so that no privileged process
  has to enter that network; it comes before any command, so none can have the port. The helper
  gets the only descriptor. Bound and not listening, it refuses every connection; without
  SO_REUSEADDR no other socket can have its address, whatever options that one sets.
- init keeps SETUID and SETGID (a command's change of identity) and SETPCAP (its bounding set and
  securebits). It signals nobody: commands are killed through their cgroup.
- init has no PDEATHSIG: it is to outlive the helper. It ends when its channel does.
"""

import errno
import fcntl
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn

from sbxd.jail import bridge, identity, landlock, mounts, syscalls, workload
from sbxd.jail.handshake import Gate
from sbxd.jail.identity import Capability
from sbxd.jail.init import Broken, Init
from sbxd.jail.plan import JailPlan
from sbxd.jail.steps import JailError, Step, run_steps
from sbxd.jail.syscalls import (
    AT_RECURSIVE,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
)

KEPT: Final = identity.mask(Capability.SETUID, Capability.SETGID, Capability.SETPCAP)
NAMESPACE_LIMITS: Final = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time")
MAPPED: Final = b"mapped"
BOUND: Final = b"bound"
LOOPBACK: Final = "127.0.0.1"
PROC_SHOWN: Final = frozenset(
    ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version")
)
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 0x1
_PROC_FLAGS: Final = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC


@dataclass
class InitContext:
    """What the steps share."""

    plan: JailPlan
    gate: Gate
    workspace_fd: int
    devices: dict[str, int] = field(default_factory=dict)
    proc_fd: int = -1
    whole_proc_fd: int = -1
    bridge_fd: int = -1
    ruleset_fd: int | None = None


def close_inherited_descriptors(context: InitContext) -> None:
    """Close everything but image, workspace, commands' program, channel and helper's gate."""
    plan = context.plan
    mounts_fds = {context.workspace_fd, plan.image_fd}
    identity.close_all_but(
        {context.gate.fileno(), plan.init_channel_fd, plan.command_program_fd, *mounts_fds}
    )


def wait_for_maps(context: InitContext) -> None:
    """Wait until the helper has written the uid and gid maps."""
    message, _ = context.gate.receive()
    if message != MAPPED:
        raise OSError(errno.EPROTO, "not the word that the maps are written")


def become_root_of_the_namespace(_: InitContext) -> None:
    """Uid and gid 0, no supplementary group, a session of its own, default signals, umask 022."""
    identity.become(0)
    os.setsid()
    os.umask(0o022)
    identity.reset_signals()


def make_mounts_private(_: InitContext) -> None:
    """Cut the propagation between this mount namespace and the host's."""
    mounts.make_private()


def collect_devices(context: InitContext) -> None:
    """Detach copies of null, zero, full, random and urandom, each verified by its number."""
    for name in mounts.DEVICES:
        context.devices[name] = mounts.device(name)


def make_proc(context: InitContext) -> None:
    """Two instances of proc for the new pid namespace: the commands', and a whole one."""
    context.proc_fd = mounts.filesystem(b"proc", {"hidepid": "invisible"}, _PROC_FLAGS)
    context.whole_proc_fd = mounts.filesystem(b"proc", {}, _PROC_FLAGS)


def forbid_new_namespaces(context: InitContext) -> None:
    """Set every limit on namespaces of this user namespace to 0, and read them back."""
    for kind in NAMESPACE_LIMITS:
        path = f"sys/user/max_{kind}_namespaces"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC, dir_fd=context.whole_proc_fd)
        try:
            os.write(descriptor, b"0")
            if os.pread(descriptor, 16, 0).strip() != b"0":
                raise OSError(errno.EPERM, "the limit did not become 0", path)
        finally:
            os.close(descriptor)
    os.close(context.whole_proc_fd)


def put_image_over_root(context: InitContext) -> None:
    """Attach the image over the root: read-only, nosuid, nodev, with all below."""
    image = context.plan.image_fd
    flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    mounts.restrict(image, flags, AT_RECURSIVE)
    mounts.put_on_root(image)


def mount_proc(context: InitContext) -> None:
    """Attach proc (hidepid=invisible) at /proc; cover all but processes and PROC_SHOWN."""
    mounts.attach(context.proc_fd, context.plan.image_fd, "proc")
    mounts.cover_all_but(PROC_SHOWN, context.proc_fd)


def mount_dev(context: InitContext) -> None:
    """Attach a small tmpfs at /dev with devices, links and the bridge; then make it read-only."""
    flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC
    dev = mounts.tmpfs(16 * mounts.PAGE_BYTES, 0o755, flags)
    mounts.attach(dev, context.plan.image_fd, "dev")
    mounts.fill_dev(dev, context.devices)
    shm = mounts.tmpfs(context.plan.shm_bytes, 0o1777, flags)
    mounts.attach(shm, dev, "shm")
    context.bridge_fd = bridge.bind(dev)
    mounts.restrict(dev, MOUNT_ATTR_RDONLY)


def mount_tmp(context: InitContext) -> None:
    """Attach a tmpfs of tmp_bytes at /tmp: nosuid, nodev."""
    tmp = mounts.tmpfs(context.plan.tmp_bytes, 0o1777, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
    mounts.attach(tmp, context.plan.image_fd, "tmp")


def mount_workspace(context: InitContext) -> None:
    """Attach the volume at /workspace: nosuid, nodev."""
    mounts.restrict(context.workspace_fd, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
    mounts.attach(context.workspace_fd, context.plan.image_fd, "workspace")


def pivot_into_image(context: InitContext) -> None:
    """Make the image the root, detach the host's root, and close all mount descriptors."""
    mounts.pivot_into(context.plan.image_fd)
    plan = context.plan
    identity.close_all_but(
        {context.gate.fileno(), plan.init_channel_fd, plan.command_program_fd, context.bridge_fd}
    )


def leave_the_standard_streams(_: InitContext) -> None:
    """Put the environment's own null device on 0, 1 and 2."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)


def raise_loopback(_: InitContext) -> None:
    """Set the loopback up in the new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(end, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(end, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def bind_the_proxy_port(context: InitContext) -> None:
    """Bind the proxy's socket to its port of the loopback and give it away, if there is a port."""
    port = context.plan.proxy_port
    if port is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as end:
            end.bind((LOOPBACK, port))
            context.gate.send(BOUND, (end.fileno(),))


def name_the_host(context: InitContext) -> None:
    """Set the plan's host name, and no domain name."""
    socket.sethostname(context.plan.hostname)
    syscalls.setdomainname(b"(none)")


def join_a_new_keyring(_: InitContext) -> None:
    """A new anonymous session keyring."""
    syscalls.keyctl_join_session_keyring()


def make_a_ruleset(context: InitContext) -> None:
    """Landlock's ruleset for commands; nothing where the kernel has no Landlock."""
    if context.plan.landlock_version > 0:
        context.ruleset_fd = landlock.make_ruleset(context.plan.landlock_version)


def confine_system_calls(context: InitContext) -> None:
    """Init's seccomp filter."""
    syscalls.seccomp_set_mode_filter(context.plan.seccomp_init)


def drop_capabilities(_: InitContext) -> None:
    """Keep SETUID, SETGID and SETPCAP; drop all others, from the bounding set too."""
    identity.drop_bounding_set(KEPT)
    identity.keep_capabilities(KEPT)


def hide(_: InitContext) -> None:
    """Not dumpable, no core."""
    # RLIMIT_CORE stays as it is: a command could not raise it again to the 1 that it needs.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.set_process_name(b"sbx-init")


INIT_STEPS: tuple[Step[InitContext], ...] = (
    close_inherited_descriptors,
    wait_for_maps,
    become_root_of_the_namespace,
    make_mounts_private,
    collect_devices,
    make_proc,
    put_image_over_root,
    mount_proc,
    mount_dev,
    mount_tmp,
    mount_workspace,
    forbid_new_namespaces,
    pivot_into_image,
    leave_the_standard_streams,
    raise_loopback,
    bind_the_proxy_port,
    name_the_host,
    join_a_new_keyring,
    make_a_ruleset,
    confine_system_calls,
    drop_capabilities,
    hide,
)


def main(plan: JailPlan, gate: Gate, workspace_fd: int) -> NoReturn:
    """The whole life of init. Exits with 0 when its channel ends, else with 1."""
    code = 1
    context = InitContext(plan, gate, workspace_fd)
    try:
        run_steps(INIT_STEPS, context)
        gate.send_done((context.bridge_fd,))
        gate.close()
        os.close(context.bridge_fd)  # the daemon's from now on
        confinement = workload.Confinement(
            plan.rlimits,
            plan.seccomp_workload,
            plan.apparmor_label,
            context.ruleset_fd,
            plan.command_program_fd,
        )
        channel = socket.socket(fileno=plan.init_channel_fd)
        Init(channel, lambda leaf_fd: _spawn(confinement, leaf_fd)).serve()
    except JailError as problem:
        gate.send_failure(problem)
    except Broken:
        code = 0
    finally:
        os._exit(code)


def _spawn(confinement: workload.Confinement, leaf_fd: int) -> tuple[int, Gate, int]:
    ours, theirs = Gate.pair()
    error_read, error_write = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(error_read, False)
        pid, pidfd = syscalls.clone3(0, leaf_fd)
    except OSError:
        ours.close()
        theirs.close()
        os.close(error_read)
        os.close(error_write)
        raise
    if pid == 0:
        workload.main(confinement, error_write, theirs.fileno())
    theirs.close()
    os.close(error_write)
    os.close(pidfd)
    with suppress(OSError):  # it died; the reaper finds it
        ours.send(confinement.seccomp)
    return pid, ours, error_read
