"""The comparison of two trees against one that cannot be wrong."""

from hypothesis import given
from hypothesis import strategies as st

from sbxd.steward.changes import PATHS_BYTES_MAX, Change, Collector, compare
from sbxd.steward.frames import Kind
from sbxd.steward.nodes import EMPTY, UNKNOWN, UNREAD, Node, is_directory, make, pack_record, split

NAMES = st.sampled_from(["a", "b", "c", "é", "\udcff", "a\n"])
RECORDS = st.sampled_from([pack_record(number, number, number, 0o100644) for number in (1, 2, 3)])
DIRECTORY = pack_record(0, 0, 0, 0o040755)


def whole(tree: dict[str, bytes]) -> dict[str, bytes]:
    """The tree with its directories; what has something below it is one."""
    found = dict(tree)
    for path in tree:
        parts = path.split("/")
        found |= {"/".join(parts[:depth]): DIRECTORY for depth in range(1, len(parts))}
    return found


# path -> record
TREES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=4).map("/".join), RECORDS, max_size=12
).map(whole)
SPLIT = st.booleans()


def build(tree: dict[str, bytes], is_split: bool = False) -> Node:
    """The tree, with every directory as one block or as many."""
    children: dict[str, dict[bytes, bytes]] = {"": {}}
    for path, record in whole(tree).items():
        above, _, name = path.rpartition("/")
        children.setdefault(above, {})[encoded(name)] = record
        if is_directory(record):
            children.setdefault(path, {})
    nodes: dict[str, Node] = {}
    for path in sorted(children, key=lambda each: -each.count("/") if each else 1):
        entries = children[path]
        prefix = f"{path}/" if path else ""
        below = {
            name: nodes[prefix + name.decode("utf-8", "surrogateescape")]
            for name, record in entries.items()
            if is_directory(record)
        }
        node = make(entries, below)
        nodes[path] = split(node) if is_split else node
    return nodes[""]


def encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def expected(before: dict[str, bytes], after: dict[str, bytes]) -> list[Change]:
    changes = []
    for path in before.keys() | after.keys():
        if path not in before:
            changes.append(Change(encoded(path), Kind.CREATED, after[path]))
        elif path not in after:
            changes.append(Change(encoded(path), Kind.DELETED, before[path]))
        elif before[path] != after[path]:
            changes.append(Change(encoded(path), Kind.MODIFIED, after[path]))
    return sorted(changes)


@given(before=TREES, after=TREES, maximum=st.integers(0, 30), one=SPLIT, other=SPLIT)
def test_the_first_changes_by_path_and_whether_there_were_more(
    before: dict[str, bytes], after: dict[str, bytes], maximum: int, one: bool, other: bool
) -> None:
    into = Collector(maximum)
    compare(build(before, one), build(after, other), into)
    every = expected(before, after)
    assert into.first() == every[:maximum]
    assert into.truncated == (len(every) > maximum)


@given(before=TREES, one=SPLIT)
def test_a_tree_is_equal_to_itself_and_to_its_copy(before: dict[str, bytes], one: bool) -> None:
    into = Collector(10)
    tree = build(before)
    compare(tree, tree, into)
    compare(tree, build(before, one), into)
    assert into.first() == []
    assert not into.truncated


def test_memory_is_bounded_by_the_maximum_and_not_by_the_changes() -> None:
    into = Collector(5)
    for number in range(50_000, 0, -1):
        into.add(Change(b"%06d" % number, Kind.CREATED, b""))
    assert [change.path for change in into.first()] == [b"%06d" % n for n in range(1, 6)]
    assert into.truncated


def test_the_bytes_of_all_paths_together_are_bounded() -> None:
    into = Collector(100_000)
    for number in range(5000, 0, -1):
        into.add(Change(b"%06d" % number + b"x" * 4000, Kind.CREATED, b""))
    kept = [change.path for change in into.first()]
    assert [int(path[:6]) for path in kept] == list(range(1, PATHS_BYTES_MAX // 4006 + 1))
    assert into.truncated


def test_what_is_too_deep_to_be_named_is_said_to_be_missing() -> None:
    deep = "/".join(["x" * 255] * 17)
    into = Collector(100)
    compare(EMPTY, build({deep: pack_record(1, 1, 1, 0o100644), "seen": DIRECTORY}), into)
    paths = [change.path for change in into.first()]
    assert paths[0] == b"seen"
    assert max(map(len, paths)) == 16 * 256 - 1
    assert into.truncated


def test_of_what_was_not_read_nothing_is_said_but_that_it_is_missing() -> None:
    known = build({"d/f": pack_record(1, 1, 1, 0o100644)})
    unread = make({b"d": DIRECTORY}, {b"d": UNREAD})
    for before, after in ((known, unread), (unread, known)):
        into = Collector(10)
        compare(before, after, into)
        assert into.first() == []
        assert into.truncated
    assert unread.get(b"d/f") == UNKNOWN
    assert unread.get(b"d") == DIRECTORY


@given(tree=TREES, path=st.lists(NAMES, min_size=1, max_size=4).map("/".join), one=SPLIT)
def test_what_is_in_a_tree_is_found_by_its_path(
    tree: dict[str, bytes], path: str, one: bool
) -> None:
    root = build(tree, one)
    assert root.get(encoded(path)) == tree.get(path)
    for each, record in tree.items():
        assert root.get(encoded(each)) == record
