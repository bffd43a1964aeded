"""Where an image is unpacked: a probe stands in for the process that reads it, as if the image had
taken it over. What it finds there is what a steward's probe finds."""

import errno
import json
import os
import platform
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.jail import syscalls
from sbxd.jail.steps import JailError
from sbxd.jail.steward_alone import Intermediate
from sbxd.launcher import unpacker
from sbxd.launcher.kernel import hostpaths, images, uids
from tests.kernel.image_layers import entry, put_image, seccomp, tar_of

pytestmark = pytest.mark.needs("root", "systemd", "cgroup2")

X86 = platform.machine() == "x86_64"
PRELUDE = f"""
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def refusal(function):
    try:
        function()
    except OSError as problem:
        return problem.errno
    return 0
def call(x86_number, arm_number, *arguments):
    result = libc.syscall(x86_number if {X86} else arm_number, *arguments)
    return ctypes.get_errno() if result == -1 else 0
"""
# What a process that was taken over would try; each expression is one of the probe's.
ATTEMPTS = {
    "a socket": "refusal(lambda: socket.socket())",
    "mount proc": "call(165, 40, b'proc', b'/workspace', b'proc', 0, 0)",
    "open a file system": "call(430, 430, b'proc', 0)",
    "enter a namespace": "call(308, 268, 0, 0x10000000)",
    "a user namespace": "call(272, 97, 0x10000000)",
    "chroot": "refusal(lambda: os.chroot('/workspace'))",
    "a device": "refusal(lambda: os.mknod('/workspace/node', 0o20666, os.makedev(1, 3)))",
    "a set-uid change of identity": "refusal(lambda: os.setuid(1000))",
    "a process": "refusal(os.fork)",
    "a program": "refusal(lambda: os.execv('/proc/self/exe', ['x']))",
    "another's memory": "call(101, 117, 16, 1, 0, 0)",
    "bpf": "call(321, 280, 0, 0, 0)",
    "a handle": "call(304, 265, 0, 0, 0)",
    "the host's name": "refusal(lambda: socket.sethostname('x'))",
    "the launcher's stream": "refusal(lambda: os.write(2, b'x'))",
}
REFUSED = (errno.EPERM, errno.ENOSYS, errno.EPIPE)


def probe(channel: int, workspace_fd: int) -> int:
    """Runs what the test sends and answers with `answer`; by read and write alone, which the
    filter allows."""
    while source := os.read(channel, 65536):
        names: dict[str, object] = {"workspace_fd": workspace_fd}
        try:
            exec(source, names)
            reply = json.dumps(names["answer"])
        except OSError as problem:
            reply = json.dumps({"errno": problem.errno})
        os.write(channel, reply.encode())
    return 0


