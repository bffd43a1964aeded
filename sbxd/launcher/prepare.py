"""Build one slot (runs in a helper). The order below is the specification.

 1 apparmor      the workload's profile is loaded and enforced, where the kernel has AppArmor
 2 uid_block     a durable block of host uids
 3 anchor        a process that does nothing; PID 1 is asked for a transient scope around it
 4 volume        the workspace, as a detached mount
 5 image         the image's root, as a detached read-only mount
 6 id_maps       both mounts show the block's uids
 7 scope         the scope is there (PID 1 made it meanwhile)
 8 box           box, box/init, box/steward
 9 launch        init and the steward are born in their leaves, in namespaces of their own
10 ready         init says that construction is complete
11 controllers   the anchor is killed and reaped, so that the scope's root holds no process; cpu,
                 io, memory and pids are handed down, and the box gets its limits
12 verify        what the kernel shows of init, of the steward and of a process that was confined
                 like a command (`canary`) is what was asked for
13 leaf          exec-1 with the specification's limits

Invariant: this module only builds. Whatever a failure leaves is removed by the destruction that
the launcher starts after it, which goes by what the kernel holds and not by what was noted here.
"""

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from sbxd.jail import construct, frames, landlock, syscalls
from sbxd.jail.plan import INNER_IDS, IdBlock, JailPlan, Launched
from sbxd.launcher import canary
from sbxd.launcher.filters import Filters
from sbxd.launcher.helpers import Outcome, Report
from sbxd.launcher.kernel import (
    apparmor,
    cgroup,
    hostpaths,
    images,
    mounts,
    static_program,
    systemd,
    uids,
    volume,
)
from sbxd.launcher.requests import VERIFY, CgroupLimits, Prepare, Prepared
from sbxd.launcher.steps import StepFailed, Steps
from sbxd.launcher.verify import Process, verify_command, verify_process
from sbxd.port.network import PROXY_PORT, NetworkShape

HOSTNAME = "sandbox"
SCOPE_SECONDS = 15.0
READY_SECONDS = 20.0
TMP_BYTES_MIN = 16 * 1024 * 1024
# soft and hard; what is absent here is inherited from the launcher's unit
RLIMITS = {
    "RLIMIT_CORE": (1, 1),  # core(5): 0 would still start the host's handler, as the host's root
    "RLIMIT_NOFILE": (1024, 4096),
    "RLIMIT_MEMLOCK": (8 * 1024 * 1024, 8 * 1024 * 1024),
    "RLIMIT_MSGQUEUE": (0, 0),
    "RLIMIT_NICE": (0, 0),
    "RLIMIT_RTPRIO": (0, 0),
    "RLIMIT_SIGPENDING": (1024, 1024),  # POSIX timers, too, are counted here
    "RLIMIT_STACK": (8 * 1024 * 1024, 8 * 1024 * 1024),
}


