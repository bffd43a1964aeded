"""Init's end of its channel: what ends it, what it keeps, and how it is built."""

import os
import socket
from collections.abc import Iterator

import pytest

from sbxd.jail import frames
from sbxd.jail.frames import Park, Parked, Ready
from tests.kernel.jail_environment import Environment, environment

pytestmark = pytest.mark.needs("root", "cgroup2")


@pytest.fixture
def built() -> Iterator[Environment]:
    with environment() as one:
        yield one


def send_raw(built: Environment, raw: bytes, descriptors: int) -> None:
    null = [os.open("/dev/null", os.O_RDWR) for _ in range(descriptors)]
    socket.send_fds(built.init, [raw], null)
    for descriptor in null:
        os.close(descriptor)


PARK_1 = frames.encode(Park(1))
RUN_1 = frames.encode(frames.Run(1, b".", (b"true",), (), b"/usr/bin"))


@pytest.mark.parametrize(
    ("raw", "descriptors"),
    [
        (b"garbage", 0),
        (PARK_1 + b"x", 1),
        (PARK_1, 0),
        (PARK_1, 2),
        (PARK_1, 20),
        (RUN_1, 3),
        (frames.encode(Ready()), 0),
        (frames.encode(Parked(1)), 0),
    ],
)
def test_a_frame_out_of_place_ends_init(built: Environment, raw: bytes, descriptors: int) -> None:
    send_raw(built, raw, descriptors)
    assert built.init_ended()


@pytest.mark.parametrize(("raw", "descriptors"), [(PARK_1, 1), (RUN_1, 2), (RUN_1, 4)])
def test_a_frame_that_a_parked_process_does_not_allow_ends_init(
    built: Environment, raw: bytes, descriptors: int
) -> None:
    assert built.park() == 1
    send_raw(built, raw, descriptors)
    assert built.init_ended()


def test_a_second_run_of_one_number_ends_init(built: Environment) -> None:
    assert built.run("true").status == 0
    send_raw(built, RUN_1, 3)
    assert built.init_ended()


def test_the_launchers_own_command_is_refused_without_its_program(built: Environment) -> None:
    built.send(frames.Park(frames.CANARY), built.leaf())
    assert built.receive() == frames.Parked(frames.CANARY)
    send_raw(built, frames.encode(frames.Run(0, b".", (b"x",), (), b"/")), 3)
    assert built.init_ended()


def test_a_legal_frame_does_not_end_init(built: Environment) -> None:
    assert built.run("true").status == 0
    assert not built.init_ended(0.05)


def test_the_end_of_the_channel_ends_init_and_every_command(built: Environment) -> None:
    running = built.release(built.park(), "sh", "-c", "setsid sleep 60 & echo up; exec sleep 60")
    assert running.read() == b"up\n"
    assert len(built.pids(running.number)) == 2
    built.init.close()
    assert built.init_ended()
    assert running.read() == b"", "nobody holds the stream any more"
    assert built.pids(running.number) == []


def test_the_end_of_its_channel_ends_the_steward_and_not_init(built: Environment) -> None:
    built.steward_channel.close()
    assert built.steward_ended()
    assert not built.init_ended(0.05)


def test_init_is_hidden_and_keeps_its_channel_its_commands_program_and_the_null_device(
    built: Environment,
) -> None:
    pid = built.facts["init"]
    kinds = sorted(
        os.readlink(f"/proc/{pid}/fd/{name}").split(":")[0]
        for name in os.listdir(f"/proc/{pid}/fd")
    )
    assert kinds == ["/dev/null", "/dev/null", "/dev/null", "/memfd", "anon_inode", "socket"]
    assert os.stat(f"/proc/{pid}/environ").st_uid == 0, "not dumpable: the file is the host root's"
    status = built.status("init")
    assert status["NSpid"].split()[1:] == ["1"]
    assert status["Seccomp"] == "2"
    assert status["Groups"] == ""
    assert built.procfs("init", "comm") == "sbx-init\n"


@pytest.mark.case("KRN-04")
def test_init_has_a_keyring_and_namespaces_of_its_own(built: Environment) -> None:
    pid = built.facts["init"]
    for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        theirs = os.readlink(f"/proc/{pid}/ns/{name}")
        assert theirs != os.readlink(f"/proc/self/ns/{name}"), name
    assert os.readlink(f"/proc/{pid}/root") == "/"
    assert sorted(os.listdir(f"/proc/{pid}/root/workspace")) == []


@pytest.mark.case("ESC-07")
def test_every_limit_on_namespaces_is_zero(built: Environment) -> None:
    """Read through a proc of the host's from inside init's user namespace."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        from sbxd.jail import syscalls

        syscalls.setns(os.pidfd_open(built.facts["init"]), syscalls.CLONE_NEWUSER)
        with open("/proc/sys/user/max_user_namespaces", "rb") as file:
            os.write(writing, file.read())
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 64).strip() == b"0"
    os.close(reading)
    os.waitpid(child, 0)
    with open("/proc/sys/user/max_user_namespaces") as file:
        assert int(file.read()) > 0, "the host's own limit is untouched"
