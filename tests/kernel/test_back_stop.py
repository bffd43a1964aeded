"""The scope's own limit: with daemon and launcher stuck, systemd ends an environment by itself."""

import os
import signal
from pathlib import Path

import msgspec
import pytest

from sbxd.launcher.kernel import hostpaths
from sbxd.launcher.requests import Acknowledged, Destroy, Prepared
from tests.kernel import launcher_subject as subject
from tests.kernel.test_launcher_lab import Client, gone, prepare, wait_for, wait_until_gone

pytestmark = pytest.mark.needs("cgroup2", "idmap", "image", "loop", "root", "systemd")

# From the scope's start: in this time the slot is finished, and the launcher is stopped.
BACK_STOP_SECONDS = 8


def processes(environment_id: str) -> list[str]:
    """Of the whole scope; none when the scope is gone."""
    found = []
    for file in Path(hostpaths.scope_directory(environment_id)).rglob("cgroup.procs"):
        try:
            found += file.read_text().split()
        except OSError:  # removed while we looked
            continue
    return found


def test_an_environment_ends_at_its_back_stop_though_nobody_of_ours_moves(tmp_path: Path) -> None:
    image = subject.unpacked_image()
    with subject.launcher(tmp_path) as launcher:
        client = Client(launcher)
        limited, free = subject.fresh_id(), subject.fresh_id()
        for name, seconds in ((free, 600), (limited, BACK_STOP_SECONDS)):
            request = msgspec.structs.replace(prepare(image, name), back_stop_seconds=seconds)
            assert isinstance(client.ask(request)[0], Prepared)
        os.kill(launcher.process.pid, signal.SIGSTOP)
        try:
            wait_for(lambda: not processes(limited))
            assert processes(free), "the control: another one lives on"
            assert not gone(limited), "its volume and its uids are still to be removed"
        finally:
            os.kill(launcher.process.pid, signal.SIGCONT)
        for name in (limited, free):
            reply, _ = client.ask(Destroy(ticket=2, environment_id=name))
            assert isinstance(reply, Acknowledged)
            wait_until_gone(name)
        client.close()