def tmpfs_bytes(limits: CgroupLimits) -> int:
    """The size of /tmp and of /dev/shm: each a quarter of the memory limit, to which both are
    charged."""
    return max(limits.memory_bytes // 4, TMP_BYTES_MIN)


def prepare(request: Prepare, filters: Filters) -> Outcome:
    """Build the slot that `request` describes. Raises StepFailed."""
    steps = Steps()
    with ExitStack() as held:
        return _build(request, filters, steps, held)


def _build(request: Prepare, filters: Filters, steps: Steps, held: ExitStack) -> Outcome:
    environment_id = request.environment_id
    with steps.step("apparmor"):
        label = apparmor.workload_label()
    with Steps().step("seccomp_profile"):  # a look-up: no step of the preparation
        seccomp_workload = filters.of_profile(request.seccomp_profile)
    with steps.step("uid_block"):
        ids = uids.allocate(environment_id)
    with steps.step("anchor"):
        # It is also what the workspace's map is made with.
        anchor = mounts.start_holder(ids.map_lines())
        held.callback(os.close, anchor.user_namespace)
        wait_scope = begin_scope(request, anchor.pid, request.most, held)
    with steps.step("volume"):
        workspace = volume.create(environment_id, request.volume)
        held.callback(os.close, workspace.mount_fd)
        held.callback(os.close, workspace.numbers_fd)
    with steps.step("image"):
        image = images.mount(request.image_digest)
        held.callback(os.close, image)
    with steps.step("id_maps"):
        mounts.id_map(workspace.mount_fd, anchor.user_namespace)
        with suppress_unsupported():
            id_map(image, [(uids.IMAGE_BASE + i, ids.outer(i), 1) for i in INNER_IDS])
    with steps.step("scope"):
        wait_scope()
    with steps.step("box"):
        scope = cgroup.open_directory(hostpaths.scope_directory(environment_id))
        held.callback(os.close, scope)
        box, init_leaf, steward_leaf = _make_box(scope, held)
    init_ours, init_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    steward_ours, steward_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for channel in (init_ours, init_theirs, steward_ours, steward_theirs):
        held.enter_context(channel)
    program = static_program.command()
    held.callback(os.close, program)
    plan = JailPlan(
        environment_id=environment_id,
        hostname=HOSTNAME,
        ids=ids,
        image_fd=image,
        workspace_fd=workspace.mount_fd,
        box_fd=box,
        init_leaf_fd=init_leaf,
        steward_leaf_fd=steward_leaf,
        init_channel_fd=init_theirs.fileno(),
        steward_channel_fd=steward_theirs.fileno(),
        command_program_fd=program,
        seccomp_workload=seccomp_workload,
        seccomp_init=filters.init,
        seccomp_steward=filters.steward,
        tmp_bytes=tmpfs_bytes(request.limits),
        shm_bytes=tmpfs_bytes(request.limits),
        rlimits=RLIMITS,
        apparmor_label=label,
        landlock_version=_landlock_version(),
        proxy_port=PROXY_PORT if request.network is NetworkShape.PROXY_PORT else None,
    )
    with steps.step("launch"):
        launched = construct.launch(plan, mounts.write_maps)
        held.callback(os.close, launched.init_pidfd)
        held.callback(os.close, launched.steward_pidfd)
        proxy = () if launched.proxy_listener is None else (launched.proxy_listener,)
        for descriptor in proxy:
            held.callback(os.close, descriptor)
        held.callback(os.close, launched.bridge_fd)
        init_theirs.close()
        steward_theirs.close()
    with steps.step("ready"):
        _await_ready(init_ours, launched)
    with steps.step("controllers"):
        anchor.end()
        controllers = cgroup.controllers_of(scope)
        cgroup.enable(scope, controllers)
        cgroup.apply(box, cgroup.box_limits(request.limits), controllers)
        unlimited = cgroup.limit_io(box, request.io, hostpaths.state_disk(), controllers)
        cgroup.enable(box, controllers)
        cgroup.give_procs(box, ids.outer(0))
    with steps.step(VERIFY):
        _verify(environment_id, ids, launched)
        with canary.running(init_ours, box, request.limits, ids.outer(0)) as (pid, name):
            path = hostpaths.cgroup_path(environment_id, name)
            verify_command(pid, launched.init_pid, ids, path, label)
    with steps.step("leaf"):
        leaf = cgroup.make_leaf(box, 1, request.limits, ids.outer(0))
        for descriptor in leaf:
            held.callback(os.close, descriptor)
    with steps.step("descriptors"):
        box_kill = os.open("cgroup.kill", os.O_WRONLY | os.O_CLOEXEC, dir_fd=box)
        box_events = os.open("cgroup.events", os.O_RDONLY | os.O_CLOEXEC, dir_fd=box)
        box_memory = cgroup.open_or_null(box, "memory.current")
        descriptors = [
            os.dup(init_ours.fileno()),
            os.dup(steward_ours.fileno()),
            os.dup(launched.init_pidfd),
            os.dup(launched.steward_pidfd),
            box_kill,
            box_events,
            box_memory,
            os.dup(workspace.numbers_fd),
            os.dup(launched.bridge_fd),
            *(os.dup(descriptor) for descriptor in (*leaf, *proxy)),
        ]
    reply = Prepared(
        ticket=request.ticket,
        environment_id=environment_id,
        scope=hostpaths.scope_name(environment_id),
        volume_kind=workspace.kind,
        workspace=workspace.identity,
        unenforced=(*cgroup.unenforced(controllers), *unlimited),
        steps=steps.done,
    )
    report = Report(
        reply=reply,
        init_pid=launched.init_pid,
        steward_pid=launched.steward_pid,
        uid_base=ids.base,
    )
    return Outcome(report, descriptors)


@contextmanager
def suppress_unsupported() -> Iterator[None]:
    """An image on a file system without id-mapped mounts stays plain: what everybody may read
    works, and Probe says so. (The workspace has no such way out.)"""
    try:
        yield
    except OSError as problem:
        if problem.errno not in mounts.NOT_SUPPORTED:
            raise


def id_map(mount: int, lines: list[mounts.MapLine]) -> None:
    """Show the owners of the disk as these lines say. Raises OSError."""
    namespace = mounts.user_namespace(mounts.map_text(lines))
    try:
        mounts.id_map(mount, namespace)
    finally:
        os.close(namespace)


def begin_scope(
    request: Prepare, anchor: int, limits: CgroupLimits, held: ExitStack
) -> Callable[[], None]:
    """Have PID 1 put a scope around the anchor; what is returned waits until it has. limits: the
    most that the environment can ever have. Both raise OSError."""
    properties = systemd.scope_properties(
        f"environment {request.environment_id}", anchor, limits, request.back_stop_seconds
    )
    manager = held.enter_context(systemd.connect())
    job = manager.start_scope(hostpaths.scope_name(request.environment_id), properties)
    return lambda: manager.wait_job(job, time.monotonic() + SCOPE_SECONDS)


def _make_box(scope: int, held: ExitStack) -> tuple[int, int, int]:
    """box, box/init and box/steward. No controller is enabled yet: the box itself holds a process
    while the two are born."""
    box = make_cgroup(scope, "box", held)
    return box, make_cgroup(box, "init", held), make_cgroup(box, "steward", held)


def make_cgroup(parent: int, name: str, held: ExitStack) -> int:
    """A new cgroup; its descriptor is closed with the stack. Raises OSError."""
    os.mkdir(name, 0o755, dir_fd=parent)
    descriptor = os.open(name, os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=parent)
    held.callback(os.close, descriptor)
    return descriptor


def _await_ready(channel: socket.socket, launched: Launched) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(launched.init_pidfd, select.POLLIN)
    poll.register(launched.steward_pidfd, select.POLLIN)
    deadline = time.monotonic() + READY_SECONDS
    while True:
        left_ms = int((deadline - time.monotonic()) * 1000)
        ready = dict(poll.poll(max(left_ms, 0)))
        if not ready:
            raise TimeoutError(errno.ETIMEDOUT, "init did not get ready in time")
        if channel.fileno() in ready:
            raw = channel.recv(frames.FRAME_BYTES_MAX)
            if not raw:
                raise OSError(errno.EPIPE, "init closed its channel before it was ready")
            if not isinstance(frames.decode(raw), frames.Ready):
                raise StepFailed("ready", 0, "init's first frame is not READY")
            return
        raise OSError(errno.ESRCH, "init or the steward died before it was ready")


def _landlock_version() -> int:
    """Of the kernel's interface; 0 where it has none that is of use, which Probe names."""
    version = syscalls.landlock_version()
    return version if version >= landlock.VERSION_MIN else 0


def _verify(environment_id: str, ids: IdBlock, launched: Launched) -> None:
    for kind, pid in (
        (Process.INIT, launched.init_pid),
        (Process.STEWARD, launched.steward_pid),
    ):
        verify_process(pid, ids, hostpaths.cgroup_path(environment_id, kind.value), kind)
