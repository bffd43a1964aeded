"""Build the steward of an environment whose commands run on a kernel of their own.

There is no init on the host whose user namespace it could join: it joins one that is handed in,
with its maps already written. Everything else is as `sbxd.jail.steward_process` says.

The caller is the launcher's helper: the host's root, freshly forked, one thread. It forks the
intermediate before it does anything else, so that the steward, which is born of that, keeps for
itself no page that the helper's work has made its own. One detached mount can be attached only
once, so the intermediate, in a mount namespace of its own, also copies the volume's. The steward
is the helper's child (CLONE_PARENT), and the launcher's (a subreaper's) when the helper ends. Once
it has a pidfd here, it is killed and reaped before an error leaves `begin_steward` or
`finish_steward`; an error before that leaves it in its leaf, which is killed whole.
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


class Intermediate:
    """A process that copies the volume's mount once and makes the steward once, in this order.
    `pid` and `pidfd` are the steward's, once it is born. The caller ends it."""

    pid = 0
    pidfd = -1

    def __init__(
        self,
        hostname: str,
        seccomp_steward: bytes,
        serve: Serve = serve_workspace,
        memory_bytes: int | None = None,
    ) -> None:
        """Fork it. memory_bytes: see StewardPlan. Raises JailError, OSError."""
        if not seccomp_steward or len(seccomp_steward) % _SOCK_FILTER_BYTES:
            raise JailError("check_the_plan", errno.EINVAL, "a seccomp program is missing or cut")
        self._gate, theirs = Gate.pair()
        self._stewards_gate: Gate | None = None
        parent = os.getpid()
        self._own_pid = os.fork()
        if self._own_pid == 0:
            _intermediate(hostname, seccomp_steward, serve, memory_bytes, theirs, parent)
        theirs.close()

    def copy(self, workspace_fd: int) -> int:
        """Have it keep one copy of the volume for the steward, and answer another, which the caller
        owns. workspace_fd: a detached mount, id-mapped; it can no longer be attached afterwards.
        Raises JailError, OSError."""
        return self._ask(_COPIED, workspace_fd)[1]

    def begin_steward(self, user_namespace_fd: int, leaf_fd: int, channel_fd: int) -> None:
        """Have the steward born in its leaf, and build itself. The descriptors are borrowed. Raises
        JailError, OSError."""
        self._stewards_gate, theirs = Gate.pair()
        try:
            message, self.pidfd = self._ask(
                MAPPED, user_namespace_fd, leaf_fd, channel_fd, theirs.fileno()
            )
            self.pid = int(message)
        finally:
            theirs.close()
        try:
            self._stewards_gate.send(MAPPED)
        except BaseException:
            self.end_steward()
            raise

    def finish_steward(self) -> None:
        """Wait until it is complete. Raises JailError; then it is not left."""
        assert self._stewards_gate is not None
        try:
            self._stewards_gate.receive_done("steward")
        except BaseException:
            self.end_steward()
            raise

    def _ask(self, what: bytes, *descriptors: int) -> tuple[bytes, int]:
        self._gate.send(what, descriptors)
        message, received = self._gate.receive(1)
        if len(received) != 1:
            raise_failure(message, "intermediate")
        return message, received[0]

    def end_steward(self) -> None:
        """Kill it and reap it, if that is not done yet."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with suppress(ChildProcessError, TimeoutError):
            await_end(self.pidfd)

    def end(self) -> None:
        """Kill it and reap it, and release what is here: nothing then tells the steward to go on
        that is not complete."""
        os.kill(self._own_pid, signal.SIGKILL)
        os.waitpid(self._own_pid, 0)
        self._gate.close()
        if self._stewards_gate is not None:
            self._stewards_gate.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)


def _intermediate(
    hostname: str,
    seccomp_steward: bytes,
    serve: Serve,
    memory_bytes: int | None,
    gate: Gate,
    parent: int,
) -> NoReturn:
    """Not by `receive`: what the helper does in between has deadlines of its own."""
    try:
        identity.close_all_but({gate.fileno()})
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _, (workspace,) = gate.receive_when_it_comes(_WORD_BYTES, 1)
        syscalls.unshare(CLONE_NEWNS)
        mounts.make_private()
        mounts.put_on_root(workspace)
        flags = OPEN_TREE_CLONE | AT_EMPTY_PATH
        kept, given = (syscalls.open_tree(workspace, b"", flags) for _ in range(2))
        mounts.detach(workspace)
        gate.send(_COPIED, (given,))
        _, (users, leaf, channel, its_gate) = gate.receive_when_it_comes(_WORD_BYTES, 4)
        plan = StewardPlan(hostname, kept, users, leaf, channel, seccomp_steward, memory_bytes)
        pid, pidfd = syscalls.clone3(_NAMESPACES | CLONE_PARENT, leaf)
        if pid == 0:
            its_end = Gate(socket.socket(fileno=its_gate))
            steward_process.main(steward_process.StewardContext(plan, its_end, kept, users), serve)
        gate.send(b"%d" % pid, (pidfd,))
    except OSError as problem:
        gate.send_failure(JailError("work", problem.errno or 0, str(problem)))
    finally:
        os._exit(1)
