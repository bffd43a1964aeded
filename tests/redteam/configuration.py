"""The daemon's configuration file, for as long as tests have it say something else.

Invariants: nothing else in the tests writes it; it is written whole and by a rename; what it said
before the first change of a run is kept beside it until it is put back, so what a run has left that
was killed (its lane's agent kills a command whose caller has gone) is never taken for the lane's
own, and never added to; one run at a time changes it; a table that is added replaces the one of
its name.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIGURATION = Path("/etc/sbxd/config.toml")
_KEPT = ".own-"  # then the number of the process that keeps it
_TABLE = re.compile(r"^\[\[?\s*([\w.-]+)\s*\]\]?\s*(?:#.*)?$")


class AnotherRun(Exception):
    """Somebody else's tests are changing the configuration of this host."""


def put(text: str, file: Path = CONFIGURATION) -> None:
    """The file holds this from one moment to the next; owner and mode stay."""
    status = file.stat()
    new = file.with_name(f"{file.name}.new-{os.getpid()}")
    new.write_text(text)
    new.chmod(status.st_mode & 0o7777)
    os.chown(new, status.st_uid, status.st_gid)
    new.replace(file)


def current(file: Path = CONFIGURATION) -> str:
    """What the file holds, without what a dead run has left in it. Raises AnotherRun."""
    recover(file)
    return file.read_text()


@contextmanager
def holding(text: str, file: Path = CONFIGURATION) -> Iterator[None]:
    """The file holds this for the length of the block, then what it held before. Nothing is
    started. Blocks of one process may be nested.

    Raises AnotherRun.
    """
    before = current(file)
    kept = file.with_name(f"{file.name}{_KEPT}{os.getpid()}")
    is_first = not kept.exists()
    if is_first:
        _keep(before, kept)
    try:
        put(text, file)
        yield
    finally:
        put(before, file)
        if is_first:
            kept.unlink()


def recover(file: Path = CONFIGURATION) -> bool:
    """Put back what a run that is dead has changed; whether there was anything.

    Raises AnotherRun when it is not dead.
    """
    is_changed = False
    for kept in sorted(file.parent.glob(f"{file.name}{_KEPT}*")):
        owner = int(kept.name.rpartition("-")[2])
        if owner == os.getpid():
            continue
        if Path(f"/proc/{owner}").exists():
            raise AnotherRun(f"process {owner} has changed {file}, and is to put it back")
        put(kept.read_text(), file)
        kept.unlink()
        is_changed = True
    return is_changed


def with_tables(own: str, text: str) -> str:
    """A configuration with these tables, in the place of those that it has of their names."""
    replaced = {found[1] for line in text.splitlines() if (found := _TABLE.match(line))}
    kept = []
    is_replaced = False
    for line in own.splitlines():
        if found := _TABLE.match(line):
            is_replaced = any(
                found[1] == name or found[1].startswith(f"{name}.") for name in replaced
            )
        if not is_replaced:
            kept.append(line)
    return "\n".join(kept).rstrip("\n") + f"\n\n{text}\n"


def _keep(text: str, kept: Path) -> None:
    """Never half of it: by a rename as well."""
    new = kept.with_name(f".{kept.name}.new")
    new.write_text(text)
    new.replace(kept)
