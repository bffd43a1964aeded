"""Build the steward of an environment whose commands run on a kernel of their own.

There is no init on the host whose user namespace it could join: it joins one that is handed in,
with its maps already written. Everything else is as `sbxd.jail.steward_process` says.

The caller is the launcher's helper: the host's root, freshly forked, one thread. It forks the
intermediate before it does anything else, so that the steward, which is born of that, keeps for
itself no page that the helper's work has made its own. One detached mount can be attached only
once, so the intermediate, in a mount namespace of its own, also copies the volume's. The steward
is the helper's child (CLONE_PARENT), and the launcher's (a subreaper's) when the helper ends. On an
error it is killed and reaped before JailError leaves `finish`; an error before that leaves it in
its leaf, which is killed whole.
"""

import errno
import os
import signal
import socket
from contextlib import suppress
from typing import Final, NoReturn

from sbxd.jail import identity, mounts, steward_process, syscalls
from sbxd.jail.build import MAPPED
from sbxd.jail.handshake import Gate, await_end, raise_failure
from sbxd.jail.plan import StewardPlan
from sbxd.jail.steps import JailError
from sbxd.jail.steward_process import Serve
from sbxd.jail.syscalls import (
    AT_EMPTY_PATH,
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUTS,
    CLONE_PARENT,
    OPEN_TREE_CLONE,
)
from sbxd.steward.server import serve as serve_workspace

_NAMESPACES: Final = (
    CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)
_SOCK_FILTER_BYTES: Final = 8
_COPIED: Final = b"copied"
_WORD_BYTES: Final = 64


class Beginning:
    """A steward that is building itself. The caller closes it; then nothing tells it to go on."""

    def __init__(self, pid: int, pidfd: int, gate: Gate) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._gate = gate

    def finish(self) -> None:
        """Wait until it is complete. Raises JailError; then it is not left."""
        try:
            self._gate.receive_done("steward")
        except BaseException:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            with suppress(ChildProcessError, TimeoutError):
                await_end(self.pidfd)
            raise

    def close(self) -> None:
        """Release the descriptors."""
        self._gate.close()
        os.close(self.pidfd)


class Intermediate:
    """A process that copies the volume's mount once and makes the steward once, in this order.
    The caller ends it."""

    def __init__(
        self, hostname: str, seccomp_steward: bytes, serve: Serve = serve_workspace
    ) -> None:
        """Fork it. Raises JailError, OSError."""
        if not seccomp_steward or len(seccomp_steward) % _SOCK_FILTER_BYTES:
            raise JailError("check_the_plan", errno.EINVAL, "a seccomp program is missing or cut")
        self._gate, theirs = Gate.pair()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _intermediate(hostname, seccomp_steward, serve, theirs, parent)
        theirs.close()

    def copy(self, workspace_fd: int) -> int:
        """Have it keep one copy of the volume for the steward, and answer another, which the caller
        owns. workspace_fd: a detached mount, id-mapped; it can no longer be attached afterwards.
        Raises JailError, OSError."""
        self._gate.send(_COPIED, (workspace_fd,))
        message, received = self._gate.receive(1)
        if message != _COPIED or len(received) != 1:
            raise_failure(message, "intermediate")
        return received[0]

    def begin(self, user_namespace_fd: int, leaf_fd: int, channel_fd: int) -> Beginning:
        """Have the steward born in its leaf, and build itself; `finish` it. The descriptors are
        borrowed. Raises JailError, OSError."""
        ours, theirs = Gate.pair()
        try:
            self._gate.send(MAPPED, (user_namespace_fd, leaf_fd, channel_fd, theirs.fileno()))
            message, received = self._gate.receive(1)
            if not message.isdigit() or len(received) != 1:
                raise_failure(message, "intermediate")
            beginning = Beginning(int(message), received[0], ours)
            ours.send(MAPPED)
            return beginning
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def end(self) -> None:
        """Kill it and reap it."""
        self._gate.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _intermediate(
    hostname: str, seccomp_steward: bytes, serve: Serve, gate: Gate, parent: int
) -> NoReturn:
    try:
        identity.close_all_but({gate.fileno()})
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            plan, its_gate = _gather(hostname, seccomp_steward, gate)
            pid, pidfd = syscalls.clone3(_NAMESPACES | CLONE_PARENT, plan.steward_leaf_fd)
            if pid == 0:
                context = steward_process.StewardContext(
                    plan, its_gate, plan.workspace_fd, plan.user_namespace_fd
                )
                steward_process.main(context, serve)
            gate.send(b"%d" % pid, (pidfd,))
    except OSError as problem:
        gate.send_failure(JailError("work", problem.errno or 0, str(problem)))
    finally:
        os._exit(1)


def _gather(hostname: str, seccomp_steward: bytes, gate: Gate) -> tuple[StewardPlan, Gate]:
    """Copy the volume; then what the steward is made of. Not by `receive`: what the helper does in
    between has deadlines of its own."""
    _, (workspace,) = gate.receive_when_it_comes(_WORD_BYTES, 1)
    syscalls.unshare(CLONE_NEWNS)
    mounts.make_private()
    mounts.put_on_root(workspace)
    flags = OPEN_TREE_CLONE | AT_EMPTY_PATH
    kept, given = (syscalls.open_tree(workspace, b"", flags) for _ in range(2))
    mounts.detach(workspace)
    gate.send(_COPIED, (given,))
    _, received = gate.receive_when_it_comes(_WORD_BYTES, 4)
    user_namespace, leaf, channel, its_gate = received
    plan = StewardPlan(
        hostname=hostname,
        workspace_fd=kept,
        user_namespace_fd=user_namespace,
        steward_leaf_fd=leaf,
        steward_channel_fd=channel,
        seccomp_steward=seccomp_steward,
    )
    return plan, Gate(socket.socket(fileno=its_gate))
