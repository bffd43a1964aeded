"""Build the steward of an environment whose commands run on a kernel of their own.

There is no init on the host whose user namespace it could join: it joins one that is handed in,
with its maps already written. Everything else is as `sbxd.jail.steward_process` says.

The caller is the launcher's helper: the host's root, freshly forked, one thread. The steward is
its child, and the launcher's (a subreaper's) when the helper ends. On an error it is killed and
reaped before the error leaves this module.
"""

import errno
import os
import signal
from contextlib import suppress
from typing import Final

from sbxd.jail import steward_process, syscalls
from sbxd.jail.build import MAPPED
from sbxd.jail.handshake import Gate, await_end
from sbxd.jail.plan import StewardPlan
from sbxd.jail.steps import JailError
from sbxd.jail.steward_process import Serve
from sbxd.jail.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUTS,
)
from sbxd.steward.server import serve as serve_workspace

_NAMESPACES: Final = (
    CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)
_SOCK_FILTER_BYTES: Final = 8


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
            self.end()
            raise

    def end(self) -> None:
        """Kill and reap it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with suppress(ChildProcessError, TimeoutError):
            await_end(self.pidfd)

    def close(self) -> None:
        """Release the descriptors."""
        self._gate.close()
        os.close(self.pidfd)


def begin_steward(plan: StewardPlan, serve: Serve = serve_workspace) -> Beginning:
    """Have the steward born and build itself; `finish` it. Raises JailError and OSError; then
    nothing is left."""
    program = plan.seccomp_steward
    if not program or len(program) % _SOCK_FILTER_BYTES:
        raise JailError("check_the_plan", errno.EINVAL, "a seccomp program is missing or cut")
    ours, theirs = Gate.pair()
    try:
        beginning = Beginning(*_clone(plan, ours, theirs, serve), ours)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    try:
        ours.send(MAPPED)
    except BaseException:
        beginning.end()
        beginning.close()
        raise
    return beginning


def _clone(plan: StewardPlan, ours: Gate, theirs: Gate, serve: Serve) -> tuple[int, int]:
    pid, pidfd = syscalls.clone3(_NAMESPACES, plan.steward_leaf_fd)
    if pid == 0:
        try:
            ours.close()
            context = steward_process.StewardContext(
                plan, theirs, plan.workspace_fd, plan.user_namespace_fd
            )
            steward_process.main(context, serve)
        finally:
            os._exit(1)
    return pid, pidfd
