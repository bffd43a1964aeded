"""The operator's own syscall profiles: from the launcher's directory to a command they bind."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.launcher.kernel import hostpaths
from sbxd.launcher.kernel.seccomp import ProfileName, profile_text
from sbxd.mechanism.launcher_client import LauncherRefused
from sbxd.mechanism.namespaces import open_namespaces
from sbxd.mechanism.protocol import SlotProfile
from tests.kernel import launcher_subject as subject
from tests.pure.test_seccomp_compare import changed
from tests.pure.test_seccomp_compile import entry, refuse

pytestmark = pytest.mark.needs("cgroup2", "idmap", "image", "loop", "root", "systemd")

FOLDER = Path(hostpaths.PROFILES_DIRECTORY)
SOCKET = "import socket; socket.socket()"


@pytest.fixture
def folder() -> Iterator[Path]:
    """The launcher's directory of profiles, with a stricter and a weaker one."""
    FOLDER.mkdir(parents=True)
    try:
        stricter = changed(refuse(97, names=["socket"]), without=("socket",))
        weaker = changed(entry(names=["ptrace"]), without=("ptrace",))
        (FOLDER / "no-network.json").write_bytes(stricter)
        (FOLDER / "weaker.json").write_bytes(weaker)
        (FOLDER / "note.txt").write_text("no profile")
        yield FOLDER
    finally:
        shutil.rmtree(FOLDER)


async def test_a_stricter_profile_binds_commands_and_a_weaker_one_is_never_used(
    folder: Path, tmp_path: Path
) -> None:
    image = subject.unpacked_image()
    with subject.launcher(tmp_path) as running:
        async with (
            subject.mechanism(running) as opened,
            subject.sandbox(opened, image) as slot,
        ):  # the control: under the shipped one
            made = await subject.run(slot, "python3", "-c", SOCKET)
            assert made.end.exit_code == 0, made
        async with (
            open_namespaces(running.socket, seccomp_profile="no-network") as opened,
            subject.sandbox(opened, image) as slot,
        ):
            refused = await subject.run(slot, "python3", "-c", SOCKET)
            assert refused.end.exit_code == 1
            assert b"Address family not supported" in refused.stderr
            assert (await subject.run(slot, "true")).end.exit_code == 0
        for name, number, words in (
            ("weaker", 1, "it would open ptrace"),
            ("nobody", 2, "there was no profile nobody"),
        ):
            async with open_namespaces(running.socket, seccomp_profile=name) as opened:
                with pytest.raises(LauncherRefused, match="seccomp_profile") as failure:
                    await opened.prepare(
                        subject.fresh_id(),
                        SlotProfile(image, subject.LIMITS),
                        back_stop_seconds=600,
                    )
                assert failure.value.errno == number
                assert words in str(failure.value)


def launcher_says(tmp_path: Path) -> str:
    """What a launcher that does not start says of it."""
    command = [sys.executable, "-m", "sbxd.launcher", "--socket", str(tmp_path / "socket")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done
    return done.stderr


@pytest.mark.parametrize("planted", ["folder", "file", "link", "large"])
def test_a_profile_that_another_user_could_have_written_keeps_the_launcher_from_starting(
    folder: Path, tmp_path: Path, planted: str
) -> None:
    file = folder / "planted.json"
    file.write_bytes(profile_text(ProfileName.WORKLOAD))
    match planted:
        case "folder":
            folder.chmod(0o777)
        case "file":
            os.chown(file, 1000, 1000)
        case "link":
            file.unlink()
            file.symlink_to("no-network.json")
        case "large":
            file.write_bytes(b" " * (hostpaths.PROFILE_BYTES_MAX + 1))
    assert "seccomp" in launcher_says(tmp_path)


def test_sbxctl_shows_an_operators_profile_and_why_one_is_refused(folder: Path) -> None:
    command = ["sbxctl", "seccomp", "dump", "--profile"]
    kept = subprocess.run([*command, "no-network"], capture_output=True, text=True, timeout=60)
    assert kept.returncode == 0
    assert "socket EAFNOSUPPORT" in kept.stdout.splitlines()
    weaker = subprocess.run([*command, "weaker"], capture_output=True, text=True, timeout=60)
    assert weaker.returncode == 240
    assert "it would open ptrace" in weaker.stderr
    assert json.loads((folder / "weaker.json").read_text())
