"""Options that several verbs have, declared once: what an environment is asked for, and what bounds
a command in it."""

from collections.abc import Callable
from functools import reduce, wraps
from typing import Any, TypeVar

import click

from sbxctl.specification import LimitOptions
from sbxctl.units import Cpus, Size, Whole

# A verb: click calls it with its options by name.
VerbT = TypeVar("VerbT", bound=Callable[..., None])

# What the wire can carry; the daemon's ceilings are lower, and it names them.
COUNT_MAX = 2**53 - 1
_ENVIRONMENT = (
    click.option("--image", help="An alias of the configuration, or a sha256 digest."),
    click.option("--memory", type=Size(), help="Memory, like 256M."),
    click.option("--cpus", type=Cpus(), help="CPU rate in cores, like 0.5."),
    click.option("--pids", type=Whole(1, COUNT_MAX), help="Processes and threads."),
    click.option("--disk", type=Size(), help="Bytes of the workspace, like 64M."),
    click.option("--inodes", type=Whole(16, COUNT_MAX), help="Files of the workspace."),
)
_BOUNDS = (
    click.option(
        "--timeout",
        type=Whole(1, 86_400),
        help="Seconds that a command may take; by default what its environment allows.",
    ),
    click.option("--max-output", type=Size(), default=4 * 2**20, help="Bytes kept of each stream."),
)


def environment_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The image and the limits of a fresh environment: `image`, and `asked`, a LimitOptions."""

    @wraps(verb)
    def with_asked(*arguments: Any, **options: Any) -> None:
        names = ("memory", "cpus", "pids", "disk", "inodes")
        asked = LimitOptions(*(options.pop(name) for name in names))
        verb(*arguments, asked=asked, **options)

    return reduce(lambda made, option: option(made), reversed(_ENVIRONMENT), with_asked)


def bound_options(verb: VerbT) -> VerbT:
    """What bounds one command: `timeout` in seconds, None where none was asked for; `max_output` in
    bytes of each stream."""
    return reduce(lambda made, option: option(made), reversed(_BOUNDS), verb)


def raw_option(verb: VerbT) -> VerbT:
    """`raw`: what a program prints goes to a terminal as it is."""
    option = click.option(
        "--raw", is_flag=True, help="Send control characters to the terminal as they are."
    )
    return option(verb)
