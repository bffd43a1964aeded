"""The tree on the file system: what it refuses, what it leaves, how it fails."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sbxd.artifacts.identifiers import ArtifactIds
from sbxd.artifacts.tree import ArtifactTree, ObjectMissing
from sbxd.policy.storage_key import storage_key
from sbxd.port.artifact import ArtifactId, ArtifactUnavailable, ArtifactUnavailableCode
from sbxd.port.ids import TenantId

STORE = "0" * 36
ALICE = TenantId("alice")
IDS = ArtifactIds(lambda: 1_700_000_000_000, os.urandom)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    return path


def put(tree: ArtifactTree, data: bytes = b"data") -> tuple[ArtifactId, str]:
    artifact_id = IDS.new()
    key = storage_key(ALICE, artifact_id)
    partial_fd = tree.begin(artifact_id)
    try:
        tree.append(partial_fd, data)
        tree.commit(partial_fd, artifact_id, key)
    finally:
        os.close(partial_fd)
    return artifact_id, key


def read(tree: ArtifactTree, key: str) -> bytes:
    object_fd, size = tree.open_object(key)
    try:
        return tree.read(object_fd, 0, size + 1)
    finally:
        os.close(object_fd)


def test_an_object_is_read_as_it_was_written_by_this_tree_and_the_next(root: Path) -> None:
    tree = ArtifactTree(root, STORE)
    _, key = put(tree)
    assert read(tree, key) == b"data"
    tree.close()
    tree.close()
    again = ArtifactTree(root, "1" * 36)
    assert (again.store_id, again.is_empty()) == (STORE, False)
    assert read(again, key) == b"data"
    again.remove(key)
    again.remove(key)
    with pytest.raises(ObjectMissing):
        again.open_object(key)
    again.close()


def test_modes_do_not_depend_on_the_umask(root: Path) -> None:
    before = os.umask(0)
    try:
        tree = ArtifactTree(root, STORE)
        put(tree)
        tree.begin(IDS.new())
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777: path.is_dir() for path in sorted(root.rglob("*"))}
    assert modes == {0o700: True, 0o600: False}
    tree.close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_root_that_others_may_write_to_is_refused(root: Path, mode: int) -> None:
    root.chmod(mode)
    with pytest.raises(ArtifactUnavailable) as caught:
        ArtifactTree(root, STORE)
    assert caught.value.code is ArtifactUnavailableCode.REFUSED


def test_a_root_that_is_not_there_is_an_error_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(ArtifactUnavailable) as caught:
        ArtifactTree(tmp_path / "none", STORE)
    assert caught.value.code is ArtifactUnavailableCode.IO
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("which", ["objects", "tenant", "shard"])
def test_a_link_in_a_folders_place_is_neither_followed_nor_removed(
    root: Path, tmp_path: Path, which: str
) -> None:
    tree = ArtifactTree(root, STORE)
    artifact_id, key = put(tree)
    tenant, shard, _ = key.split("/")
    place = {
        "objects": root / "objects",
        "tenant": root / "objects" / tenant,
        "shard": root / "objects" / tenant / shard,
    }[which]
    elsewhere = tmp_path / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    if which == "objects":
        tree.close()
        with pytest.raises(ArtifactUnavailable):
            ArtifactTree(root, STORE)
        return
    with pytest.raises(ArtifactUnavailable) as caught:
        tree.open_object(key)
    assert caught.value.code is ArtifactUnavailableCode.REFUSED
    with pytest.raises(ArtifactUnavailable):
        tree.remove(key)
    assert any(path.name == artifact_id for path in elsewhere.rglob("*"))
    other_fd = tree.begin(IDS.new())
    try:
        with pytest.raises(ArtifactUnavailable):
            tree.commit(other_fd, IDS.new(), key)
    finally:
        os.close(other_fd)
    tree.close()


def plant_link(place: Path, target: Path) -> None:
    place.symlink_to(target)


def plant_hard_link(place: Path, target: Path) -> None:
    place.hardlink_to(target)


def plant_fifo(place: Path, _: Path) -> None:
    os.mkfifo(place, 0o600)


def plant_folder(place: Path, _: Path) -> None:
    place.mkdir()


@pytest.mark.parametrize("plant", [plant_link, plant_hard_link, plant_fifo, plant_folder])
def test_what_is_no_object_of_ours_is_neither_read_nor_removed(
    root: Path, tmp_path: Path, plant: object
) -> None:
    assert callable(plant)
    canary = tmp_path / "canary"
    canary.write_bytes(b"canary")
    canary.chmod(0o600)
    tree = ArtifactTree(root, STORE)
    _, key = put(tree)
    place = root / "objects" / key
    place.unlink()
    plant(place, canary)
    with pytest.raises(ArtifactUnavailable) as caught:
        tree.open_object(key)
    assert caught.value.code is ArtifactUnavailableCode.REFUSED
    with pytest.raises(ArtifactUnavailable) as caught:
        tree.remove(key)
    assert caught.value.code is ArtifactUnavailableCode.REFUSED
    assert os.path.lexists(place)
    assert canary.read_bytes() == b"canary"
    tree.close()


@pytest.mark.parametrize("call", ["stat", "fstat"])
def test_what_another_removes_while_it_is_looked_at_is_gone_and_not_refused(
    call: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sweeps, or a sweep and a reader: a file that was found has no name a moment later."""
    tree = ArtifactTree(root, STORE)
    _, key = put(tree)
    path = root / "objects" / key
    inode, fstat, seen = path.stat().st_ino, os.fstat, list[int]()

    def removed_meanwhile(what: str | int, **options: Any) -> os.stat_result:
        if isinstance(what, int) and fstat(what).st_ino != inode:
            return fstat(what)  # of a folder on the way
        monkeypatch.undo()
        with path.open("rb") as file:
            path.unlink()
            facts = fstat(file.fileno())
        seen.append(facts.st_nlink)
        return facts

    monkeypatch.setattr(os, call, removed_meanwhile)
    if call == "stat":
        tree.remove(key)
    else:
        with pytest.raises(ObjectMissing):
            tree.open_object(key)
    assert seen == [0]
    assert put(tree)


