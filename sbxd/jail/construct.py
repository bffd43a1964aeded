"""Build the two processes of an environment: its init and its steward.

The caller is the launcher's helper: the host's root, freshly forked, one thread. It makes an
intermediate process, because CLONE_INTO_CGROUP below a box is allowed only from a cgroup
namespace that is rooted at the box (under `nsdelegate`), and because one detached mount can be
attached only once. Init and the steward are born by CLONE_PARENT, so they are the helper's
children, and the launcher's (a subreaper's) when the helper ends.

LAUNCH_STEPS (in the helper)
 1. check_the_plan
 2. clone_the_intermediate
 3. await_the_intermediate
 4. write_the_maps
 5. release_both
 6. receive_the_proxy_socket
 7. await_init
 8. await_the_steward

INTERMEDIATE_STEPS (in the box's cgroup, as the host's root)
 1. unshare_cgroup_and_mounts
 2. copy_the_workspace
 3. clone_init
 4. clone_the_steward
 5. hand_over

The steps of the two processes themselves are in `build`, `steward_process` and `workload`.

Invariants: nothing runs with a half-written map; every wait has a deadline; on an error whatever
was made is killed and reaped before JailError leaves `launch`. Only after it has returned is the
intermediate gone from the box, so only then may controllers be enabled there.

The caller's own oom_score_adj is inherited by both processes, and a command can lower its own to
that value: it must not be below the host's default.
"""

import errno
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Final, NoReturn

from sbxd.jail import build, mounts, steward_process, syscalls
from sbxd.jail.handshake import Gate, await_end, raise_failure
from sbxd.jail.mounts import PAGE_BYTES
from sbxd.jail.plan import JailPlan, Launched
from sbxd.jail.steps import JailError, Step, run_steps
from sbxd.jail.steward_process import Serve
from sbxd.jail.syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    CLONE_PARENT,
)
from sbxd.steward.server import serve as serve_workspace

# Writes uid_map and gid_map of this pid (of the caller's pid namespace) with these lines.
MapWriter = Callable[[int, str], None]

_OWN_NAMESPACES: Final = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
_SOCK_FILTER_BYTES: Final = 8


@dataclass
class Launch:
    """What the helper's steps share. Whatever it holds at a failure is undone."""

    plan: JailPlan
    write_maps: MapWriter
    serve: Serve
    intermediate: tuple[Gate, Gate]
    init: tuple[Gate, Gate]
    steward: tuple[Gate, Gate]
    pids: list[int] = field(default_factory=list)
    pidfds: list[int] = field(default_factory=list)
    proxy_listener: int | None = None
    bridge_fds: list[int] = field(default_factory=list)

    def gates(self) -> tuple[Gate, ...]:
        return (*self.intermediate, *self.init, *self.steward)


@dataclass
class Intermediate:
    """What the intermediate's steps share."""

    launch: Launch
    workspace_fds: tuple[int, int] = (-1, -1)
    pids: list[int] = field(default_factory=list)
    pidfds: list[int] = field(default_factory=list)


def launch(plan: JailPlan, map_writer: MapWriter, serve: Serve = serve_workspace) -> Launched:
    """Build both processes and wait until both are complete.

    The descriptors of the plan stay the caller's, who also owns those of the result. Raises
    JailError; then neither process is left. Takes at most some tens of seconds, whatever happens.
    """
    state = Launch(plan, map_writer, serve, Gate.pair(), Gate.pair(), Gate.pair())
    try:
        run_steps(LAUNCH_STEPS, state)
    except BaseException:
        for pidfd in state.pidfds:
            _kill_and_reap(pidfd)
            os.close(pidfd)
        if state.proxy_listener is not None:
            os.close(state.proxy_listener)
        for descriptor in state.bridge_fds:
            os.close(descriptor)
        raise
    finally:
        for gate in state.gates():
            gate.close()
    pids, pidfds = state.pids, state.pidfds
    return Launched(
        pids[0], pidfds[0], pids[1], pidfds[1], state.bridge_fds[0], state.proxy_listener
    )


# the helper ------------------------------------------------------------------------------------


def check_the_plan(state: Launch) -> None:
    """Refuse a missing filter, a tmpfs of no size, and a descriptor among the standard streams."""
    plan = state.plan
    given = [getattr(plan, item.name) for item in fields(plan) if item.name.endswith("_fd")]
    if min(*given, *(gate.fileno() for gate in state.gates())) < 3:
        raise OSError(errno.EBADF, "a descriptor is missing or one of 0, 1 and 2")
    for program in (plan.seccomp_init, plan.seccomp_steward, plan.seccomp_workload):
        if not program or len(program) % _SOCK_FILTER_BYTES:
            raise OSError(errno.EINVAL, "a seccomp program is missing or cut")
    if min(plan.tmp_bytes, plan.shm_bytes) < PAGE_BYTES:
        raise OSError(errno.EINVAL, "a tmpfs is smaller than a page")


