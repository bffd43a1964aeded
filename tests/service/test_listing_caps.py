"""What is cut off says so: of every adapter's listing, and of every list of the wire."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect
from trio.testing import MockClock

from sbxd.client import local_workspace
from sbxd.client.local_workspace import open_local_workspace
from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.client.workspace import RemoteWorkspace
from sbxd.fake import files as fake_files
from sbxd.lifecycle.listing import list_pages
from sbxd.mechanism.protocol import ListPage
from sbxd.port.command import ChangeKind, FileChange
from sbxd.port.workspace import StreamingWorkspace
from sbxd.service.listing import shortened
from sbxd.wire import messages as m
from sbxd.wire.descriptions import EnvironmentInfo
from tests.lifecycle.double import DoubleSandbox
from tests.properties.test_wire_vectors import sample
from tests.properties.wire_messages import SERVER_MESSAGES
from tests.service.memory import memory_daemon
from tests.service.requests import SCRIPT, SPECIFICATION

# Lists of a server's messages that may be cut, and the field that says so.
CUT: dict[tuple[str, str], str] = {
    ("Entries", "entries"): "truncated of Listed, files_changed_truncated of Executed",
    ("Environments", "environments"): "more",
    ("EnvironmentInfo", "running_argv"): "running_argv_truncated",
    ("MetersAre", "environments"): "more",
    ("StatusIs", "denials"): "denials_truncated",
    ("StatusIs", "quarantined"): "quarantined_truncated",
}
# Those that never are: a reply that does not fit a frame is an error.
WHOLE = {
    "Described": {"destinations", "posture"},
    "EgressChecked": {"addresses"},
    "EgressDestination": {"ports"},
    "EgressPolicy": {"destinations"},
    "EgressShown": {"host_network"},
    "Executed": {"unenforced_limits"},
    "ImageInfo": {"aliases", "held_by"},
    "Images": {"images"},
    "PoolInfo": {"ages_ms"},
    "QuarantineIs": {"items"},
    "QuarantinedItem": {"kinds"},
    "Reaped": {"released", "stale", "unanswered"},
    "Reconciled": {"destroyed", "quarantined", "released"},
    "StatusIs": {"alerts", "authorities", "deviations"},
}


async def told(workspace: StreamingWorkspace, count: int) -> tuple[int, bool]:
    for number in range(count):
        await workspace.write(f"d/{number}", b"")
    listed = await workspace.listdir("d")
    return len(listed), listed.truncated


@pytest.mark.case("PEER-10")
@pytest.mark.parametrize(("count", "expected"), [(3, (3, False)), (4, (3, True))])
async def test_a_listing_that_is_cut_says_so_whoever_gives_it(
    count: int,
    expected: tuple[int, bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    autojump_clock: MockClock,
) -> None:
    monkeypatch.setattr(local_workspace, "LISTING_ENTRIES_MAX", 3)
    monkeypatch.setattr(fake_files, "LISTING_ENTRIES_MAX", 3)
    async with memory_daemon(SCRIPT) as daemon, daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
        assert await told(RemoteWorkspace(channel, handle), count) == expected


@pytest.mark.case("PEER-10")
@pytest.mark.parametrize(("count", "expected"), [(3, (3, False)), (4, (3, True))])
async def test_a_listing_of_a_plain_folder_that_is_cut_says_so(
    count: int, expected: tuple[int, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_workspace, "LISTING_ENTRIES_MAX", 3)
    async with open_local_workspace(tmp_path) as workspace:
        assert await told(workspace, count) == expected


class Directory(DoubleSandbox):
    """A sandbox with one directory of numbered files."""

    def __init__(self, count: int, *, omitted: bool = False) -> None:
        self.names = [f"{number:05}" for number in range(count)]
        self.omitted = omitted
        self.asked: list[tuple[bytes, int, int]] = []

    async def list_page(
        self, path: bytes, *, after: bytes, maximum: int, hash_bytes_max: int
    ) -> ListPage:
        self.asked.append((after, maximum, hash_bytes_max))
        left = [name for name in self.names if name > after.decode()]
        entries = [
            FileChange(path=name, change=ChangeKind.CREATED, size_bytes=1, sha256=None)
            for name in left[:maximum]
        ]
        return ListPage(tuple(entries), len(left) > maximum, self.omitted, len(entries))


@pytest.mark.case("PEER-10")
async def test_a_directory_is_listed_page_by_page_up_to_the_cap_and_one_budget() -> None:
    for count, omitted, entries_max, truncated in (
        (0, False, 2000, False),
        (2000, False, 2000, False),
        (2001, False, 2000, True),
        (30_000, False, 100_000, False),
        (5, True, 2000, True),
    ):
        directory = Directory(count, omitted=omitted)
        taken: list[str] = []

        async def take(entries: Sequence[FileChange], taken: list[str] = taken) -> None:
            assert 0 < len(entries) <= 1024
            taken += [entry.path for entry in entries]

        cut = await list_pages(directory, b".", take, entries_max=entries_max)
        assert cut is truncated
        assert taken == directory.names[:entries_max]
        budgets = [hash_bytes for _, _, hash_bytes in directory.asked]
        assert budgets == sorted(budgets, reverse=True)
        assert budgets[0] - budgets[-1] == (len(budgets) - 1) * 1024


def lists_of(info: inspect.Type, owner: str, name: str) -> set[tuple[str, str]]:
    """The lists in a type, by the struct and the field that they are in."""
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            return {
                found for each in fields for found in lists_of(each.type, cls.__name__, each.name)
            }
        case inspect.VarTupleType(item_type=item):
            return {(owner, name)} | lists_of(item, owner, name)
        case inspect.UnionType(types=types):
            return {found for each in types for found in lists_of(each, owner, name)}
        case _:
            return set()


def test_every_list_of_the_wire_says_how_it_is_known_to_be_whole() -> None:
    """A message that is added with a list is not forgotten: it is cut and says so, or is whole."""
    found = {each for kind in SERVER_MESSAGES for each in lists_of(inspect.type_info(kind), "", "")}
    whole = {(struct, name) for struct, names in WHOLE.items() for name in names}
    assert found == whole | set(CUT)
    structs: list[type[msgspec.Struct]] = [*SERVER_MESSAGES, m.EnvironmentInfo]
    fields = {struct.__name__: set(struct.__struct_fields__) for struct in structs}
    for (struct, _), how in CUT.items():
        for each in how.split(", "):
            field, _, owner = each.partition(" of ")
            assert field in fields[owner or struct]


@pytest.mark.case("PEER-10")
def test_a_long_argv_that_is_listed_says_that_it_is_cut() -> None:
    info: EnvironmentInfo = sample(inspect.type_info(EnvironmentInfo))
    for argv, cut in (
        ((b"x" * 256,) * 32, False),
        ((b"x" * 257,), True),
        ((b"x",) * 33, True),
    ):
        shown = shortened(msgspec.structs.replace(info, running_argv=argv))
        assert shown.running_argv_truncated is cut
