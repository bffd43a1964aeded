"""The layers behind the filter, as a worker's command meets them: AppArmor's label, Landlock.

That each stops something by itself is shown in `tests/kernel/test_jail_layers.py` and
`test_apparmor_profiles.py`, with controls; here it is shown that what the daemon hands out has
them.
"""

import json
import secrets
import subprocess

import pytest
import trio

from sbxd.probes.probe import PRELUDE
from tests.redteam.live import live, wait_process_on_the_host

pytestmark = pytest.mark.gate("gate.sandbox.escape_denied")

LABEL = "sbxd-workload (enforce)"

# A thread can take on sixteen rulesets: the last that it gets tells how many it had.
LAYERS = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.prctl(38, 1, 0, 0, 0)
attributes = struct.pack("QQQ", 1 << 12, 0, 0)
ruleset = libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
taken = 0
while libc.syscall(446, ctypes.c_long(ruleset), ctypes.c_uint(0)) == 0:
    taken += 1
print(taken)
"""


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


@pytest.mark.case("ESC-20")
@pytest.mark.needs("daemon", "apparmor")
async def test_a_command_cannot_change_its_label() -> None:
    source = """
words = (b"exec unconfined", b"changeprofile unconfined", b"exec sbxd-launcher", b"stack sbxd")
def write(path, word):
    with open(path, "wb", buffering=0) as file:
        file.write(word)
answer({
    f"{of} {name} {word.decode()}": attempt(write, f"/proc/{of}/attr/{name}", word)
    for of in ("self", "thread-self", "1")
    for name in ("current", "exec", "apparmor/current", "apparmor/exec")
    for word in words
})
"""
    async with live() as environment:
        found = await environment.look(source)
        label = await environment.run("cat", "/proc/self/attr/current")
    hidden = {text for text in found if text.startswith("1 ")}
    assert {found[text] for text in hidden} == {"ENOENT"}, "init is not visible"
    assert {found[text] for text in found.keys() - hidden} == {"EACCES"}
    assert label.stdout.decode().strip("\0\n") == LABEL


@pytest.mark.needs("daemon", "apparmor")
def test_control_an_unconfined_process_can_change_its_label() -> None:
    source = (
        PRELUDE
        + """
with open("/proc/self/attr/apparmor/exec", "wb", buffering=0) as file:
    file.write(b"exec sbxd-workload")
os.execv("/usr/bin/cat", ["cat", "/proc/self/attr/apparmor/current"])
"""
    )
    done = subprocess.run(["python3", "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip("\0\n") == LABEL


@pytest.mark.needs("daemon", "landlock")
async def test_a_command_is_in_a_domain_of_landlock() -> None:
    async with live() as environment:
        inside = await environment.python(LAYERS)
    outside = await trio.run_process(["python3", "-c", LAYERS], capture_stdout=True)
    assert json.loads(outside.stdout) == 16, "the control: nothing is taken on yet"
    assert json.loads(inside.stdout) == 15
