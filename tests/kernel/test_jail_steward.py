"""Who the steward is and what it can reach. A probe stands in for its server."""

import errno
import os
from collections.abc import Iterator

import pytest

from tests.kernel.jail_environment import BASE, Environment, environment

pytestmark = pytest.mark.needs("root", "cgroup2")

REFUSAL = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
def refusal(function, *arguments):
    try:
        function(*arguments)
    except OSError as problem:
        return problem.errno
    return 0
def call(x86_number, arm_number, *arguments):
    result = libc.syscall(x86_number if x86 else arm_number, *arguments)
    return ctypes.get_errno() if result == -1 else 0
"""


@pytest.fixture(scope="module")
def built() -> Iterator[Environment]:
    with environment() as one:
        one.script("""
            import os
            with open("secret", "w") as file:
                file.write("hidden")
            os.chmod("secret", 0)
            os.mkdir("closed")
            open("closed/inner", "w").close()
            os.chmod("closed", 0)
        """).finished_well()
        yield one


def ask(built: Environment, expression: str) -> object:
    answer: object = built.steward(f"{REFUSAL}\nanswer = {expression}")
    return answer


def test_it_is_root_of_the_environments_user_namespace(built: Environment) -> None:
    steward, init = built.facts["steward"], built.facts["init"]
    assert os.readlink(f"/proc/{steward}/ns/user") == os.readlink(f"/proc/{init}/ns/user")
    assert built.status("steward")["Uid"].split() == [str(BASE)] * 4
    assert ask(built, "[os.getuid(), os.getgid(), os.getgroups()]") == [0, 0, []]


@pytest.mark.parametrize("name", ["mnt", "pid", "net", "ipc", "uts"])
def test_its_other_namespaces_are_its_own(built: Environment, name: str) -> None:
    ours = os.readlink(f"/proc/self/ns/{name}")
    init = os.readlink(f"/proc/{built.facts['init']}/ns/{name}")
    assert os.readlink(f"/proc/{built.facts['steward']}/ns/{name}") not in (ours, init)


def test_it_holds_four_capabilities_and_can_gain_none(built: Environment) -> None:
    status = built.status("steward")
    assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 0b1111
    assert int(status["CapBnd"], 16) == 0b1111
    assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


def test_it_reads_what_the_workload_hid_and_writes_as_the_workload(built: Environment) -> None:
    source = """
import os
flags = os.O_RDONLY
with open(os.open("secret", flags, dir_fd=workspace_fd)) as file:
    text = file.read()
closed = os.open("closed", flags, dir_fd=workspace_fd)
inner = os.listdir(closed)
os.close(closed)
made = os.open("made", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=workspace_fd)
os.fchown(made, 10001, 10001)
answer = [text, inner, os.fstat(made).st_uid]
os.close(made)
"""
    assert built.steward(source) == ["hidden", ["inner"], 10001]
    assert built.run("stat", "-c", "%u", "made").stdout == b"10001\n"
    assert built.run("cat", "secret").status == 1, "the workload itself cannot: the control"


def test_its_root_holds_the_volume_and_nothing_else(built: Environment) -> None:
    assert ask(built, "os.listdir('/')") == ["workspace"]
    assert ask(built, "'secret' in os.listdir('/workspace')") is True
    assert ask(built, "refusal(os.mkdir, '/new')") == errno.EROFS
    lines = [line.split() for line in built.procfs("steward", "mountinfo").splitlines()]
    options = {words[4]: set(words[5].split(",")) for words in lines}
    assert len(lines) == 2
    assert options["/workspace"] >= {"nosuid", "nodev", "noexec", "rw"}
    assert options["/"] >= {"nosuid", "nodev", "noexec", "ro"}


def test_it_holds_no_descriptor_of_the_host(built: Environment) -> None:
    pid = built.facts["steward"]
    held = sorted(
        os.readlink(f"/proc/{pid}/fd/{name}").split(":")[0]
        for name in os.listdir(f"/proc/{pid}/fd")
    )
    assert held == ["/workspace", "pipe", "pipe", "pipe", "socket"]
    assert ask(built, "os.read(0, 1) == b''") is True
    assert ask(built, "refusal(os.write, 1, b'x')") == errno.EPIPE


def test_it_has_no_network_and_no_power_over_its_namespaces(built: Environment) -> None:
    assert ask(built, "[name for _, name in socket.if_nameindex()]") == ["lo"]
    assert ask(built, "refusal(socket.socket().connect, ('127.0.0.1', 9))") == errno.ENETUNREACH
    assert ask(built, "refusal(socket.sethostname, 'x')") == errno.EPERM
    assert ask(built, "call(165, 40, 0, b'/', 0, 1 << 18, 0)") == errno.EPERM
    assert ask(built, "refusal(os.chroot, '/workspace')") == errno.EPERM
    assert ask(built, "call(272, 97, 0x10000000)") in (errno.EPERM, errno.ENOSPC)
    assert ask(built, "refusal(os.setuid, 10001)") == errno.EPERM


def test_it_can_make_no_process(built: Environment) -> None:
    assert ask(built, "refusal(os.fork)") == errno.EAGAIN


def test_its_filter_is_the_plans(built: Environment) -> None:
    assert ask(built, "call(135, 92, 0xffffffff)") == errno.EXDEV


def test_no_command_sees_it(built: Environment) -> None:
    source = (
        "import os\nprint([n for n in os.listdir('/proc') if n.isdigit()] == [str(os.getpid())])"
    )
    assert built.script(source).stdout == b"True\n"
