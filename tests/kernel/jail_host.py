"""The launcher's part in the jail's tests: a root process with mounts and cgroups of its own.

Run as a program: argv[1] is the plan as JSON, descriptors 3, 4 and 5 are the control socket and
the environment's ends of init's and the steward's channel. It works in a private mount namespace
and in one cgroup directory, and removes both. Commands on the control socket: `leaf` answers with
a new leaf directory, `write NAME TEXT` and `read NAME` reach files of the box, `end` kills and
removes all.
"""

import errno
import json
import os
import select
import signal
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path

from sbxd.jail import build, construct, handshake, mounts, syscalls
from sbxd.jail.plan import IdBlock, JailPlan
from sbxd.jail.steps import JailError
from sbxd.jail.steward_process import Serve
from sbxd.launcher.kernel import static_program
from sbxd.steward.server import serve

CONTROL, INIT_CHANNEL, STEWARD_CHANNEL = 3, 4, 5
PR_SET_CHILD_SUBREAPER = 36


def probe(channel_fd: int, workspace_fd: int) -> int:
    """Stands in for the steward's server: runs what the test sends and answers with `answer`."""
    with socket.socket(fileno=channel_fd) as channel:
        while source := channel.recv(65536):
            names: dict[str, object] = {"workspace_fd": workspace_fd}
            try:
                exec(source, names)
                reply = json.dumps(names["answer"])
            except OSError as problem:
                reply = json.dumps({"errno": problem.errno})
            channel.send(reply.encode())
    return 0


def write_maps(pid: int, lines: str) -> None:
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(lines)


def idmap(mount_fd: int, lines: str) -> None:
    """Id-map a detached mount through a user namespace that lives for this call."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go[1])
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    write_maps(pid, lines)
    namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    syscalls.mount_setattr(
        mount_fd, b"", syscalls.AT_EMPTY_PATH, syscalls.MOUNT_ATTR_IDMAP, namespace
    )
    os.write(go[1], b".")
    os.waitpid(pid, 0)
    for descriptor in (*ready, *go, namespace):
        os.close(descriptor)


def image(place: str, without: str) -> int:
    """A detached tree: this machine's /usr, an empty /etc, and the mount points."""
    os.makedirs(place)
    syscalls.mount(b"tmpfs", place.encode(), b"tmpfs", 0)
    for name in ("usr", "proc", "dev", "tmp", "workspace", "etc", "elsewhere"):
        if name != without:
            os.mkdir(f"{place}/{name}")
    os.chmod(f"{place}/elsewhere", 0o777)
    for name in ("bin", "lib", "lib64", "sbin"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{place}/{name}")
    if without.startswith("link:"):
        name = without.removeprefix("link:")
        os.rmdir(f"{place}/{name}")
        os.symlink("elsewhere", f"{place}/{name}")
    syscalls.mount(b"/usr", f"{place}/usr".encode(), None, 0x1000)
    return syscalls.open_tree(
        -100, place.encode(), syscalls.OPEN_TREE_CLONE | syscalls.AT_RECURSIVE
    )


def cgroup_root(scratch: str) -> str:
    """Where a cgroup v2 hierarchy is mounted: the system's own, or one mounted here."""
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        return "/sys/fs/cgroup"
    os.mkdir(f"{scratch}/cgroup")
    syscalls.mount(b"cgroup2", f"{scratch}/cgroup".encode(), b"cgroup2", 0)
    return f"{scratch}/cgroup"


class Tree:
    """The cgroups of one environment."""

    def __init__(self, root: str, owner: int) -> None:
        self.scope = f"{root}/sbxd-test-{os.getpid()}"
        self.box = f"{self.scope}/box"
        self._owner = owner
        self._leaves = 0
        os.mkdir(self.scope)
        offered = Path(self.scope, "cgroup.controllers").read_text().split()
        enabled = " ".join(f"+{name}" for name in ("memory", "pids") if name in offered)
        Path(self.scope, "cgroup.subtree_control").write_text(enabled)
        os.mkdir(self.box)
        os.chown(f"{self.box}/cgroup.procs", owner, owner)
        self.init = self._make("init")
        self.steward = self._make("steward")

    def box_fd(self) -> int:
        return os.open(self.box, os.O_DIRECTORY)

    def _make(self, name: str) -> int:
        os.mkdir(f"{self.box}/{name}")
        return os.open(f"{self.box}/{name}", os.O_DIRECTORY)

    def leaf(self) -> int:
        self._leaves += 1
        descriptor = self._make(f"exec-{self._leaves}")
        os.chown("cgroup.procs", self._owner, self._owner, dir_fd=descriptor)
        return descriptor

    def remove(self) -> None:
        """Kill what is left and remove the directories; idempotent."""
        if not os.path.exists(self.scope):
            return
        with open(f"{self.box}/cgroup.kill", "w") as file:
            file.write("1")
        with open(f"{self.scope}/cgroup.events") as events:
            changed = select.poll()
            changed.register(events, select.POLLPRI)
            while "populated 1" in events.read():
                assert changed.poll(10_000), "the box does not become empty"
                events.seek(0)
        for base, _, _ in os.walk(self.scope, topdown=False):
            os.rmdir(base)


def main() -> None:
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=CONTROL)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    mounts.make_private()
    scratch = tempfile.mkdtemp(prefix="sbxd-jail-")
    syscalls.mount(b"tmpfs", scratch.encode(), b"tmpfs", 0)
    ids = IdBlock(settings["base"])
    tree = Tree(cgroup_root(scratch), ids.base)
    if settings["cgroup_namespace"] == "init":
        at = build.INIT_STEPS.index(build.make_mounts_private)
        late = (*build.INIT_STEPS[:at], enter_a_cgroup_namespace_of_its_own)
        build.INIT_STEPS = late + build.INIT_STEPS[at:]
    if settings["image"] == "writable":
        build.INIT_STEPS = tuple(
            put_a_writable_image_over_root if step is build.put_image_over_root else step
            for step in build.INIT_STEPS
        )
    try:
        workspace = mounts.tmpfs(settings["workspace_bytes"], 0o755, 0)
        os.chown(f"/proc/self/fd/{workspace}", 10001, 10001)
        idmap(workspace, ids.map_lines())
        plan = JailPlan(
            environment_id="test",
            hostname="sandbox",
            ids=ids,
            image_fd=image(f"{scratch}/image", settings.get("without", "")),
            workspace_fd=workspace,
            box_fd=tree.box_fd(),
            init_leaf_fd=tree.init,
            steward_leaf_fd=tree.steward,
            init_channel_fd=INIT_CHANNEL,
            steward_channel_fd=STEWARD_CHANNEL,
            command_program_fd=static_program.command(),
            seccomp_workload=bytes.fromhex(settings["seccomp_workload"]),
            seccomp_init=bytes.fromhex(settings["seccomp_init"]),
            seccomp_steward=bytes.fromhex(settings["seccomp_steward"]),
            tmp_bytes=settings["tmp_bytes"],
            shm_bytes=settings["shm_bytes"],
            rlimits={name: tuple(pair) for name, pair in settings["rlimits"].items()},
            apparmor_label=settings["apparmor_label"],
            landlock_version=settings["landlock_version"],
            proxy_port=settings["proxy_port"],
        )
        server = serve if settings["steward"] == "server" else probe
        serve_host(control, tree, plan, MAP_WRITERS[settings["maps"]], server)
    finally:
        tree.remove()
        syscalls.umount2(scratch.encode(), syscalls.MNT_DETACH)
        os.rmdir(scratch)


def die_instead(pid: int, lines: str) -> None:
    """A map writer under which init has died before its maps are written."""
    os.kill(pid, signal.SIGKILL)


def refuse(pid: int, lines: str) -> None:
    """A map writer that fails."""
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def stop_init(pid: int, lines: str) -> None:
    """A map writer under which init neither answers nor dies."""
    handshake.DEADLINE_SECONDS = 1
    write_maps(pid, lines)
    os.kill(pid, signal.SIGSTOP)


def vanish(pid: int, lines: str) -> None:
    """A map writer under which the helper itself is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


MAP_WRITERS: dict[str, construct.MapWriter] = {
    "write": write_maps,
    "kill": die_instead,
    "refuse": refuse,
    "stop": stop_init,
    "vanish": vanish,
}


def enter_a_cgroup_namespace_of_its_own(_: build.InitContext) -> None:
    """Init's cgroup namespace is rooted at its own leaf: the arrangement that must not work."""
    syscalls.unshare(syscalls.CLONE_NEWCGROUP)


def put_a_writable_image_over_root(context: build.InitContext) -> None:
    """The image as it is: what the mount flags stop elsewhere is left to the other layers."""
    mounts.put_on_root(context.plan.image_fd)


def outlive_a_helper(plan: JailPlan) -> dict[str, object]:
    """Be the launcher of a helper that is killed; report when none of its processes is left."""
    syscalls.prctl(PR_SET_CHILD_SUBREAPER, 1)
    helper = os.fork()
    if helper == 0:
        construct.launch(plan, vanish, probe)
        os._exit(1)
    signal.alarm(20)
    ended = []
    while True:
        try:
            ended.append(os.wait())
        except ChildProcessError:
            break
    statuses = dict(ended)
    return {"step": "vanished", "errno": statuses.pop(helper), "children": False,
            "others": sorted(statuses.values())}  # fmt: skip


def serve_host(
    control: socket.socket,
    tree: Tree,
    plan: JailPlan,
    maps: construct.MapWriter,
    server: Serve,
) -> None:
    if maps is vanish:
        control.send(json.dumps(outlive_a_helper(plan)).encode())
        return
    began = time.monotonic()
    try:
        launched = construct.launch(plan, maps, server)
    except JailError as problem:
        children = True
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            children = False
        failure = {"step": problem.step, "errno": problem.errno, "children": children}
        control.send(json.dumps(failure | {"detail": str(problem)}).encode())
        return
    seconds = time.monotonic() - began
    os.close(INIT_CHANNEL)
    os.close(STEWARD_CHANNEL)
    answer = {
        "init": launched.init_pid,
        "steward": launched.steward_pid,
        "seconds": seconds,
        "box": tree.box,
        "populated": Path(tree.box, "cgroup.procs").read_text(),
    }
    descriptors = [launched.init_pidfd, launched.steward_pidfd, launched.bridge_fd]
    socket.send_fds(control, [json.dumps(answer).encode()], descriptors)
    os.close(launched.bridge_fd)
    while command := control.recv(4096).decode():
        if command == "leaf":
            leaf = tree.leaf()
            socket.send_fds(control, [b"leaf"], [leaf])
            os.close(leaf)
        elif command.startswith(("write ", "read ")):
            verb, name, *text = command.split(" ", 2)
            try:
                file = Path(tree.box, name)
                control.send(
                    file.read_bytes() if verb == "read" else b"%d" % file.write_text(text[0])
                )
            except OSError as problem:
                control.send(str(problem).encode())
        elif command == "end":
            break
    tree.remove()
    for _ in range(2):
        os.waitpid(-1, 0)


if __name__ == "__main__":
    assert stat.S_ISSOCK(os.fstat(CONTROL).st_mode)
    main()
