"""What a command finds around itself, and that there is nothing else.

Source: DESIGN 3.10, CASES ESC-02, ESC-04, ESC-09, ESC-10, ESC-11, ESC-15, ESC-17, ESC-18,
FS-13. System calls are in `test_inside_system_calls`, the network in `test_inside_network`.
"""

import secrets
import socket
import tarfile

import pytest

from sbxd.port.errors import ExecutionRejected, RejectedCode
from tests.redteam.live import live

pytestmark = [
    pytest.mark.needs("daemon", "image"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.escape_denied"),
]

IMAGE_TAR = "/var/cache/sbxd-lab/image.tar"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


# --- the process -------------------------------------------------------------------------------


async def test_the_environment_is_exactly_what_was_built() -> None:
    async with live() as environment:
        result = await environment.run("env", "-0")
    found = dict(word.split("=", 1) for word in result.stdout.decode().split("\0") if word)
    assert found == {
        "HOME": "/workspace",
        "LANG": "C.UTF-8",
        "PATH": PATH,
        "PWD": "/workspace",
        "TMPDIR": "/tmp",
    }


@pytest.mark.case("ESC-02", "ESC-04")
async def test_only_three_descriptors_are_open_and_they_are_pipes_or_null() -> None:
    source = """
control = os.open("/etc/passwd", os.O_RDONLY)
os.dup2(control, 900)
found = {}
for number in range(4096):
    try:
        status = os.fstat(number)
    except OSError:
        continue
    kind = "fifo" if stat.S_ISFIFO(status.st_mode) else (
        "null" if status.st_rdev == os.makedev(1, 3) else "other")
    found[number] = kind
answer([found, control])
"""
    async with live() as environment:
        found, control = await environment.look(source)
    assert found.pop(str(control)) == "other", "the control: the search finds what is open"
    assert found.pop("900") == "other"
    assert set(found) == {"0", "1", "2"}
    assert set(found.values()) <= {"fifo", "null"}


@pytest.mark.case("ESC-02", "FS-02")
async def test_the_working_directory_is_in_the_workspace_and_so_is_every_other() -> None:
    async with live() as environment:
        assert (await environment.run("pwd", "-P")).stdout == b"/workspace\n"
        assert (await environment.look("answer(os.readlink('/proc/self/cwd'))")) == "/workspace"
        for odd in ("/proc/self/fd/7", "../..", "/", "/etc", "proc/self/fd/7", "a/../../etc"):
            with pytest.raises(ExecutionRejected):
                await environment.run("pwd", directory=odd)
        await environment.run("ln", "-s", "/etc", "link")
        await environment.run("mkdir", "real")
        with pytest.raises(ExecutionRejected) as refused:
            await environment.run("cat", "passwd", directory="link")
        assert refused.value.code is RejectedCode.WORKING_DIRECTORY_NOT_FOUND
        assert (await environment.run("pwd", directory="real")).stdout == b"/workspace/real\n"


@pytest.mark.case("ESC-02")
@pytest.mark.parametrize("program", [f"/proc/self/fd/{n}" for n in (3, 4, 7, 100)])
async def test_a_descriptor_is_no_program(program: str) -> None:
    async with live() as environment:
        with pytest.raises(ExecutionRejected):
            await environment.run(program)
        assert (await environment.run("/bin/true")).exit_code == 0


async def test_the_identity_is_powerless_and_locked() -> None:
    source = """
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
names = ["Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
         "Seccomp", "NSpid"]
answer({name: fields[name].split() for name in names})
"""
    async with live() as environment:
        found = await environment.look(source)
    assert found["Uid"] == found["Gid"] == ["10001"] * 4
    assert found["Groups"] == []
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert found[name] == ["0" * 16], name
    assert found["NoNewPrivs"] == ["1"]
    assert found["Seccomp"] == ["2"]
    assert len(found["NSpid"]) == 1, "the pid of an outer namespace is shown"


async def test_the_hostname_is_fixed_and_says_nothing_of_the_host() -> None:
    async with live() as environment, live() as other:
        names = [(await each.look("answer(os.uname())")) for each in (environment, other)]
        changed = await environment.look("answer(attempt(socket.sethostname, 'x'))")
    assert names[0][1] == names[1][1] == "sandbox"
    assert changed == "EPERM"


@pytest.mark.case("ESC-10")
async def test_a_crash_leaves_no_core_and_the_limit_cannot_be_changed() -> None:
    source = """
import resource
before = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
answer([before, resource.getrlimit(resource.RLIMIT_CORE), os.listdir("/workspace"),
        attempt(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64)),
        resource.getrlimit(resource.RLIMIT_NOFILE)])
"""
    async with live() as environment:
        crash = await environment.python("import os; os.kill(os.getpid(), 11)")
        before, after, files, other, control = await environment.look(source)
    assert (crash.exit_code, crash.signal) == (139, 11)
    assert crash.files_changed == ()
    assert before == after == [1, 1], "0 would let the host's core handler run"
    assert files == []
    assert (other, control) == ("ok", [64, 64])


# --- what is mounted ---------------------------------------------------------------------------


async def test_the_mounts_are_exactly_ours_and_writable_only_where_meant() -> None:
    source = """
found = []
for line in open("/proc/self/mountinfo"):
    left, right = line.split(" - ")
    fields = left.split()
    found.append([fields[4], right.split()[0], sorted(fields[5].split(","))])
answer(found)
"""
    async with live() as environment:
        mounts = await environment.look(source)
    by_place = {place: (kind, options) for place, kind, options in mounts}
    assert len(by_place) == len(mounts), "one mount hides another"
    masks = {place for place in by_place if place.startswith("/proc/")}
    assert all(by_place[place][0] == "tmpfs" for place in masks)
    assert set(by_place) - masks == {
        "/",
        "/workspace",
        "/proc",
        "/tmp",
        "/dev",
        "/dev/shm",
        *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")),
    }
    for place, (_, options) in by_place.items():
        assert "nosuid" in options, place
        if not place.startswith("/dev"):
            assert "nodev" in options, place
    writable = {place for place, (_, options) in by_place.items() if "rw" in options}
    assert writable == {"/workspace", "/proc", "/tmp", "/dev/shm"}
    assert by_place["/proc"][0] == "proc"
    assert by_place["/tmp"][0] == by_place["/dev/shm"][0] == "tmpfs"


async def test_of_the_hosts_part_of_proc_only_what_programs_need_can_be_read() -> None:
    source = """
readable, empty = [], []
for name in os.listdir("/proc"):
    path = "/proc/" + name
    if name.isdigit() or name in ("self", "thread-self", "mounts", "net"):
        continue
    try:
        if os.path.isdir(path):
            found = os.listdir(path)
        else:
            with open(path, "rb") as file:
                found = file.read(1)
    except OSError:
        found = None
    if found:
        readable.append(name)
answer([readable, os.listdir("/proc/net"), open("/proc/meminfo").read(8)])
"""
    async with live() as environment:
        readable, network, control = await environment.look(source)
    assert set(readable) <= {
        "cpuinfo",
        "filesystems",
        "loadavg",
        "meminfo",
        "stat",
        "uptime",
        "version",
    }
    assert "dev" in network
    assert control == "MemTotal"


async def test_only_the_workspace_and_the_temporary_folders_can_be_written() -> None:
    source = """
def create(folder):
    return attempt(lambda: os.close(os.open(folder + "/probe", os.O_CREAT | os.O_WRONLY)))

places = ["/", "/etc", "/usr/bin", "/root", "/home", "/var", "/run", "/dev", "/proc", "/sys",
          "/proc/self", "/workspace", "/tmp", "/dev/shm"]
found = {place: create(place) for place in places if os.path.isdir(place)}
found["write"] = attempt(open, "/etc/passwd", "r+")
found["interpreter"] = attempt(open, os.path.realpath(sys.executable), "r+b")
answer(found)
"""
    async with live() as environment:
        found = await environment.look(source)
    allowed = {place for place, how in found.items() if how == "ok"}
    assert allowed == {"/workspace", "/tmp", "/dev/shm"}
    assert found["interpreter"] in ("EROFS", "EACCES")


@pytest.mark.case("ESC-04", "ESC-15")
async def test_dev_holds_only_what_is_listed_and_works() -> None:
    source = """
nodes = {}
for name in sorted(os.listdir("/dev")):
    status = os.lstat("/dev/" + name)
    nodes[name] = ["chr", os.major(status.st_rdev), os.minor(status.st_rdev)] \\
        if stat.S_ISCHR(status.st_mode) else [stat.filemode(status.st_mode)[0]]
open("/dev/null", "w").write("x")
assert open("/dev/zero", "rb").read(4) == bytes(4)
assert len(open("/dev/urandom", "rb").read(32)) == 32
full = attempt(lambda: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
made = {kind: attempt(os.mknod, "/tmp/" + kind, mode | 0o666, os.makedev(*number))
        for kind, mode, number in [("chr", stat.S_IFCHR, (1, 1)), ("blk", stat.S_IFBLK, (7, 0))]}
made["fifo"] = attempt(os.mkfifo, "/tmp/fifo")
opened = {name: attempt(open, "/dev/" + name) for name in [
    "kmsg", "mem", "kvm", "net/tun", "fuse", "vhost-net", "userfaultfd", "loop0", "loop-control",
    "tty", "console", "ptmx", "pts/0", "sda", "vda", "ubda", "input/event0", "dri/card0"]}
answer([nodes, full, made, opened])
"""
    async with live() as environment:
        nodes, full, made, opened = await environment.look(source)
    assert nodes == {
        "fd": ["l"],
        "full": ["chr", 1, 7],
        "null": ["chr", 1, 3],
        "random": ["chr", 1, 8],
        "shm": ["d"],
        "stderr": ["l"],
        "stdin": ["l"],
        "stdout": ["l"],
        "urandom": ["chr", 1, 9],
        "zero": ["chr", 1, 5],
    }
    assert full == "ENOSPC"
    assert made == {"chr": "EPERM", "blk": "EPERM", "fifo": "ok"}
    assert set(opened.values()) == {"ENOENT"}


@pytest.mark.case("ESC-06", "ESC-10")
async def test_sys_and_the_kernels_knobs_are_absent() -> None:
    source = """
knobs = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger",
         "/proc/sys/fs/binfmt_misc/register", "/sys/kernel/uevent_helper", "/proc/kcore",
         "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/release_agent", "/proc/config.gz",
         "/proc/sys/user/max_user_namespaces", "/proc/kallsyms", "/proc/keys", "/proc/timer_list",
         "/sys/kernel/debug", "/sys/firmware", "/sys/class/net"]
opened = {name: [attempt(open, name, mode) for mode in ("r", "r+")] for name in knobs}
answer([os.listdir("/sys"), opened, attempt(open, "/proc/self/status")])
"""
    async with live() as environment:
        sys_entries, opened, control = await environment.look(source)
    assert sys_entries == []
    for name, how in opened.items():
        assert "ok" not in how, name
    assert control == "ok"


# --- who else is there -------------------------------------------------------------------------


@pytest.mark.case("ESC-09")
async def test_no_other_process_can_be_seen_and_the_own_children_can() -> None:
    source = """
import subprocess
child = subprocess.Popen(["sleep", "30"])
while not open(f"/proc/{child.pid}/cmdline").read().startswith("sleep"):
    os.sched_yield()  # its exec is not complete
seen = {}
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    seen[pid] = open("/proc/" + pid + "/cmdline").read().split("\\0")[0]
reached = {}
for pid in range(1, 5000):
    for name in ("root", "cwd", "exe"):
        how = attempt(os.readlink, f"/proc/{pid}/{name}")
        if how == "ok":
            reached.setdefault(str(pid), []).append(name)
    for name in ("environ", "maps", "mem", "cmdline"):
        if attempt(open, f"/proc/{pid}/{name}") == "ok":
            reached.setdefault(str(pid), []).append(name)
signals = {str(pid): attempt(os.kill, pid, 0) for pid in (1, 2 ** 20)}
answer([seen, sorted(reached), str(os.getpid()), str(child.pid), signals])
child.kill()
"""
    async with live() as environment, live():
        seen, reached, own, child, signals = await environment.look(source)
    assert set(seen) == {own, child}, "init or a host process is visible"
    assert seen[child] == "sleep", "the control: what is there is seen"
    assert set(reached) == {own, child}
    assert signals["1"] == "EPERM"
    assert signals[str(2**20)] == "ESRCH"


@pytest.mark.case("ESC-11", "ESC-17")
async def test_no_socket_of_the_host_can_be_reached_by_path_or_name() -> None:
    source = """
paths = ["/run/sbxd/worker.sock", "/run/sbxd/admin.sock", "/run/sbxd/launcher.sock",
         "/run/dbus/system_bus_socket", "/var/run/dbus/system_bus_socket", "/run/systemd/private",
         "/run/systemd/notify", "/run/systemd/journal/socket", "/run/systemd/journal/stdout",
         "/run/systemd/journal/dev-log", "/dev/log", "/run/docker.sock", "/var/run/docker.sock",
         "/run/containerd/containerd.sock", "/run/podman/podman.sock", "/run/user/0/bus"]
names = ["\\0/org/freedesktop/systemd1/notify", "\\0/containerd-shim/x.sock", "\\0sbxd",
         "\\0/tmp/dbus-x"]

def connect(address):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(address)

found = {path: attempt(connect, path) for path in paths}
abstract = {name: attempt(connect, name) for name in names}
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind("\\0control")
    listening.listen()
    control = attempt(connect, "\\0control")
    table = [line.split()[7:] for line in open("/proc/net/unix").read().splitlines()[1:]]
answer([found, abstract, control, os.path.exists("/run/sbxd"), [name for name in table if name]])
"""
    async with live() as environment:
        found, abstract, control, directory, table = await environment.look(source)
    assert set(found.values()) == {"ENOENT"}, found
    assert set(abstract.values()) == {"ECONNREFUSED"}, abstract
    assert control == "ok"
    assert directory is False
    assert table, "the control: the own socket is listed"
    assert all(name == ["@control"] for name in table), "the host's sockets are listed"


@pytest.mark.case("ESC-11")
async def test_an_abstract_socket_of_the_host_is_not_reached() -> None:
    """The name is really bound on the host, and really answers there."""
    name = f"\0sbxd-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(name)
        source = f"""
with socket.socket(socket.AF_UNIX) as one:
    answer(attempt(one.connect, {name!r}))
"""
        async with live() as environment:
            assert await environment.look(source) == "ECONNREFUSED"


# --- what is planted ---------------------------------------------------------------------------


@pytest.mark.case("FS-13")
async def test_a_planted_program_is_not_run_for_a_bare_name() -> None:
    async with live() as environment:
        for name in ("python3", "ls", "env", "sh"):
            await environment.workspace.write(name, b"#!/bin/sh\necho PLANTED\n")
        await environment.run("chmod", "755", "python3", "ls", "env", "sh")
        planted = await environment.run("/workspace/ls")
        assert planted.stdout == b"PLANTED\n", "the control: it would run"
        for argv in (("ls",), ("env",), ("sh", "-c", "echo real"), ("python3", "--version")):
            result = await environment.run(*argv)
            assert b"PLANTED" not in result.stdout, argv
            assert result.exit_code == 0
        for odd in ("./ls", "bin/ls", "../bin/ls", "", ".", ".."):
            with pytest.raises(ExecutionRejected):
                await environment.run(odd)
        await environment.workspace.write("only-here", b"#!/bin/sh\n")
        with pytest.raises(ExecutionRejected) as refused:
            await environment.run("only-here")
        assert refused.value.code is RejectedCode.COMMAND_NOT_FOUND


@pytest.mark.case("ESC-18")
async def test_a_setuid_program_gives_nothing() -> None:
    source = """
import shutil, subprocess
shutil.copy(os.path.realpath("/usr/bin/id"), "/workspace/id")
modes = {}
for place in ("/workspace/id", "/tmp/id"):
    if place != "/workspace/id":
        shutil.copy("/workspace/id", place)
    modes[place] = attempt(os.chmod, place, 0o6755)
out = subprocess.run(["/workspace/id"], capture_output=True, text=True).stdout
planted = []
for folder, _, files in os.walk("/usr"):
    for name in files:
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) and mode & 0o6000:
            planted.append(path)
answer([modes, out, os.stat("/workspace/id").st_mode & 0o6000, planted])
"""
    async with live() as environment:
        modes, out, bits, planted = await environment.look(source)
    assert out.startswith("uid=10001 gid=10001 groups=10001"), out
    assert modes["/workspace/id"] == "ok"
    assert bits, "the control: the bit is set"
    assert planted == [], "the image's own setuid programs kept their bits"
    with tarfile.open(IMAGE_TAR) as archive:
        assert any(member.mode & 0o4000 for member in archive), "the control: it came with some"


async def test_a_file_with_foreign_owner_cannot_be_made() -> None:
    source = """
open("/workspace/f", "w").close()
answer([attempt(os.chown, "/workspace/f", 0, 0), attempt(os.chown, "/workspace/f", 10001, 10001),
        attempt(os.setuid, 0), attempt(os.setgid, 0), attempt(os.setgroups, [0]),
        attempt(os.setuid, 10001)])
"""
    async with live() as environment:
        found = await environment.look(source)
    assert found == ["EPERM", "ok", "EPERM", "EPERM", "EPERM", "EPERM"]


async def test_ordinary_programs_just_work() -> None:
    """The control of this file: what is taken away is not what programs need."""
    source = """
import concurrent.futures, multiprocessing, subprocess, tempfile, threading, time
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert sum(pool.map(lambda n: n * n, range(50))) == sum(n * n for n in range(50))
with multiprocessing.get_context("fork").Pool(3) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
with tempfile.NamedTemporaryFile() as f:
    assert f.name.startswith("/tmp/")
assert subprocess.run(["sh", "-c", "echo hi | tr h H"], capture_output=True).stdout == b"Hi\\n"
print("über", flush=True)
"""
    async with live() as environment:
        result = await environment.python(source)
        assert result.exit_code == 0, result
        assert result.stdout.decode() == "über\n"
