"""A steward that cannot be begun leaves nothing: no process, no zombie, no descriptor."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from sbxd.jail.handshake import Gate
from sbxd.jail.steward_alone import Intermediate


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of ours in the place of the steward, which never says a word."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def intermediate(
    child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> Iterator[Intermediate]:
    """One that is told of that process as the steward."""
    one = Intermediate("sandbox", bytes(8))
    its_end = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def ask(_: bytes, *descriptors: int) -> tuple[bytes, int]:
        os.dup2(descriptors[-1], its_end)
        return b"%d" % child.pid, os.pidfd_open(child.pid)

    monkeypatch.setattr(one, "_ask", ask)
    yield one
    os.close(its_end)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def is_child(pid: int) -> bool:
    """Whether it is a process of ours, be it alive or not reaped."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def test_a_word_that_does_not_reach_it_ends_it_and_closes_everything(
    intermediate: Intermediate,
    child: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def send(*_: object) -> None:
        raise BrokenPipeError(32, "told to")

    before = descriptors()
    monkeypatch.setattr(Gate, "send", send)
    with pytest.raises(BrokenPipeError):
        intermediate.begin_steward(-1, -1, -1)
    assert not is_child(child.pid)
    intermediate.end()
    assert len(before - descriptors()) == 1, "its own gate, and nothing is left besides"
    assert descriptors() < before


def test_one_that_is_begun_is_alive_until_it_does_not_answer(
    intermediate: Intermediate, child: "subprocess.Popen[bytes]"
) -> None:
    """The control: until then there is a process, and there are descriptors."""
    before = descriptors()
    intermediate.begin_steward(-1, -1, -1)
    assert is_child(child.pid)
    assert len(descriptors() - before) == 2
    intermediate.end()
    assert descriptors() < before
