"""What comes over the launcher's channel is one request exactly, or the peer is dropped."""

import os
import socket
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.launcher import channel
from sbxd.launcher.channel import ChannelViolation
from sbxd.launcher.requests import (
    MESSAGE_BYTES_MAX,
    Acknowledged,
    CgroupLimits,
    Destroy,
    Inventory,
    InventoryIs,
    InventoryItem,
    Leaf,
    Prepare,
    Probe,
    VolumeSize,
)
from sbxd.launcher.rest import ITEMS_MAX
from sbxd.port.ids import EnvironmentId

ENVIRONMENT = EnvironmentId("ab" * 16)
LIMITS = CgroupLimits(cpu_millicores=1000, memory_bytes=64 << 20, pids_max=32)
REQUESTS = (
    Prepare(
        ticket=1,
        environment_id=ENVIRONMENT,
        image_digest="sha256:" + "0" * 64,
        volume=VolumeSize(workspace_bytes=16 << 20, inodes_max=1000),
        limits=LIMITS,
        back_stop_seconds=60,
    ),
    Leaf(ticket=2, environment_id=ENVIRONMENT, number=2, limits=LIMITS),
    Destroy(ticket=3, environment_id=ENVIRONMENT),
    Inventory(ticket=4),
    Probe(ticket=5),
)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_every_request_survives_the_channel(request_: msgspec.Struct) -> None:
    assert channel.decode_request(channel.encode(request_)) == request_


@given(st.binary(max_size=300))
def test_no_bytes_whatever_raise_anything_but_a_violation(raw: bytes) -> None:
    with suppress(ChannelViolation):
        channel.decode_request(raw)


@given(st.sampled_from(REQUESTS), st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_is_a_violation_or_another_valid_request(
    request_: msgspec.Struct, position: int, value: int
) -> None:
    raw = bytearray(channel.encode(request_))
    raw[position % len(raw)] = value
    try:
        decoded = channel.decode_request(bytes(raw))
    except ChannelViolation:
        return
    assert channel.decode_request(channel.encode(decoded)) == decoded


@pytest.mark.parametrize(
    "fields",
    [
        {"environment_id": "../../../etc/passwd0000000000000"},
        {"environment_id": "AB" * 16},
        {"environment_id": ENVIRONMENT + "\n"},
        {"environment_id": ENVIRONMENT, "scope": "other.scope"},
        {"environment_id": ENVIRONMENT, "ticket": 0},
        {"environment_id": ENVIRONMENT, "ticket": "1"},
        {"environment_id": ENVIRONMENT.encode()},
    ],
)
def test_a_request_with_a_bad_or_unknown_field_is_a_violation(fields: dict[str, object]) -> None:
    good = {"type": "destroy", "ticket": 1, "environment_id": ENVIRONMENT}
    assert channel.decode_request(msgspec.msgpack.encode(good)) == Destroy(
        ticket=1, environment_id=ENVIRONMENT
    )
    with pytest.raises(ChannelViolation):
        channel.decode_request(msgspec.msgpack.encode(good | fields))


def test_a_reply_is_no_request() -> None:
    with pytest.raises(ChannelViolation):
        channel.decode_request(channel.encode(Acknowledged(ticket=1)))


def test_a_request_that_carries_a_descriptor_is_a_violation_and_leaves_none_open() -> None:
    ours, theirs = pair()
    with ours, theirs:
        channel.send(theirs, channel.encode(Inventory(ticket=1)))
        assert channel.receive_request(ours) == Inventory(ticket=1)
        before = len(os.listdir("/proc/self/fd"))
        channel.send(theirs, channel.encode(Inventory(ticket=1)), [theirs.fileno()])
        with pytest.raises(ChannelViolation):
            channel.receive_request(ours)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_request_above_the_cap_is_a_violation() -> None:
    ours, theirs = pair()
    with ours, theirs:
        theirs.send(b"\0" * (MESSAGE_BYTES_MAX + 1))
        with pytest.raises(ChannelViolation):
            channel.receive_request(ours)


def test_the_end_of_the_channel_is_no_request() -> None:
    ours, theirs = pair()
    with ours:
        theirs.close()
        assert channel.receive_request(ours) is None


def test_descriptors_arrive_in_their_order_and_close_on_exec() -> None:
    ours, theirs = pair()
    read, write = os.pipe()
    with ours, theirs:
        channel.send(ours, channel.encode(Acknowledged(ticket=1)), [read, write])
        raw, received = channel.receive(theirs)
        assert channel.decode_reply(raw) == Acknowledged(ticket=1)
        os.write(received[1], b"x")
        assert os.read(received[0], 1) == b"x"
        assert not any(os.get_inheritable(descriptor) for descriptor in received)
        channel.close_all([*received, read, write])


def test_the_largest_inventory_fits_into_one_message() -> None:
    kinds = ("cgroup", "mount", "process", "scope", "uid_block", "volume")
    items = tuple(
        InventoryItem(environment_id=f"{number:032x}", kinds=kinds) for number in range(ITEMS_MAX)
    )
    reply = InventoryIs(ticket=2**53, boot_id="0" * 36, items=items)
    assert channel.decode_reply(channel.encode(reply)) == reply
