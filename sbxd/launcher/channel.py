"""One typed message per SOCK_SEQPACKET packet, descriptors beside it. No I/O but send and receive.

Invariants: a packet that is not exactly one request of the closed set is a ChannelViolation (the
caller drops the peer); a request never carries a descriptor; a message above MESSAGE_BYTES_MAX is
neither sent nor accepted.
"""

import array
import os
import socket
from collections.abc import Sequence

import msgspec

from sbxd import rights
from sbxd.launcher.requests import (
    DESCRIPTORS_MAX,
    MESSAGE_BYTES_MAX,
    LauncherReply,
    LauncherRequest,
)

_INT_BYTES = array.array("i").itemsize


class ChannelViolation(Exception):
    """The peer sent what is no message of this protocol."""


_requests: "msgspec.msgpack.Decoder[LauncherRequest]" = msgspec.msgpack.Decoder(LauncherRequest)
_replies: "msgspec.msgpack.Decoder[LauncherReply]" = msgspec.msgpack.Decoder(LauncherReply)
_encoder = msgspec.msgpack.Encoder()


def _once(raw: bytes) -> None:
    """Both ends encode alike, so other bytes than those say a thing twice, or are not theirs."""
    if _encoder.encode(msgspec.msgpack.decode(raw)) != raw:
        raise ValueError("a key is there twice, or the encoding is not this protocol's")


def decode_request(raw: bytes) -> LauncherRequest:
    """The request that these bytes are. Raises ChannelViolation for anything else whatever."""
    try:
        _once(raw)
        return _requests.decode(raw)
    except (msgspec.DecodeError, ValueError) as problem:
        raise ChannelViolation(str(problem)) from None


def decode_reply(raw: bytes) -> LauncherReply:
    """The reply that these bytes are. Raises ChannelViolation for anything else whatever."""
    try:
        _once(raw)
        return _replies.decode(raw)
    except (msgspec.DecodeError, ValueError) as problem:
        raise ChannelViolation(str(problem)) from None


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of one message. Raises ValueError when it is above the cap."""
    raw = _encoder.encode(message)
    if len(raw) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(raw)} bytes is above the cap of {MESSAGE_BYTES_MAX}")
    return raw


def ancillary(descriptors: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """The control message that carries these descriptors."""
    if not descriptors:
        return []
    if len(descriptors) > DESCRIPTORS_MAX:
        raise ValueError("too many descriptors for one message")
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]


def ancillary_space() -> int:
    """The room that receiving DESCRIPTORS_MAX descriptors takes."""
    return socket.CMSG_SPACE(DESCRIPTORS_MAX * _INT_BYTES)


def descriptors_of(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a packet; the caller owns them."""
    found = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    return list(found)


def send(channel: socket.socket, raw: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one packet whole. Raises BlockingIOError on a full non-blocking socket."""
    channel.sendmsg([raw], ancillary(descriptors), socket.MSG_NOSIGNAL)


def receive_request(channel: socket.socket) -> LauncherRequest | None:
    """The next request; None at end of file. Raises ChannelViolation, BlockingIOError.

    A packet with descriptors is not taken from the queue: that would drop them, here.
    """
    try:
        rights.look(channel, 1)
    except rights.DescriptorsSent as problem:
        raise ChannelViolation(str(problem)) from None
    raw, control, flags, _ = channel.recvmsg(MESSAGE_BYTES_MAX, 0)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or control:
        raise ChannelViolation("a request is too long or carries descriptors")
    if not raw:
        return None
    return decode_request(raw)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors (owned by the caller, close-on-exec); b"" at end of file."""
    raw, control, flags, _ = channel.recvmsg(
        MESSAGE_BYTES_MAX, ancillary_space(), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = descriptors_of(control)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(descriptors)
        raise ChannelViolation("a packet was truncated")
    return raw, descriptors


def close_all(descriptors: Sequence[int]) -> None:
    """Close every one."""
    for descriptor in descriptors:
        os.close(descriptor)
