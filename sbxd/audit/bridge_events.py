"""The orchestration bridge's events. What is said over it is counted and never kept.

Rules, base and writing: `sbxd.audit.events`.
"""

from typing import ClassVar

from sbxd.audit.events import EnvironmentEvent, Priority
from sbxd.policy.bridge import BridgeCounts, Refusal
from sbxd.policy.violations import ViolationCode


class BridgeOpened(EnvironmentEvent, frozen=True, kw_only=True):
    """A program of a command presented the token; its frames go to the worker from now on."""

    MESSAGE_ID: ClassVar[str] = "6266d137af5a4bf8962c589dfa6e9cee"
    SUMMARY: ClassVar[str] = (
        "Bridge of environment {environment_id} opened by command {command_number}"
    )

    command_number: int


class BridgeRefused(EnvironmentEvent, frozen=True, kw_only=True):
    """A connection to the bridge was refused. The first of a turn have an event each; all of them
    are in the count of BridgeClosed."""

    MESSAGE_ID: ClassVar[str] = "d23a67993c6c4dd981469c9ee681498f"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = (
        "Bridge of environment {environment_id} refused a connection of command "
        "{command_number}: {refusal}"
    )

    command_number: int
    refusal: Refusal
    violation: ViolationCode = ViolationCode.BRIDGE_DENIED


class BridgeClosed(EnvironmentEvent, frozen=True, kw_only=True):
    """The turn of a bridge is over, and nobody listens any more. opened: the token was used."""

    MESSAGE_ID: ClassVar[str] = "96b0d957fefc4a758b60c288e6ee4f9b"
    SUMMARY: ClassVar[str] = (
        "Bridge of environment {environment_id} closed after command {command_number}: "
        "opened {opened}, {refused} refused"
    )

    command_number: int
    opened: bool
    refused: int
    counts: BridgeCounts


BRIDGE_EVENT_TYPES = (BridgeOpened, BridgeRefused, BridgeClosed)
