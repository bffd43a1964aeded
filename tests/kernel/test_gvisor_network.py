"""The network of a gVisor sandbox from both sides: a loopback within the guest's kernel, a relay
to the daemon's proxy, and nothing on the host.

That the boundary is the same as on the host's kernel is the gates' to show, which run here as well;
this is what only this mechanism has.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from sbxd.port.command import KillReason
from sbxd.port.egress import DENY_ALL
from tests.kernel.test_gvisor_lab import (
    HANG_SECONDS,
    box,
    interfaces,
    processes,
    sentry,
    stop_once_started,
    text_of,
    wait_ended,
)
from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.redteam.egress import (
    ALLOWLIST,
    CLIENT,
    NO_ROUTE,
    Networked,
    allowlist,
    configured,
    networked,
)

pytestmark = [
    pytest.mark.needs("lane-gvisor", "daemon"),
    pytest.mark.gate("gate.sandbox.egress_allowlisted"),
]
HOST = "files.lab-allowed.com:443"


@pytest.fixture(scope="module", autouse=True)
def internet() -> Iterator[Internet]:
    with lab.internet() as built, configured(allowlist()):
        yield built


async def looked(one: Networked, source: str, *, network_enabled: bool = True) -> Any:
    """What a program prints."""
    prelude = """
import errno
def attempt(call, *arguments):
    try:
        call(*arguments)
    except OSError as problem:
        return errno.errorcode.get(problem.errno, type(problem).__name__)
    return "ok"
"""
    argv = ("python3", "-c", CLIENT + prelude + source)
    result = await one.run(*argv, network_enabled=network_enabled, timeout_seconds=60)
    assert result.exit_code == 0, result
    return json.loads(result.stdout)


@pytest.mark.gate("gate.sandbox.network_denied")
@pytest.mark.case("EGR-20", "EGR-21")
@pytest.mark.parametrize("has_network", [True, False], ids=["with a network", "mode deny"])
async def test_there_is_no_link_to_play_tricks_on(has_network: bool) -> None:
    """No gateway, no neighbour, no address to gain: the guest has its loopback, and its Sentry, in
    a network namespace of its own, not even that (it is down)."""
    source = """
names = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
routes = open("/proc/net/route").read().splitlines()[1:]
six = [line.split()[-1] for line in open("/proc/net/if_inet6")]
arp = open("/proc/net/arp").read().splitlines()[1:]
packet = [attempt(socket.socket, 17, kind, 768) for kind in (2, 3)]
netlink = attempt(socket.socket, 16, 3, 16)
raw = [attempt(socket.socket, family, 3, 1) for family in (2, 10)]
import fcntl, struct
with socket.socket() as end:
    request = struct.pack("16sH14x", b"lo", 2) + bytes(8)
    change = [attempt(fcntl.ioctl, end, number, request)
              for number in (0x8914, 0x8916, 0x890b, 0x8946)]
def tun():
    with open("/dev/net/tun", "r+b", buffering=0) as file:
        fcntl.ioctl(file, 0x400454ca, struct.pack("16sH22x", b"tun0", 2))
print(json.dumps([names, routes, six, arp, packet, netlink, raw, change, attempt(tun)]))
"""
    async with networked(ALLOWLIST if has_network else DENY_ALL) as one:
        names, routes, six, arp, *attempts, tun = await looked(one, source)
        assert (names, arp) == (["lo"], [])
        assert set(six) <= {"lo"}
        assert [line for line in routes if not line.startswith("lo")] == []
        refused = [tun]
        for each in attempts:
            refused += [each] if isinstance(each, str) else each
        assert "ok" not in refused, attempts
        pid = sentry(one)
        assert interfaces(text_of(f"/proc/{pid}/net/dev")) == ["lo"]
        for process in processes(box(one)):
            assert os.readlink(f"/proc/{process}/ns/net") != os.readlink("/proc/self/ns/net")


@pytest.mark.case("EGR-20")
async def test_neither_the_host_nor_a_neighbour_nor_its_proxy_is_reached(
    internet: Internet,
) -> None:
    """Both have the network at the same time, each its own proxy at the same address."""
    addresses = [(lab.LINK, 443), (lab.LINK_PEER, 443), (lab.METADATA, 80), ("10.0.0.1", 3128),
                 ("192.168.0.1", 3128), ("169.254.0.1", 3128)]  # fmt: skip
    source = f"""
