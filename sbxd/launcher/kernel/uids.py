"""Blocks of host uids (and equal gids), one per environment, recorded on disk while in use.

Invariants: a block belongs to at most one environment; it is given back only by `release`, which
the destruction calls last; a block whose environment could not be proven stopped stays recorded
and so is never used again. The next block is searched after the last one given out, so that a
released block rests as long as possible.

Nothing on disk is owned by these uids (mounts are id-mapped), so a record that a power failure
loses names nothing any more, and no fsync is paid.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sbxd.jail.plan import INNER_IDS, IdBlock
from sbxd.launcher.kernel import hostpaths

RANGE_FIRST = 1_879_048_192
RANGE_LAST = 2_147_483_647
IMAGE_BLOCK_SIZE = 65_536
IMAGE_BASE = RANGE_FIRST  # the owners of unpacked images: never given to an environment
_FIRST = RANGE_FIRST + IMAGE_BLOCK_SIZE
_STRIDE = len(INNER_IDS)
_SLOTS = (RANGE_LAST + 1 - _FIRST) // _STRIDE
_RECORD = re.compile(r"^([0-9]{10})-([0-9a-f]{32})$")
_LOCK = ".lock"  # its content is the number of the last slot given out


def slot_base(slot: int) -> int:
    """The first host uid of slot 0.._SLOTS-1."""
    if not 0 <= slot < _SLOTS:
        raise ValueError("no such slot")
    return _FIRST + slot * _STRIDE


def allocate(environment_id: str) -> IdBlock:
    """Record a free block for this environment. Raises FileExistsError when it has one, OSError
    when none is free."""
    with _locked() as (directory, lock):
        used = dict(_records(directory))
        if environment_id in used.values():
            raise FileExistsError(17, "this environment has a uid block")
        last = os.pread(lock, 32, 0)
        slot = (int(last) + 1) % _SLOTS if last.isdigit() else 0
        for _ in range(len(used) + 1):
            base = slot_base(slot)
            if base not in used:
                break
            slot = (slot + 1) % _SLOTS
        else:
            raise OSError(28, "no uid block is free")
        record = os.open(
            f"{base:d}-{environment_id}",
            os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC,
            0o600,
            dir_fd=directory,
        )
        os.close(record)
        os.pwrite(lock, b"%010d" % slot, 0)
        return IdBlock(base)


def find(environment_id: str) -> IdBlock | None:
    """The block of this environment, or None."""
    with _locked() as (directory, _):
        for base, owner in _records(directory):
            if owner == environment_id:
                return IdBlock(base)
    return None


def release(environment_id: str) -> None:
    """Give the block back. Only for an environment of which nothing is left. Idempotent."""
    with _locked() as (directory, _):
        for base, owner in _records(directory):
            if owner == environment_id:
                with suppress(FileNotFoundError):
                    os.unlink(f"{base:d}-{environment_id}", dir_fd=directory)


def owners() -> set[str]:
    """The environments that hold a block."""
    with _locked() as (directory, _):
        return {owner for _, owner in _records(directory)}


@contextmanager
def _locked() -> Iterator[tuple[int, int]]:
    directory = hostpaths.private_directory(hostpaths.uids_directory())
    try:
        lock = os.open(
            _LOCK,
            os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
            dir_fd=directory,
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield directory, lock
        finally:
            os.close(lock)
    finally:
        os.close(directory)


def _records(directory: int) -> Iterator[tuple[int, str]]:
    for name in os.listdir(directory):
        match = _RECORD.fullmatch(name)
        if match:
            yield int(match.group(1)), match.group(2)
