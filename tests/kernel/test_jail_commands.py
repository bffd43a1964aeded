"""How commands start, fail and end: lookup, typed failures, exact statuses, the parked process."""

import errno
import os
import socket
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.jail.frames import Exited, Park, Parked, Run, RunFailed, Started
from tests.kernel.jail_environment import BASE, ENVIRONMENT, Environment, environment

pytestmark = pytest.mark.needs("root", "cgroup2")

FAST_SECONDS = 5  # far above what a typed failure takes, far below any deadline of the jail


@pytest.fixture(scope="module")
def built() -> Iterator[Environment]:
    with environment() as one:
        one.script("""
            import os
            os.makedirs("sub/deep", exist_ok=True)
            os.symlink("sub", "link")
            os.symlink("/tmp", "out")
            os.symlink("/proc/self/cwd", "magic")
            def put(path, text, mode):
                with open(path, "w") as file:
                    file.write(text)
                os.chmod(path, mode)
            put("planted", "#!/bin/sh\\necho planted\\n", 0o755)
            put("cat", "#!/bin/sh\\necho planted\\n", 0o755)
            put("plain", "text", 0o644)
            put("garbage", "\\x00\\x01text", 0o755)
            put("orphan", "#!/no/such/interpreter\\n", 0o755)
            os.mkdir("locked", 0o000)
        """).finished_well()
        yield one


@pytest.mark.parametrize("code", [0, 1, 42, 127, 137, 255])
def test_an_exit_code_arrives_exactly(built: Environment, code: int) -> None:
    assert built.run("sh", "-c", f"exit {code}").status == code


@pytest.mark.parametrize("number", [1, 6, 9, 11, 13, 15, 34])
def test_a_death_by_signal_arrives_as_that_signal(built: Environment, number: int) -> None:
    assert built.run("sh", "-c", f"kill -{number} $$; sleep 9").status == -number


def test_a_writer_without_reader_dies_of_sigpipe(built: Environment) -> None:
    source = "import os\nr, w = os.pipe()\nos.close(r)\nimport signal\n"
    ignored = built.script(source + "os.write(w, b'x')")
    assert ignored.status == 1, "an interpreter ignores the signal: the control"
    shell = built.run("sh", "-c", "yes | true; kill -13 $$")
    assert shell.status == -13


def test_output_of_both_streams_and_input_pass(built: Environment) -> None:
    done = built.run("sh", "-c", "cat; echo error >&2", stdin=b"given\n")
    assert (done.status, done.stdout, done.stderr) == (0, b"given\n", b"error\n")


def test_no_input_is_the_end_of_file(built: Environment) -> None:
    assert built.run("cat").stdout == b""


def test_the_environment_is_exactly_what_was_given(built: Environment) -> None:
    given = (b"A=1", b"A=2", b"EMPTY=", b"odd", b"\xff=\xfe")
    done = built.run("cat", "/proc/self/environ", env=given)
    assert done.stdout == b"".join(entry + b"\0" for entry in given)


def test_arguments_pass_unchanged(built: Environment) -> None:
    words: list[str | bytes] = ["", " ", "a b", "\n", "ü", b"\xff"]
    done = built.run("cat", "/proc/self/cmdline")
    assert done.stdout == b"cat\0/proc/self/cmdline\0"
    printed = built.run("printf", "%s|", *words)
    assert printed.stdout == b"| |a b|\n|\xc3\xbc|\xff|"


def test_a_long_argument_list_passes(built: Environment) -> None:
    words = ["x" * 1000] * 150
    done = built.run("sh", "-c", "echo $#", "sh", *words)
    assert done.stdout == b"150\n"


# lookup -----------------------------------------------------------------------------------------


@pytest.mark.case("FS-13")
def test_a_bare_name_is_never_looked_up_in_the_workspace(built: Environment) -> None:
    assert built.run("planted").failure == ("execute", errno.ENOENT)
    assert built.run("/workspace/planted").stdout == b"planted\n", "it is there and executable"
    assert built.run("cat", "/workspace/plain").stdout == b"text", (
        "the image's cat, not the planted"
    )


@pytest.mark.parametrize(
    "path", [b"", b":/usr/bin", b"/usr/bin:", b".:/usr/bin", b"usr/bin", b"/workspace",
             b"/usr/bin:/workspace/sub", b"//workspace", b"/usr/../workspace", b"/./workspace"]
)  # fmt: skip
def test_a_search_path_with_the_workspace_or_a_relative_entry_is_refused(
    built: Environment, path: bytes
) -> None:
    assert built.run("cat", search_path=path).failure == ("search_path", errno.EINVAL)


@pytest.mark.parametrize("name", ["", ".", "..", "./planted", "sub/../planted", "../usr/bin/cat"])
def test_a_relative_program_is_refused(built: Environment, name: str) -> None:
    assert built.run(name).failure == ("program_name", errno.EINVAL)


