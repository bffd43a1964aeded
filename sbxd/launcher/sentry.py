"""Build one slot whose commands run on gVisor's kernel (runs in a helper). The order below is the
specification.

 1 runsc         the program is the one that was found when the launcher started
 2 intermediate  forked before there is anything to copy: 7 and 9 use it
 3 uid_block     a durable block of host uids
 4 anchor        a process that does nothing; PID 1 is asked for a transient scope around it
 5 volume        the workspace, as a detached mount
 6 image         the image's root, as a detached read-only mount
 7 id_maps       both mounts show the block's uids
 8 scope         the scope is there (PID 1 made it meanwhile)
 9 steward       box, box/steward; the steward is born in its leaf, since the scope would not
                 outlive its anchor empty, and builds itself while the Sentry boots
10 controllers   the anchor ends; cpu, memory and pids are handed down, the box gets its limits
11 leaf          exec-1 with the specification's limits and what a Sentry needs besides
12 boot          runsc is born in it, and starts the Sentry and its gofer
13 ready         process 1 within the sandbox says so, and gets the filter of system calls: it binds
                 commands to the same calls as on a host's kernel, and keeps them from the Sentry
14 canary        a program of the image is started, confined and ended like a command; it also warms
                 what the guest's kernel keeps of the image, so that no tenant waits for it
15 verify        what the kernel shows of Sentry, gofer and steward is what was asked for
16 warm_up       in a slot that nobody waits for yet: see `sbxd.launcher.warm_up`

`boot` repeats 11 to 15 on the same volume, when a Sentry has ended with a command.

Invariant: this module only builds, as `sbxd.launcher.prepare` does.
"""

import errno
import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from sbxd.jail import frames
from sbxd.jail.plan import SENTRY_INNER_IDS, IdBlock
from sbxd.jail.steward_alone import Intermediate
from sbxd.launcher import prepare
from sbxd.launcher.filters import Filters
from sbxd.launcher.helpers import Outcome, Report
from sbxd.launcher.kernel import (
    cgroup,
    hostpaths,
    images,
    mount_copies,
    mounts,
    oci_spec,
    runsc,
    uids,
    volume,
)
from sbxd.launcher.kernel.runsc import Runsc, Unusable
from sbxd.launcher.requests import VERIFY, Boot, Booted, CgroupLimits, Kernel, Prepare, Prepared
from sbxd.launcher.steps import StepFailed, Steps
from sbxd.launcher.verify import Process, verify_process, verify_sentry
from sbxd.launcher.warm_up import warm_up
from sbxd.port.network import NetworkShape

CANARY = (b"true",)
CANARY_PATH = b"/usr/local/bin:/usr/bin:/bin"
CANARY_SECONDS = 15.0


class Known(NamedTuple):
    """What the launcher's books know of the environment that is to get a fresh Sentry."""

    prepared: Prepare
    uid_base: int


class Ground(NamedTuple):
    """What a Sentry is started on. All descriptors are borrowed."""

    environment_id: str
    ids: IdBlock
    box: int
    image: int
    workspace: int
    program: int
    seccomp: bytes


class Started(NamedTuple):
    """A Sentry that is ready. The descriptors are closed with the stack that they were made on."""

    pid: int
    pidfd: int
    channel: socket.socket
    leaf: tuple[int, ...]
    forks: socket.socket  # where the Sentry tells of forks


def sentry_ids(base: int) -> IdBlock:
    """The block that begins here, with the Sentry's id in it."""
    return IdBlock(base, SENTRY_INNER_IDS)


def prepare_sentry(request: Prepare, filters: Filters, program: Runsc | Unusable) -> Outcome:
    """Build the slot that `request` describes. Raises StepFailed."""
    steps = Steps()
    with ExitStack() as held:
        return _build(request, filters, program, steps, held)


