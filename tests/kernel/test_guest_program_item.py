"""What doctor says of the compiled program that both mechanisms start: where it is not, or is that
of another machine, no sandbox is built, and the operator is told so before the first one is.
"""

import platform
import sys
from pathlib import Path

import pytest

import sbxd
from sbxd.launcher.kernel import hostpaths, mounts, probe, static_program
from sbxd.launcher.requests import ProbeItem

MACHINE = platform.machine()
ET_EXEC, ET_DYN = 2, 3


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where the program may lie: of the package, of the prefix, of the source tree."""
    monkeypatch.setattr(hostpaths, "LIBRARY_DIRECTORY", str(tmp_path / "package"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(sbxd, "__file__", str(tmp_path / "tree/sbxd/__init__.py"))
    found = [tmp_path / "package", tmp_path / "prefix/lib/sbxd", tmp_path / "tree/build"]
    for place in found:
        place.mkdir(parents=True)
    return found


def item() -> ProbeItem:
    look = dict(probe._PROBES)["guest_program"]
    return look("guest_program")


def program_for(machine: str) -> bytes:
    return static_program.image(machine, mounts.HOLDER)


def other_machine() -> str:
    return next(each for each in mounts.HOLDER if each != MACHINE)


def is_told_whole(found: ProbeItem) -> bool:
    """Which program, for which machine, who needs it and what to do."""
    told = (
        ("sbx-guest-init", MACHINE, "`namespaces`", "`gvisor`"),
        ("reinstall the package", "make guest"),
    )
    texts = (found.detail, found.fix)
    return found.state == "missing" and all(
        word in text for words, text in zip(told, texts, strict=True) for word in words
    )


def test_a_program_that_is_not_there_is_named_with_what_to_do(places: list[Path]) -> None:
    assert is_told_whole(item()), item()


@pytest.mark.parametrize("place", range(3), ids=["package", "prefix", "tree"])
@pytest.mark.parametrize("kind", [ET_EXEC, ET_DYN], ids=["at a fixed place", "at any"])
def test_one_for_this_machine_is_fine_wherever_it_is_looked_for(
    places: list[Path], place: int, kind: int
) -> None:
    raw = bytearray(program_for(MACHINE))
    raw[16] = kind
    (places[place] / "sbx-guest-init").write_bytes(raw)
    found = item()
    assert (found.state, found.detail) == ("ok", f"sbx-guest-init for {MACHINE}")


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", None], ids=["empty", "text", "other"])
def test_what_this_machine_cannot_run_is_as_good_as_missing(
    places: list[Path], content: bytes | None
) -> None:
    raw = program_for(other_machine()) if content is None else content
    (places[0] / "sbx-guest-init").write_bytes(raw)
    assert is_told_whole(item()), item()