def direct(place):
    socket.create_connection(place, 5).close()
found = [attempt(direct, place) for place in {addresses!r}]
others = [attempt(direct, ("127.0.0.1", port)) for port in (22, 53, 80, 3129, 8080)]
print(json.dumps([found, others, status({HOST!r})[0]]))
"""
    async with networked() as one, networked() as two:
        for each in (one, two):
            found, others, through = await looked(each, source)
            assert set(found) <= set(NO_ROUTE)
            assert set(others) == {"ECONNREFUSED"}
            assert through == 200, "the control"
        # Its record is each one's own.
        assert len(one.decisions()) == len(two.decisions()) == 1


async def test_nobody_can_take_the_proxys_port_before_during_or_after() -> None:
    source = """
def bind(place, *options):
    with socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET) as end:
        for option in options:
            end.setsockopt(socket.SOL_SOCKET, option, 1)
        end.bind(place)
        end.listen()
found = []
for host in ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "::"):
    for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,),
                    (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
        found.append(attempt(bind, (host, 3128), *options))
print(json.dumps([attempt(bind, ("127.0.0.1", 3129)), found]))
"""
    async with networked() as one:
        for network_enabled in (False, True, False, True):
            control, found = await looked(one, source, network_enabled=network_enabled)
            assert control == "ok"
            assert set(found) <= {"EADDRINUSE", "EADDRNOTAVAIL", "EAFNOSUPPORT"}, found


async def test_a_command_cannot_touch_the_relay_and_has_its_own_processes_beside_it() -> None:
    source = """
import resource, signal
relays = []
for name in os.listdir("/proc"):
    if name.isdigit():
        with open(f"/proc/{name}/status") as file:
            fields = dict(line.rstrip("\\n").split(":\\t", 1) for line in file if ":\\t" in line)
        if fields["Name"] == "sbx-relay":
            uid, kept = fields["Uid"].split()[0], (fields["CapEff"], fields["Seccomp"])
            relays.append([int(name), uid, *kept])
tried = {}
for pid, *_ in relays:
    tried = {name: attempt(open, f"/proc/{pid}/{name}", "rb") for name in ("mem", "fd/3", "fd/6")}
    tried["kill"] = attempt(os.kill, pid, signal.SIGKILL)
    tried["stop"] = attempt(os.kill, pid, signal.SIGSTOP)
print(json.dumps([[each[1:] for each in relays], sorted(set(tried.values())),
                  resource.getrlimit(resource.RLIMIT_NPROC)[0], status("x.invalid:443")[0]]))
"""
    async with networked() as one:
        relays, refused, forks, alive = await looked(one, source)
        assert relays == [["10002", "0" * 16, "2"]]
        assert "ok" not in refused
        assert "EPERM" in refused
        assert forks == 63
        assert alive == 403


async def test_a_fresh_kernel_has_the_network_again() -> None:
    async with networked() as one:
        assert (await one.statuses(HOST))[0][0] == 200
        before = sentry(one)
        results = []

        async def hang() -> None:
            script = "touch started; sleep 100"
            results.append(
                await one.run(
                    "sh", "-c", script, network_enabled=True, timeout_seconds=HANG_SECONDS
                )
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang)
            stopped = await stop_once_started(one, before)
        assert results[0].killed_by is KillReason.TIMEOUT
        await wait_ended(stopped)
        assert (await one.statuses(HOST))[0][0] == 200