def clone_the_intermediate(state: Launch) -> None:
    """Make the intermediate process in the box's cgroup."""
    pid, pidfd = syscalls.clone3(0, state.plan.box_fd)
    if pid == 0:
        _intermediate(state)
    state.pidfds.append(pidfd)
    state.intermediate[1].close()


def await_the_intermediate(state: Launch) -> None:
    """Receive both pids and pidfds from it, and see it end."""
    message, received = state.intermediate[0].receive(descriptors=2)
    intermediate, *_ = state.pidfds
    state.pidfds.extend(received)
    if not message[:1].isdigit():
        raise_failure(message, "intermediate")
    state.pids.extend(int(part) for part in message.split())
    await_end(intermediate)
    os.close(state.pidfds.pop(0))
    state.init[1].close()
    state.steward[1].close()


def write_the_maps(state: Launch) -> None:
    """Write the uid and gid maps of init's user namespace."""
    state.write_maps(state.pids[0], state.plan.ids.map_lines())


def release_both(state: Launch) -> None:
    """Tell both that the maps are written."""
    state.init[0].send(build.MAPPED)
    state.steward[0].send(build.MAPPED)


def receive_the_proxy_socket(state: Launch) -> None:
    """Receive the proxy's socket from init, if the plan has a port for it."""
    if state.plan.proxy_port is None:
        return
    message, received = state.init[0].receive(descriptors=1)
    if message != build.BOUND or len(received) != 1:
        for descriptor in received:
            os.close(descriptor)
        raise_failure(message, "init")
        raise OSError(errno.EPROTO, "init is complete without the proxy's socket")
    state.proxy_listener = received[0]


def await_init(state: Launch) -> None:
    """Wait until init is complete, and receive the bridge's socket from it."""
    state.bridge_fds = state.init[0].receive_done("init", descriptors=1)


def await_the_steward(state: Launch) -> None:
    """Wait until the steward is complete."""
    state.steward[0].receive_done("steward")


def _kill_and_reap(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    with suppress(ChildProcessError, TimeoutError):
        await_end(pidfd)


# the intermediate ------------------------------------------------------------------------------


def unshare_cgroup_and_mounts(_: Intermediate) -> None:
    """A cgroup namespace rooted at the box, and a private mount namespace."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.unshare(CLONE_NEWCGROUP | CLONE_NEWNS)
    mounts.make_private()


def copy_the_workspace(state: Intermediate) -> None:
    """Attach the workspace here, where alone it can be copied; copy it twice; detach it again."""
    workspace = state.launch.plan.workspace_fd
    mounts.put_on_root(workspace)
    state.workspace_fds = (_copy(workspace), _copy(workspace))
    mounts.detach(workspace)  # a user namespace cannot be made below a covered root


def clone_init(state: Intermediate) -> None:
    """Make init in its leaf, with every namespace of its own."""
    launch, plan = state.launch, state.launch.plan
    pid, pidfd = syscalls.clone3(CLONE_NEWUSER | _OWN_NAMESPACES | CLONE_PARENT, plan.init_leaf_fd)
    if pid == 0:
        build.main(plan, launch.init[1], state.workspace_fds[0])
    state.pids.append(pid)
    state.pidfds.append(pidfd)


def clone_the_steward(state: Intermediate) -> None:
    """Make the steward in its leaf, with namespaces of the initial user namespace."""
    launch, plan = state.launch, state.launch.plan
    pid, pidfd = syscalls.clone3(_OWN_NAMESPACES | CLONE_PARENT, plan.steward_leaf_fd)
    if pid == 0:
        context = steward_process.StewardContext(
            plan, launch.steward[1], state.workspace_fds[1], state.pidfds[0]
        )
        steward_process.main(context, launch.serve)
    state.pids.append(pid)
    state.pidfds.append(pidfd)


def hand_over(state: Intermediate) -> None:
    """Send both pids and pidfds to the helper."""
    message = b"%d %d" % tuple(state.pids)
    state.launch.intermediate[1].send(message, tuple(state.pidfds))


def _copy(mount_fd: int) -> int:
    return syscalls.open_tree(mount_fd, b"", syscalls.OPEN_TREE_CLONE | syscalls.AT_EMPTY_PATH)


LAUNCH_STEPS: tuple[Step[Launch], ...] = (
    check_the_plan,
    clone_the_intermediate,
    await_the_intermediate,
    write_the_maps,
    release_both,
    receive_the_proxy_socket,
    await_init,
    await_the_steward,
)
INTERMEDIATE_STEPS: tuple[Step[Intermediate], ...] = (
    unshare_cgroup_and_mounts,
    copy_the_workspace,
    clone_init,
    clone_the_steward,
    hand_over,
)


def _intermediate(launch: Launch) -> NoReturn:
    # Held back until here: the ends of the others would keep a dead partner's pair open.
    code = 1
    state = Intermediate(launch)
    try:
        for gate in (launch.intermediate[0], launch.init[0], launch.steward[0]):
            gate.close()
        run_steps(INTERMEDIATE_STEPS, state)
        code = 0
    except JailError as problem:
        launch.intermediate[1].send_failure(problem, tuple(state.pidfds))
    finally:
        os._exit(code)
