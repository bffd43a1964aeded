"""One judgement, two callers, and nothing around it: only the sandbox proxy and the worker's guard
call `evaluate`, and nothing else in the tree dials out or looks a name up.

The walk sees names, not values: what it proves is that no module does so in plain sight. The last
part plants violations and expects each to be found.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.gates.imports import imports_of, within
from tests.gates.source import Module, aliases, dotted, load

EVALUATE = "sbxd.policy.egress.evaluate"
CALLERS = ("sbxd.egress", "sbxd.client.guard")

# Whatever opens a connection, sends to an address or looks a name up, by the last part of its name.
DIALS = frozenset(
    {
        "connect", "connect_ex", "connect_tcp", "connect_unix", "create_connected_udp_socket",
        "create_connected_unix_datagram_socket", "create_connection", "create_datagram_endpoint",
        "create_udp_socket", "create_unix_connection", "create_unix_datagram_socket",
        "getaddrinfo", "gethostbyaddr", "gethostbyname", "gethostbyname_ex", "getnameinfo",
        "open_connection", "open_ssl_over_tcp_stream", "open_tcp_stream", "open_unix_connection",
        "open_unix_socket", "sendto", "sock_connect", "sock_sendto", "urlopen",
    }
)  # fmt: skip
# The same word for something that is no network.
NOT_A_NETWORK = frozenset({"sqlite3.connect", "aiosqlite.connect"})
CLIENT_LIBRARIES = (
    "aiohttp", "ftplib", "grpc", "http.client", "httpcore", "httpx", "imaplib", "nntplib",
    "paramiko", "poplib", "psycopg", "requests", "smtplib", "telnetlib", "urllib.request",
    "urllib3", "websockets", "xmlrpc.client",
)  # fmt: skip
# Who may, and whom it reaches.
DIALLERS = {
    "sbxd.egress": "the sandbox proxy: what was judged",
    "sbxd.client.guard": "the worker's guard: what was judged",
    "sbxd.client.guard_httpx": "the guard's transports: what was judged",
    "sbxd.client.resolver": "the guard's lookups",
    "sbxd.client.routes": "the kernel, by route netlink",
    "sbxd.client.unix": "the Unix sockets of the daemon and of the lease authority",
    "sbxd.tools.mcp_http": "nobody: its transport's connect joins two memory streams",
    "sbxd.service.unix": "the lease authority's Unix socket",
    "sbxd.artifacts.metadata_postgres": "PostgreSQL, at the worker's",
    "sbxd.audit.journald": "the journal's Unix socket",
    "sbxd.doors": "its own Unix socket, to see whether another daemon serves it",
    "sbxd.launcher.notify": "systemd's notification socket",
    "sbxd.notify": "systemd's notification socket",
    "sbxd.mechanism.launcher_client": "the launcher's Unix socket",
}


def references(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of each name and attribute that is read, through the imports. An
    attribute of something computed is named with a leading dot."""
    names = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = dotted(node).partition(".")
            yield node.lineno, f"{names.get(head, head)}.{rest}" if rest else f".{node.attr}"
        elif isinstance(node, ast.Name) and node.id in names:
            yield node.lineno, names[node.id]


def evaluations(modules: Mapping[str, Module]) -> Iterator[tuple[str, int]]:
    """Module and line of each mention of `evaluate`, and of each star import of its module."""
    home = EVALUATE.rpartition(".")[0]
    for module in modules.values():
        if module.name == home:
            continue
        for line, name in references(module.tree):
            if name == EVALUATE:
                yield module.name, line
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == home
                and node.names[0].name == "*"
            ):
                yield module.name, node.lineno