def test_the_search_goes_on_past_directories_that_lack_the_program(built: Environment) -> None:
    done = built.run("cat", "/workspace/plain", search_path=b"/no/such:/usr/bin/env/x:/usr/bin")
    assert done.stdout == b"text"


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("/no/such/program", ("execute", errno.ENOENT)),
        ("no-such-program", ("execute", errno.ENOENT)),
        ("/workspace/plain", ("execute", errno.EACCES)),
        ("/usr", ("execute", errno.EACCES)),
        ("/workspace/plain/below", ("execute", errno.ENOENT)),
        ("/workspace/garbage", ("execute", errno.ENOEXEC)),
        ("/workspace/orphan", ("interpreter", errno.ENOENT)),
    ],
)
def test_a_program_that_cannot_start_is_a_fast_typed_failure(
    built: Environment, program: str, failure: tuple[str, int]
) -> None:
    began = time.monotonic()
    assert built.run(program).failure == failure
    assert time.monotonic() - began < FAST_SECONDS


def test_a_program_whose_arguments_are_too_long_is_a_typed_failure(built: Environment) -> None:
    failure = built.run("true", "x" * 140_000).failure
    assert failure == ("execute", errno.E2BIG)


# working directory ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directory", "place"),
    [(b".", b"/workspace"), (b"sub", b"/workspace/sub"), (b"sub/deep", b"/workspace/sub/deep"),
     (b"link/deep", b"/workspace/sub/deep"), (b"../../..", b"/workspace")],
)  # fmt: skip
def test_a_command_starts_in_its_directory(
    built: Environment, directory: bytes, place: bytes
) -> None:
    assert built.run("pwd", "-P", cwd=directory).stdout == place + b"\n"


@pytest.mark.parametrize(
    ("directory", "number"),
    [(b"missing", errno.ENOENT), (b"plain", errno.ENOTDIR), (b"out", errno.ENOENT),
     (b"magic", errno.ENOENT), (b"locked/x", errno.EACCES), (b"/workspace", errno.EINVAL),
     (b"/proc/self/fd/3", errno.EINVAL), (b"proc/self/fd/3", errno.ENOENT)],
)  # fmt: skip
def test_a_directory_that_is_not_below_the_workspace_is_a_typed_failure(
    built: Environment, directory: bytes, number: int
) -> None:
    assert built.run("pwd", cwd=directory).failure == ("enter_the_working_directory", number)


# the end of a command ---------------------------------------------------------------------------


def test_the_main_process_decides_the_end_and_orphans_are_reaped(built: Environment) -> None:
    done = built.script("""
        import os, signal, time
        reading, writing = os.pipe()
        for _ in range(5):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.close(reading)
                    os.write(writing, b".")
                    os._exit(3)
                os._exit(4)
        os.close(writing)
        seen = b""
        while piece := os.read(reading, 16):
            seen += piece
        for _ in range(5):
            os.wait()
        print(len(seen))
    """)
    assert (done.status, done.stdout) == (0, b"5\n")
    _wait_until_init_has_no_child(built)
    assert built.pids(built.number) == []


def test_a_zombie_is_counted_which_shows_that_the_count_sees_them(built: Environment) -> None:
    running = built.release(
        built.park(), built.python, "-c",
        "import os\nif os.fork() == 0: os._exit(0)\nos.waitid(os.P_ALL, 0, os.WEXITED"
        " | os.WNOWAIT)\nprint(1, flush=True)\nos.read(0, 1)\nimport time\ntime.sleep(60)",
    )  # fmt: skip
    assert running.read() == b"1\n"
    assert _zombies(built) == 1
    built.kill(running.number)
    assert running.finish().status == -9
    _wait_until_init_has_no_child(built)


def _children(built: Environment) -> list[str]:
    """Init's own, alive or dead."""
    return built.procfs("init", f"task/{built.facts['init']}/children").split()


def _wait_until_init_has_no_child(built: Environment) -> None:
    """An orphan may still be on its way out when the command that had it has ended."""
    deadline = time.monotonic() + 20
    while _children(built):
        assert time.monotonic() < deadline


def _zombies(built: Environment) -> int:
    children = _children(built)
    every = [*children]
    for pid in children:
        every += Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    states = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in every]
    return states.count("Z")


def test_a_killed_leaf_ends_its_command_with_the_signal(built: Environment) -> None:
    running = built.release(built.park(), "sh", "-c", "setsid sleep 60 & echo up; exec sleep 60")
    assert running.read() == b"up\n"
    built.kill(running.number)
    assert running.finish().status == -9
    deadline = time.monotonic() + 20  # the kill reaches all; init tells of the first alone
    while built.pids(running.number):
        assert time.monotonic() < deadline


