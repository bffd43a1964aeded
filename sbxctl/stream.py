"""Output without an end: how it ends when its reader does, or the person who watches."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sbxctl.exits import Exit


@contextmanager
def endless() -> Iterator[None]:
    """A block that writes to stdout for as long as there is something to write. Whoever reads it
    may stop (`| head`): that is no error. Ctrl-C exits with INTERRUPTED."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is buffered goes nowhere, also when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