def dials(modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    """Module and "line name" of each dial, lookup and import of a client library."""
    for module in modules.values():
        for line, name in references(module.tree):
            ours = within(name, ("sbxd", "sbxctl"))  # judged where it is defined
            if name.rpartition(".")[2] in DIALS and not ours and name not in NOT_A_NETWORK:
                yield module.name, f"{line} {name}"
        for each in imports_of(module, modules):
            if within(each.target, CLIENT_LIBRARIES):
                yield module.name, f"{each.line} import {each.target}"


@pytest.fixture(scope="module")
def product() -> dict[str, Module]:
    return load()


def test_only_the_proxy_and_the_guard_evaluate(product: dict[str, Module]) -> None:
    found = sorted(evaluations(product))
    assert [each for each in found if not within(each[0], CALLERS)] == []
    for caller in CALLERS:
        if caller in product:  # the walk does find them
            assert any(within(name, (caller,)) for name, _ in found), caller


def test_nothing_else_dials_out_or_looks_a_name_up(product: dict[str, Module]) -> None:
    found = sorted(dials(product))
    assert [each for each in found if not within(each[0], frozenset(DIALLERS))] == []
    # A listed module that dials nothing is a list that nobody reads.
    diallers = {name for name, _ in found}
    for listed in DIALLERS:
        assert listed not in product or any(within(name, (listed,)) for name in diallers), listed


# --- planted violations -------------------------------------------------------------------------


def planted(tmp_path: Path, text: str) -> dict[str, Module]:
    folder = tmp_path / "sbxd" / "service"
    folder.mkdir(parents=True)
    (tmp_path / "sbxctl").mkdir()
    (folder / "bad.py").write_text(text)
    return load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "from sbxd.policy.egress import evaluate\nx = evaluate(p)\n",
        "from sbxd.policy.egress import evaluate as judge\nx = judge\n",
        "from sbxd.policy import egress\nx = egress.evaluate\n",
        "import sbxd.policy.egress\nsbxd.policy.egress.evaluate(p)\n",
        "import sbxd.policy.egress as e\ne.evaluate(p)\n",
        "from sbxd.policy.egress import *\n",
    ],
)
def test_a_third_caller_is_found(tmp_path: Path, text: str) -> None:
    assert [name for name, _ in evaluations(planted(tmp_path, text))]


@pytest.mark.parametrize(
    "text",
    [
        "import socket\nsocket.create_connection(('x.example', 443))\n",
        "from socket import create_connection as c\nc(address)\n",
        "import socket\nsocket.socket().connect(address)\n",
        "def f(sock):\n    sock.connect_ex(address)\n",
        "def f(sock):\n    go = sock.connect\n    go(address)\n",
        "def f(socks):\n    socks[0].sendto(b'', address)\n",
        "import trio\nasync def f():\n    await trio.open_tcp_stream('x.example', 443)\n",
        "from trio import open_unix_socket\nasync def f():\n    await open_unix_socket('/x')\n",
        "import anyio as a\nasync def f():\n    await a.connect_tcp('x.example', 443)\n",
        "import asyncio\nasync def f():\n    await asyncio.open_connection('x.example', 443)\n",
        "async def f(loop):\n    await loop.create_connection(P, 'x.example', 443)\n",
        "import socket\nsocket.getaddrinfo('x.example', 443)\n",
        "from socket import gethostbyname\ngethostbyname('x.example')\n",
        "from urllib.request import urlopen\n",
        "import http.client\n",
        "def f():\n    import httpx\n",
        "import importlib\nimportlib.import_module('requests')\n",
    ],
)
def test_a_dial_from_elsewhere_is_found(tmp_path: Path, text: str) -> None:
    assert [name for name, _ in dials(planted(tmp_path, text))] != []


@pytest.mark.parametrize(
    "text",
    [
        "from sbxd.client.remote import connect\nx = connect('/x')\n",
        "import sqlite3\nsqlite3.connect('/x')\n",
        "from sbxd.policy.egress import Allowed, Refused\nx = Allowed\n",
        "def evaluate(p):\n    return p\nevaluate(1)\n",
        "def connect(p):\n    return p\nconnect(1)\n",
    ],
)
def test_control_what_is_fine_is_not_found(tmp_path: Path, text: str) -> None:
    modules = planted(tmp_path, text)
    assert [*evaluations(modules), *dials(modules)] == []
