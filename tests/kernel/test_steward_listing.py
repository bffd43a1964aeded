"""A listing's memory and scans are bounded whatever the directory holds; its order and its ends."""

import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbxd.steward import listing
from sbxd.steward.frames import End, Entry, List, Reply, Request, Snapshot, Status
from sbxd.steward.server import Channel, Steward, Stopped
from sbxd.steward.tree import kernel_clock

COUNT = 50_000
PAGE = 1024


class Answers(Channel):
    """What a steward sends to a daemon that takes it at once."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.end = End(Status.OK)
        self.looks = 0
        self.stops_at = -1

    def send(self, reply: Reply) -> None:
        match reply:
            case Entry():
                self.names.append(reply.path)
            case End():
                self.end = reply

    def check_stop(self) -> None:
        self.looks += 1
        if self.looks == self.stops_at:
            raise Stopped


class Listed:
    """A steward of one folder, asked in this thread."""

    def __init__(self, root: Path) -> None:
        self.descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self.answers = Answers()
        clock, owner = kernel_clock(), os.geteuid()
        self._steward = Steward(self.answers, self.descriptor, clock, owner)

    def ask(self, request: Request) -> list[bytes]:
        self.answers.names = []
        self._steward.answer(request)
        return self.answers.names

    def page(self, after: bytes, maximum: int = PAGE, path: bytes = b".") -> tuple[bytes, ...]:
        names = self.ask(List(maximum, 0, after, path))
        assert self.answers.end.status is Status.OK
        assert len(names) <= maximum
        return tuple(names)

    @property
    def more(self) -> bool:
        return self.answers.end.truncated

    def pages(self, maximum: int = PAGE, path: bytes = b".") -> Iterator[tuple[bytes, ...]]:
        after = b""
        while True:
            page, more = self.page(after, maximum, path), self.more
            yield page
            if not more:
                return
            after = page[-1]

    def whole(self, maximum: int = PAGE, path: bytes = b".") -> list[bytes]:
        return [name for page in self.pages(maximum, path) for name in page]


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="steward-") as folder:
        yield Path(folder)


@pytest.fixture
def ask(root: Path) -> Iterator[Callable[[], Listed]]:
    """A steward that begins when it is called; its descriptor is closed with the test."""
    begun: list[Listed] = []

    def begin() -> Listed:
        begun.append(Listed(root))
        return begun[-1]

    yield begin
    for each in begun:
        os.close(each.descriptor)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was scanned, from here on."""
    scan = os.scandir
    seen: list[object] = []

    def counting(directory: int) -> object:
        seen.append(directory)
        return scan(directory)

    monkeypatch.setattr(os, "scandir", counting)
    return seen


def fill(root: Path, names: list[bytes]) -> None:
    """FIFOs, which have no content to digest."""
    for name in names:
        os.mkfifo(os.fsencode(root) + b"/" + name)


