"""The jail with what is shipped: the three filters of `seccomp/` and the steward's own server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.launcher.kernel.seccomp import ProfileName, compile_profile
from sbxd.steward import frames as steward
from tests.kernel.jail_environment import Environment, environment

pytestmark = pytest.mark.needs("root", "cgroup2")

PROFILES = Path(__file__).parents[2] / "seccomp"


@pytest.fixture(scope="module")
def built() -> Iterator[Environment]:
    filters = {
        f"seccomp_{name.value}": compile_profile(
            (PROFILES / f"{name.value}.json").read_bytes()
        ).bpf.hex()
        for name in ProfileName
    }
    with environment(**filters, steward="server") as one:
        yield one


def ask(built: Environment, request: steward.Request) -> list[steward.Reply]:
    """A request to the steward; all its replies."""
    built.steward_channel.sendall(steward.encode(request))
    replies: list[steward.Reply] = []
    while not (replies and isinstance(replies[-1], steward.End)):
        (length,) = steward.LENGTH.unpack(exactly(built, steward.LENGTH.size))
        replies.append(steward.decode_reply(exactly(built, length)))
    return replies


def exactly(built: Environment, size: int) -> bytes:
    whole = b""
    while len(whole) < size:
        piece = built.steward_channel.recv(size - len(whole))
        assert piece, "the steward is gone"
        whole += piece
    return whole


def test_a_python_program_runs_under_the_shipped_filters(built: Environment) -> None:
    done = built.script("""
        import json, multiprocessing, os, subprocess, threading
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(pool.map(abs, [-1, -2]))
            print(subprocess.run(["echo", "x"], capture_output=True).stdout)
            thread = threading.Thread(target=print, args=("thread",))
            thread.start()
            thread.join()
    """).finished_well()
    assert done.stdout == b"[1, 2]\nb'x\\n'\nthread\n"


def test_typed_failures_come_through_the_shipped_filters(built: Environment) -> None:
    assert built.run("no-such-program").failure == ("execute", 2)
    assert built.run("/usr").failure == ("execute", 13)
    assert built.run("true", cwd=b"missing").failure == ("enter_the_working_directory", 2)
    assert built.run("sh", "-c", "kill -11 $$").status == -11


def test_the_shipped_steward_reads_what_a_command_wrote(built: Environment) -> None:
    ask(built, steward.Snapshot())
    built.run("sh", "-c", "echo content > hidden; chmod 0 hidden").finished_well()
    *found, end = ask(built, steward.Changes(10, 1 << 20))
    assert isinstance(end, steward.End)
    assert end.status is steward.Status.OK
    assert [item.path for item in found if isinstance(item, steward.Entry)] == [b"hidden"]


def test_the_end_of_the_daemon_ends_both(built: Environment) -> None:
    with environment(steward="server") as other:
        other.steward_channel.close()
        other.init.close()
        assert other.init_ended()
        assert other.steward_ended()