class Place:
    """A directory as an image's, and a probe in the process that has it."""

    def __init__(self, channel: socket.socket, pid: int, root: Path) -> None:
        self.channel, self.pid, self.root = channel, pid, root

    def ask(self, expression: str) -> object:
        self.channel.sendall(f"{PRELUDE}\nanswer = {expression}".encode())
        answer: object = json.loads(self.channel.recv(65536))
        return answer

    def status(self, name: str) -> str:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith(f"{name}:"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("image")
    os.chown(root, uids.IMAGE_BASE, uids.IMAGE_BASE)
    directory = os.open(root, os.O_DIRECTORY)
    with unpacker.confined(directory, seccomp(), probe) as (channel, pid):
        yield Place(channel, pid, root)
    os.close(directory)


@pytest.mark.case("ESC-21")
@pytest.mark.parametrize("what", ATTEMPTS)
def test_what_a_hostile_image_tries_with_the_process_is_refused(place: Place, what: str) -> None:
    assert place.ask(ATTEMPTS[what]) in REFUSED


@pytest.mark.case("ESC-21")
def test_the_same_attempts_succeed_where_nothing_confines_them() -> None:
    """The positive control: what is refused there is no fault of the probe."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUTS)
            here.close()
            probe(there.detach(), -1)
        finally:
            os._exit(0)
    there.close()
    control = Place(here, pid, Path("/"))
    works = ("a socket", "open a file system", "the host's name", "a user namespace")
    found = {what: control.ask(ATTEMPTS[what]) for what in works}
    here.close()
    os.waitpid(pid, 0)
    assert found == dict.fromkeys(works, 0)


@pytest.mark.case("ESC-21")
def test_no_namespace_is_the_hosts_and_the_network_is_empty(place: Place) -> None:
    for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        ours = os.readlink(f"/proc/self/ns/{name}")
        assert os.readlink(f"/proc/{place.pid}/ns/{name}") != ours, name
    assert place.ask("os.getpid()") == 1
    devices = Path(f"/proc/{place.pid}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]


@pytest.mark.case("ESC-21")
def test_it_holds_four_capabilities_a_filter_and_no_new_privileges(place: Place) -> None:
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert int(place.status(name), 16) == 0b1111, name  # CHOWN, DAC_*, FOWNER; not MKNOD
    for name in ("CapInh", "CapAmb"):
        assert int(place.status(name), 16) == 0, name
    assert (place.status("NoNewPrivs"), place.status("Seccomp")) == ("1", "2")
    assert place.status("Uid").split() == [str(uids.IMAGE_BASE)] * 4
    assert place.status("Groups") == ""
    limits = Path(f"/proc/{place.pid}/limits").read_text()
    memory = next(line for line in limits.splitlines() if line.startswith("Max address space"))
    assert memory.split()[3:5] == [str(unpacker.MEMORY_BYTES_MAX)] * 2


@pytest.mark.case("ESC-21")
def test_it_sees_its_directory_and_holds_nothing_of_the_host(place: Place) -> None:
    assert place.ask("os.listdir(os.open('/', os.O_RDONLY))") == ["workspace"]
    assert place.ask("refusal(lambda: os.mkdir('../new', dir_fd=workspace_fd))") == errno.EROFS
    held = sorted(
        os.readlink(f"/proc/{place.pid}/fd/{name}").split(":")[0]
        for name in os.listdir(f"/proc/{place.pid}/fd")
        if "workspace" not in os.readlink(f"/proc/{place.pid}/fd/{name}")
    )
    assert set(held) <= {"/", "pipe", "socket"}
    mounts = Path(f"/proc/{place.pid}/mountinfo").read_text().splitlines()
    assert sorted(line.split()[4] for line in mounts) == ["/", "/workspace"]
    assert all({"nosuid", "nodev", "noexec"} <= set(m.split()[5].split(",")) for m in mounts)


def test_it_may_do_what_laying_an_image_takes(place: Place) -> None:
    """The positive control of its rights: owners, modes and times of the image block."""
    assert place.ask("refusal(lambda: os.mkdir('made', dir_fd=workspace_fd))") == 0
    assert place.ask("refusal(lambda: os.chown('made', 7, 9, dir_fd=workspace_fd))") == 0
    made = (place.root / "made").stat()
    assert (made.st_uid, made.st_gid) == (uids.IMAGE_BASE + 7, uids.IMAGE_BASE + 9)


@pytest.mark.also("uml")
def test_it_is_in_a_scope_of_its_own_with_limits(place: Place) -> None:
    lines = Path(f"/proc/{place.pid}/cgroup").read_text().splitlines()
    path = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
    name = path.rpartition("/")[2]
    assert path == f"/{hostpaths.SLICE}/{name}"
    assert name.startswith("sbx-image-")
    assert hostpaths.environment_of_scope(name) is None
    directory = Path(hostpaths.slice_directory()) / name
    controllers = (directory / "cgroup.controllers").read_text().split()
    bounded = {
        "memory": ("memory.max", unpacker.MEMORY_BYTES_MAX),
        "pids": ("pids.max", unpacker.PIDS_MAX),
    }
    for controller in set(bounded) & set(controllers):
        file, least = bounded[controller]
        assert int((directory / file).read_text()) < 2 * least + 128


@pytest.mark.case("ESC-21")
def test_it_dies_with_the_helper(tmp_path: Path) -> None:
    os.chown(tmp_path, uids.IMAGE_BASE, uids.IMAGE_BASE)
    directory = os.open(tmp_path, os.O_DIRECTORY)
    here, there = socket.socketpair()
    helper = os.fork()
    if helper == 0:
        try:
            with unpacker.confined(directory, seccomp(), probe) as (_, pid):
                socket.send_fds(there, [b"born"], [os.pidfd_open(pid)])
                signal.pause()
        finally:
            os._exit(1)
    there.close()
    _, (pidfd,), _, _ = socket.recv_fds(here, 16, 1)
    os.kill(helper, signal.SIGKILL)
    os.waitpid(helper, 0)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(60_000), "it outlived its helper"
    for each in (directory, pidfd):
        os.close(each)
    here.close()


@pytest.mark.case("ESC-21")
def test_the_helper_reads_nothing_that_an_image_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest, the configuration and the layers pass it by as bytes."""
    from sbxd.oci import documents, tar

    monkeypatch.setattr(hostpaths, "STATE_DIRECTORY", str(tmp_path))
    (tmp_path / "images" / "blobs" / "sha256").mkdir(parents=True)
    digest = put_image(tmp_path, tar_of((entry("file"), b"x")))
    here = os.getpid()
    decode, records = documents.decode, tar._check_sum

    def elsewhere(*arguments: object) -> object:
        if os.getpid() == here:
            os._exit(70)
        return decode(*arguments)  # type: ignore[arg-type]

    def header_elsewhere(header: bytes) -> None:
        if os.getpid() == here:
            os._exit(71)
        records(header)

    monkeypatch.setattr(documents, "decode", elsewhere)
    monkeypatch.setattr(tar, "_check_sum", header_elsewhere)
    unpacker.unpack(digest, seccomp())
    os.close(images.mount(digest))


def test_a_process_that_failed_and_was_reaped_is_not_killed_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number may be another's by then."""

    def fail(made: Intermediate) -> None:
        signal.pidfd_send_signal(made.pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, made.pidfd, os.WEXITED)
        raise JailError("work", errno.EIO, "it failed")

    was_ours: list[bool] = []
    plain = os.kill

    def kill(pid: int, number: int) -> None:
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            was_ours.append(False)
            return
        was_ours.append(True)
        plain(pid, number)

    monkeypatch.setattr(Intermediate, "finish_steward", fail)
    monkeypatch.setattr(os, "kill", kill)
    os.chown(tmp_path, uids.IMAGE_BASE, uids.IMAGE_BASE)
    directory = os.open(tmp_path, os.O_DIRECTORY)
    with (
        pytest.raises(JailError, match="it failed"),
        unpacker.confined(directory, seccomp(), probe),
    ):
        raise AssertionError
    os.close(directory)
    assert was_ours == [True, True], "the anchor and the intermediate"
