"""The daemon as a process: refusals, readiness, an orderly end. With the fake mechanism."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from sbxd.__main__ import PriorityPrefix, read_credential
from sbxd.client.remote import connect
from sbxd.daemon import LAUNCHER_SECONDS, CannotStart, read_boot_id
from sbxd.mechanism.protocol import Inventory
from sbxd.notify import turn_away
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from tests.lifecycle.double import MechanismDouble
from tests.redteam.live import specification

SECONDS_MAX = 30.0
FAKE = 'deployment_mode = "development"\nauth_mode = "dev"\nsandbox = "fake"\n'


@dataclass
class Place:
    """Where a daemon runs: its files, its service manager and its journal."""

    directory: Path
    manager: socket.socket
    journal: socket.socket

    def start(self, configuration: str, **environment: str) -> subprocess.Popen[str]:
        for name in ("images", "journal", "run"):
            (self.directory / name).mkdir(exist_ok=True)
        config = self.directory / "config.toml"
        config.write_text(
            f"state_directory = {json.dumps(str(self.directory))}\n"
            f"runtime_directory = {json.dumps(str(self.directory / 'run'))}\n"
            f"launcher_socket = {json.dumps(str(self.directory / 'no-launcher'))}\n"
            f"journal_socket = {json.dumps(str(self.directory / 'journal.sock'))}\n" + configuration
        )
        return subprocess.Popen(
            [sys.executable, "-m", "sbxd", "--config", str(config)],
            env={**os.environ, "NOTIFY_SOCKET": str(self.directory / "notify.sock"), **environment},
            stderr=subprocess.PIPE,
            text=True,
        )

    def events(self) -> list[str]:
        """The MESSAGE of every event so far."""
        self.journal.setblocking(False)
        messages: list[str] = []
        while True:
            try:
                entry = self.journal.recv(65536).decode()
            except BlockingIOError:
                return messages
            fields = dict(line.split("=", 1) for line in entry.splitlines() if "=" in line)
            messages.append(fields["MESSAGE"])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal,
    ):
        manager.bind(str(tmp_path / "notify.sock"))
        manager.settimeout(SECONDS_MAX)
        journal.bind(str(tmp_path / "journal.sock"))
        yield Place(tmp_path, manager, journal)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_it_says_when_it_is_ready_shows_life_and_stops_when_told(place: Place) -> None:
    with ended(place.start(FAKE, WATCHDOG_USEC="30000000")) as process:
        said = {place.manager.recv(1000), place.manager.recv(1000)}
        assert said == {b"READY=1\nSTATUS=serving", b"WATCHDOG=1"}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(str(place.directory / "run/worker.sock"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS_MAX) == 0
        assert place.manager.recv(1000).startswith(b"STOPPING=1")
        events = place.events()
        assert events[0] == "Audit opened after number 0, 0 records waiting"
        assert events[1].startswith("Service started: mechanism fake")
        assert events[-1] == "Service stopped (SIGNALLED): 0 environments ended"


@pytest.mark.parametrize("mechanism", ["microvm"])
def test_a_mechanism_that_is_not_built_is_refused_by_name(place: Place, mechanism: str) -> None:
    with ended(
        place.start(f'deployment_mode = "development"\nsandbox = "{mechanism}"\nauth_mode = "dev"')
    ) as process:
        _out, told = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 2
        assert f"refusing to start: sandbox = {mechanism}" in told
        assert place.events()[1:] == [f"Startup refused: sandbox={mechanism}"]


def test_the_journal_is_told_how_urgent_each_line_is(place: Place) -> None:
    wrong = 'sandbox = "namespaces"\n'
    with ended(place.start(wrong, JOURNAL_STREAM="1:2")) as process:
        _out, told = process.communicate(timeout=SECONDS_MAX)
    assert told
    assert all(line.startswith("<3>refusing to start: ") for line in told.splitlines())


def test_a_line_in_a_message_has_the_messages_priority() -> None:
    record = logging.LogRecord("sbxd", logging.WARNING, "", 0, "a\n<0>b", (), None)
    assert PriorityPrefix().format(record) == "<4>a\n<4><0>b"


def test_every_refusal_is_told_at_once(place: Place) -> None:
    with ended(place.start('sandbox = "namespaces"\n[images]\ndefault = "nothing"\n')) as process:
        _out, told = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 2
        for named in ("deployment_mode = production", "auth_mode = token", "images.default"):
            assert named in told


def test_a_configuration_that_does_not_decode_is_refused(place: Place) -> None:
    with ended(place.start('sandbox = "docker"\n')) as process:
        _out, told = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 2
        assert "namespaces" in told


def test_who_waits_at_the_sockets_of_a_refused_start_is_turned_away(tmp_path: Path) -> None:
    path = str(tmp_path / "listening.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen(8)
        assert turn_away([listening.fileno()]) == 0
        clients = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
        for client in clients:
            client.settimeout(SECONDS_MAX)
            client.connect(path)
        assert turn_away([listening.fileno()]) == 3
        for client in clients:
            with client:
                assert client.recv(1) == b""
        # The control: the socket is the service manager's, and takes the next one.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as later:
            later.connect(path)
            assert turn_away([listening.fileno()]) == 1


def test_without_a_launcher_it_fails_and_says_what_to_look_at(place: Place) -> None:
    with ended(place.start(FAKE.replace("fake", "namespaces"))) as process:
        _out, told = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 1
        assert "sbxd-launcher.socket" in told
        assert "Traceback" not in told


async def test_a_launcher_that_never_answers_is_given_up_after_a_while(
    autojump_clock: MockClock,
) -> None:
    class Mute(MechanismDouble):
        async def inventory(self) -> Inventory:
            return await trio.sleep_forever()

    assert await read_boot_id(MechanismDouble()) == "boot"
    began = trio.current_time()
    with pytest.raises(CannotStart):
        await read_boot_id(Mute())
    assert trio.current_time() - began == LAUNCHER_SECONDS


def test_without_a_journal_it_serves_refuses_new_work_and_keeps_the_records(place: Place) -> None:
    (place.directory / "journal.sock").unlink()
    with ended(place.start(FAKE)) as process:
        assert place.manager.recv(1000).startswith(b"READY=1")
        with pytest.raises(ExecutionUnavailable) as refused:
            trio.run(_provision, str(place.directory / "run/worker.sock"))
        assert refused.value.code is UnavailableCode.AUDIT_UNAVAILABLE
        process.send_signal(signal.SIGTERM)
        _out, told = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 0
        assert "Traceback" not in told
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(place.directory / "journal.sock"))
        back = replace(place, journal=journal)
        with ended(back.start(FAKE)) as process:
            assert place.manager.recv(1000).startswith(b"STOPPING=1")
            assert place.manager.recv(1000).startswith(b"READY=1")
            events = back.events()
    assert events[1].startswith("Service started: mechanism fake")
    assert events[2].startswith("Service stopped (SIGNALLED)")
    assert events[3].startswith("The journal took no record for")


async def _provision(path: str) -> None:
    async with connect(path, client_name="test") as remote:
        await remote.provision(specification("sha256:" + "0" * 64))


def test_a_state_directory_that_another_daemon_has_is_refused(place: Place) -> None:
    with ended(place.start(FAKE)):
        assert place.manager.recv(1000).startswith(b"READY=1")
        with ended(place.start(FAKE)) as second:
            _out, told = second.communicate(timeout=SECONDS_MAX)
            assert second.returncode == 1
            assert "held by another daemon" in told


def test_the_credential_is_the_files_content_without_white_space(tmp_path: Path) -> None:
    assert read_credential({}) is None
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert read_credential(environ) is None
    (tmp_path / "service-credential").write_bytes(b"  \n")
    assert read_credential(environ) is None
    (tmp_path / "service-credential").write_bytes(b"a secret\n")
    assert read_credential(environ) == b"a secret"
