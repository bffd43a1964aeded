"""The installed daemon under another configuration, for as long as a block runs."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.redteam.configuration import current, holding, recover

SERVICE = "sbxd.service"


@contextmanager
def configured(text: str) -> Iterator[None]:
    """The file holds this; nothing is started. Afterwards the daemon is as it was."""
    recover()  # raises where another run is at it, before anything is stopped
    stop()
    try:
        with holding(text):
            try:
                yield
            finally:
                stop()
    finally:
        assert start() == 0, "the lane's own configuration starts no more"


@contextmanager
def on_gvisor() -> Iterator[None]:
    """The lane's own configuration, but every command runs on gVisor's kernel; with the longest
    start budget, fewer refused forks to a bomb, and nothing built ahead of a test, since an
    emulated machine is slow."""
    text = current()
    for own, other in (
        ('sandbox = "namespaces"', 'sandbox = "gvisor"'),
        ("slots = 2", "slots = 0"),
        ("[limits]\n", "[limits]\nstart_budget_seconds = 60\npids_refusals_max = 100\n"),
    ):
        assert own in text, f"the lane's configuration is another: {own}"
        text = text.replace(own, other)
    with configured(text):
        assert start() == 0, said()
        yield


def start() -> int:
    """The exit status of the attempt: 0 once the daemon serves."""
    subprocess.run(["systemctl", "reset-failed", SERVICE], check=False, timeout=60)
    return subprocess.run(
        ["systemctl", "start", SERVICE], check=False, capture_output=True, timeout=300
    ).returncode


def stop() -> None:
    """Also while the service manager tries again and again."""
    subprocess.run(["systemctl", "stop", SERVICE], check=True, timeout=120)


def now() -> str:
    """A place in the journal, for `events` and `said`."""
    subprocess.run(["journalctl", "--sync"], check=True, timeout=60)
    done = subprocess.run(
        ["journalctl", "--lines=1", "--output=json"], check=True, capture_output=True, timeout=60
    )
    return str(json.loads(done.stdout)["__CURSOR"])


def events(since: str, *kinds: str) -> list[dict[str, Any]]:
    """What the daemon's audit has recorded since then, of these types."""
    return [each for each in _read(since) if each.get("SBX_EVENT") in kinds]


def said(since: str | None = None) -> str:
    """What the daemon has said since then."""
    return "\n".join(str(each.get("MESSAGE")) for each in _read(since))


def _read(since: str | None) -> list[dict[str, Any]]:
    subprocess.run(["journalctl", "--sync"], check=True, timeout=60)
    place = ["--lines=50"] if since is None else [f"--after-cursor={since}"]
    done = subprocess.run(
        ["journalctl", "--output=json", "--all", *place, "SYSLOG_IDENTIFIER=sbxd"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
