"""What the audit keeps of an argument vector: enough to recognise, too little to leak."""

import hashlib
from collections.abc import Sequence

from msgspec import Struct

PROGRAM_BYTES_MAX = 256


class ArgvDescription(Struct, frozen=True, kw_only=True):
    """program: argv[0], at most 256 bytes of it, decoded with backslash escapes for what is not
    UTF-8. program_bytes: its full length, so that a cut is seen. argv_sha256: over each argument's
    length (8 bytes, big-endian) and bytes.
    """

    program: str
    program_bytes: int
    argv_count: int
    argv_sha256: str


def describe_argv(argv: Sequence[bytes]) -> ArgvDescription:
    """Reduce an argument vector of at least one element to what may be kept of it."""
    digest = hashlib.sha256()
    for argument in argv:
        digest.update(len(argument).to_bytes(8, "big"))
        digest.update(argument)
    return ArgvDescription(
        program=argv[0][:PROGRAM_BYTES_MAX].decode("utf-8", "backslashreplace"),
        program_bytes=len(argv[0]),
        argv_count=len(argv),
        argv_sha256=digest.hexdigest(),
    )
