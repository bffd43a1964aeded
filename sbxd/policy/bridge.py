"""The orchestration bridge's rules: who may open it, and how much one turn may carry.

Terms. A *turn* is the first command that is started with the bridge, from its start to its end.
The token of the specification authorises one connection in it: the first that presents it. When
that connection ends, the token is used up; when the command ends, the turn is over, whether the
token was presented or not, and with it the bridge of this environment for good.

What is said between a program and the daemon, before frames are passed on: the program's first
frame is the token; the daemon answers with one frame, ACCEPTED or REFUSED and a space and one of
Refusal, and closes after the latter. A frame is a 4-byte big-endian length, at least 1 and at most
BRIDGE_FRAME_BYTES_MAX of `sbxd.wire.messages`, and so many bytes. The same on every mechanism.

Invariants: pure; a token is compared in constant time, and is in no text that leaves here.
"""

import hmac
from enum import StrEnum
from typing import Final

from msgspec import Struct

from sbxd.port.environment import BRIDGE_SOCKET_PATH, BridgeEndpoint
from sbxd.port.errors import ExecutionRejected, RejectedCode

ACCEPTED: Final = b"ACCEPTED"
REFUSED: Final = b"REFUSED "
TOKEN_FRAME_BYTES_MAX: Final = 1024  # 256 characters of UTF-8


class Refusal(StrEnum):
    """Why a connection is refused. NO_TOKEN: none came whole, or in time."""

    NO_TOKEN = "NO_TOKEN"  # noqa: S105  (the name of a refusal)
    WRONG_TOKEN = "WRONG_TOKEN"  # noqa: S105
    TOKEN_USED = "TOKEN_USED"  # noqa: S105


class BridgeCaps(Struct, frozen=True, kw_only=True):
    """What bounds one turn.

    waiting_max: connections that the kernel keeps. greetings_max: those whose token is awaited at
    a time, each for at most greeting_seconds. refusals_max: then nobody listens any more.
    refusals_audited_max: refusals with an event of their own; all are counted. turn_bytes_max: of
    frames in either direction.
    """

    waiting_max: int = 8
    greetings_max: int = 4
    greeting_seconds: float = 5.0
    refusals_max: int = 64
    refusals_audited_max: int = 8
    turn_bytes_max: int = 64 * 1024 * 1024


class BridgeCounts(Struct, frozen=True, kw_only=True):
    """What a turn has carried: frames and bytes by who sent them."""

    frames_from_environment: int = 0
    bytes_from_environment: int = 0
    frames_from_worker: int = 0
    bytes_from_worker: int = 0


def admit_bridge(bridge: BridgeEndpoint | None) -> None:
    """The socket's place is fixed.

    Raises: ExecutionRejected(BRIDGE_REFUSED), `field` "bridge.socket_path".
    """
    if bridge is not None and bridge.socket_path != BRIDGE_SOCKET_PATH:
        raise ExecutionRejected(
            RejectedCode.BRIDGE_REFUSED,
            f"bridge.socket_path: the socket is at {BRIDGE_SOCKET_PATH} in every environment: "
            "ask for that",
            field="bridge.socket_path",
        )


def no_bridge() -> ExecutionRejected:
    """A command with the bridge, in an environment whose specification has none."""
    return ExecutionRejected(
        RejectedCode.BRIDGE_REFUSED,
        "bridge: the environment was provisioned without one: put a BridgeEndpoint into its "
        "specification, or execute without a handler",
        field="bridge",
    )


def turn_is_over() -> ExecutionRejected:
    """A second command with the bridge."""
    return ExecutionRejected(
        RejectedCode.BRIDGE_REFUSED,
        "bridge: the one turn of this environment is over: provision an environment with a new "
        "token",
        field="bridge",
    )


def same_token(presented: bytes, bridge: BridgeEndpoint) -> bool:
    """Whether this is the token, in a time that does not depend on how much of it is right."""
    return hmac.compare_digest(presented, bridge.token.encode("utf-8", "surrogatepass"))
