"""A steward that cannot be begun leaves nothing: no process, no zombie, no descriptor."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from sbxd.jail import steward_alone
from sbxd.jail.handshake import Gate
from sbxd.jail.plan import StewardPlan
from sbxd.jail.steward_alone import begin_steward

PLAN = StewardPlan(
    hostname="sandbox",
    workspace_fd=-1,
    user_namespace_fd=-1,
    steward_leaf_fd=-1,
    steward_channel_fd=-1,
    seccomp_steward=bytes(8),
)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of ours in the place of the steward, which never says a word."""
    process = subprocess.Popen(["sleep", "600"])
    its_end: list[int] = []

    def clone(plan: StewardPlan, ours: Gate, theirs: Gate, serve: object) -> tuple[int, int]:
        os.dup2(theirs.fileno(), its_end[0])
        return process.pid, os.pidfd_open(process.pid)

    monkeypatch.setattr(steward_alone, "_clone", clone)
    its_end.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    yield process
    os.close(its_end[0])
    process.kill()
    process.wait()


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
    child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(*_: object) -> None:
        raise BrokenPipeError(32, "told to")

    monkeypatch.setattr(Gate, "send", send)
    before = descriptors()
    with pytest.raises(BrokenPipeError):
        begin_steward(PLAN)
    assert descriptors() == before
    assert not is_child(child.pid)


def test_one_that_is_begun_is_alive_until_it_does_not_answer(
    child: "subprocess.Popen[bytes]",
) -> None:
    """The control: until then there is a process, and there are descriptors."""
    before = descriptors()
    beginning = begin_steward(PLAN)
    assert is_child(child.pid)
    assert len(descriptors() - before) == 2
    beginning.close()
    assert descriptors() == before
