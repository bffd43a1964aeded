"""The commands that sbxd is measured beside, on the same image in the same run.

bare: no sandbox, the floor. bwrap: all seven namespaces, a read-only root, its own /proc, /dev
and /tmp; no seccomp filter, no cgroup, no limits. crun: a read-only root, the default
specification's namespaces and a user namespace. crun exec: a second command in a running one.
runsc, beside sbxd on gVisor alone: with the flags that sbxd gives it, as the host's root.
systemd-run --scope: a cgroup and no isolation.
"""

import json
import secrets
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.bench.samples import Marks
from tests.bench.spawn import ENVIRONMENT, found, must, time_to_exit, time_to_output

PROGRAMS = {
    "true": ("/usr/bin/true",),
    "echo": ("/usr/bin/echo", "x"),
    "python3": ("/usr/bin/python3", "-c", "pass"),
}
PRINTING = ("echo",)


class Tool(StrEnum):
    BARE = "bare"
    BWRAP = "bwrap"
    CRUN = "crun run"
    CRUN_EXEC = "crun exec"
    RUNSC = "runsc run"
    RUNSC_EXEC = "runsc exec"
    SCOPE = "systemd-run --scope"


@dataclass(frozen=True)
class Peer:
    """One command line, as an Operation. `name_at`: where a fresh name goes for each sample."""

    tool: str
    program: str
    argv: tuple[str, ...]
    name_at: int | None = None

    async def ready(self) -> None:
        """Nothing is to be made ahead."""

    async def run(self) -> Marks:
        return self.run_blocking()

    async def clean(self) -> Marks:
        return {}

    def run_blocking(self) -> Marks:
        """Run the command once and time it. Raises OperationFailed."""
        argv = list(self.argv)
        if self.name_at is not None:
            argv[self.name_at] = f"bench-{secrets.token_hex(6)}"
        if self.program in PRINTING:
            return time_to_output(argv)
        return time_to_exit(argv)


