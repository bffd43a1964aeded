"""What this host can enforce, found by trying it where trying is cheap and leaves nothing.

Every item that is not ok says exactly what to change. Reading only: a probe changes nothing.
"""

import errno
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import suppress

from sbxd.jail import landlock, syscalls
from sbxd.launcher.kernel import apparmor, cgroup, hostpaths, mounts, static_program, systemd, uids
from sbxd.launcher.kernel.runsc import Runsc, Unusable
from sbxd.launcher.requests import RUNSC_ITEM, ProbeItem

SYSTEMD_MIN = 254  # OOMPolicy= and RuntimeMaxSec= of scopes, Delegate= as it is used here
KERNEL_MIN = (5, 14)  # cgroup.kill
_BOOT = "boot with systemd.unified_cgroup_hierarchy=1 and without cgroup_disable="


def run() -> Iterator[ProbeItem]:
    """One item per facility. A facility that cannot be looked at is missing."""
    for name, look in _PROBES:
        try:
            yield look(name)
        except OSError as problem:
            detail = problem.strerror or type(problem).__name__
            yield ProbeItem(name=name, state="missing", detail=f"cannot be used: {detail}")


def of_runsc(runsc: Runsc | Unusable) -> ProbeItem:
    """gVisor's program: its version and digest, as the launcher found them when it started."""
    if isinstance(runsc, Unusable):
        detail = f"{runsc.detail}: the mechanism gvisor is not available"
        return ProbeItem(name=RUNSC_ITEM, state="missing", detail=detail, fix=runsc.fix)
    return _ok(RUNSC_ITEM, f"version {runsc.version} sha256 {runsc.sha256}")


def _ok(name: str, detail: str) -> ProbeItem:
    return ProbeItem(name=name, state="ok", detail=detail)


def _kernel(name: str) -> ProbeItem:
    release = platform.release()
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if numbers < KERNEL_MIN:
        fix = f"install a kernel of {KERNEL_MIN[0]}.{KERNEL_MIN[1]} or later"
        return ProbeItem(name=name, state="missing", detail=release, fix=fix)
    return _ok(name, release)


def _systemd(name: str) -> ProbeItem:
    with systemd.connect() as manager:
        version = manager.version()
    number = re.match(r"\d+", version)
    if number is None or int(number.group()) < SYSTEMD_MIN:
        fix = f"use a distribution with systemd {SYSTEMD_MIN} or later"
        return ProbeItem(name=name, state="missing", detail=version, fix=fix)
    return _ok(name, version)


def _cgroup2(name: str) -> ProbeItem:
    options = _mount_options(hostpaths.CGROUP_ROOT)
    if options is None:
        return ProbeItem(name=name, state="missing", detail="cgroup v2 is not mounted", fix=_BOOT)
    return _ok(name, "cgroup v2")


def _controller(name: str) -> ProbeItem:
    wanted = name.removeprefix("cgroup.")
    root = cgroup.open_directory(hostpaths.CGROUP_ROOT)
    try:
        has = wanted in cgroup.controllers_of(root)
    finally:
        os.close(root)
    if has:
        return _ok(name, "the limit is enforced")
    return ProbeItem(
        name=name,
        state="missing",
        detail=f"no {wanted} controller in cgroup v2: the limit is not enforced",
        fix=_BOOT,
    )


def _io(name: str) -> ProbeItem:
    item = _controller(name)
    if item.state == "ok" and hostpaths.state_disk() is not None:
        return _ok(name, "ceilings on the disk are enforced, and written bytes are counted")
    fix = item.fix or "put the state directory on a file system of one disk"
    detail = "limits.io cannot be enforced, and bytes written to the disk are not counted"
    return ProbeItem(name=name, state="degraded", detail=detail, fix=fix)


def _nsdelegate(name: str) -> ProbeItem:
    options = _mount_options(hostpaths.CGROUP_ROOT) or ""
    if "nsdelegate" in options.split(","):
        return _ok(name, "delegation boundaries are enforced")
    return ProbeItem(
        name=name,
        state="degraded",
        detail="cgroup2 is mounted without nsdelegate",
        fix=f"mount -o remount,nsdelegate {hostpaths.CGROUP_ROOT}",
    )


def _user_namespaces(name: str) -> ProbeItem:
    os.close(mounts.user_namespace(mounts.map_text([(0, uids.RANGE_LAST, 1)])))
    return _ok(name, "user namespaces with a map of our choice can be made")


def _idmapped_mounts(name: str) -> ProbeItem:
    directory = hostpaths.private_directory(hostpaths.unpacked_directory())
    try:
        detached = mounts.clone_tree(directory)
    finally:
        os.close(directory)
    try:
        namespace = mounts.user_namespace(mounts.map_text([(0, uids.RANGE_LAST, 1)]))
        try:
            mounts.id_map(detached, namespace)
        finally:
            os.close(namespace)
    except OSError as problem:
        if problem.errno not in mounts.NOT_SUPPORTED:
            raise
        return ProbeItem(
            name=name,
            state="degraded",
            detail="the state directory's file system has no id-mapped mounts: only what everybody"
            " may read of an image can be read, and workspaces do not work",
            fix="put the state directory on ext4, xfs or btrfs",
        )
    finally:
        os.close(detached)
    return _ok(name, "image and workspace show the environment's own ids")


def _project_quota(name: str) -> ProbeItem:
    options = _mount_options(hostpaths.STATE_DIRECTORY, "nearest") or ""
    if any(option in ("prjquota", "pquota") for option in options.split(",")):
        return _ok(name, "workspaces are limited by project quota")
    return ProbeItem(
        name=name,
        state="degraded",
        detail="no project quota on the state directory: each workspace is a loop-mounted image",
        fix="put the state directory on xfs or ext4 mounted with prjquota",
    )


