"""A cache of built things, addressed by the content of their recipe.

Invariants: an entry under its final name is complete (it is built beside it and renamed); an
entry is never changed after that (lanes use it as a lower layer, read-only); two builders of one
entry wait for each other; a recipe's key holds everything that decides the content.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .host import CACHE


def key(recipe: object) -> str:
    """A short name for a recipe (any JSON value)."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it however this process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def obtain(
    name: str, recipe: object, build: Callable[[Path], None], say: Callable[[str], None]
) -> Path:
    """The cached entry for a recipe, built now if there is none.

    Args:
        name: what it is; entries of one name with other keys are kept (branches alternate).
        build: fills the given path (which does not exist yet) with a folder or a file.
        say: told when a build starts and how long it took.
    """
    entry = CACHE / f"{name}-{key(recipe)}"
    if entry.exists():
        return entry
    with locked(CACHE / f".lock-{name}"):
        if entry.exists():
            return entry
        begun = time.monotonic()
        say(f"building {name} (not in the cache)")
        unfinished = CACHE / f".unfinished-{name}"
        _remove(unfinished)
        build(unfinished)
        unfinished.rename(entry)
        say(f"built {name} in {time.monotonic() - begun:.0f} s")
    return entry


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