def _build(
    request: Prepare, filters: Filters, program: Runsc | Unusable, steps: Steps, held: ExitStack
) -> Outcome:
    environment_id = request.environment_id
    if request.network is not NetworkShape.NONE:
        raise StepFailed("network", errno.EOPNOTSUPP, "the port is the guest's own to bind")
    with steps.step("runsc"):
        program_fd = runsc.open_program(program, request.runsc_sha256)
        held.callback(os.close, program_fd)
    with Steps().step("seccomp_profile"):  # a look-up: no step of the preparation
        seccomp = filters.of_profile(request.seccomp_profile)
    with steps.step("intermediate"):
        intermediate = Intermediate(prepare.HOSTNAME, filters.steward)
        held.callback(intermediate.end)
    with steps.step("uid_block"):
        ids = sentry_ids(uids.allocate(environment_id).base)
    limits = cgroup.kernel_limits(request.limits, Kernel.SENTRY)
    with steps.step("anchor"):
        anchor = mounts.start_holder(ids.map_lines())
        held.callback(os.close, anchor.user_namespace)
        most = cgroup.kernel_limits(request.most, Kernel.SENTRY)
        wait_scope = prepare.begin_scope(request, anchor.pid, most, held)
    with steps.step("volume"):
        workspace = volume.create(environment_id, request.volume)
        held.callback(os.close, workspace.mount_fd)
        held.callback(os.close, workspace.numbers_fd)
    with steps.step("image"):
        image = _image(request.image_digest, held)
    with steps.step("id_maps"):
        mounts.id_map(workspace.mount_fd, anchor.user_namespace)
        _map_image(image, ids)
        copied = intermediate.copy(workspace.mount_fd)
        held.callback(os.close, copied)
    with steps.step("scope"):
        wait_scope()
    with steps.step("box"):
        scope = cgroup.open_directory(hostpaths.scope_directory(environment_id))
        held.callback(os.close, scope)
        box = prepare.make_cgroup(scope, "box", held)
        steward_leaf = prepare.make_cgroup(box, "steward", held)
    steward_ours, steward_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for channel in (steward_ours, steward_theirs):
        held.enter_context(channel)
    with steps.step("steward"):
        intermediate.begin_steward(anchor.user_namespace, steward_leaf, steward_theirs.fileno())
        steward_theirs.close()
    with steps.step("controllers"):
        anchor.end()
        controllers = cgroup.controllers_of(scope)
        cgroup.enable(scope, controllers)
        cgroup.apply(box, cgroup.box_limits(limits), controllers)
        unlimited = cgroup.limit_io(box, request.io, hostpaths.state_disk(), controllers)
        cgroup.enable(box, controllers)
    ground = Ground(environment_id, ids, box, image, copied, program_fd, seccomp)
    started = _start(ground, 1, request.limits, steps, held)
    with steps.step("steward_ready"):
        intermediate.finish_steward()
    with steps.step(VERIFY):
        path = hostpaths.cgroup_path(environment_id, Process.STEWARD.value)
        verify_process(intermediate.pid, ids, path, Process.STEWARD)
    if request.ceilings is not None:
        with steps.step("warm_up"):
            warm_up(started.channel, CANARY_PATH)
    with steps.step("descriptors"):
        descriptors = [
            os.dup(started.channel.fileno()),
            os.dup(steward_ours.fileno()),
            os.dup(started.pidfd),
            os.dup(intermediate.pidfd),
            os.open("cgroup.kill", os.O_WRONLY | os.O_CLOEXEC, dir_fd=box),
            os.open("cgroup.events", os.O_RDONLY | os.O_CLOEXEC, dir_fd=box),
            cgroup.open_or_null(box, "memory.current"),
            os.dup(workspace.numbers_fd),
            # In the place of the bridge's socket, which is the guest's own.
            os.open(hostpaths.NULL_DEVICE, os.O_RDWR | os.O_CLOEXEC),
            *(os.dup(descriptor) for descriptor in started.leaf),
            os.dup(started.forks.fileno()),
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
        reply=reply, init_pid=started.pid, steward_pid=intermediate.pid, uid_base=ids.base
    )
    return Outcome(report, descriptors)


def boot(request: Boot, ground: Known, filters: Filters, program: Runsc | Unusable) -> Outcome:
    """Boot a fresh Sentry on the volume of an environment. Raises StepFailed; what was started
    is then in the leaf, which the caller kills and removes."""
    steps = Steps()
    with ExitStack() as held:
        prepared, ids = ground.prepared, sentry_ids(ground.uid_base)
        with steps.step("runsc"):
            program_fd = runsc.open_program(program, prepared.runsc_sha256)
            held.callback(os.close, program_fd)
        with steps.step("image"):
            image = _image(prepared.image_digest, held)
            _map_image(image, ids)
        with steps.step("volume"):
            box = held.enter_context(cgroup.box_of(request.environment_id))
            held.callback(os.close, steward := mount_copies.steward_of(box))
            workspace = mount_copies.copy_of_stewards(steward)
            held.callback(os.close, workspace)
        seccomp = filters.of_profile(prepared.seccomp_profile)
        again = Ground(request.environment_id, ids, box, image, workspace, program_fd, seccomp)
        started = _start(again, request.number, request.limits, steps, held)
        descriptors = [
            os.dup(started.channel.fileno()),
            os.dup(started.pidfd),
            *(os.dup(descriptor) for descriptor in started.leaf),
            os.dup(started.forks.fileno()),
        ]
    reply = Booted(
        ticket=request.ticket, environment_id=request.environment_id, number=request.number
    )
    return Outcome(Report(reply=reply, init_pid=started.pid), descriptors)


