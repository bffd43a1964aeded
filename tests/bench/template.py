"""gVisor from a checkpoint (a template) beside gVisor from a boot, with runsc used directly.

Both end when `true` has run in the sandbox: what stands between a request and its first byte. The
checkpoint is of an idle sandbox, or of one whose interpreter has loaded what a program needs.
"""

import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.peers import PROGRAMS, Peers
from tests.bench.samples import Mark, Marks, OperationFailed
from tests.bench.spawn import ENVIRONMENT, elapsed_ms

BOOT = "runsc boot, exec"
RESTORE = "runsc restore, exec"
RESTORE_WARM = "runsc restore warm, exec"
IDLE = ("/usr/bin/sleep", "infinity")
WARM = (
    "/usr/bin/python3",
    "-c",
    "import json, subprocess, urllib.request, asyncio, time; print(1, flush=True); time.sleep(9e6)",
)
WARM_SECONDS = 3.0


@dataclass
class Template:
    """One way to a sandbox in which `true` has run. An Operation."""

    tool: str
    runsc: tuple[str, ...]
    begin: tuple[str, ...]  # with NAME at its end
    program: str = "true"
    names: list[str] = field(default_factory=list)

    async def ready(self) -> None:
        """The checkpoint is there."""

    async def run(self) -> Marks:
        name = f"bench-{secrets.token_hex(6)}"
        self.names.append(name)
        began_ns = time.perf_counter_ns()
        _silently((*self.runsc, *self.begin, name))
        up = elapsed_ms(began_ns)
        _silently((*self.runsc, "exec", name, *PROGRAMS[self.program]))
        return {Mark.PROVISION: up, Mark.REPLY: elapsed_ms(began_ns)}

    async def clean(self) -> Marks:
        while self.names:
            _silently((*self.runsc, "delete", "--force", self.names.pop()))
        return {}


@contextmanager
def templates(peers: Peers) -> Iterator[list[Template]]:
    """The three ways; their checkpoints for the length of the block. Raises OperationFailed."""
    runsc = peers.runsc_argv()
    found = [Template(BOOT, runsc, ("run", "--detach", "--bundle", str(peers.bundle(IDLE))))]
    for tool, argv in ((RESTORE, IDLE), (RESTORE_WARM, WARM)):
        bundle = peers.bundle(argv)
        image = _checkpoint(runsc, bundle, argv)
        words = ("restore", "--detach", "--image-path", str(image), "--bundle", str(bundle))
        found.append(Template(tool, runsc, words))
    yield found


def _checkpoint(runsc: Sequence[str], bundle: Path, argv: Sequence[str]) -> Path:
    name, image = f"bench-{secrets.token_hex(6)}", bundle / "checkpoint"
    _silently((*runsc, "run", "--detach", "--bundle", str(bundle), name))
    if argv is WARM:
        time.sleep(WARM_SECONDS)
    _silently((*runsc, "checkpoint", "--image-path", str(image), name))
    _silently((*runsc, "delete", "--force", name))
    return image


def _silently(argv: Sequence[str]) -> None:
    """Its descriptors go nowhere, since a sandbox keeps them. Raises OperationFailed."""
    ended = subprocess.run(
        argv,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if ended.returncode != 0:
        raise OperationFailed(f"{' '.join(argv[-6:])}: exit {ended.returncode}")
