"""Take one environment apart (runs in a helper): kill, prove empty, detach, erase, release.

Invariants: it goes by what the kernel, PID 1 and the disk hold under the environment's id, so it
removes what a crash, a failed preparation or an earlier launcher left as well; each step is a
no-op when there is nothing to do; the uid block is released last and only when everything before
it is proven. A failure leaves the record of the block, which quarantines the uids.
"""

import errno
import os
import time
from contextlib import suppress

from sbxd.launcher.helpers import Outcome, Report
from sbxd.launcher.kernel import cgroup, hostpaths, systemd, uids, volume
from sbxd.launcher.requests import Acknowledged, Destroy
from sbxd.launcher.steps import StepFailed, Steps

STOP_SECONDS = 5.0
UNIT_SECONDS = 5.0
_RETRY_SECONDS = 0.02


def destroy(request: Destroy) -> Outcome:
    """Remove all of the environment. Raises StepFailed."""
    destroy_environment(request.environment_id)
    return Outcome(Report(reply=Acknowledged(ticket=request.ticket)))


def destroy_environment(environment_id: str) -> None:
    """Remove all of the environment, in order. Raises StepFailed."""
    steps = Steps()
    path = hostpaths.scope_directory(environment_id)
    with steps.step("stop_proof"):
        _stop(path)
    with steps.step("unit"):
        _remove_unit(environment_id, path)
    with steps.step("volume"):
        volume.erase(environment_id)
    with steps.step("uid_block"):
        uids.release(environment_id)


def kill_now(environment_id: str) -> None:
    """Kill everything at once, without proof or removal; nothing when there is nothing."""
    with suppress(FileNotFoundError, OSError):
        directory = cgroup.open_directory(hostpaths.scope_directory(environment_id))
        try:
            cgroup.kill(directory)
        finally:
            os.close(directory)


def _stop(path: str) -> None:
    try:
        directory = cgroup.open_directory(path)
    except FileNotFoundError:
        return
    try:
        cgroup.kill(directory)
        if not cgroup.wait_empty(directory, time.monotonic() + STOP_SECONDS):
            raise TimeoutError(errno.ETIMEDOUT, "processes outlived cgroup.kill")
        cgroup.remove_below(directory)
    except OSError as problem:
        if problem.errno not in (errno.ENODEV, errno.ENOENT):  # PID 1 removed it meanwhile
            raise
    finally:
        os.close(directory)


def _remove_unit(environment_id: str, path: str) -> None:
    """PID 1 sees the empty cgroup and drops the unit by itself; asking it makes sure."""
    deadline = time.monotonic() + UNIT_SECONDS
    with systemd.connect() as manager:
        manager.stop_scope(hostpaths.scope_name(environment_id), deadline)
    while True:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError as problem:
            if problem.errno != errno.EBUSY:
                raise
            if time.monotonic() >= deadline:
                raise StepFailed("cgroup", problem.errno, "a cgroup stays busy") from None
            time.sleep(_RETRY_SECONDS)
        else:
            return
