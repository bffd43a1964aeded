"""A launcher whose n-th effect fails: `python -m tests.kernel.faulty_launcher ARMED --socket PATH`.

The file ARMED says `nonce number what`: the effect of that number, counted in each process from
the moment that it sees a new nonce, fails with the errno of that name, or ends its process with
SIGKILL (`KILL`), or is a bus that does not answer (`ETIMEDOUT`). It fails once: who removes the
file first is the one that fails. What counts as an effect is listed below.
"""

import errno
import fcntl
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from sbxd.jail import syscalls
from sbxd.launcher.__main__ import main
from sbxd.launcher.kernel import cgroup, systemd

EFFECTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("chown", "dup", "fchown", "fsync", "ftruncate", "link", "mkdir", "open", "pidfd_open",
          "posix_fallocate", "rename", "rmdir", "symlink", "unlink")),
    (fcntl, ("flock", "ioctl")),
    (syscalls, ("capset", "clone3", "fsconfig", "fsmount", "fsopen", "keyctl_join_session_keyring",
                "landlock_add_path", "landlock_create_ruleset", "mount",
                "mount_setattr", "move_mount", "open_tree", "openat2", "pivot_root", "prctl",
                "seccomp_set_mode_filter", "setns", "syncfs", "umount2", "unshare")),
    (cgroup, ("kill", "read", "write")),
    (systemd, ("connect",)),
    (systemd.Connection, ("set_cpu_weight", "start_scope", "stop_scope", "wait_job")),
)  # fmt: skip

_open, _unlink, _read, _close = os.open, os.unlink, os.read, os.close


class Fault:
    """What is armed, and how many effects this process has had since."""

    def __init__(self, armed: str) -> None:
        self._armed = armed
        self._nonce = ""
        self._count = 0
        self._is_looking = False

    def effect(self) -> None:
        """One effect is about to be had. Raises OSError when it is the one."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            self._look()
        finally:
            self._is_looking = False

    def _look(self) -> None:
        try:
            descriptor = _open(self._armed, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        text = _read(descriptor, 100).decode()
        _close(descriptor)
        nonce, number, what = text.split()
        if nonce != self._nonce:
            self._nonce, self._count = nonce, 0
        self._count += 1
        if self._count != int(number):
            return
        try:
            _unlink(self._armed)
        except OSError:
            return
        if what == "KILL":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(getattr(errno, what), os.strerror(getattr(errno, what)))


def failing(fault: Fault, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        fault.effect()
        return function(*arguments, **named)

    return called


if __name__ == "__main__":
    armed_fault = Fault(sys.argv.pop(1))
    for owner, names in EFFECTS:
        for name in names:
            setattr(owner, name, failing(armed_fault, getattr(owner, name)))
    main()
