"""The layers behind the filter, as a worker's command meets them: AppArmor's label, Landlock.

That each stops something by itself is shown in `tests/kernel/test_jail_layers.py` and
`test_apparmor_profiles.py`, with controls; here it is shown that what the daemon hands out has
them.
"""

import secrets
import subprocess

import pytest
import trio

from sbxd.probes.hardening import APPARMOR, LABEL, LANDLOCK, PROFILE
from tests.redteam.live import live, wait_process_on_the_host
from tests.redteam.probing import find_nothing_wrong_on_either_side

pytestmark = pytest.mark.gate("gate.sandbox.escape_denied")


@pytest.mark.also("qemu")
@pytest.mark.needs("daemon", "apparmor")
async def test_a_command_and_what_it_starts_carry_the_profile_inside_and_outside() -> None:
    marker = secrets.token_hex(8)
    async with live() as environment:
        found = await environment.run(
            "sh", "-c", "cat /proc/self/attr/apparmor/current; exec cat /proc/$$/attr/current"
        )
        assert found.stdout.decode().split("\n")[:2] == [LABEL, LABEL]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                environment.run, "python3", "-c", "import time; time.sleep(600)", marker
            )
            process = await wait_process_on_the_host(marker)
            assert (process / "attr/apparmor/current").read_text().strip("\0\n") == LABEL
            nursery.cancel_scope.cancel()


@pytest.mark.also("qemu")
@pytest.mark.needs("daemon", "apparmor")
async def test_the_probe_of_the_label_finds_what_it_is_to_find() -> None:
    await find_nothing_wrong_on_either_side(APPARMOR)


@pytest.mark.needs("daemon", "apparmor")
def test_control_an_unconfined_process_can_change_its_label() -> None:
    source = f"""
import os
with open("/proc/self/attr/apparmor/exec", "wb", buffering=0) as file:
    file.write(b"exec {PROFILE}")
os.execv("/usr/bin/cat", ["cat", "/proc/self/attr/apparmor/current"])
"""
    done = subprocess.run(["python3", "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip("\0\n") == LABEL


@pytest.mark.also("qemu")
@pytest.mark.needs("daemon", "landlock")
async def test_the_probe_of_the_domain_finds_what_it_is_to_find() -> None:
    await find_nothing_wrong_on_either_side(LANDLOCK)
