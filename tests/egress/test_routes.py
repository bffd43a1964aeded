"""What the kernel's answers say of a destination, as both adapters read them.

recorded_routes.json has the bytes that a kernel (6.1) answered in a network with one link of two,
multipath routes, next hop objects, a gateway of the other family and a tunnel-like route.
"""

import errno
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbxd.client import routes as stdlib
from sbxd.egress import netlink
from sbxd.policy.addresses import Address, HostNetwork, parse_address
from sbxd.policy.routes import (
    Answers,
    Flow,
    HostNetworkUnknown,
    LiveHostNetwork,
    NoWay,
    OnHostNetwork,
    Route,
    judge_route,
)

RECORDED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("recorded_routes.json").read_text("utf-8")
)
READERS = [stdlib.read_answer, netlink.read_answer]
ASKERS = [stdlib.ask_kernel, netlink.ask_kernel]
PUBLIC = parse_address("8.8.8.8")
BEYOND = Route(kind=1, length=0, hops=(parse_address("9.9.9.1"),))
Reader = Callable[[bytes, int], Route]


def verdict(read: Reader, recorded: dict[str, Any]) -> str | None:
    try:
        answers = Answers(
            matched=read(bytes.fromhex(recorded["matched"]), 1),
            taken=read(bytes.fromhex(recorded["taken"]), 2),
        )
    except NoWay:
        return "no way"
    return judge_route(parse_address(recorded["destination"]), answers)


@pytest.mark.case("EGR-23")
@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: str(each["name"]))
@pytest.mark.parametrize("read", READERS, ids=["stdlib", "pyroute2"])
def test_a_recorded_answer_is_judged_alike_by_both_adapters(
    read: Reader, recorded: dict[str, Any]
) -> None:
    assert verdict(read, recorded) == recorded["why"]


def test_the_recording_has_both_families_and_both_verdicts() -> None:
    for family in (":", "."):
        whys = {each["why"] for each in RECORDED if family in each["destination"]}
        assert {None, "no way", "local route"} <= whys
        assert any("without a gateway" in str(why) for why in whys)


@pytest.mark.parametrize("read", READERS, ids=["stdlib", "pyroute2"])
def test_what_is_not_a_whole_answer_to_the_question_is_unknown(read: Reader) -> None:
    whole = bytes.fromhex(RECORDED[3]["matched"])
    assert read(whole, 1).hops
    for bytes_left in range(len(whole)):
        with pytest.raises(HostNetworkUnknown):
            read(whole[:bytes_left], 1)
    with pytest.raises(HostNetworkUnknown):
        read(whole, 2)  # an answer to another question
    with pytest.raises(HostNetworkUnknown):
        read(whole[:4] + struct.pack("=H", 25) + whole[6:], 1)  # RTM_DELROUTE
    refused = struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -errno.EPERM)
    with pytest.raises(HostNetworkUnknown):
        read(refused, 1)


@pytest.mark.parametrize("text", ["93.184.216.34", "2606:4700::7"])
@pytest.mark.parametrize("sequence", [1, 2])
def test_both_adapters_ask_the_same(text: str, sequence: int) -> None:
    destination = parse_address(text)
    there = Flow(destination=destination, port=443, source=destination, source_port=40_000)
    for flow in (Flow(destination=destination, port=443), there):
        asked = [question(flow, sequence) for question in (stdlib.question, netlink.question)]
        assert [len(each) for each in asked] == [len(asked[0])] * 2
        fixed = 28  # header and route, and then attributes in any order
        heads = [each[:fixed] for each in asked]
        assert heads[0] == heads[1]
        assert stdlib._attributes(asked[0][fixed:]) == stdlib._attributes(asked[1][fixed:])


@pytest.mark.parametrize("ask", ASKERS, ids=["stdlib", "pyroute2"])
def test_the_kernel_that_runs_this_calls_loopback_its_own(ask: Callable[[Flow], Answers]) -> None:
    for text in ("127.0.0.1", "127.77.1.2"):
        answers = ask(Flow(destination=parse_address(text), port=443))
        assert judge_route(parse_address(text), answers) == "local route"


@pytest.mark.parametrize("module", [stdlib, netlink], ids=["stdlib", "pyroute2"])
def test_a_kernel_that_does_not_answer_is_a_refusal(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(module.socket, "socket", refuse)
    network = LiveHostNetwork(module.ask_kernel)
    with pytest.raises(HostNetworkUnknown):
        network.range_of(PUBLIC, 443)
    with pytest.raises(HostNetworkUnknown):
        network.require(Flow(destination=PUBLIC, port=443))


def test_nothing_is_remembered_between_two_questions() -> None:
    link = Route(kind=1, length=24, hops=(None,))
    answers = [BEYOND, link, BEYOND]
    network = LiveHostNetwork(lambda _: Answers(matched=answers[0], taken=answers.pop(0)))
    flow = Flow(destination=PUBLIC, port=443)
    network.require(flow)
    with pytest.raises(OnHostNetwork, match=r"8\.8\.8\.0/24"):
        network.require(flow)
    network.require(flow)


def test_what_is_known_besides_is_refused_without_a_question() -> None:
    asked: list[Flow] = []

    def ask(flow: Flow) -> Answers:
        asked.append(flow)
        return Answers(matched=BEYOND, taken=BEYOND)

    network = LiveHostNetwork(ask, lambda: HostNetwork.of(["8.8.8.1/24"]))
    assert network.range_of(PUBLIC, 443) == "8.8.8.0/24"
    with pytest.raises(OnHostNetwork):
        network.require(Flow(destination=PUBLIC, port=443))
    assert asked == []
    assert network.range_of(parse_address("8.8.4.4"), 443) is None  # the control
    assert len(asked) == 1


def test_a_destination_without_a_route_is_not_dialled_and_not_called_the_hosts() -> None:
    def ask(_: Flow) -> Answers:
        raise NoWay(errno.ENETUNREACH, "Network is unreachable")

    network = LiveHostNetwork(ask)
    assert network.range_of(PUBLIC, 443) is None
    with pytest.raises(NoWay):
        network.require(Flow(destination=PUBLIC, port=443))


@pytest.mark.parametrize("kind", [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 99])
def test_every_type_of_route_but_unicast_is_refused(kind: int) -> None:
    other = Route(kind=kind, length=0, hops=BEYOND.hops)
    for matched, taken in ((other, BEYOND), (BEYOND, other)):
        assert judge_route(PUBLIC, Answers(matched=matched, taken=taken)) is not None
    assert judge_route(PUBLIC, Answers(matched=BEYOND, taken=BEYOND)) is None


@pytest.mark.parametrize("length", range(33))
def test_a_route_without_a_gateway_is_a_link_from_eight_bits_on(length: int) -> None:
    without = Route(kind=1, length=length, hops=(None,))
    taken = Route(kind=1, length=32, hops=(None,))
    is_link = judge_route(PUBLIC, Answers(matched=without, taken=taken)) is not None
    assert is_link is (length >= 8)


def test_a_table_entry_that_names_no_next_hop_is_judged_by_the_route_that_is_taken() -> None:
    unnamed = Route(kind=1, length=24, hops=())
    gateway: Address = parse_address("9.9.9.1")
    beyond = Route(kind=1, length=32, hops=(gateway,))
    assert judge_route(PUBLIC, Answers(matched=unnamed, taken=beyond)) is None
    assert judge_route(PUBLIC, Answers(matched=unnamed, taken=unnamed)) is not None
    assert socket.AF_NETLINK  # a machine that can ask at all
