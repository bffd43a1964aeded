"""Without a configured destination nothing is reachable, and the namespace has only a loopback.

Source: gate.sandbox.network_denied, CASES Part 2 number 25 (direct connections;
the proxy's cases come with egress).
"""

import os
import secrets
import socket
from pathlib import Path

import pytest
import trio

from sbxd.probes.network import PROBES
from sbxd.probes.probe import Probe
from tests.pacing import next_look
from tests.redteam.live import Live, live, wait_process_on_the_host
from tests.redteam.probing import find_nothing_wrong_on_either_side

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.network_denied"),
]


@pytest.mark.parametrize("probe", PROBES, ids=[probe.id for probe in PROBES])
async def test_a_probe_of_the_network_finds_what_it_is_to_find(probe: Probe) -> None:
    await find_nothing_wrong_on_either_side(probe)


async def test_what_listens_on_the_host_is_not_reached() -> None:
    """On every address of the host, the loopback included; the host itself reaches it."""
    with socket.socket() as listening:
        listening.bind(("0.0.0.0", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            pass  # the control
        addresses = sorted({"127.0.0.1", "127.1.2.3", *_addresses_of_this_host()})
        source = f"answer([attempt(connect, socket.AF_INET, (a, {port})) for a in {addresses!r}])"
        async with live() as environment:
            found = await environment.look(source)
    assert set(found) <= {"ENETUNREACH", "ECONNREFUSED"}, found


async def test_two_environments_do_not_share_a_loopback() -> None:
    async with live() as one, live() as other, trio.open_nursery() as nursery:
        source = """
import socket, time
s = socket.socket(); s.bind(("127.0.0.1", 8099)); s.listen()
a = socket.socket(socket.AF_UNIX); a.bind("\\0shared-name"); a.listen()
open("ready", "w").close()
time.sleep(600)
"""
        nursery.start_soon(_run_until_cancelled, one, source)
        with trio.fail_after(30):
            while not [e for e in await one.workspace.listdir(".") if e.path == "ready"]:
                await next_look()
        look = (
            'tcp = attempt(connect, 2, ("127.0.0.1", 8099))\n'
            'answer([tcp, attempt(connect, 1, "\\0shared-name")])'
        )
        assert await other.look(look) == ["ECONNREFUSED", "ECONNREFUSED"]
        nursery.cancel_scope.cancel()
    own = """
s = socket.socket(); s.bind(("127.0.0.1", 8099)); s.listen()
answer(attempt(connect, 2, ("127.0.0.1", 8099)))
"""
    async with live() as control:
        assert await control.look(own) == "ok"


@pytest.mark.case("KRN-08")
async def test_the_kernel_shows_one_interface_no_route_and_another_namespace() -> None:
    marker = f"marker-{secrets.token_hex(8)}"
    async with live() as environment, trio.open_nursery() as nursery:
        nursery.start_soon(
            _run_until_cancelled, environment, "import time; time.sleep(600)", marker
        )
        process = await wait_process_on_the_host(marker)
        interfaces = _interfaces(process)
        routes = _lines(process / "net/route")[1:]
        routes6 = _lines(process / "net/ipv6_route")
        namespace = os.readlink(process / "ns/net")
        nursery.cancel_scope.cancel()
    assert interfaces == ["lo"]
    assert routes == []
    assert all(line.split()[-1] == "lo" for line in routes6)
    assert namespace != os.readlink("/proc/self/ns/net")
    assert "lo" in _interfaces(Path("/proc/self")), "the control: the reader reads"


# What changes something of a network, by the number of its message, with enough zeros behind it.
CHANGES = {
    "RTM_NEWLINK": 16,
    "RTM_DELLINK": 17,
    "RTM_SETLINK": 19,
    "RTM_NEWADDR": 20,
    "RTM_NEWROUTE": 24,
    "RTM_NEWNEIGH": 28,
    "RTM_NEWRULE": 32,
    "RTM_NEWQDISC": 36,
    "RTM_NEWTFILTER": 44,
    "RTM_NEWNSID": 88,
}
ASKS = f"""
import errno, socket, struct
CHANGES = {CHANGES!r}
asked = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
asked.settimeout(30)
def change(kind):
    body = bytes(64)
    asked.send(struct.pack("IHHII", 16 + len(body), kind, 1 | 4, 1, 0) + body)
    code = struct.unpack_from("i", asked.recv(4096), 16)[0]
    return errno.errorcode.get(-code, str(code))
answer({{
    "names": [name for _, name in socket.if_nameindex()],
    **{{name: change(kind) for name, kind in CHANGES.items()}},
    "afterwards": [name for _, name in socket.if_nameindex()],
}})
"""


@pytest.mark.case("KRN-08")
async def test_the_interfaces_can_be_listed_and_nothing_of_them_changed() -> None:
    async with live() as environment:
        found = await environment.look(ASKS)
    assert (found.pop("names"), found.pop("afterwards")) == (["lo"], ["lo"])
    assert found.keys() == CHANGES.keys()
    assert set(found.values()) <= {"EPERM", "EACCES"}, "Linux says the first, gVisor the second"


def _interfaces(process: Path) -> list[str]:
    lines = (process / "net/dev").read_text().splitlines()[2:]
    return [line.split(":")[0].strip() for line in lines]


def _lines(path: Path) -> list[str]:
    """Empty when the kernel has no such table."""
    return path.read_text().splitlines() if path.exists() else []


async def _run_until_cancelled(environment: Live, source: str, *arguments: str) -> None:
    await environment.run("python3", "-c", source, *arguments)


def _addresses_of_this_host() -> list[str]:
    found = []
    for line in Path("/proc/net/fib_trie").read_text().splitlines():
        if "|--" in line:
            address = line.split("|--")[1].strip()
            if not address.endswith((".0", ".255")):
                found.append(address)
    return found
