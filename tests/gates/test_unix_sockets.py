"""One place for each side accepts on Unix sockets, connects them, receives from them and closes
them: a socket beside these would have no defence against descriptors in flight (decision 0180).

The rule is a function from source to violations, which must find what is planted.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.gates.imports import within
from tests.gates.source import REPOSITORY, Module, aliases, called, dotted, load

# Who may accept, listen, connect a Unix socket or make one, and why there.
ALLOWED: Mapping[str, str] = {
    "sbxd.service.unix": "the daemon's: every door, and the question to a lease authority",
    "sbxd.client.unix": "the worker's: to the daemon, to a lease authority, and the authority's",
    "sbxd.doors": "binds and listens; hands the socket to `sbxd.service.unix`",
    "sbxd.notify": "turns waiting clients away as the process ends; sends to the service manager",
    "sbxd.launcher.loop": "the launcher's one client; closed by `sbxd.launcher.parting`",
    "sbxd.launcher.__main__": "makes the launcher's listener",
    "sbxd.launcher.notify": "sends one datagram to the service manager",
    "sbxd.launcher.kernel.trace": "in a helper that is killed at its deadline; runsc connects",
    "sbxd.mechanism.launcher_client": "to the launcher, which is root; its descriptors are taken",
    "sbxd.mechanism.bridge": "a program's: in threads of its own door (decision 0061)",
    "sbxd.audit.journald": "sends to the journal, which answers nothing",
    "sbxd.jail.bridge": "binds in an environment, and refuses descriptors",
    "sbxd.egress.listening": "TCP, which carries no descriptors",
    "sbxd.worker_cli.mcp": "TCP, which carries no descriptors",
}
# A pair is made on this side, for a process that this side starts.
PAIRS: Mapping[str, str] = {
    "sbxd.jail.handshake": "between a helper and what it starts; each wait has a deadline",
    "sbxd.launcher.helpers": "between the launcher and its helper, which is root",
    "sbxd.launcher.unpacker": "to a process whose filter lets it send nothing but bytes",
    "sbxd.launcher.sentry": "made here, received from by the daemon (`sbxd.mechanism`)",
    "sbxd.launcher.prepare": "made here, received from by the daemon (`sbxd.mechanism`)",
    "sbxd.mechanism.guest_doors": "refuses descriptors",
}
METHODS = frozenset({"accept", "listen"})
FUNCTIONS = re.compile(
    r"(?:anyio|trio|asyncio)\.(?:\w+\.)*(?:connect_unix\w*|create_unix\w*|open_unix\w*"
    r"|start_unix_server|SocketListener|UNIXSocketStream)\Z"
)


def sockets(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each accept and listen on something with arguments of a socket's, of each
    AF_UNIX, and of each function of a library that makes or accepts Unix sockets."""
    names = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                yield node.lineno, node.func.attr
            elif FUNCTIONS.match(called(node, names)):
                yield node.lineno, called(node, names)
        elif isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node).rpartition(".")[2]
            if name in ("AF_UNIX", "socketpair", "from_stdlib_socket", "SocketStream"):
                yield node.lineno, name


# `accept` and `listen` of our own interfaces, behind which is one of the places above.
OURS: Mapping[str, str] = {
    "sbxd.service.listener": "accepts from a trio listener, which `sbxd.doors` makes",
    "sbxd.client.authority": "listens by `sbxd.client.unix`",
    "sbxd.launcher.kernel.runsc": "accepts by `trace`",
    "sbxd.lifecycle.bridge": "accepts from a mechanism's door",
    "sbxd.mechanism.guest_bridge": "accepts from a guest's door",
    "sbxd.mechanism.guest_doors": "accepts from its pairs",
    "sbxd.egress.proxy": "accepts from a door that it was handed",
}
# What is handed over as a descriptor is wrapped, not made.
WRAPPED: Mapping[str, str] = {
    "sbxd.mechanism.namespaces_sandbox": "init's and the steward's channels, from the launcher",
    "sbxd.mechanism.steward_client": "the steward's channel",
    "sbxd.mechanism.guest_doors": "its pairs",
    "sbxd.client.guard": "TCP, which carries no descriptors",
    "sbxd.egress": "TCP, which carries no descriptors",
    "sbxd.client.channel": "whether a stream is a Unix socket",
}
PLACES = frozenset({*ALLOWED, *PAIRS, *OURS, *WRAPPED})


def violations(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{name}:{line} {what}"
        for name, module in modules.items()
        for line, what in sockets(module.tree)
        if not within(name, tuple(PLACES))
    ]


@pytest.fixture(scope="module")
def product() -> dict[str, Module]:
    return load()


@pytest.mark.case("PEER-04")
def test_nothing_else_accepts_or_makes_unix_sockets(product: dict[str, Module]) -> None:
    assert violations(product) == []


def test_every_place_of_the_table_is_one(product: dict[str, Module]) -> None:
    found = {name for name, module in product.items() if any(sockets(module.tree))}
    unused = [place for place in PLACES if not any(within(name, (place,)) for name in found)]
    assert sorted(unused) == []


@pytest.mark.parametrize(
    "text",
    [
        "import socket\ns = socket.socket(socket.AF_UNIX)\n",
        "from socket import AF_UNIX, socket\ns = socket(AF_UNIX)\n",
        "client, _ = listener.accept()\n",
        "import trio\nl = trio.SocketListener(s)\n",
        "import anyio\nasync def f():\n    await anyio.connect_unix(p)\n",
        "from anyio import create_unix_listener as c\nasync def f():\n    await c(p)\n",
        "import asyncio\nasync def f():\n    await asyncio.start_unix_server(h, p)\n",
        "import trio\nasync def f():\n    await trio.open_unix_socket(p)\n",
        "import socket\na, b = socket.socketpair()\n",
    ],
)
def test_another_place_is_found(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "sbxd" / "service"
    folder.mkdir(parents=True)
    (tmp_path / "sbxctl").mkdir()
    (folder / "bad.py").write_text(text)
    assert violations(load(tmp_path))


def test_the_units_listeners_are_those_that_are_known() -> None:
    """A socket unit beside these needs the one accept path too."""
    listed = sorted(path.name for path in (REPOSITORY / "units").glob("*.socket"))
    assert listed == ["sbxd-admin.socket", "sbxd-launcher.socket", "sbxd.socket"]