class Peers:
    """Makes the peers' operations. Made by `peers_on`."""

    def __init__(self, root: Path, folder: Path, stack: ExitStack) -> None:
        self._root = root
        self._folder = folder
        self._stack = stack

    def bare(self, program: str) -> Peer:
        return Peer(Tool.BARE, program, PROGRAMS[program])

    def bwrap(self, program: str) -> Peer:
        return Peer(Tool.BWRAP, program, self.bwrap_argv(PROGRAMS[program]))

    def bwrap_argv(self, argv: Sequence[str]) -> tuple[str, ...]:
        """bwrap's command line around a command."""
        return (
            *(found("bwrap"), "--unshare-user", "--unshare-pid", "--unshare-net"),
            *("--unshare-ipc", "--unshare-uts", "--unshare-cgroup", "--die-with-parent"),
            *("--ro-bind", str(self._root), "/", "--proc", "/proc", "--dev", "/dev"),
            *("--tmpfs", "/tmp", "--clearenv", "--new-session", "--", *argv),
        )

    def crun(self, program: str) -> Peer:
        bundle = self.bundle(PROGRAMS[program])
        argv = (found("crun"), "run", "--bundle", str(bundle), "NAME")
        return Peer(Tool.CRUN, program, argv, name_at=4)

    def crun_exec(self, program: str) -> Peer:
        """A second command in a container that idles until the peers are closed."""
        crun, name = found("crun"), f"bench-{secrets.token_hex(6)}"
        bundle = self.bundle(("/usr/bin/sleep", "infinity"))
        # Its descriptors go nowhere, since the container keeps them for its whole life.
        begun = subprocess.run(
            (crun, "run", "--detach", "--bundle", str(bundle), name),
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        self._stack.callback(
            subprocess.run, (crun, "delete", "--force", name), env=ENVIRONMENT, check=False
        )
        if begun.returncode != 0:
            must((crun, "run", "--bundle", str(self.bundle(PROGRAMS["true"])), name))
        return Peer(Tool.CRUN_EXEC, program, (crun, "exec", name, *PROGRAMS[program]))

    def runsc(self, program: str) -> Peer:
        bundle = self.bundle(PROGRAMS[program])
        argv = (*self.runsc_argv(), "run", "--bundle", str(bundle), "NAME")
        return Peer(Tool.RUNSC, program, argv, name_at=len(argv) - 1)

    def runsc_exec(self, program: str) -> Peer:
        """A second command in a sandbox that idles until the peers are closed."""
        runsc, name = self.runsc_argv(), f"bench-{secrets.token_hex(6)}"
        bundle = self.bundle(("/usr/bin/sleep", "infinity"))
        subprocess.run(
            (*runsc, "run", "--detach", "--bundle", str(bundle), name),
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        self._stack.callback(
            subprocess.run, (*runsc, "delete", "--force", name), env=ENVIRONMENT, check=False
        )
        return Peer(Tool.RUNSC_EXEC, program, (*runsc, "exec", name, *PROGRAMS[program]))

    @contextmanager
    def idle_runscs(self, count: int) -> Iterator[list[int]]:
        """So many sandboxes around `sleep`, for the length of the block: Sentry and gofer of each
        (the stubs are the Sentry's children)."""
        runsc = self.runsc_argv()
        bundle = self.bundle(("/usr/bin/sleep", "infinity"))
        names = [f"bench-{secrets.token_hex(6)}" for _ in range(count)]
        try:
            for name in names:
                subprocess.run(
                    (*runsc, "run", "--detach", "--bundle", str(bundle), name),
                    env=ENVIRONMENT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    check=True,
                )
            yield _processes_with(f"--bundle={bundle}")
        finally:
            for name in names:
                subprocess.run((*runsc, "delete", "--force", name), env=ENVIRONMENT, check=False)

    def runsc_argv(self) -> tuple[str, ...]:
        """runsc's command line with the flags that sbxd gives it, as far as they bear on speed."""
        state = ("--root", str(self._folder / "runsc"))
        flags = ("--network=none", "--directfs=false", "--overlay2=none", "--ignore-cgroups")
        return (found("runsc"), *state, *flags)

    def scope(self, program: str) -> Peer:
        argv = (found("systemd-run"), "--scope", "--quiet", "--collect", "--", *PROGRAMS[program])
        return Peer(Tool.SCOPE, program, argv)

    def bundle(self, argv: Sequence[str]) -> Path:
        """A bundle for this command on the image. Raises OperationFailed."""
        bundle = self._folder / f"bundle-{secrets.token_hex(4)}"
        bundle.mkdir()
        must((found("crun"), "spec", "--bundle", str(bundle)))
        place = bundle / "config.json"
        config: dict[str, Any] = json.loads(place.read_text())
        config["process"]["args"] = list(argv)
        config["process"]["terminal"] = False
        config["root"] = {"path": str(self._root), "readonly": True}
        linux = config["linux"]
        if not any(each["type"] == "user" for each in linux["namespaces"]):
            linux["namespaces"].append({"type": "user"})
            mapping = [{"containerID": 0, "hostID": 100000, "size": 65536}]
            linux["uidMappings"] = linux["gidMappings"] = mapping
        linux.pop("resources", None)
        place.write_text(json.dumps(config))
        return bundle


def _processes_with(argument: str) -> list[int]:
    """The processes that carry this argument. (A gofer does not carry its sandbox's name.)"""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if argument.encode() in words:
                found.append(int(entry.name))
    return found


@contextmanager
def peers_on(image_tar: Path | None) -> Iterator[Peers]:
    """Peers on the unpacked image, or on this machine's own root where there is no image."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="sbxd-bench-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        root = Path("/")
        if image_tar is not None:
            root = folder / "root"
            root.mkdir()
            with tarfile.open(image_tar) as tar:
                tar.extractall(root, filter="tar")
        yield Peers(root, folder, stack)
