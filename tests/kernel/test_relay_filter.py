"""The system calls of a guest's relay are those that it makes, and any other ends it: on an
ordinary kernel, and on the guest's own. That it works with them is every test of the doors."""

import re
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.redteam.live import LIMITS, live

REPOSITORY = Path(__file__).parents[2]
# On x86-64 and aarch64 they have other numbers: the compiler knows them.
NAMES = (
    "accept4", "close", "epoll_ctl", "epoll_pwait", "exit_group", "fcntl", "read", "recvmsg",
    "setsockopt", "shutdown", "write",
)  # fmt: skip

# A thousand processes, begun and ended by a guest's kernel: half a minute on a busy machine.
TRIED_SECONDS = 600


def compiled(folder: Path) -> Path:
    program = folder / "relay-filter"
    source = REPOSITORY / "tests/kernel/relay_filter.c"
    command = ["gcc", "-std=gnu11", "-Wall", "-Werror", "-static", f"-I{REPOSITORY / 'guest'}"]
    subprocess.run([*command, "-o", str(program), str(source)], check=True)
    return program


def numbers() -> set[int]:
    source = "#include <sys/syscall.h>\n" + "".join(f"SYS_{name}\n" for name in NAMES)
    shown = subprocess.run(
        ["gcc", "-E", "-P", "-"], input=source, capture_output=True, text=True, check=True
    ).stdout
    return {int(each) for each in shown.split()[-len(NAMES) :]}


def test_the_calls_of_the_filter_are_those_in_the_relays_source_once_it_serves() -> None:
    source = (REPOSITORY / "guest/relay.h").read_text()
    begin, end = source.index("one connection"), source.index("process 1: the doors")
    serving = source[begin:end]
    setup = serving[serving.index("static void relay(") : serving.index("SYS_seccomp")]
    made = set(re.findall(r"SYS_(\w+)", serving.replace(setup, ""))) - {"seccomp"}
    assert made | {"exit_group"} == set(NAMES)  # leave() is init.c's


@pytest.mark.needs("cgroup2")
def test_every_other_call_ends_the_process(tmp_path: Path) -> None:
    shown = subprocess.run([compiled(tmp_path)], capture_output=True, text=True, check=True).stdout
    control, *allowed = (int(line) for line in shown.split())
    assert control == 1
    assert set(allowed) == numbers()


@pytest.mark.needs("lane-gvisor", "daemon")
async def test_the_guests_own_kernel_ends_it_too(tmp_path: Path) -> None:
    program = compiled(tmp_path).read_bytes()
    async with live(replace(LIMITS, wall_clock_seconds=TRIED_SECONDS)) as one:
        await one.workspace.write("tried", program)
        script = "cp tried /tmp/tried && chmod +x /tmp/tried && /tmp/tried"
        done = await one.run("sh", "-c", script, timeout_seconds=TRIED_SECONDS)
        assert done.exit_code == 0, done.stderr
        control, *allowed = (int(line) for line in done.stdout.split())
    assert control == 1
    assert set(allowed) == numbers()
