"""Who put a file where it is.

The record is written by the write itself and by nothing else; it lives and dies with the volume.
A volume starts empty, so what the host did not write, the sandbox did; only what was there when
the steward started is UNKNOWN. Where a record is lost or too costly to check, the answer errs
towards SANDBOX_WRITTEN.
"""

import os
import stat
from dataclasses import dataclass

from sbxd.steward.digest import Budget, Digester
from sbxd.steward.files import OPEN_PATH, open_beneath, refusal
from sbxd.steward.frames import Origin, Status
from sbxd.steward.history import History
from sbxd.steward.nodes import Node, ctime_of
from sbxd.steward.tree import Clock, Interrupted, record_of

RECORDS_MAX = 100_000
RECORDS_BYTES_MAX = 12 * 1024 * 1024
_RECORD_BYTES = 400  # what one takes besides its path
HASH_BYTES_MAX = 1024 * 1024 * 1024


@dataclass(slots=True)
class _Record:
    """quiet_since: the number of commands there had been when the content was last known for sure,
    with none running; None where that cannot be said."""

    device: int
    inode: int
    ctime_ns: int
    digest: bytes
    quiet_since: int | None


class Origins:
    """The records of one workspace. `before` is what was there when it was opened."""

    def __init__(
        self, root_fd: int, digester: Digester, clock: Clock, before: Node, history: History
    ) -> None:
        self._root_fd = root_fd
        self._digester = digester
        self._clock = clock
        self._before = before
        self._history = history
        self._records: dict[bytes, _Record] = {}
        self._bytes = 0

    def enter(self, path: bytes, status: os.stat_result, digest: bytes) -> None:
        """The host wrote this."""
        self._forget(path)
        self._bytes += _RECORD_BYTES + len(path)
        while len(self._records) >= RECORDS_MAX or self._bytes > RECORDS_BYTES_MAX:
            self._forget(next(iter(self._records)))
        ctime = ctime_of(record_of(status, self._clock))
        quiet_since = self._history.quiet_since
        self._records[path] = _Record(status.st_dev, status.st_ino, ctime, digest, quiet_since)

    def origin(self, path: bytes, interrupted: Interrupted) -> Origin:
        """UNKNOWN for what is not there. Raises Refusal: ESCAPE, REFUSED."""
        try:
            found = open_beneath(self._root_fd, path, OPEN_PATH)
        except OSError as problem:
            refused = refusal(problem)
            if refused.status is Status.NOT_FOUND:
                return Origin.UNKNOWN
            raise refused from None
        try:
            status = os.fstat(found)
        finally:
            os.close(found)
        if stat.S_ISDIR(status.st_mode):
            return Origin.UNKNOWN
        record = self._records.get(path)
        if record is None:
            same = self._before.get(path) == record_of(status, self._clock)
            return Origin.UNKNOWN if same else Origin.SANDBOX_WRITTEN
        if self._holds(path, record, status, interrupted):
            return Origin.TOOL_WRITTEN
        self._forget(path)
        return Origin.SANDBOX_WRITTEN

    def _forget(self, path: bytes) -> None:
        if self._records.pop(path, None) is not None:
            self._bytes -= _RECORD_BYTES + len(path)

    def _holds(
        self, path: bytes, record: _Record, status: os.stat_result, interrupted: Interrupted
    ) -> bool:
        """Whether these are still the bytes that the host wrote.

        A command may change a page that it has mapped and dirtied without moving the ctime, so
        the ctime proves something only while no command has run.
        """
        if (record.device, record.inode) != (status.st_dev, status.st_ino):
            return False
        ctime = ctime_of(record_of(status, self._clock))
        quiet_since = self._history.quiet_since
        if record.ctime_ns == ctime and record.quiet_since == quiet_since is not None:
            return True
        budget = Budget(HASH_BYTES_MAX)
        digest = self._digester.of(path, status.st_mode, budget, interrupted)
        record.ctime_ns, record.quiet_since = ctime, quiet_since
        return digest == record.digest
