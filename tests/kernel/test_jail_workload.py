"""What a command can and cannot see and do. Each claim about a wall has a control beside it."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.jail_environment import BASE, Environment, environment, filter_refusing

pytestmark = pytest.mark.needs("root", "cgroup2")

EXAMINE = """
import ctypes, json, os, resource, socket, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
x86 = os.uname().machine == "x86_64"

def call(x86_number, arm_number, *arguments):
    result = libc.syscall(x86_number if x86 else arm_number, *arguments)
    return ctypes.get_errno() if result == -1 else 0

def refusal(function, *arguments):
    try:
        function(*arguments)
    except OSError as problem:
        return problem.errno
    return 0

def write(path, text="x"):
    with open(path, "w") as file:
        file.write(text)

def look(path):
    try:
        if os.path.isdir(path):
            return "entries" if os.listdir(path) else "empty"
        with open(path, "rb") as file:
            return "text" if file.read(1) else "nothing"
    except OSError as problem:
        return problem.errno

def dev(path):
    found = os.stat(path)
    return [stat.S_ISCHR(found.st_mode), os.major(found.st_rdev), os.minor(found.st_rdev)]

print(json.dumps({
    "status": {key: value.strip() for key, value in status.items()},
    "open": [n for n in range(1024) if not refusal(os.fstat, n)],
    "pipes": [stat.S_ISFIFO(os.fstat(n).st_mode) for n in range(3)],
    "mounts": [line.split() for line in open("/proc/self/mountinfo")],
    "processes": sorted(int(n) for n in os.listdir("/proc") if n.isdigit()),
    "proc": {name: look(f"/proc/{name}") for name in os.listdir("/proc") if not name.isdigit()},
    "init": [refusal(os.listdir, "/proc/1/fd"), refusal(os.stat, "/proc/1")],
    "dev": sorted(os.listdir("/dev")),
    "nodes": {name: dev("/dev/" + name) for name in ("null", "zero", "full", "random", "urandom")},
    "dev_links": {n: os.readlink("/dev/" + n) for n in ("fd", "stdin", "stdout", "stderr")},
    "dev_works": [open("/dev/zero", "rb").read(2) == bytes(2), refusal(write, "/dev/null"),
                  refusal(write, "/dev/full"), len(os.urandom(4))],
    "root": sorted(os.listdir("/")),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "connect": {host: refusal(lambda: socket.create_connection((host, 9), 5))
                for host in ("127.0.0.1", "192.0.2.1")},
    "cgroup": open("/proc/self/cgroup").read().strip(),
    "setuid": [refusal(os.setuid, 0), refusal(os.setuid, 20002), refusal(os.setuid, 10001)],
    "setgid": refusal(os.setgid, 0),
    "setgroups": refusal(os.setgroups, [0]),
    "filtered": call(135, 92, 0xffffffff),
    "unshare": {name: call(272, 97, flag) for name, flag in {
        "user": 0x10000000, "mnt": 0x20000, "net": 0x40000000, "pid": 0x20000000}.items()},
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "cwd": os.getcwd(),
    "umask": os.umask(0o22),
    "oom": open("/proc/self/oom_score_adj").read().strip(),
    "oom_lower": refusal(write, "/proc/self/oom_score_adj", "-1"),
    "oom_higher": refusal(write, "/proc/self/oom_score_adj", "501"),
    "hostname": [socket.gethostname(), open("/proc/self/environ").read().count("PATH=")],
    "environment": {key: value for key, value in os.environ.items()},
    "session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "write": {path: refusal(write, path) for path in (
        "/usr/planted", "/planted", "/etc/planted", "/dev/planted",
        "/workspace/planted", "/tmp/planted", "/dev/shm/planted")},
    "ptrace_init": call(101, 117, 16, 1, 0, 0),
    "kill_init": refusal(os.kill, 1, 9),
    "keyring": call(250, 219, 0, -3, 0),
    "tty": refusal(write, "/dev/tty"),
    "mknod": refusal(os.mknod, "/workspace/node", stat.S_IFCHR | 0o666, os.makedev(1, 3)),
    "chroot": refusal(os.chroot, "/tmp"),
    "cpus": os.cpu_count(),
}))
"""


@pytest.fixture(scope="module")
def built() -> Iterator[Environment]:
    with environment() as one:
        yield one


@pytest.fixture(scope="module")
def found(built: Environment) -> dict[str, Any]:
    """What one command finds out about itself."""
    answer: dict[str, Any] = built.script(EXAMINE).json()
    return answer


def test_the_identity_is_10001_with_no_group(found: dict[str, Any]) -> None:
    assert found["status"]["Uid"].split() == ["10001"] * 4
    assert found["status"]["Gid"].split() == ["10001"] * 4
    assert found["status"]["Groups"] == ""


def test_the_identity_outside_is_in_the_block(built: Environment) -> None:
    running = built.release(built.park(), "sh", "-c", "echo up; exec sleep 60")
    assert running.read() == b"up\n"
    (pid,) = built.pids(running.number)
    lines = Path(f"/proc/{pid}/uid_map").read_text().splitlines()
    assert [line.split() for line in lines] == [
        ["0", str(BASE), "1"],
        ["10001", str(BASE + 1), "1"],
        ["20002", str(BASE + 2), "1"],
    ]
    assert Path(f"/proc/{pid}/gid_map").read_text().splitlines() == lines
    status = Path(f"/proc/{pid}/status").read_text()
    assert f"Uid:\t{BASE + 1}\t{BASE + 1}\t{BASE + 1}\t{BASE + 1}\n" in status
    built.kill(running.number)
    assert running.finish().status == -9


@pytest.mark.parametrize("name", ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"])
def test_every_capability_set_is_empty(found: dict[str, Any], name: str) -> None:
    assert int(found["status"][name], 16) == 0


def test_init_holds_three_capabilities_so_the_sets_are_read_right(built: Environment) -> None:
    status = built.status("init")
    assert int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == 0b1_1100_0000
    assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0


def test_no_new_privs_and_the_filter_are_on(found: dict[str, Any]) -> None:
    assert found["status"]["NoNewPrivs"] == "1"
    assert found["status"]["Seccomp"] == "2"
    assert found["filtered"] == errno.EXDEV, "the plan's filter answers with this errno"


def test_the_filter_of_the_plan_is_what_answers() -> None:
    with environment(seccomp_workload=filter_refusing(1023).hex()) as other:
        assert other.script(EXAMINE).json()["filtered"] == 0


def test_only_three_pipes_are_open(found: dict[str, Any]) -> None:
    assert found["open"] == [0, 1, 2]
    assert found["pipes"] == [True, True, True]


def test_there_is_no_way_back_to_another_identity(found: dict[str, Any]) -> None:
    assert found["setuid"] == [errno.EPERM, errno.EPERM, 0], "its own uid is the control"
    assert found["setgid"] == found["setgroups"] == errno.EPERM


def test_no_mount_of_the_host_is_left(found: dict[str, Any]) -> None:
    points = [line[4] for line in found["mounts"] if not line[4].startswith("/proc/")]
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    assert sorted(points) == sorted(
        ["/", "/usr", "/workspace", "/proc", "/dev", "/dev/shm", "/tmp", *devices]
    )


def test_the_covers_of_proc_are_empty_and_read_only(found: dict[str, Any]) -> None:
    covers = [line for line in found["mounts"] if line[4].startswith("/proc/")]
    assert {line[3] for line in covers} == {"/file", "/directory"}
    assert all(line[5].split(",")[0] == "ro" for line in covers)
    assert {line[-3] for line in covers} == {"tmpfs"}


def test_every_mount_is_nosuid_and_only_three_are_writable(found: dict[str, Any]) -> None:
    options = {line[4]: line[5].split(",") for line in found["mounts"]}
    assert all("nosuid" in words for words in options.values())
    assert all("rw" in words or "ro" in words for words in options.values())
    writable = {point for point, words in options.items() if "rw" in words}
    assert writable == {"/workspace", "/tmp", "/dev/shm", "/proc"}
    assert all("nodev" in options[point] for point in ("/", "/usr", "/workspace", "/tmp"))
    assert "noexec" in options["/dev/shm"]
    assert all(
        not any(w.startswith(("shared", "master")) for w in line) for line in found["mounts"]
    )


def test_writes_succeed_in_the_writable_places_alone(found: dict[str, Any]) -> None:
    assert found["write"] == {
        "/usr/planted": errno.EROFS,
        "/planted": errno.EROFS,
        "/etc/planted": errno.EROFS,
        "/dev/planted": errno.EROFS,
        "/workspace/planted": 0,
        "/tmp/planted": 0,
        "/dev/shm/planted": 0,
    }


def test_the_file_systems_have_the_sizes_of_the_plan(built: Environment) -> None:
    sizes = built.script("""
        import json, os
        print(json.dumps([os.statvfs(p).f_blocks * os.statvfs(p).f_frsize
                          for p in ("/tmp", "/dev/shm", "/workspace")]))
    """).json()
    assert sizes == [4 << 20, 2 << 20, 16 << 20]


def test_no_process_but_its_own_is_visible(found: dict[str, Any]) -> None:
    assert len(found["processes"]) == 1
    assert found["init"] == [errno.ENOENT, errno.ENOENT]


def test_a_process_of_the_same_command_is_visible(built: Environment) -> None:
    count = built.script("""
        import os, subprocess
        child = subprocess.Popen(["sleep", "60"])
        print(len([n for n in os.listdir("/proc") if n.isdigit()]))
        child.kill()
    """)
    assert count.stdout == b"2\n"


PROC_OPEN = {
    "cpuinfo", "filesystems", "loadavg", "meminfo", "mounts", "stat", "uptime", "version",
}  # fmt: skip


def test_only_the_chosen_files_of_proc_can_be_opened(found: dict[str, Any]) -> None:
    kinds: dict[str, Any] = found["proc"]
    assert set(kinds) >= PROC_OPEN | {"sys", "keys", "interrupts", "self", "thread-self", "net"}
    assert {name for name, answer in kinds.items() if answer == "text"} == PROC_OPEN
    assert {name for name, answer in kinds.items() if answer == "entries"} == {
        "self",
        "thread-self",
        "net",
    }
    assert kinds["sys"] == kinds["fs"] == "empty"
    assert kinds["keys"] == kinds["interrupts"] == errno.EACCES


@pytest.mark.parametrize(
    "path",
    ["sys/kernel/core_pattern", "sys/kernel/modprobe", "sys/vm/drop_caches", "sysrq-trigger",
     "sys/user/max_user_namespaces", "interrupts", "keys", "meminfo"],
)  # fmt: skip
def test_no_setting_of_the_kernel_can_be_written(built: Environment, path: str) -> None:
    source = f"open('/proc/{path}', 'w')"
    tried = built.script(f"try:\n    {source}\nexcept OSError as p:\n    print(p.errno)")
    assert int(tried.stdout) in (errno.ENOENT, errno.EACCES, errno.EROFS)


def test_dev_holds_the_listed_nodes_and_they_work(found: dict[str, Any]) -> None:
    names = ["fd", "full", "null", "random", "sbx-bridge", "shm", "stderr", "stdin", "stdout"]
    assert found["dev"] == [*names, "urandom", "zero"]
    assert found["nodes"] == {
        "null": [True, 1, 3],
        "zero": [True, 1, 5],
        "full": [True, 1, 7],
        "random": [True, 1, 8],
        "urandom": [True, 1, 9],
    }
    assert found["dev_works"] == [True, 0, errno.ENOSPC, 4]
    assert found["dev_links"]["stdout"] == "/proc/self/fd/1"
    assert found["tty"] == errno.EROFS


def test_the_network_is_a_loopback_that_is_up(found: dict[str, Any]) -> None:
    assert found["interfaces"] == ["lo"]
    assert found["connect"] == {"127.0.0.1": errno.ECONNREFUSED, "192.0.2.1": errno.ENETUNREACH}


def test_the_cgroup_namespace_is_rooted_at_the_box(found: dict[str, Any]) -> None:
    assert found["cgroup"].splitlines()[-1].startswith("0::/exec-"), "version 1 comes before it"


def test_no_namespace_can_be_made(found: dict[str, Any]) -> None:
    assert found["unshare"]["user"] == errno.ENOSPC, "the limit of the user namespace is 0"
    assert set(found["unshare"].values()) <= {errno.ENOSPC, errno.EPERM}


def test_the_limits_of_the_plan_hold(found: dict[str, Any]) -> None:
    assert found["core"] == [0, 0]
    assert found["files"] == [256, 256]


def test_the_oom_killer_prefers_it_and_it_cannot_hide_below_the_host(
    found: dict[str, Any],
) -> None:
    assert found["oom"] == "500"
    assert found["oom_lower"] == errno.EACCES
    assert found["oom_higher"] == 0


def test_a_command_starts_in_the_workspace_with_the_environment_given(
    found: dict[str, Any],
) -> None:
    assert found["cwd"] == "/workspace"
    assert found["umask"] == 0o022
    assert found["hostname"] == ["sandbox", 1]
    assert found["session"] is True
    expected = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/workspace", "LANG": "C.UTF-8"}
    assert {name: found["environment"][name] for name in expected} == expected
    assert set(found["environment"]) <= {*expected, "LC_CTYPE"}


def test_signals_are_at_their_defaults(built: Environment) -> None:
    status = built.run("cat", "/proc/self/status")
    words = dict(line.split(b":", 1) for line in status.stdout.splitlines())
    assert [int(words[name], 16) for name in (b"SigIgn", b"SigBlk", b"SigCgt")] == [0, 0, 0]


@pytest.mark.case("ESC-12")
def test_init_cannot_be_killed_or_traced(built: Environment, found: dict[str, Any]) -> None:
    assert found["kill_init"] == errno.EPERM
    assert found["ptrace_init"] == errno.EPERM
    hostile = built.script("""
        import os, signal
        for number in signal.valid_signals():
            for target in (1, -1):
                try:
                    if (target, number) not in ((-1, 9), (-1, 19)):
                        signal.signal(number, signal.SIG_IGN)
                except OSError:
                    pass
                try:
                    os.kill(1, number)
                    print("sent", number)
                except PermissionError:
                    pass
    """)
    assert hostile.status == 0
    assert hostile.stdout == b""
    assert built.run("true").status == 0


def test_a_process_of_its_own_can_be_traced_which_shows_that_ptrace_is_not_off(
    built: Environment,
) -> None:
    traced = built.script("""
        import ctypes, os, subprocess
        libc = ctypes.CDLL(None, use_errno=True)
        child = subprocess.Popen(["sleep", "60"])
        number = 101 if os.uname().machine == "x86_64" else 117
        print(libc.syscall(number, 0x4206, child.pid, 0, 0), ctypes.get_errno())
        child.kill()
    """)
    assert traced.stdout == b"0 0\n"


def test_devices_cannot_be_made_and_the_root_cannot_be_changed(found: dict[str, Any]) -> None:
    assert found["mknod"] == errno.EPERM
    assert found["chroot"] == errno.EPERM


def test_the_session_keyring_is_new_and_shared_with_nobody_outside(built: Environment) -> None:
    keys = built.script("""
        import ctypes, json, os
        libc = ctypes.CDLL(None, use_errno=True)
        x86 = os.uname().machine == "x86_64"
        libc.syscall.restype = ctypes.c_long
        def keyctl(*arguments):
            return libc.syscall(250 if x86 else 219, *arguments)
        buffer = ctypes.create_string_buffer(256)
        session = keyctl(0, -3, 0)
        length = keyctl(6, -3, buffer, 256)
        held = ctypes.create_string_buffer(256)
        count = keyctl(11, -3, held, 256)
        print(json.dumps([session, buffer.value.decode(), count]))
    """).json()
    serial, description, held = keys
    assert serial > 0
    assert description.startswith("keyring;")
    assert description.endswith(";_ses")
    assert held == 0, "the ring is empty"


def test_python_works_as_a_user_expects(built: Environment) -> None:
    work = built.script("""
        import multiprocessing, os, subprocess, tempfile, threading
        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            with context.Pool(2) as pool:
                assert pool.map(abs, [-1, -2]) == [1, 2]
            assert subprocess.run(["echo", "x"], capture_output=True).stdout == b"x\\n"
            assert (os.cpu_count() or 0) >= 1
            with tempfile.TemporaryFile() as file:
                file.write(b"1")
            thread = threading.Thread(target=print, args=("fine",))
            thread.start()
            thread.join()
    """)
    assert work.status == 0, work.stderr.decode()
    assert work.stdout == b"fine\n"


def test_streams_open_by_name_when_the_daemon_lets_others_write_to_its_pipes(
    built: Environment,
) -> None:
    done = built.run("sh", "-c", "echo out > /dev/stdout; echo err > /dev/stderr; cat /dev/stdin")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