def _start(
    ground: Ground, number: int, limits: CgroupLimits, steps: Steps, held: ExitStack
) -> Started:
    with steps.step("leaf"):
        promised = cgroup.kernel_limits(limits, Kernel.SENTRY)
        leaf = cgroup.make_leaf(ground.box, number, promised, 0, Kernel.SENTRY)
        for descriptor in leaf:
            held.callback(os.close, descriptor)
    with _killing(leaf[1]):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        held.enter_context(ours)
        with steps.step("boot"), theirs, open(hostpaths.guest_init(), "rb") as init:
            pid, pidfd, forks = runsc.boot(
                runsc.Boot(
                    spec=oci_spec.SentrySpec(
                        hostname=prepare.HOSTNAME,
                        tmp_bytes=prepare.tmpfs_bytes(limits),
                        shm_bytes=prepare.tmpfs_bytes(limits),
                    ),
                    ids=ground.ids,
                    program_fd=ground.program,
                    init_fd=init.fileno(),
                    leaf_fd=leaf[0],
                    image_fd=ground.image,
                    workspace_fd=ground.workspace,
                    channel_fd=theirs.fileno(),
                )
            )
            held.callback(os.close, pidfd)
            held.enter_context(forks)
        with steps.step("ready"):
            _await_ready(ours, pidfd)
            ours.send(frames.encode(frames.Filter(ground.seccomp)))
        with steps.step("canary"):
            _run_canary(ours)
        with steps.step(VERIFY):
            _verify(ground, number, leaf[0], pid)
    return Started(pid, pidfd, ours, leaf, forks)


@contextmanager
def _killing(leaf_kill: int) -> Iterator[None]:
    """What is in the leaf when the block fails is killed."""
    try:
        yield
    except BaseException:
        os.write(leaf_kill, b"1")
        raise


def _image(image_digest: str, held: ExitStack) -> int:
    image = images.mount(image_digest)
    held.callback(os.close, image)
    return image


def _map_image(image: int, ids: IdBlock) -> None:
    with prepare.suppress_unsupported():
        prepare.id_map(image, [(uids.IMAGE_BASE + i, ids.outer(i), 1) for i in ids.inner])


def _await_ready(channel: socket.socket, pidfd: int) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    ready = dict(poll.poll(int(prepare.READY_SECONDS * 1000)))
    if not ready:
        raise StepFailed(
            "ready", errno.ETIMEDOUT, "process 1 of the sandbox did not get ready in time"
        )
    raw = channel.recv(frames.FRAME_BYTES_MAX) if channel.fileno() in ready else b""
    if not raw or not isinstance(frames.decode(raw), frames.Ready):
        raise StepFailed("ready", 0, "the sandbox ended before process 1 was ready")


def _run_canary(channel: socket.socket) -> None:
    """An image without the program is none the worse: every step before it was taken.

    Raises StepFailed, named after the step that failed; OSError; ValueError for no frame.
    """
    run = frames.Run(frames.CANARY, b".", CANARY, (), CANARY_PATH)
    null = os.open(hostpaths.NULL_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        socket.send_fds(channel, [frames.encode(run)], [null, null, null])
    finally:
        os.close(null)
    channel.settimeout(CANARY_SECONDS)
    for kind in (frames.Started, frames.Exited, frames.Quiet):
        found = frames.decode(channel.recv(frames.FRAME_BYTES_MAX))
        if isinstance(found, frames.RunFailed):
            if found.step in ("execute", "interpreter"):
                break
            raise StepFailed(f"canary.{found.step}", found.errno, "a command cannot be confined")
        if not isinstance(found, kind):
            raise OSError(errno.EPROTO, f"of the canary init says {type(found).__name__}")
    channel.settimeout(None)


def _verify(ground: Ground, number: int, leaf: int, sentry: int) -> None:
    path = hostpaths.cgroup_path(ground.environment_id, f"exec-{number:d}")
    pids = [int(word) for word in cgroup.read(leaf, "cgroup.procs").split()]
    verify_sentry(sentry, pids, ground.ids, path)
