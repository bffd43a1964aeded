"""Identifiers that cross the port.

Invariant: an identifier is opaque. Nothing in sbxd derives a host path, a unit name of
another sandbox or an authority from its text; the grammar below only keeps it printable,
bounded and safe to log.
"""

from typing import Annotated, NewType

from msgspec import Meta

TenantId = NewType("TenantId", str)
RunId = NewType("RunId", str)
EnvironmentId = NewType("EnvironmentId", str)

IDENTIFIER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}\Z"
ENVIRONMENT_ID_PATTERN = r"^[0-9a-f]{32}\Z"

# What a wire field of each kind must look like (msgspec enforces it when it decodes).
TenantIdField = Annotated[TenantId, Meta(pattern=IDENTIFIER_PATTERN)]
RunIdField = Annotated[RunId, Meta(pattern=IDENTIFIER_PATTERN)]
EnvironmentIdField = Annotated[EnvironmentId, Meta(pattern=ENVIRONMENT_ID_PATTERN)]
LeaseEpochField = Annotated[int, Meta(ge=0, le=2**53)]
