"""The few system calls of the lab that Python 3.11 has no wrapper for, and mounts by program.

Invariant: `private_mounts` comes before any mount of a process, so nothing that the lab mounts is
ever seen by the machine, and everything vanishes with the last process of the namespace.
"""

import ctypes
import os
import signal
import subprocess
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_SHARED = 0x100000
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
SYS_PIVOT_ROOT = 155  # x86-64: the only architecture whose kernel the uml lane has

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")


def private_mounts() -> None:
    """Give this process a mount namespace from which nothing propagates back."""
    _check(_libc.unshare(CLONE_NEWNS), "unshare")
    _check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "make mounts private")


def share_mounts() -> None:
    """Have mounts of this namespace propagate to those made from it, as systemd does on a host."""
    _check(_libc.mount(None, b"/", None, MS_REC | MS_SHARED, None), "make mounts shared")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def pivot_root(new: Path, old: Path) -> None:
    """Make `new` the root and put the previous one at `old`."""
    _check(_libc.syscall(SYS_PIVOT_ROOT, bytes(new), bytes(old)), "pivot_root")


def detach(target: Path) -> None:
    """Take a mount away at once, whoever still uses it."""
    _check(_libc.umount2(bytes(target), MNT_DETACH), "umount2")


def mount(source: str | Path, target: Path, *options: str, kind: str | None = None) -> None:
    """mount(8), which knows loop devices and how to read options; makes the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    what = ["-t", kind] if kind else []
    flags = ["-o", ",".join(options)] if options else []
    run("mount", *what, *flags, str(source), str(target))


def bind(source: str | Path, target: Path, *options: str) -> None:
    """Bind a folder or a file; with options (`ro`) in the second step that they need."""
    if Path(source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    run("mount", "--bind", str(source), str(target))
    if options:
        run("mount", "-o", ",".join(("remount", "bind", *options)), str(target))


def overlay(lower: list[Path], upper: Path, work: Path, target: Path) -> None:
    """Mount `upper` over the `lower` layers (topmost first) at `target`."""
    for folder in (upper, work):
        folder.mkdir(parents=True, exist_ok=True)
    layers = ":".join(str(layer) for layer in lower)
    mount(
        "overlay",
        target,
        f"lowerdir={layers}",
        f"upperdir={upper}",
        f"workdir={work}",
        kind="overlay",
    )


def run(*command: str, fds: tuple[int, ...] = (), environment: dict[str, str] | None = None) -> str:
    """Run a program to its end and return what it printed; OSError with its words if it fails."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        pass_fds=fds,
        env=environment,
    )
    if done.returncode:
        raise OSError(
            f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout
