"""The volume as the daemon holds it: numbers by an O_PATH descriptor; an identity that stays."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from sbxd.launcher.requests import STOP_PROOF, Failed
from sbxd.mechanism.launcher_client import LauncherClient, LauncherRefused
from sbxd.mechanism.namespaces_sandbox import destroy_environment
from sbxd.mechanism.protocol import MechanismError, ProcessSurvived, WorkspaceChanged
from sbxd.mechanism.volume import Volume
from sbxd.port.ids import EnvironmentId
from tests.kernel.steward_bench import steward


@contextmanager
def volume_of(place: Path) -> Iterator[tuple[Volume, int]]:
    """The numbers come from the directory around the workspace, as in a quota volume."""
    descriptor = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Volume(descriptor, identity(place)), descriptor
    finally:
        os.close(descriptor)


def identity(place: Path) -> tuple[int, int]:
    status = os.stat(place)
    return status.st_dev, status.st_ino


def test_the_numbers_are_the_file_systems(tmp_path: Path) -> None:
    with volume_of(tmp_path) as (volume, _):
        reading = volume.read()
    status = os.statvfs(tmp_path)
    assert reading.bytes_total == status.f_blocks * status.f_frsize
    assert reading.inodes_total == status.f_files
    assert 0 <= reading.bytes_left <= reading.bytes_total
    assert 0 <= reading.bytes_used <= reading.bytes_total


def test_a_descriptor_that_is_gone_is_an_error_and_no_number(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    volume = Volume(descriptor, (1, 2))
    os.close(descriptor)
    with pytest.raises(MechanismError) as caught:
        volume.read()
    assert caught.value.errno == errno.EBADF


def test_the_same_root_passes_and_another_does_not(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "other").mkdir()
    with volume_of(tmp_path / "volume") as (volume, _):
        volume.check(identity(tmp_path / "volume"))
        with pytest.raises(WorkspaceChanged):
            volume.check(identity(tmp_path / "other"))


def test_a_root_that_was_removed_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    with volume_of(tmp_path / "volume") as (volume, _):
        seen = identity(tmp_path / "volume")
        volume.check(seen)
        (tmp_path / "volume").rmdir()
        with pytest.raises(WorkspaceChanged):
            volume.check(seen)


def test_another_directory_behind_the_descriptor_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "other").mkdir()
    with volume_of(tmp_path / "volume") as (volume, descriptor):
        replacement = os.open(tmp_path / "other", os.O_PATH | os.O_DIRECTORY)
        volume.check(identity(tmp_path / "volume"))  # the control
        os.dup2(replacement, descriptor)
        os.close(replacement)
        with pytest.raises(WorkspaceChanged):
            volume.check(identity(tmp_path / "volume"))


async def test_a_snapshot_names_the_root_that_the_steward_walks(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        assert await client.snapshot() == identity(tmp_path)


@pytest.mark.parametrize(
    ("step", "number", "survived"),
    [
        (STOP_PROOF, errno.ETIMEDOUT, True),
        (STOP_PROOF, errno.EIO, False),
        ("unit", errno.ETIMEDOUT, False),
    ],
)
async def test_only_processes_that_outlived_the_kill_have_survived(
    step: str, number: int, *, survived: bool
) -> None:
    class Refusing:
        async def request(self, make: object) -> None:
            raise LauncherRefused(Failed(ticket=1, step=step, errno=number, detail="told to"))

    with pytest.raises(MechanismError) as caught:
        await destroy_environment(cast(LauncherClient, Refusing()), EnvironmentId("0" * 32))
    assert isinstance(caught.value, ProcessSurvived) is survived
    assert (caught.value.step, caught.value.errno) == (step, number)
