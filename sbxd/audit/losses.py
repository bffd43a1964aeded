"""What is recorded of each environment that ends as ENVIRONMENT_LOST, once, before its destruction.

Beside `sbxd.audit.events`, with its rules.
"""

from enum import StrEnum
from typing import ClassVar

from sbxd.audit.events import EnvironmentEvent, Priority


class LostPart(StrEnum):
    """What was missing first. COMMAND: no process of the environment itself, but a command could
    not be set up, or its end not be observed or proven."""

    INIT = "init"
    STEWARD = "steward"
    LAUNCHER = "launcher"
    COMMAND = "command"


class EnvironmentLost(EnvironmentEvent, frozen=True, kw_only=True):
    """A process that the environment cannot do without ended by itself, or what became of a
    command could not be proven."""

    MESSAGE_ID: ClassVar[str] = "a3dff3044dbd4359a7660fe0215aae16"
    PRIORITY: ClassVar[Priority] = Priority.ERROR
    SUMMARY: ClassVar[str] = "Environment {environment_id} lost its {part}"

    part: LostPart