def _apparmor(name: str) -> ProbeItem:
    found = apparmor.state()
    if found is apparmor.State.ENFORCED:
        return _ok(name, apparmor.DETAILS[found])
    return ProbeItem(
        name=name,
        # Without AppArmor a sandbox has a layer less; with it and no profile, none is built.
        state="degraded" if found is apparmor.State.OFF else "missing",
        detail=apparmor.DETAILS[found],
        fix=apparmor.FIXES[found],
    )


def _selinux(name: str) -> ProbeItem:
    """Told, and never asked for: no policy of ours is shipped."""
    mode = hostpaths.flag_file("selinux")
    if mode == "1":
        return _ok(name, "enforcing; services and sandboxes are in the domain that the host gives")
    if mode == "0":
        detail, fix = "permissive: it judges and prevents nothing", "setenforce 1"
    elif apparmor.state() is not apparmor.State.OFF:
        return _ok(name, "off; AppArmor is on")
    else:
        detail = "off, and so is AppArmor: nothing but the other layers judges files"
        fix = "boot with apparmor=1 security=apparmor, or security=selinux"
    return ProbeItem(name=name, state="degraded", detail=detail, fix=fix)


def _landlock(name: str) -> ProbeItem:
    version = syscalls.landlock_version()
    if version >= landlock.VERSION_MIN:
        return _ok(name, f"version {version}")
    if version > 0:
        detail, fix = f"version {version} is not used", "use Linux 5.19 or later"
    else:
        detail, fix = "Landlock is off", "boot with lsm=landlock,…"
    return ProbeItem(name=name, state="degraded", detail=detail, fix=fix)


def _seccomp(name: str) -> ProbeItem:
    actions = hostpaths.flag_file("seccomp")
    if actions and "errno" in actions.split() and "kill_process" in actions.split():
        return _ok(name, "filters with errno and kill_process")
    return ProbeItem(
        name=name,
        state="missing",
        detail="the kernel has no seccomp filters",
        fix="use a kernel with CONFIG_SECCOMP_FILTER=y",
    )


def _clone_into_cgroup(name: str) -> ProbeItem:
    """What is no cgroup directory is refused with EBADF only where the flag is known."""
    no_cgroup = os.open(hostpaths.NULL_DEVICE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        cloned = syscalls.clone3(0, no_cgroup)
    except OSError as problem:
        if problem.errno == errno.EBADF:
            return _ok(name, "processes are born in their cgroup")
        raise
    finally:
        os.close(no_cgroup)
    if cloned.pid == 0:
        os._exit(0)
    os.close(cloned.pidfd)
    os.waitpid(cloned.pid, 0)
    return ProbeItem(
        name=name,
        state="missing",
        detail="clone3 ignores CLONE_INTO_CGROUP",
        fix="use Linux 5.7 or later with cgroup v2",
    )


def _guest_program(name: str) -> ProbeItem:
    machine = platform.machine()
    program = f"{hostpaths.GUEST_INIT} for {machine}"
    with suppress(OSError), open(hostpaths.guest_init(), "rb") as file:
        # The kind of file and the machine; whether it is position independent is between them.
        head, wanted = file.read(20), static_program.image(machine, mounts.HOLDER)
        if (head[:16], head[18:]) == (wanted[:16], wanted[18:20]):
            return _ok(name, program)
    return ProbeItem(
        name=name,
        state="missing",
        detail=f"no {program}: `namespaces` and `gvisor` need it, so no sandbox is built",
        fix="reinstall the package sbxd; in a source tree: make guest",
    )


def _swap(name: str) -> ProbeItem:
    if hostpaths.swap_lines():
        return ProbeItem(
            name=name,
            state="degraded",
            detail="the host has swap: what a sandbox held can reach a disk by other processes",
            fix="turn swap off, or encrypt it",
        )
    return _ok(name, "no swap")


def _mount_options(path: str, which: str = "exact") -> str | None:
    """The super-block options of the mount at `path`, or of the nearest one above it."""
    best: tuple[int, str] | None = None
    with open(hostpaths.process_file(os.getpid(), "mountinfo"), encoding="utf-8") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            point = left.split()[4]
            inside = path == point or (
                which == "nearest" and (path + "/").startswith(point.rstrip("/") + "/")
            )
            kind, _, options = right.split()[:3]
            wanted = inside and (path != hostpaths.CGROUP_ROOT or kind == "cgroup2")
            if wanted and (best is None or len(point) >= best[0]):
                best = (len(point), f"{left.split()[5]},{options}")
    return best[1] if best else None


_PROBES: tuple[tuple[str, Callable[[str], ProbeItem]], ...] = (
    ("kernel", _kernel),
    ("systemd", _systemd),
    ("cgroup2", _cgroup2),
    ("cgroup.memory", _controller),
    ("cgroup.pids", _controller),
    ("cgroup.cpu", _controller),
    ("cgroup.io", _io),
    ("cgroup.nsdelegate", _nsdelegate),
    ("clone_into_cgroup", _clone_into_cgroup),
    ("user_namespaces", _user_namespaces),
    ("idmapped_mounts", _idmapped_mounts),
    ("project_quota", _project_quota),
    ("seccomp", _seccomp),
    ("apparmor", _apparmor),
    ("selinux", _selinux),
    ("landlock", _landlock),
    ("guest_program", _guest_program),
    ("swap", _swap),
)
