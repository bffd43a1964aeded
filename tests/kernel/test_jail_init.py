"""Init's end of its channel: what ends it, what it keeps, and how it is built."""

import os
import socket
from collections.abc import Callable, Iterator

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


def run_frame(number: int) -> bytes:
    return frames.encode(frames.Run(number, b".", (b"true",), (), b"/usr/bin"))


@pytest.mark.parametrize(
    "breach",
    [
        lambda built: send_raw(built, b"garbage", 0),
        lambda built: send_raw(built, frames.encode(Park(1)) + b"x", 1),
        lambda built: send_raw(built, frames.encode(Park(1)), 0),
        lambda built: send_raw(built, frames.encode(Park(1)), 2),
        lambda built: send_raw(built, run_frame(1), 3),
        lambda built: send_raw(built, frames.encode(Ready()), 0),
        lambda built: send_raw(built, frames.encode(Parked(1)), 0),
        lambda built: (built.park(), send_raw(built, frames.encode(Park(1)), 1)),
        lambda built: (built.park(), send_raw(built, run_frame(1), 2)),
        lambda built: (built.park(), send_raw(built, run_frame(1), 4)),
        lambda built: (built.run("true"), send_raw(built, run_frame(1), 3)),
    ],
)
def test_a_broken_rule_on_the_channel_ends_init_and_all_with_it(
    built: Environment, breach: Callable[[Environment], object]
) -> None:
    breach(built)
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


def test_init_is_hidden_and_keeps_only_its_channel_and_the_null_device(
    built: Environment,
) -> None:
    pid = built.facts["init"]
    kinds = sorted(
        os.readlink(f"/proc/{pid}/fd/{name}").split(":")[0]
        for name in os.listdir(f"/proc/{pid}/fd")
    )
    assert kinds == ["/dev/null", "/dev/null", "/dev/null", "anon_inode", "socket"]
    assert os.stat(f"/proc/{pid}/environ").st_uid == 0, "not dumpable: the file is the host root's"
    status = built.status("init")
    assert status["NSpid"].split()[1:] == ["1"]
    assert status["Seccomp"] == "2"
    assert status["Groups"] == ""
    assert built.procfs("init", "comm") == "sbx-init\n"


def test_init_has_a_keyring_and_namespaces_of_its_own(built: Environment) -> None:
    pid = built.facts["init"]
    for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        theirs = os.readlink(f"/proc/{pid}/ns/{name}")
        assert theirs != os.readlink(f"/proc/self/ns/{name}"), name
    assert os.readlink(f"/proc/{pid}/root") == "/"
    assert sorted(os.listdir(f"/proc/{pid}/root/workspace")) == []


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
