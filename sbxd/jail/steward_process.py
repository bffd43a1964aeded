"""What the steward does before it serves: a root with nothing in it but the volume.

Invariants: it is born as the host's root into mount, pid, network, ipc and uts namespaces that
belong to the *initial* user namespace, and enters init's user namespace after its root is built:
so it is root where the workload's ids mean something, and has no power over any namespace that it
is in, not even its own. No host descriptor, no proc, no device, no network interface is left.

STEWARD_STEPS
 1. close_inherited_descriptors
 2. make_mounts_private
 3. make_an_empty_root
 4. mount_workspace
 5. pivot_into_the_root
 6. leave_the_standard_streams
 7. name_the_host
 8. wait_for_maps
 9. enter_the_user_namespace
10. become_root_of_the_namespace
11. join_a_new_keyring
12. keep_two_descriptors
13. set_limits
14. drop_capabilities
15. hide
16. confine_system_calls

Capabilities kept, all in init's user namespace: DAC_OVERRIDE and DAC_READ_SEARCH (files and
directories of mode 000), CHOWN and FOWNER (what it writes belongs to the workload). Explicitly
not SYS_RESOURCE (it would write through quotas), SYS_ADMIN, SETUID, SETGID, MKNOD, KILL.
"""

import errno
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from sbxd.jail import identity, mounts, syscalls
from sbxd.jail.build import MAPPED
from sbxd.jail.handshake import Gate
from sbxd.jail.identity import Capability
from sbxd.jail.plan import JailPlan, StewardPlan
from sbxd.jail.steps import JailError, Step, run_steps
from sbxd.jail.syscalls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
)

KEPT: Final = identity.mask(
    Capability.DAC_OVERRIDE, Capability.DAC_READ_SEARCH, Capability.CHOWN, Capability.FOWNER
)
RLIMITS: Final = {
    "CORE": (0, 0),
    "NPROC": (0, 0),
    "NOFILE": (256, 256),
    "MEMLOCK": (0, 0),
    "MSGQUEUE": (0, 0),
    "RTPRIO": (0, 0),
    "NICE": (0, 0),
}
Serve = Callable[[int, int], int]


@dataclass
class StewardContext:
    """What the steps share."""

    plan: JailPlan | StewardPlan
    gate: Gate
    workspace_fd: int
    user_namespace_fd: int  # its own, or a pidfd of a process in it
    root_fd: int = -1


def close_inherited_descriptors(context: StewardContext) -> None:
    """Close all but the workspace, the user namespace, the channel and the helper's gate."""
    identity.close_all_but(
        {
            context.gate.fileno(),
            context.workspace_fd,
            context.user_namespace_fd,
            context.plan.steward_channel_fd,
        }
    )


def make_mounts_private(_: StewardContext) -> None:
    """Cut the propagation between this mount namespace and the host's."""
    mounts.make_private()


def make_an_empty_root(context: StewardContext) -> None:
    """Put a tmpfs over the root that holds one empty directory, /workspace."""
    flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC
    context.root_fd = mounts.tmpfs(mounts.PAGE_BYTES, 0o755, flags)
    mounts.put_on_root(context.root_fd)
    os.mkdir("workspace", 0o755, dir_fd=context.root_fd)
    mounts.restrict(context.root_fd, MOUNT_ATTR_RDONLY)


def mount_workspace(context: StewardContext) -> None:
    """Attach the volume there: nosuid, nodev, noexec."""
    flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC
    mounts.restrict(context.workspace_fd, flags)
    mounts.attach(context.workspace_fd, context.root_fd, "workspace")


def pivot_into_the_root(context: StewardContext) -> None:
    """Make it the root, and detach the host's root."""
    mounts.pivot_into(context.root_fd)


def leave_the_standard_streams(_: StewardContext) -> None:
    """Put dead pipes on 0, 1 and 2: nothing to read, nobody to write to."""
    ended, its_writer = os.pipe2(os.O_CLOEXEC)
    its_reader, deaf = os.pipe2(os.O_CLOEXEC)
    for number, descriptor in enumerate((ended, deaf, deaf)):
        os.dup2(descriptor, number)
    for descriptor in (ended, its_writer, its_reader, deaf):
        os.close(descriptor)


def name_the_host(context: StewardContext) -> None:
    """Forget the host's name."""
    socket.sethostname(context.plan.hostname)
    syscalls.setdomainname(b"(none)")


def wait_for_maps(context: StewardContext) -> None:
    """Wait until the helper has written the uid and gid maps of init's user namespace."""
    message, _ = context.gate.receive()
    if message != MAPPED:
        raise OSError(errno.EPROTO, "not the word that the maps are written")


def enter_the_user_namespace(context: StewardContext) -> None:
    """Join the user namespace of the environment."""
    syscalls.setns(context.user_namespace_fd, syscalls.CLONE_NEWUSER)


def become_root_of_the_namespace(_: StewardContext) -> None:
    """Uid and gid 0 of it, no supplementary group, a session of its own, umask 022."""
    identity.become(0)
    os.setsid()
    os.umask(0o022)
    identity.reset_signals()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def join_a_new_keyring(_: StewardContext) -> None:
    """A new anonymous session keyring."""
    syscalls.keyctl_join_session_keyring()


def set_limits(context: StewardContext) -> None:
    """No process or thread of its own, no core, few descriptors; the memory of the plan, if any."""
    identity.set_rlimits(RLIMITS)
    plan = context.plan
    if isinstance(plan, StewardPlan) and plan.memory_bytes is not None:
        identity.set_rlimits({"AS": (plan.memory_bytes, plan.memory_bytes)})
        # After the last change of credentials; if the helper is gone already, so is the gate.
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_two_descriptors(context: StewardContext) -> None:
    """Open the volume's root; close all but it, the channel and the helper's gate."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    context.workspace_fd = os.open("/workspace", flags)
    identity.close_all_but(
        {context.gate.fileno(), context.workspace_fd, context.plan.steward_channel_fd}
    )


def drop_capabilities(_: StewardContext) -> None:
    """Keep the four that reading and writing the workload's files needs."""
    identity.drop_bounding_set(KEPT)
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, identity.SECUREBITS_LOCKED)
    identity.keep_capabilities(KEPT)


def hide(_: StewardContext) -> None:
    """Not dumpable."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.set_process_name(b"sbx-steward")


def confine_system_calls(context: StewardContext) -> None:
    """no_new_privs and the steward's seccomp filter."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.seccomp_set_mode_filter(context.plan.seccomp_steward)


STEWARD_STEPS: tuple[Step[StewardContext], ...] = (
    close_inherited_descriptors,
    make_mounts_private,
    make_an_empty_root,
    mount_workspace,
    pivot_into_the_root,
    leave_the_standard_streams,
    name_the_host,
    wait_for_maps,
    enter_the_user_namespace,
    become_root_of_the_namespace,
    join_a_new_keyring,
    keep_two_descriptors,
    set_limits,
    drop_capabilities,
    hide,
    confine_system_calls,
)


def main(context: StewardContext, serve: Serve) -> NoReturn:
    """The whole life of the steward. Exits with what `serve` answers, or with 1."""
    code = 1
    try:
        run_steps(STEWARD_STEPS, context)
        context.gate.send_done()
        context.gate.close()
        code = serve(context.plan.steward_channel_fd, context.workspace_fd)
    except JailError as problem:
        context.gate.send_failure(problem)
    finally:
        os._exit(code)
