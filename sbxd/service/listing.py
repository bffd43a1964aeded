"""The listing of live environments as an operator gets it: page by page, each within a frame."""

from collections.abc import Sequence

import msgspec

from sbxd.wire.descriptions import EnvironmentInfo

LIST_PAGE_BYTES = 512 * 1024
LISTED_ARGUMENTS = 32
LISTED_ARGUMENT_BYTES = 256


def page_of(
    infos: Sequence[EnvironmentInfo], *, skip: int
) -> tuple[tuple[EnvironmentInfo, ...], bool]:
    """As many infos from `skip` on as a frame holds, and whether there are more."""
    page: list[EnvironmentInfo] = []
    size = 0
    for info in infos[skip:]:
        entry = shortened(info)
        size += len(msgspec.msgpack.encode(entry))
        if page and size > LIST_PAGE_BYTES:
            break
        page.append(entry)
    return tuple(page), skip + len(page) < len(infos)


def shortened(info: EnvironmentInfo) -> EnvironmentInfo:
    """With a running argv that is for reading, not for running again."""
    if info.running_argv is None:
        return info
    argv = tuple(word[:LISTED_ARGUMENT_BYTES] for word in info.running_argv[:LISTED_ARGUMENTS])
    return msgspec.structs.replace(
        info, running_argv=argv, running_argv_truncated=argv != info.running_argv
    )
