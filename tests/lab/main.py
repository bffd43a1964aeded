"""The lab's command line: `tests/lab/run` (see README.md beside this file).

Exit status: that of the command in the lane; 1 when tests failed; 125 when a lane could not be
set up or the arguments make no sense; 130 when interrupted.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from . import layers, session
from .features import LaneKind, offered_natively
from .host import REPOSITORY, LabError, interpreter, require_root
from .session import LANE_NAMES, Lane, Wish
from .terminal import shell

USAGE_STATUS = 125


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        return _main(argv)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return USAGE_STATUS
    except KeyboardInterrupt:
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests/lab/run", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--lane", choices=(*LANE_NAMES, "host", "native"))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shell", action="store_true", help="a shell for a person")
    what.add_argument("--tests", action="store_true", help="run tests, each where it belongs")
    what.add_argument("--stop", metavar="NAME", help="end a kept lane")
    what.add_argument("--list", action="store_true", help="show the lanes that are up")
    what.add_argument("--build", action="store_true", help="fill the cache for --lane and stop")
    parser.add_argument("--keep", metavar="NAME", help="use the kept lane NAME, booted if need be")
    parser.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="LANE=SECONDS",
        help="how long a lane's tests may take (with --tests)",
    )
    parser.add_argument("--no-daemon", action="store_true", help="do not enable sbxd's sockets")
    parser.add_argument("--bare", action="store_true", help="without the project, for its package")
    parser.add_argument("--writable", action="store_true", help="/src may be written in the lane")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command, or pytest's arguments")
    return parser


def _main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    command: list[str] = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    if arguments.list:
        for lane in session.alive():
            print(f"{lane.name}\t{lane.lane}")
        return 0
    if arguments.stop:
        found = session.find(arguments.stop)
        if not found:
            raise LabError(f"no lane `{arguments.stop}` is up")
        found.stop()
        return 0
    if arguments.tests:
        from .testing import run_tests

        return run_tests(arguments.lane, _budgets(arguments.budget), command, _say)
    if arguments.lane in ("host", "native") and command:
        return _run_here(arguments.lane, command)
    if arguments.lane not in LANE_NAMES:
        raise LabError(f"say which lane: --lane {' | '.join(LANE_NAMES)}")
    require_root()
    if arguments.build:
        layers.obtain(arguments.lane, _say)
        return 0
    if not command and not arguments.shell and not arguments.keep:
        raise LabError("say what to run, or --shell")
    wish = Wish(
        lane=arguments.lane,
        daemon=not arguments.no_daemon,
        writable=arguments.writable,
        bare=arguments.bare,
    )
    up = session.find(arguments.keep) if arguments.keep else None
    if up and up.lane != wish.lane:
        raise LabError(f"the lane `{up.name}` is up and of kind {up.lane}")
    lane = up or session.start(wish, arguments.keep, _say)
    try:
        return _run(lane, command, arguments.shell)
    finally:
        lane.release()


def _budgets(words: list[str]) -> dict[LaneKind, float]:
    budgets = {}
    for word in words:
        lane, _, seconds = word.partition("=")
        try:
            budgets[LaneKind(lane)] = float(seconds)
        except ValueError as error:
            raise LabError(f"--budget {word}: say it like uml=600") from error
    return budgets


def _run_here(lane: str, command: list[str]) -> int:
    """On the machine itself: `native` wants one that systemd runs, and its root."""
    if lane == "native" and not offered_natively():
        raise LabError("this machine is no native lane: it needs root, systemd and cgroup2")
    path = f"{Path(interpreter()).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SBXD_LANE": lane}
    try:
        status = subprocess.run(command, env=environment, cwd=REPOSITORY).returncode
    except OSError as error:
        raise LabError(str(error)) from error
    return 128 - status if status < 0 else status


def _run(lane: Lane, command: list[str], interactive: bool) -> int:
    if interactive:
        return shell(lane, command or ["/bin/bash", "-l"])
    if not command:
        return 0
    return lane.run(command, lambda data: _write(1, data), lambda data: _write(2, data))


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
