"""Take one environment apart (runs in a helper): kill, prove empty, detach, release.

Invariants: it goes by what the kernel, PID 1 and the disk hold under the environment's id, so it
removes what a crash, a failed preparation or an earlier launcher left as well; each step is a
no-op when there is nothing to do; the uid block is released last and only when everything before
it is proven. A failure leaves the record of the block, which quarantines the uids. Its time
does not grow with what the volume holds, which is erased later (`sbxd.launcher.erase`).
"""

import errno
import os
import time
from contextlib import suppress

from sbxd.launcher.helpers import Outcome, Report
from sbxd.launcher.kernel import cgroup, hostpaths, systemd, uids, volume
from sbxd.launcher.requests import STOP_PROOF, Acknowledged, Destroy
from sbxd.launcher.steps import Steps

STOP_SECONDS = 5.0
UNASKED_SECONDS = 0.05
UNIT_SECONDS = 5.0
_PACE_SECONDS = 0.002


def destroy(request: Destroy) -> Outcome:
    """Remove all of the environment. Raises StepFailed."""
    is_erasing = destroy_environment(request.environment_id, request.party)
    return Outcome(Report(reply=Acknowledged(ticket=request.ticket), is_erasing=is_erasing))


def destroy_environment(environment_id: str, party: int = 0) -> bool:
    """Remove all of the environment, in order; whether its volume is still to be erased. Raises
    StepFailed."""
    steps = Steps()
    path = hostpaths.scope_directory(environment_id)
    with steps.step(STOP_PROOF):
        stopped = _stop(path)
    with steps.step("unit"):
        _remove_unit(environment_id, path, stopped)
    with steps.step("volume"):
        is_erasing = volume.detach(environment_id, party)
    with steps.step("uid_block"):
        uids.release(environment_id)
    return is_erasing


def kill_now(environment_id: str) -> None:
    """Kill everything at once, without proof or removal; nothing when there is nothing."""
    with suppress(OSError):
        directory = cgroup.open_directory(hostpaths.scope_directory(environment_id))
        try:
            cgroup.kill(directory)
        finally:
            os.close(directory)


def _stop(path: str) -> bool:
    """Kill all, prove it, remove all cgroups below the scope's. False when there is no scope."""
    try:
        directory = cgroup.open_directory(path)
    except FileNotFoundError:
        return False
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
    return True


def _remove_unit(environment_id: str, path: str, stopped: bool) -> None:
    """PID 1 sees that the cgroup is empty and drops the unit and the directory by itself; when
    it does not, or had nothing to see, it is asked. It may drop the unit and leave the directory:
    that is then ours to remove."""
    if stopped and _vanishes(path, time.monotonic() + UNASKED_SECONDS):
        return
    deadline = time.monotonic() + UNIT_SECONDS
    with systemd.connect() as manager:
        manager.stop_scope(hostpaths.scope_name(environment_id), deadline)
    while True:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError as problem:
            if problem.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise
        time.sleep(_PACE_SECONDS)


def _vanishes(path: str, deadline: float) -> bool:
    while os.path.lexists(path):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PACE_SECONDS)
    return True
