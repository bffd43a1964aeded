"""Build the steward of an environment whose commands run on a kernel of their own.

There is no init on the host whose user namespace it could join: it joins one that is handed in,
with its maps already written. Everything else is as `sbxd.jail.steward_process` says.

The caller is the launcher's helper: the host's root, freshly forked, one thread. The steward is
its child, and the launcher's (a subreaper's) when the helper ends. On an error it is killed and
reaped before JailError leaves `launch_steward`.
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


def launch_steward(plan: StewardPlan, serve: Serve = serve_workspace) -> tuple[int, int]:
    """Build the steward and wait until it is complete: its pid and pidfd, which the caller owns.

    Raises JailError; then it is not left.
    """
    program = plan.seccomp_steward
    if not program or len(program) % _SOCK_FILTER_BYTES:
        raise JailError("check_the_plan", errno.EINVAL, "a seccomp program is missing or cut")
    ours, theirs = Gate.pair()
    try:
        pid, pidfd = _clone(plan, ours, theirs, serve)
        theirs.close()
        try:
            ours.send(MAPPED)
            ours.receive_done("steward")
        except BaseException:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            with suppress(ChildProcessError, TimeoutError):
                await_end(pidfd)
            os.close(pidfd)
            raise
        return pid, pidfd
    finally:
        ours.close()
        theirs.close()


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
