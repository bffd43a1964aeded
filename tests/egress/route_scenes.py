"""A program for a network of its own: a host with two links, and one neighbour on both.

    unshare --net python -m tests.egress.route_scenes

The neighbour is the gateway to 93.184.216.0/24 and 2a00:60::/32, and answers for every address.
Prints one JSON object: for each way to dial and each scene, what it came to.
"""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import trio

from sbxd.client.guard import Decision, EgressDenied, Guard
from sbxd.egress import netlink
from sbxd.egress.dialling import Dialler
from sbxd.egress.sockets import dial
from sbxd.policy.egress import Allowed, Refused, evaluate, refused_at_dial
from sbxd.policy.routes import HostNetworkUnknown, LiveHostNetwork, OnHostNetwork
from tests.service.guard_parts import POLICY, Names

PORT = 443
SCENES = {
    # name: the address, and what is done between the judgement and the dial
    "behind the gateway": ("93.184.216.10", ()),
    "behind the gateway 6": ("2a00:60::10", ()),
    "neighbour": ("93.184.217.1", ()),
    "neighbour 6": ("2a00:5b::1", ()),
    "multipath without a gateway": ("93.184.220.7", ()),
    "multipath with one gateway": ("93.184.221.7", ()),
    "multipath without a gateway 6": ("2a00:61::7", ()),
    "an address of the host since a moment": (
        "93.184.216.11", ("address", "add", "93.184.216.11/32", "dev", "lo"),
    ),
    "an address of the host since a moment 6": (
        "2a00:60::11", ("address", "add", "2a00:60::11/128", "dev", "lo", "nodad"),
    ),
    "a link since a moment": ("93.184.216.12", ("route", "add", "93.184.216.12/32", "dev", "a0")),
    "a link since a moment 6": ("2a00:60::12", ("route", "add", "2a00:60::12/128", "dev", "a0")),
}  # fmt: skip
HOST = """
link set lo up
link set a0 up
link set c0 up
address add 93.184.217.2/30 dev a0
address add 93.184.218.2/30 dev c0
address add 2a00:5b::2/64 dev a0 nodad
route add default via 93.184.217.1
-6 route add default via 2a00:5b::1
route add 93.184.220.0/24 nexthop dev a0 nexthop dev c0
route add 93.184.221.0/24 nexthop via 93.184.217.1 nexthop dev c0
-6 nexthop add id 1 dev a0
-6 nexthop add id 2 dev c0
nexthop add id 3 group 1/2
-6 route add 2a00:61::/32 nhid 3
"""
NEIGHBOUR = """
link set lo up
link set b0 up
link set d0 up
address add 93.184.217.1/30 dev b0
address add 93.184.218.1/30 dev d0
address add 2a00:5b::1/64 dev b0 nodad
route add local 93.184.216.0/24 dev lo
route add local 93.184.220.0/24 dev lo
route add local 93.184.221.0/24 dev lo
-6 route add local 2a00:60::/32 dev lo
-6 route add local 2a00:61::/32 dev lo
-6 address add 2a00:61::7/128 dev b0 nodad
-6 address add 2a00:61::7/128 dev d0 nodad
-6 address add 2a00:60::12/128 dev b0 nodad
"""


def ip(text: str) -> None:
    for line in text.strip().splitlines():
        subprocess.run(["ip", *line.split()], check=True)


def listen() -> None:
    """Accept everything, in threads of this process."""
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        listener = socket.socket(family)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((everywhere, PORT))
        listener.listen()
        threading.Thread(target=accept, args=(listener,), daemon=True).start()


def accept(listener: socket.socket) -> None:
    while True:
        taken, _ = listener.accept()
        taken.close()


def verdict(refused: Refused) -> str:
    return f"denied: {refused.reason}"


def by_proxy(names: Names, between: Callable[[], None]) -> str:
    """As a connection of the sandbox's proxy: evaluate, then the dialler."""
    host_network = LiveHostNetwork(netlink.ask_kernel)

    async def run() -> str:
        judged = await evaluate(POLICY, "a.example.com", PORT, names.resolve, host_network)
        if isinstance(judged, Refused):
            return verdict(judged)
        between()
        try:
            connected = await Dialler(host_network).dial(judged.addresses[0], PORT)
        except (OnHostNetwork, HostNetworkUnknown) as late:
            return verdict(refused_at_dial(judged, judged.addresses[0], late)) + " at the dial"
        with connected:
            return "reached"

    return trio.run(run)


def by_guard(way: str) -> Callable[[Names, Callable[[], None]], str]:
    def run(names: Names, between: Callable[[], None]) -> str:
        decisions: list[Decision] = []

        def on_decision(decision: Decision) -> None:
            decisions.append(decision)
            if isinstance(decision, Allowed):
                between()

        guard = Guard(POLICY, resolver=names, on_decision=on_decision)

        async def awaited() -> None:
            async with await guard.connect("a.example.com", PORT):
                pass

        try:
            if way == "blocking":
                guard.connect_blocking("a.example.com", PORT).close()
            else:
                anyio.run(awaited, backend=way)
        except EgressDenied as denied:
            if decisions[-1] != denied.refused:
                return "a refusal that was not told"
            return verdict(denied.refused) + (" at the dial" if len(decisions) > 1 else "")
        return "reached"

    return run


def unguarded(names: Names, between: Callable[[], None]) -> str:
    """The control: the same dial without a question."""
    between()

    async def run() -> str:
        with await dial(names.resolve_blocking("a.example.com")[0], PORT):
            return "reached"

    return trio.run(run)


WAYS: dict[str, Callable[[Names, Callable[[], None]], str]] = {
    "proxy": by_proxy,
    "asyncio": by_guard("asyncio"),
    "trio": by_guard("trio"),
    "blocking": by_guard("blocking"),
    "unguarded": unguarded,
}


def scene(way: str, address: str, change: Sequence[str]) -> str:
    six = ("-6",) if ":" in address else ()

    def between() -> None:
        if change:
            subprocess.run(["ip", *six, *change], check=True)

    try:
        return WAYS[way](Names(a_example_com=[[address]]), between)
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}"
    finally:
        if change:
            undone = ["del" if word == "add" else word for word in change if word != "nodad"]
            subprocess.run(["ip", *six, *undone], check=False, capture_output=True)


def main() -> None:
    if sys.argv[1:] == ["neighbour"]:
        print("here", flush=True)
        sys.stdin.readline()  # its links are here
        ip(NEIGHBOUR)
        listen()
        print("ready", flush=True)
        sys.stdin.readline()
        return
    neighbour = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-m", "tests.egress.route_scenes", "neighbour"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert neighbour.stdin is not None
    assert neighbour.stdout is not None
    assert neighbour.stdout.readline() == "here\n"
    for ours, theirs in (("a0", "b0"), ("c0", "d0")):
        ip(f"link add {ours} type veth peer name {theirs}")
        ip(f"link set {theirs} netns {neighbour.pid}")
    neighbour.stdin.write("\n")
    neighbour.stdin.flush()
    assert neighbour.stdout.readline() == "ready\n"
    ip(HOST)
    listen()
    found: dict[str, Any] = {
        way: {name: scene(way, *each) for name, each in SCENES.items()} for way in WAYS
    }
    neighbour.stdin.close()
    neighbour.wait(60)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
