"""Text that would be costly to look through is looked through in flat memory, in as many steps as
it is long, and its flags do not depend on where the pieces are cut."""

import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import Any

import pytest

from sbxd.policy import content_flags
from sbxd.policy.content_flags import ContentScanner
from sbxd.port.artifact import ArtifactOrigin, ContentFlag, ContentRule, TrustLevel
from tests.artifacts.world import ALICE, RUN, Folder, run

MIB = 1_048_576
COSTLY: dict[str, tuple[bytes, int]] = {
    "one line": (b"x", MIB),
    "rows": (b"1,2,3\n", 500_000),
    "quotes": (b'"', 1_000_000),
    "quotes and spaces": (b'" ', 500_000),
    "separators": (b",", 1_000_000),
    "spaces after a separator": (b"," + b" " * 1023, 1024),
    "returns": (b"\r\n", 500_000),
}


def cut(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def flags(data: bytes, size: int) -> frozenset[ContentFlag]:
    scanner = ContentScanner()
    for piece in cut(data, size):
        scanner.feed(piece)
    return scanner.finish()


def steps(data: bytes, size: int) -> int:
    """Lines of the scanner's module that run, each over at most one piece."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != content_flags.__file__:
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        flags(data, size)
    finally:
        sys.settrace(None)
    return count


@pytest.mark.case("EXP-09")
@pytest.mark.parametrize("name", COSTLY)
def test_costly_text_is_stored_in_flat_memory_with_its_flags(name: str, folder: Folder) -> None:
    unit, times = COSTLY[name]
    whole = unit * times

    async def stream() -> AsyncIterator[bytes]:
        for piece in cut(whole, 65_536):
            yield piece

    async def main() -> None:
        async with folder.opened() as artifacts:
            writer = artifacts.writer(ALICE, RUN, ArtifactOrigin.SANDBOX_EXPORT)
            tracemalloc.start()
            try:
                ref = await writer.create(
                    stream(),
                    "a.csv",
                    "text/csv",
                    TrustLevel.EXTERNAL_UNTRUSTED,
                    rule=ContentRule.TEXT,
                )
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            found = await artifacts.service.describe(ALICE, ref.artifact_id)
            assert found.size_bytes == len(whole)
            assert found.flags == flags(whole, len(whole)) == frozenset()
            assert peak < 8 * MIB

    run("trio", main)


@pytest.mark.case("EXP-09")
@pytest.mark.parametrize("name", COSTLY)
def test_twice_the_text_is_twice_the_steps(name: str) -> None:
    unit, times = COSTLY[name]
    half = unit * (times // 2)
    assert steps(half + half, 65_536) <= 2 * steps(half, 65_536) + 100


@pytest.mark.parametrize("name", COSTLY)
@pytest.mark.parametrize("size", [1, 7, 4096, 2**21])
def test_control_a_formula_at_the_end_of_it_is_found_however_it_is_cut(
    name: str, size: int
) -> None:
    unit, times = COSTLY[name]
    data = unit * (times if size > 7 else 4096 // len(unit) + 1) + b'\n"=1+1"'
    assert flags(data, size) == {ContentFlag.FORMULA_LIKE}
