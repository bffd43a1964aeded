"""The installed daemon with an operator's allowlist, and what its audit says of connections.

Mechanism-neutral: everything goes through the worker's socket and the journal.
"""

import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from sbxd.client.remote import connect
from sbxd.port.command import ExecutionResult
from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy
from sbxd.port.errors import ServiceShuttingDown
from sbxd.port.limits import EnvironmentBudgets, ResourceLimits
from tests.redteam.configuration import current, holding, with_tables
from tests.redteam.live import LIMITS, WORKER_SOCKET, Live, default_image, specification

DESTINATIONS = (
    EgressDestination(host="files.lab-allowed.com", ports=(443, 7777)),
    EgressDestination(host="*.lab-allowed.com", ports=(443,)),
)
ALLOWLIST = EgressPolicy(mode=EgressMode.ALLOWLIST, destinations=DESTINATIONS)

# What a kernel without a route says: Linux the first, gVisor the second.
NO_ROUTE = ("ENETUNREACH", "EHOSTUNREACH")

# What a program of the standard library alone knows of the proxy: CONNECT, and what comes back.
CLIENT = """
import json, os, socket, ssl, sys
PROXY = ("127.0.0.1", 3128)
def ask(target, more=b"", method="CONNECT"):
    s = socket.create_connection(PROXY, 30)
    s.sendall(f"{method} {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n".encode() + more)
    return s
def head(s):
    data = b""
    while b"\\r\\n\\r\\n" not in data:
        piece = s.recv(4096)
        if not piece:
            break
        data += piece
    first, _, rest = data.partition(b"\\r\\n")
    body = rest.partition(b"\\r\\n\\r\\n")[2]
    return int(first.split()[1]), body, s
def status(target, **more):
    code, body, s = head(ask(target, **more))
    while code != 200:
        piece = s.recv(4096)
        if not piece:
            break
        body += piece
    s.close()
    return code, body.decode()
"""


@contextmanager
def configured(text: str) -> Iterator[None]:
    """The daemon with these tables in its configuration; afterwards it is as it was."""
    whole = with_tables(current(), text)
    try:
        with holding(whole):
            _restart()
            yield
    finally:
        _restart()


def _restart() -> None:
    subprocess.run(["systemctl", "reset-failed", "sbxd.service"], check=False, timeout=60)
    subprocess.run(["systemctl", "restart", "sbxd.service"], check=True, timeout=120)


def allowlist(destinations: Sequence[EgressDestination] = DESTINATIONS, more: str = "") -> str:
    """The [egress] table of a configuration."""
    entries = ", ".join(
        f'{{ host = "{each.host}", ports = {list(each.ports)} }}' for each in destinations
    )
    return f'[egress]\nmode = "allowlist"\ndestinations = [{entries}]\n{more}'


@dataclass(frozen=True)
class Networked(Live):
    """An environment, and what was recorded of it."""

    async def ask(self, source: str, timeout_seconds: int = 60) -> ExecutionResult:
        """Run a Python program that begins with CLIENT, with the network."""
        argv = ("python3", "-c", CLIENT + source)
        return await self.run(*argv, timeout_seconds=timeout_seconds, network_enabled=True)

    async def statuses(self, *targets: str) -> list[tuple[int, str]]:
        """What the proxy answers to CONNECT for each of these."""
        result = await self.ask(f"print(json.dumps([status(t) for t in {targets!r}]))")
        assert result.exit_code == 0, result
        return [(code, body) for code, body in json.loads(result.stdout)]

    def recorded(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of this environment so far, oldest first; all of them or of these types."""
        subprocess.run(["journalctl", "--sync"], check=True, timeout=60)
        match = f"SBX_ENVIRONMENT_ID={self.handle.environment_id}"
        done = subprocess.run(
            ["journalctl", "--output=json", "--all", "SYSLOG_IDENTIFIER=sbxd", match],
            check=True,
            capture_output=True,
            timeout=60,
        )
        found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
        return [each for each in found if not kinds or each["SBX_EVENT"] in kinds]

    def egress(self) -> list[dict[str, Any]]:
        """What of it is the proxy's."""
        return [each for each in self.recorded() if each["SBX_EVENT"].startswith("Egress")]

    def decisions(self) -> list[tuple[str, str | None, str | None]]:
        """Each decision in order: event, "host:port", reason."""
        return [
            (
                each["SBX_EVENT"],
                f"{each.get('SBX_HOST')}:{each.get('SBX_PORT')}",
                each.get("SBX_REASON"),
            )
            for each in self.egress()
            if each["SBX_EVENT"] in ("EgressAllowed", "EgressRefused", "EgressFailed")
        ]


@asynccontextmanager
async def networked(
    policy: EgressPolicy = ALLOWLIST,
    *,
    image: str | None = None,
    limits: ResourceLimits = LIMITS,
    budgets: EnvironmentBudgets | None = None,
) -> AsyncIterator[Networked]:
    """An environment with this policy, destroyed afterwards unless its daemon was stopped."""
    wanted = msgspec.structs.replace(
        specification(image or await default_image(), limits), egress=policy, budgets=budgets
    )
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        handle = await remote.provision(wanted)
        try:
            yield Networked(remote, handle)
        finally:
            with suppress(ServiceShuttingDown):  # then it is ended already
                await remote.destroy(handle)
