"""What every record carries besides its event: the schema's version and its place in the sequence.

Invariants: the names begin with `SBX_AUDIT_`, which no field of an event does; a number is given
once in a boot, in ascending order, without a hole; the boot is the one in which the number was
given, which is not the journal's own where a record waited in the spool.
"""

from msgspec import Struct

from sbxd.audit.encode import Field

# Raised when a field changes its meaning or goes; a new event or field does not raise it.
SCHEMA_VERSION = 1
PREFIX = "SBX_AUDIT_"


class Header(Struct, frozen=True, kw_only=True):
    """schema: the version of docs/audit.md. boot_id, instance: 32 hex digits, of the boot and of
    the daemon's start. sequence: from 1 in each boot. time: when it was decided, in microseconds
    since the epoch."""

    schema: int
    boot_id: str
    instance: str
    sequence: int
    time: int


def header_fields(header: Header) -> list[Field]:
    """The header as fields of the journal, `SBX_AUDIT_` and the upper-case name."""
    return [
        (PREFIX + name.upper(), str(getattr(header, name)).encode("ascii"))
        for name in Header.__struct_fields__
    ]
