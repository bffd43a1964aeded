"""What a program of `pip install sbxd` says where a library of an extra is not installed."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_USAGE = 245  # as sbxctl.exits and sbxd.worker_cli.exits have it, which need the library


@contextmanager
def named(program: str, extras: Mapping[str, str]) -> Iterator[None]:
    """Exit with one sentence where an import of the block needs an extra. extras: which of them
    brings a library."""
    try:
        yield
    except ModuleNotFoundError as problem:
        library = (problem.name or "").partition(".")[0]
        if library not in extras:
            raise
        print(
            f"{program}: the library {library} is not installed: "
            f"pip install 'sbxd[{extras[library]}]'",
            file=sys.stderr,
        )
        sys.exit(_USAGE)
