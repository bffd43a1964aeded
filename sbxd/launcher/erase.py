"""Erase what lies in the folder of dead volumes (runs in a helper, of which there is one at most).

Invariants: it runs when nobody else wants the processor or the disk (SCHED_IDLE is both); the
folder is its root, and it has what removing files of every owner takes and no more: three
capabilities and the steward's system calls, which neither open by path nor start a program.
"""

import os
from typing import Final

from sbxd.jail import identity, syscalls
from sbxd.jail.identity import Capability
from sbxd.launcher.filters import Filters
from sbxd.launcher.helpers import Outcome, Report
from sbxd.launcher.kernel import erasure, hostpaths, volume
from sbxd.launcher.requests import Acknowledged, Erasing, ErasingIs
from sbxd.launcher.steps import StepFailed, Steps, describe

# Of one helper; what is left then is the next one's.
ROUND_SECONDS: Final = 10.0
_KEPT: Final = identity.mask(Capability.DAC_OVERRIDE, Capability.DAC_READ_SEARCH, Capability.FOWNER)


def erase(filters: Filters) -> Outcome:
    """One round. Raises StepFailed when it could remove nothing of what is there."""
    steps = Steps()
    with steps.step("erasing_folder"):
        folder = hostpaths.private_directory(hostpaths.erasing_directory())
    with steps.step("confine"):
        _confine(folder, filters.steward)
    with steps.step("erase"):
        done = erasure.work(folder, ROUND_SECONDS)
    if done.problem is not None and done.removed == 0:
        raise StepFailed("erase", done.problem.errno or 0, describe(done.problem))
    return Outcome(Report(reply=Acknowledged(ticket=1), is_erasing=not done.is_over))


def erasing(request: Erasing) -> Outcome:
    """What is still to be erased. Raises StepFailed."""
    with Steps().step("erasing"):
        volumes, used = volume.held_by_erasing()
    reply = ErasingIs(ticket=request.ticket, volumes=volumes, bytes_used=used)
    return Outcome(Report(reply=reply, is_erasing=volumes > 0))


def _confine(folder: int, seccomp: bytes) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.fchdir(folder)
    os.chroot(".")
    identity.drop_bounding_set(_KEPT)
    identity.keep_capabilities(_KEPT)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.seccomp_set_mode_filter(seccomp)