def test_a_link_in_the_place_of_what_is_received_is_not_written_through(
    root: Path, tmp_path: Path
) -> None:
    tree = ArtifactTree(root, STORE)
    artifact_id = IDS.new()
    (root / "incoming" / artifact_id).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactUnavailable) as caught:
        tree.begin(artifact_id)
    assert caught.value.code is ArtifactUnavailableCode.REFUSED
    assert not (tmp_path / "elsewhere").exists()
    tree.close()


def test_a_tenants_folder_that_others_may_enter_is_refused(root: Path) -> None:
    tree = ArtifactTree(root, STORE)
    _, key = put(tree)
    (root / "objects" / ALICE).chmod(0o755)
    with pytest.raises(ArtifactUnavailable) as caught:
        tree.open_object(key)
    assert caught.value.code is ArtifactUnavailableCode.REFUSED
    tree.close()


def test_many_that_open_a_new_folder_at_once_have_one_store(root: Path) -> None:
    (root / f"store.{'f' * 36}").write_text("left by one that died\n")
    with ThreadPoolExecutor(8) as pool:
        trees = list(pool.map(lambda n: ArtifactTree(root, str(n) * 36), range(8)))
    assert len({tree.store_id for tree in trees}) == 1
    for tree in trees:
        put(tree)
        tree.close()
    assert sorted(path.name for path in root.iterdir()) == ["incoming", "objects", "store"]


def test_a_damaged_id_of_the_store_is_refused(root: Path) -> None:
    ArtifactTree(root, STORE).close()
    (root / "store").write_text("x\n")
    with pytest.raises(ArtifactUnavailable) as caught:
        ArtifactTree(root, STORE)
    assert caught.value.code is ArtifactUnavailableCode.REFUSED


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, ArtifactUnavailableCode.NO_SPACE),
        (errno.EDQUOT, ArtifactUnavailableCode.NO_SPACE),
        (errno.EIO, ArtifactUnavailableCode.IO),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "mkdir", "rename"])
def test_each_failing_call_is_a_typed_error_and_no_object(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: ArtifactUnavailableCode,
    call: str,
) -> None:
    tree = ArtifactTree(root, STORE)

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number), "/a/path/of/the/host")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(ArtifactUnavailable) as caught:
            put(tree)
    assert caught.value.code is code
    assert "/a/path" not in str(caught.value)
    assert [path for path in (root / "objects").rglob("*") if path.is_file()] == []
    put(tree)  # the control
    tree.close()


def test_short_writes_are_continued(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ArtifactTree(root, STORE)
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
        _, key = put(tree, b"0123456789")
    assert read(tree, key) == b"0123456789"
    tree.close()


def test_everything_is_synced_before_it_is_said_to_be_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = ArtifactTree(root, STORE)
    steps: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        steps.append(f"fsync {os.path.relpath(os.readlink(f'/proc/self/fd/{fd}'), root)}")
        real_fsync(fd)

    def rename(*args: object, **kwargs: object) -> None:
        steps.append("rename")
        real_rename(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        patched.setattr(os, "rename", rename)
        artifact_id, key = put(tree)
    tenant, shard, _ = key.split("/")
    assert steps == [
        f"fsync incoming/{artifact_id}",
        "fsync objects",
        f"fsync objects/{tenant}",
        "rename",
        f"fsync objects/{tenant}/{shard}",
        "fsync incoming",
    ]
    tree.close()
