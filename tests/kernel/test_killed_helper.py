"""A helper of the launcher that is killed in the middle of a preparation: a failure that is told,
nothing that is left, and a launcher that goes on."""

import os
import signal
from pathlib import Path

import pytest
import trio

from sbxd.launcher.kernel import hostpaths
from sbxd.mechanism.protocol import MechanismError, SlotProfile
from tests.kernel import launcher_subject as subject
from tests.kernel.launcher_subject import LIMITS, Launcher

pytestmark = pytest.mark.needs("cgroup2", "idmap", "image", "loop", "root", "systemd")

# A launcher whose helpers, while a file says so, stop themselves once they have their scope.
STOPPING = """
import os, signal, sys
from sbxd.launcher.kernel import systemd
from sbxd.launcher.__main__ import main
told, wait_job = sys.argv.pop(1), systemd.Connection.wait_job
def wait_and_stop(self, job, deadline):
    wait_job(self, job, deadline)
    if os.path.exists(told):
        os.kill(os.getpid(), signal.SIGSTOP)
systemd.Connection.wait_job = wait_and_stop
main()
"""


def stopped_helpers(launcher: Launcher) -> list[int]:
    """Those that a signal has stopped."""
    return [
        pid
        for pid in launcher.helpers()
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    ]


async def test_a_helper_that_is_killed_is_a_failure_that_leaves_nothing(
    tmp_path: Path,
) -> None:
    environment_id, image = subject.fresh_id(), subject.unpacked_image()
    failures: list[MechanismError] = []
    told = tmp_path / "stop"
    told.touch()
    with subject.launcher(tmp_path, ("-c", STOPPING, str(told))) as own_launcher:
        async with subject.mechanism(own_launcher) as opened:

            async def prepare() -> None:
                try:
                    await opened.prepare(
                        environment_id, SlotProfile(image, LIMITS), back_stop_seconds=60
                    )
                except MechanismError as problem:
                    failures.append(problem)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(prepare)
                await subject.until(lambda: stopped_helpers(own_launcher))
                await subject.until(Path(hostpaths.scope_directory(environment_id)).exists)
                told.unlink()
                (helper,) = stopped_helpers(own_launcher)
                os.kill(helper, signal.SIGKILL)
            assert [problem.step for problem in failures] == ["helper"]
            assert await subject.left_of(opened, environment_id) == ()
            async with subject.sandbox(opened, image) as slot:
                assert (await subject.run(slot, "true")).end.exit_code == 0
