"""A cgroup that is gone, or is being removed, has no process left to kill."""

import errno
import os

import pytest

from sbxd.mechanism import kernel_events
from sbxd.mechanism.protocol import MechanismError


def failing_with(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_descriptor: int, _data: bytes) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("code", [errno.ENODEV, errno.ENOENT], ids=errno.errorcode.get)
def test_a_cgroup_that_goes_is_no_failure_of_a_kill(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_with(code, monkeypatch)
    kernel_events.kill(-1)


def test_control_any_other_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(errno.EIO, monkeypatch)
    with pytest.raises(MechanismError) as raised:
        kernel_events.kill(-1)
    assert (raised.value.step, raised.value.errno) == ("kill", errno.EIO)
