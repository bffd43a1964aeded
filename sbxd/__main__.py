"""`sbxd`: the daemon. Reads its configuration and what the service manager passed, then serves.

Exit status: 0 stopped as asked, 1 could not go on, 2 the configuration was refused.
"""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import trio

from sbxd import daemon
from sbxd.closing import allow_interrupts
from sbxd.config import ConfigError, load
from sbxd.notify import Notifier, passed_sockets, turn_away, watchdog_seconds

CREDENTIAL_NAME = "service-credential"
CREDENTIAL_BYTES_MAX = 1024


class PriorityPrefix(logging.Formatter):
    """Each line with the priority that the journal is to give it (sd-daemon(3)); a line in a
    message cannot choose another."""

    def format(self, record: logging.LogRecord) -> str:
        urgency = {logging.ERROR: 3, logging.WARNING: 4}.get(record.levelno, 6)
        return "\n".join(f"<{urgency}>{line}" for line in super().format(record).split("\n"))


def main() -> int:
    """Run the daemon; returns its exit status."""
    parser = argparse.ArgumentParser(prog="sbxd", description="Runs untrusted code in sandboxes.")
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("/etc/sbxd/config.toml"),
        metavar="FILE",
        help="the configuration (default: %(default)s)",
    )
    arguments = parser.parse_args()
    handler = logging.StreamHandler(sys.stderr)
    if "JOURNAL_STREAM" in os.environ:
        handler.setFormatter(PriorityPrefix())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    log = logging.getLogger("sbxd")
    passed = passed_sockets(os.environ)
    status = _serve(arguments.config, passed, log)
    if status is daemon.ExitStatus.REFUSED:
        # Who goes on waiting there would have this start again at once, for the same refusal.
        turned_away = turn_away(passed.values())
        if turned_away:
            log.error("clients that waited and were turned away: %d", turned_away)
    return status


def _serve(file: Path, passed: dict[str, int], log: logging.Logger) -> daemon.ExitStatus:
    try:
        settings = load(file)
    except ConfigError as problem:
        log.error("refusing to start: configuration %s: %s", file, problem)
        return daemon.ExitStatus.REFUSED
    try:
        given = daemon.Given(
            passed=passed,
            credential=read_credential(os.environ),
            watchdog_seconds=watchdog_seconds(os.environ),
            notifier=Notifier(os.environ.get("NOTIFY_SOCKET")),
        )
    except OSError as problem:
        log.error("unable to go on: the service credential cannot be read: %s", problem.strerror)
        return daemon.ExitStatus.FAILED
    allow_interrupts()
    # What is there from the start is not looked at again by each collection.
    gc.collect()
    gc.freeze()
    return trio.run(partial(daemon.run, settings, given, log))


def read_credential(environ: Mapping[str, str]) -> bytes | None:
    """The credential that the service manager loaded (LoadCredential=); None without one, or
    when the file is empty. White space around it is not part of it."""
    directory = environ.get("CREDENTIALS_DIRECTORY")
    if directory is None:
        return None
    try:
        with (Path(directory) / CREDENTIAL_NAME).open("rb") as file:
            return file.read(CREDENTIAL_BYTES_MAX).strip() or None
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
