"""Two layers are laid as a model says, and no layer at all does anything outside its root."""

import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbxd.launcher.kernel import hostpaths, images
from sbxd.launcher.kernel.image_tar import MOUNT_POINTS
from tests.kernel.image_layers import entry, put_image, rootfs, tar_of, unpack

pytestmark = pytest.mark.needs("root", "systemd")

Tree = dict[str, bytes | None]  # a directory is None
SLOW = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hostpaths, "STATE_DIRECTORY", str(tmp_path))
    (tmp_path / "images" / "blobs" / "sha256").mkdir(parents=True)
    return tmp_path


_paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Some files and directories, each with its parents."""
    found: Tree = {}
    for path in draw(st.sets(_paths, max_size=8)):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            found["/".join(parts[:depth])] = None
        if found.get(path, b"") is not None or path not in found:
            found[path] = draw(st.sampled_from([None, b"one", b"two"]))
    for path in list(found):
        if any(other.startswith(f"{path}/") for other in found):
            found[path] = None
    return dict(sorted(found.items()))


def below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def laid(lower: Tree, upper: Tree, whiteouts: set[str]) -> Tree:
    """What is there with `upper` over `lower`. A whiteout is a path; one that ends in "/" is
    opaque: what lies in it goes, itself not."""
    hidden = {
        path
        for path in lower
        for each in whiteouts
        if (path.startswith(each) if each.endswith("/") else below(path, each))
    }
    found = {path: content for path, content in lower.items() if path not in hidden}
    for path, content in upper.items():
        if content is not None or found.get(path, b"") is not None:
            found = {each: kept for each, kept in found.items() if not below(each, path)}
        found[path] = content
    return found


def on_disk(root: Path) -> Tree:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
        if str(path.relative_to(root)) not in MOUNT_POINTS
    }


@SLOW
@given(trees(), trees(), st.data())
def test_layers_are_laid_as_the_model_says(
    state: Path, lower: Tree, upper: Tree, data: st.DataObject
) -> None:
    # A whiteout stands in a directory of either layer, and in no place that is a file in one.
    folders = [
        path
        for path in {*lower, *upper}
        if all(
            tree.get("/".join(path.split("/")[:depth])) is None
            for tree in (lower, upper)
            for depth in range(1, 4)
        )
    ]
    places = [f"{folder}/" for folder in folders] + [
        f"{folder}{name}" for folder in ("", *(f"{f}/" for f in folders)) for name in "abc"
    ]
    whiteouts = data.draw(st.sets(st.sampled_from(sorted(places)), max_size=3))
    members = [_member(path, content) for path, content in upper.items()]
    for each in sorted(whiteouts):
        folder, _, name = each.rpartition("/")
        prefix = f"{folder}/" if folder else ""
        marker = (entry(f"{prefix}.wh.{name or '.wh..opq'}"), b"")
        members.insert(data.draw(st.integers(0, len(members))), marker)
    digest = put_image(state, tar_of(*(_member(*each) for each in lower.items())), tar_of(*members))
    unpack(digest)
    assert on_disk(rootfs(state, digest)) == laid(lower, upper, whiteouts)
    images.drop(digest)
    assert list((state / "unpacked").iterdir()) == []


def _member(path: str, content: bytes | None) -> tuple[tarfile.TarInfo, bytes]:
    if content is None:
        return entry(path, tarfile.DIRTYPE, mode=0o755), b""
    return entry(path), content


_kinds = st.sampled_from(
    [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
)
_hostile = st.lists(
    st.sampled_from(["a", "b", "c", "..", ".", "", "proc", ".wh.a", ".wh..", ".wh..wh..opq"]),
    min_size=1,
    max_size=5,
).map("/".join)


@st.composite
def hostile_members(draw: st.DrawFn) -> tuple[tarfile.TarInfo, bytes]:
    member = entry(
        draw(_hostile) or ".",
        draw(_kinds),
        draw(_hostile | st.just("/outside") | st.just("../../outside")) or "a",
        mode=draw(st.sampled_from([0, 0o7777, 0o644])),
    )
    return member, b"hostile" if member.type == tarfile.REGTYPE else b""


@SLOW
@given(st.lists(st.lists(hostile_members(), max_size=12), min_size=1, max_size=3))
def test_no_layers_whatever_change_anything_outside_their_root(
    state: Path, layers: list[list[tuple[tarfile.TarInfo, bytes]]]
) -> None:
    outside = state / "outside"
    outside.write_text("untouched")
    digest = put_image(state, *(tar_of(*members) for members in layers))
    try:
        unpack(digest)
    except ValueError:
        assert list((state / "unpacked").iterdir()) == []
    else:
        for path in rootfs(state, digest).rglob("*"):
            assert path.lstat().st_mode & 0o6000 == 0
        images.drop(digest)
    assert outside.read_text() == "untouched"
    assert {path.name for path in state.iterdir()} <= {"images", "unpacked", "outside"}
    assert list((state / "unpacked").iterdir()) == []