@pytest.mark.case("RES-22")
def test_a_listing_of_many_names_takes_bounded_memory_and_a_few_scans(
    root: Path, ask: Callable[[], Listed], scans: list[object]
) -> None:
    """Also where all are asked for at once. The names come in no order of their own."""
    names = [b"%0250d" % (number * 7919 % COUNT) for number in range(COUNT)]
    listed = ask()
    fill(root, names)
    names.sort()
    tracemalloc.start()
    try:
        told = listed.page(b"", COUNT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert told == tuple(names[: len(told)])
    assert peak < 6 * listing.NAMES_BYTES_MAX
    scans.clear()
    assert listed.whole() == names
    assert len(scans) <= 12


NAMES = st.sets(
    st.binary(min_size=1, max_size=12)
    .filter(lambda name: name not in (b".", b".."))
    .filter(lambda name: b"/" not in name and b"\0" not in name),
    max_size=40,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(names=NAMES, maximum=st.integers(1, 12), room=st.integers(150, 4000))
def test_the_pages_joined_are_the_sorted_directory(
    names: set[bytes], maximum: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for a few names, for some, and for all."""
    monkeypatch.setattr(listing, "NAMES_BYTES_MAX", room)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="steward-") as folder:
        fill(Path(folder), list(names))
        listed = Listed(Path(folder))
        try:
            assert listed.whole(maximum) == sorted(names)
            assert listed.page(max(names, default=b"a")) == ()
            after = sorted(names)[len(names) // 2] if names else b"a"
            rest = tuple(name for name in sorted(names) if name > after)
            page = listed.page(after)
            assert page == rest[: len(page)]
            assert page or not rest
        finally:
            os.close(listed.descriptor)


@pytest.mark.case("RES-22")
def test_changes_between_pages_cost_no_scan_and_hide_nothing_that_stays(
    root: Path, ask: Callable[[], Listed], scans: list[object]
) -> None:
    stay = [b"s%03d" % number for number in range(100)]
    go = [b"t%03d" % number for number in range(100)]
    fill(root, stay + go)
    listed = ask()
    scans.clear()
    told: list[bytes] = []
    for number, page in enumerate(listed.pages(7)):
        told += page
        (root / f"r{number}").touch()  # before what is told next, and so in no page
        (root / f"u{number}").touch()  # behind it: may be told
        if number < len(go):
            (root / go[number].decode()).unlink()
    assert told == sorted(set(told))
    assert set(stay) <= set(told)
    assert not [name for name in told if name.startswith(b"r")]
    assert len(scans) == 1
    assert set(listed.whole(7)) == {os.fsencode(name) for name in os.listdir(root)}


def test_a_page_whose_names_are_all_gone_is_not_the_end(
    root: Path, ask: Callable[[], Listed]
) -> None:
    fill(root, [b"%02d" % number for number in range(20)])
    listed = ask()
    assert listed.page(b"", 5)[-1] == b"04"
    for number in range(5, 15):
        (root / f"{number:02}").unlink()
    assert listed.page(b"04", 5) == (b"15", b"16", b"17", b"18", b"19")
    assert not listed.more


def test_a_new_listing_tells_what_is_new(root: Path, ask: Callable[[], Listed]) -> None:
    fill(root, [b"a", b"c"])
    listed = ask()
    assert listed.whole() == [b"a", b"c"]
    fill(root, [b"b", b"d"])
    assert listed.whole() == [b"a", b"b", b"c", b"d"]


def test_a_folder_in_the_place_of_another_is_read_anew(
    root: Path, ask: Callable[[], Listed]
) -> None:
    for folder, names in ((root / "d", [b"a", b"b", b"c"]), (root / "e", [b"a", b"x", b"y"])):
        folder.mkdir()
        fill(folder, names)
    listed = ask()
    assert listed.page(b"", 1, b"d") == (b"a",)
    (root / "d").rename(root / "old")
    (root / "e").rename(root / "d")
    assert listed.page(b"a", 9, b"d") == (b"x", b"y")


@pytest.mark.case("RES-22")
def test_listings_side_by_side_keep_their_runs_and_no_more_than_a_few_are_kept(
    root: Path, ask: Callable[[], Listed], scans: list[object]
) -> None:
    names = [b"%02d" % number for number in range(30)]
    folders = [b"f%d" % number for number in range(10)]
    for folder in folders:
        (root / folder.decode()).mkdir()
        fill(root / folder.decode(), names)
    listed = ask()
    few = folders[: listing.RUNS_MAX]
    scans.clear()
    told = [
        page for step in zip(*(listed.pages(3, each) for each in few), strict=True) for page in step
    ]
    assert sorted(name for page in told for name in page) == sorted(names * len(few))
    assert len(scans) == len(few)
    for each in folders:
        listed.page(b"", 3, each)
    scans.clear()
    assert listed.page(b"02", 3, folders[-1]) == (b"03", b"04", b"05")
    assert not scans
    assert listed.page(b"02", 3, folders[0]) == (b"03", b"04", b"05")
    assert len(scans) == 1


def test_a_command_takes_the_memory_of_a_listing_which_goes_on(
    root: Path, ask: Callable[[], Listed], scans: list[object]
) -> None:
    fill(root, [b"a", b"b", b"c"])
    listed = ask()
    assert listed.page(b"", 1) == (b"a",)
    listed.ask(Snapshot())
    scans.clear()
    assert listed.page(b"a") == (b"b", b"c")
    assert len(scans) == 1


def test_a_name_that_a_scan_shows_twice_is_told_once(
    root: Path, ask: Callable[[], Listed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is removed and made again during a scan; the daemon ends a steward whose names
    are not in order."""
    fill(root, [b"a", b"b", b"c"])
    listed = ask()
    scan = os.scandir

    class Twice:
        def __init__(self, directory: int) -> None:
            self._scanned = scan(directory)

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            found = list(self._scanned)
            return iter(found + found)

        def __exit__(self, *_: object) -> None:
            self._scanned.close()

    monkeypatch.setattr(os, "scandir", Twice)
    assert listed.whole(2) == [b"a", b"b", b"c"]


def test_a_scan_ends_when_the_daemon_wants_no_more(root: Path, ask: Callable[[], Listed]) -> None:
    fill(root, [b"%04d" % number for number in range(3 * 1024)])
    listed = ask()
    listed.answers.looks = 0
    listed.page(b"", 1)
    assert listed.answers.looks == 3
    listed.answers.stops_at = listed.answers.looks + 2
    assert listed.ask(List(1, 0, b"", b".")) == []
    assert listed.answers.end.status is Status.ABORTED