@pytest.mark.case("ESC-12")
def test_a_command_sees_no_process_of_another_before_it_is_the_program(
    built: Environment,
) -> None:
    watcher = built.release(
        built.park(), built.python, "-c", textwrap.dedent("""
            import os
            seen = set()
            open("watching", "w").close()
            print("up", flush=True)
            while os.path.exists("watching"):
                for name in os.listdir("/proc"):
                    if name.isdecimal():
                        try:
                            seen.add(os.readlink(f"/proc/{name}/exe"))
                        except (FileNotFoundError, ProcessLookupError):
                            pass
                        except PermissionError:  # also of one that was reaped since it was listed
                            if os.path.exists(f"/proc/{name}"):
                                seen.add("refused")
            print(*sorted(seen), sep="\\n")
        """),
    )  # fmt: skip
    assert watcher.read() == b"up\n"
    for _ in range(20):
        assert built.run("sleep", "0.001").status == 0
    assert built.run("rm", "watching").status == 0
    watched = watcher.finish()
    assert (watched.status, watched.stderr) == (0, b"")
    seen = set(watched.stdout.decode().split())
    assert built.python in seen, "itself: the control"
    assert seen <= {built.python, "/usr/bin/sleep", "/usr/bin/rm"}


# the parked process -----------------------------------------------------------------------------


def test_one_process_waits_while_another_command_runs(built: Environment) -> None:
    first = built.release(built.park(), "sh", "-c", "read line; exit 7", stdin=b"")
    second = built.park()
    assert first.finish().status == 7
    assert built.release(second, "true").finish().status == 0


def test_the_parked_process_is_root_of_the_namespace_so_that_no_command_can_touch_it(
    built: Environment,
) -> None:
    number = built.park()
    (pid,) = built.pids(number)
    status = Path(f"/proc/{pid}/status").read_text()
    assert f"Uid:\t{BASE}\t{BASE}\t{BASE}\t{BASE}\n" in status
    assert "CapBnd:\t0000000000000000\n" in status
    assert "CapEff:\t00000000000000c0\n" in status
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "500\n"
    assert built.release(number, "true").finish().status == 0


def test_kill_all_by_a_command_reaches_its_own_and_not_the_parked_process(
    built: Environment,
) -> None:
    source = (
        "mkfifo go; echo up; sleep 60 & read line < go; kill -STOP -1; kill -9 -1; wait $!; exit $?"
    )
    running = built.release(built.park(), "sh", "-c", source)
    assert running.read() == b"up\n"
    number = built.park()
    opened = "import os\nanswer = os.close(os.open('go', os.O_WRONLY, dir_fd=workspace_fd))"
    assert built.steward(opened) is None
    assert running.finish().status == 137
    assert built.release(number, "true").finish().status == 0


def test_a_parked_process_that_is_killed_is_a_typed_failure_and_its_run_is_dropped(
    built: Environment,
) -> None:
    number = built.park()
    built.kill(number)
    assert built.receive_about(number) == RunFailed(number, errno.ESRCH, "park")
    streams = [os.open("/dev/null", os.O_RDWR) for _ in range(3)]
    built.send(Run(number, b".", (b"true",), ENVIRONMENT, b"/usr/bin"), *streams)
    assert built.run("true").status == 0


def test_a_second_process_is_not_parked_beside_the_first(built: Environment) -> None:
    first = built.park()
    built.number += 1
    leaf = built.leaf()
    built.send(Park(built.number), leaf)
    os.close(leaf)
    assert built.receive_about(built.number) == RunFailed(built.number, errno.EBUSY, "park")
    assert built.release(first, "true").finish().status == 0


def test_run_may_follow_park_at_once(built: Environment) -> None:
    built.number += 1
    leaf = built.leaf()
    built.send(Park(built.number), leaf)
    os.close(leaf)
    done = built.release(built.number, "sh", "-c", "exit 5").finish()
    assert done.status == 5


def test_a_stream_that_is_a_socket_is_refused(built: Environment) -> None:
    number = built.park()
    one, two = socket.socketpair()
    null = os.open("/dev/null", os.O_RDWR)
    built.send(Run(number, b".", (b"true",), ENVIRONMENT, b"/usr/bin"), null, one.fileno(), null)
    assert built.receive_about(number) == RunFailed(number, errno.EINVAL, "take_the_pipes")
    one.close()
    two.close()
    os.close(null)


def test_the_null_device_is_accepted_as_a_stream(built: Environment) -> None:
    number = built.park()
    null = os.open("/dev/null", os.O_RDWR)
    built.send(Run(number, b".", (b"true",), ENVIRONMENT, b"/usr/bin"), null, null, null)
    assert built.receive_about(number) == Started(number)
    assert built.receive_about(number) == Exited(number, 0)
    os.close(null)


def test_init_holds_no_descriptor_of_commands_that_are_over(built: Environment) -> None:
    def count() -> int:
        return len(os.listdir(f"/proc/{built.facts['init']}/fd"))

    before = count()
    for program in ("true", "no-such-program"):
        built.run(program)
    assert count() == before
    number = built.park()
    assert count() == before + 2, "the parked process has two: the control"
    assert built.release(number, "true").finish().status == 0
    assert count() == before


def test_frames_about_one_number_are_parked_started_exited(built: Environment) -> None:
    built.number += 1
    leaf = built.leaf()
    built.send(Park(built.number), leaf)
    os.close(leaf)
    assert built.receive_about(built.number) == Parked(built.number)
    done = built.release(built.number, "true").finish()
    assert done.frames == [Started(built.number), Exited(built.number, 0)]
