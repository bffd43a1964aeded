"""The comparison of two trees against one that cannot be wrong."""

from hypothesis import given
from hypothesis import strategies as st

from sbxd.steward.changes import Change, Collector, compare
from sbxd.steward.frames import Kind
from sbxd.steward.tree import Node

NAMES = st.sampled_from(["a", "b", "c", "é", "\udcff", "a\n"])
RECORDS = st.sampled_from([b"1" * 28, b"2" * 28, b"3" * 28])
# path -> record; a path that is a prefix of another is a directory besides
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=4).map("/".join), RECORDS, max_size=12)


def build(tree: dict[str, bytes]) -> Node:
    root = Node()
    for path, record in tree.items():
        *parents, name = path.split("/")
        node = root
        for parent in parents:
            node = node.directories.setdefault(parent, Node())
        node.entries[name] = record
    return root


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


@given(before=TREES, after=TREES, maximum=st.integers(0, 30))
def test_the_first_changes_by_path_and_whether_there_were_more(
    before: dict[str, bytes], after: dict[str, bytes], maximum: int
) -> None:
    into = Collector(maximum)
    compare(build(before), build(after), into)
    whole = expected(before, after)
    assert into.first() == whole[:maximum]
    assert into.truncated == (len(whole) > maximum)


@given(before=TREES)
def test_a_tree_is_equal_to_itself_and_to_its_copy(before: dict[str, bytes]) -> None:
    into = Collector(10)
    tree = build(before)
    compare(tree, tree, into)
    compare(tree, build(before), into)
    assert into.first() == []
    assert not into.truncated


def test_memory_is_bounded_by_the_maximum_and_not_by_the_changes() -> None:
    into = Collector(5)
    for number in range(50_000, 0, -1):
        into.add(Change(b"%06d" % number, Kind.CREATED, b""))
    assert [change.path for change in into.first()] == [b"%06d" % n for n in range(1, 6)]
    assert into.truncated


def test_what_is_too_deep_to_be_named_is_said_to_be_missing() -> None:
    deep = "/".join(["x" * 255] * 17)
    into = Collector(10)
    compare(Node(), build({deep: b"1" * 28, "seen": b"1" * 28}), into)
    assert [change.path for change in into.first()] == [b"seen"]
    assert into.truncated


@given(tree=TREES, path=st.lists(NAMES, min_size=1, max_size=4).map("/".join), record=RECORDS)
def test_what_was_put_is_got(tree: dict[str, bytes], path: str, record: bytes) -> None:
    root = build(tree)
    root.put(path, record)
    assert root.get(path) == record
    for other, kept in tree.items():
        if other != path:
            assert root.get(other) == kept
