"""What the probes cannot see from inside (`test_inside_probes`): what the host says of a command,
what the worker is told, and what a neighbour or the host has that is not to be found.

Source: DESIGN 3.10, CASES ESC-02, ESC-09, ESC-10, ESC-11, ESC-18, FS-02, FS-13. The network is in
`test_inside_network`.
"""

import secrets
import socket
import tarfile
from pathlib import Path

import pytest
import trio

from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.probes.process import CORE_LIMIT, SET_UID
from sbxd.probes.surroundings import PROCESSES
from tests.redteam.live import Live, live, wait_process_on_the_host
from tests.redteam.probing import find_nothing_wrong

pytestmark = [
    pytest.mark.needs("daemon", "image"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.escape_denied"),
]

IMAGE_TAR = "/var/cache/sbxd-lab/image.tar"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


# --- the process -------------------------------------------------------------------------------


async def test_the_environment_is_exactly_what_was_built() -> None:
    async with live() as environment:
        result = await environment.run("env", "-0")
    found = dict(word.split("=", 1) for word in result.stdout.decode().split("\0") if word)
    assert found == {
        "HOME": "/workspace",
        "LANG": "C.UTF-8",
        "PATH": PATH,
        "PWD": "/workspace",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "MPLCONFIGDIR": "/tmp/.matplotlib",
        "UV_LINK_MODE": "copy",
    }


@pytest.mark.case("ESC-02", "FS-02")
async def test_the_working_directory_is_in_the_workspace_and_so_is_every_other() -> None:
    async with live() as environment:
        assert (await environment.run("pwd", "-P")).stdout == b"/workspace\n"
        linked = await environment.run("readlink", "/proc/self/cwd")
        assert linked.stdout == b"/workspace\n"
        for odd in ("/proc/self/fd/7", "../..", "/", "/etc", "proc/self/fd/7", "a/../../etc"):
            with pytest.raises(ExecutionRejected):
                await environment.run("pwd", directory=odd)
        await environment.run("ln", "-s", "/etc", "link")
        await environment.run("mkdir", "real")
        with pytest.raises(ExecutionRejected) as refused:
            await environment.run("cat", "passwd", directory="link")
        assert refused.value.code is RejectedCode.WORKING_DIRECTORY_NOT_FOUND
        assert (await environment.run("pwd", directory="real")).stdout == b"/workspace/real\n"


@pytest.mark.case("ESC-02")
@pytest.mark.parametrize("program", [f"/proc/self/fd/{n}" for n in (3, 4, 7, 100)])
async def test_a_descriptor_is_no_program(program: str) -> None:
    async with live() as environment:
        with pytest.raises(ExecutionRejected):
            await environment.run(program)
        assert (await environment.run("/bin/true")).exit_code == 0


async def test_the_workload_on_the_host_is_a_stranger_with_no_power() -> None:
    """What the host's kernel says of the process itself, not what it says inside."""
    marker = f"marker-{secrets.token_hex(8)}"
    async with live() as environment, trio.open_nursery() as nursery:
        nursery.start_soon(_sleep, environment, marker)
        process = await wait_process_on_the_host(marker)
        lines = (process / "status").read_text().splitlines()
        fields = {
            line.split(":\t")[0]: line.split(":\t")[1].split() for line in lines if "\t" in line
        }
        init = (process / "cgroup").read_text()
        nursery.cancel_scope.cancel()
    assert 1879048192 <= int(fields["Uid"][0]) <= 2147483647
    assert len(set(fields["Uid"] + fields["Gid"])) == 1
    assert fields["CapEff"] == fields["CapBnd"] == ["0" * 16]
    assert fields["NoNewPrivs"] == ["1"]
    assert fields["Seccomp"] == ["2"]
    assert f"sbx-{environment.handle.environment_id}.scope/box/exec-" in init


@pytest.mark.case("ESC-10")
async def test_a_crash_leaves_no_core_and_the_limit_cannot_be_changed() -> None:
    async with live() as environment:
        crash = await environment.python("import os; os.kill(os.getpid(), 11)")
        left = await environment.run("ls", "-A")
        await find_nothing_wrong(environment, CORE_LIMIT)
    assert (crash.exit_code, crash.signal) == (139, 11)
    assert crash.files_changed == ()
    assert (left.exit_code, left.stdout) == (0, b"")


# --- who else is there -------------------------------------------------------------------------


@pytest.mark.case("ESC-09")
async def test_no_other_process_can_be_seen_and_the_own_children_can() -> None:
    async with live() as environment, live():
        await find_nothing_wrong(environment, PROCESSES)


@pytest.mark.case("ESC-11")
@pytest.mark.case("API-01")
async def test_an_abstract_socket_of_the_host_is_not_reached() -> None:
    """The name is really bound on the host, and really answers there."""
    name = f"\0sbxd-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(name)
        source = f"answer(attempt(connect, socket.AF_UNIX, {name!r}))"
        async with live() as environment:
            assert await environment.look(source) == "ECONNREFUSED"


# --- what is planted ---------------------------------------------------------------------------


@pytest.mark.case("FS-13")
async def test_a_planted_program_is_not_run_for_a_bare_name() -> None:
    async with live() as environment:
        for name in ("python3", "ls", "env", "sh"):
            await environment.workspace.write(name, b"#!/bin/sh\necho PLANTED\n")
        await environment.run("chmod", "755", "python3", "ls", "env", "sh")
        planted = await environment.run("/workspace/ls")
        assert planted.stdout == b"PLANTED\n", "the control: it would run"
        for argv in (("ls",), ("env",), ("sh", "-c", "echo real"), ("python3", "--version")):
            result = await environment.run(*argv)
            assert b"PLANTED" not in result.stdout, argv
            assert result.exit_code == 0
        for odd in ("./ls", "bin/ls", "../bin/ls", "", ".", ".."):
            with pytest.raises(ExecutionRejected):
                await environment.run(odd)
        await environment.workspace.write("only-here", b"#!/bin/sh\n")
        with pytest.raises(ExecutionRejected) as refused:
            await environment.run("only-here")
        assert refused.value.code is RejectedCode.COMMAND_NOT_FOUND


@pytest.mark.case("ESC-18")
async def test_a_setuid_program_gives_nothing() -> None:
    async with live() as environment:
        await find_nothing_wrong(environment, SET_UID)
    with tarfile.open(IMAGE_TAR) as archive:
        assert any(member.mode & 0o4000 for member in archive), "the control: it came with some"


async def test_ordinary_programs_just_work() -> None:
    """The control of this file: what is taken away is not what programs need."""
    source = """
import concurrent.futures, multiprocessing, subprocess, tempfile, threading, time
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert sum(pool.map(lambda n: n * n, range(50))) == sum(n * n for n in range(50))
with multiprocessing.get_context("fork").Pool(3) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
with tempfile.NamedTemporaryFile() as f:
    assert f.name.startswith("/tmp/")
assert subprocess.run(["sh", "-c", "echo hi | tr h H"], capture_output=True).stdout == b"Hi\\n"
print("über", flush=True)
"""
    async with live() as environment:
        result = await environment.python(source)
        assert result.exit_code == 0, result
        assert result.stdout.decode() == "über\n"


async def _sleep(environment: Live, marker: str) -> None:
    await environment.run("python3", "-c", "import time; time.sleep(600)", marker)


async def test_nothing_that_the_host_mounts_reaches_the_environment() -> None:
    """No mount inside is the peer of one outside, or follows one."""
    async with live() as environment:
        seen = await environment.run("cat", "/proc/self/mountinfo")
    tags = [line.split(" - ")[0].split()[6:] for line in seen.stdout.decode().splitlines()]
    assert len(tags) > 10
    assert not any(tags), tags
    assert _host_shares_mounts(), "the control: what is not cut off is shared"


def _host_shares_mounts() -> bool:
    return "shared:" in Path("/proc/self/mountinfo").read_text()
