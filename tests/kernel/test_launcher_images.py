"""Images are verified byte by byte, and a hostile layer changes nothing outside its root."""

import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sbxd.launcher.kernel import hostpaths, image_tar, images, uids
from sbxd.launcher.unpacker import DigestMismatch
from sbxd.oci.media import Compression
from tests.kernel.image_layers import (
    config_of,
    entry,
    put_blob,
    put_image,
    rootfs,
    sha256,
    tar_of,
    unpack,
)

root = pytest.mark.needs("root", "systemd")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hostpaths, "STATE_DIRECTORY", str(tmp_path))
    (tmp_path / "images" / "blobs" / "sha256").mkdir(parents=True)
    return tmp_path


def test_set_uid_and_set_gid_bits_are_dropped_and_the_sticky_bit_is_kept() -> None:
    assert image_tar.safe_mode(0o6755) == 0o755
    assert image_tar.safe_mode(0o1777) == 0o1777


@root
@pytest.mark.parametrize("compression", Compression)
def test_an_image_is_unpacked_with_the_owners_of_its_block(
    state: Path, compression: Compression
) -> None:
    layer = tar_of(
        (entry("./", tarfile.DIRTYPE, mode=0o755), b""),
        (entry("usr", tarfile.DIRTYPE, mode=0o755), b""),
        (entry("usr/tool", mode=0o4755, uid=7, gid=8), b"#!/bin/sh\n"),
        (entry("bin", tarfile.SYMTYPE, "usr"), b""),
        (entry("hard", tarfile.LNKTYPE, "usr/tool"), b""),
        (entry("null", tarfile.CHRTYPE), b""),
        (entry("secret", mode=0o600, uid=10001, gid=10001), b"x"),
    )
    digest = put_image(state, layer, compression=compression)
    unpack(digest)
    unpack(digest)
    tree = rootfs(state, digest)
    tool = (tree / "usr" / "tool").stat()
    assert (tool.st_uid - uids.IMAGE_BASE, tool.st_gid - uids.IMAGE_BASE) == (7, 8)
    assert stat.S_IMODE(tool.st_mode) == 0o755
    assert tool.st_mtime == 1_000_000_000
    assert tool.st_nlink == 2
    assert os.readlink(tree / "bin") == "usr"
    assert not (tree / "null").exists()
    assert (tree / "secret").stat().st_uid == uids.IMAGE_BASE + 10001
    for point in image_tar.MOUNT_POINTS:
        assert (tree / point).is_dir()
    assert stat.S_IMODE((state / "unpacked").stat().st_mode) == 0o700


@root
def test_what_the_layers_do_not_name_can_be_entered_by_everybody(state: Path) -> None:
    digest = put_image(state, tar_of((entry("usr/lib/file"), b"x")))
    before = os.umask(0o077)  # the launcher's
    try:
        unpack(digest)
    finally:
        os.umask(before)
    tree = rootfs(state, digest)
    for directory in (tree, tree / "usr", tree / "usr" / "lib", tree / "workspace"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755


@root
def test_a_later_layer_removes_what_its_whiteouts_name(state: Path) -> None:
    lower = tar_of(
        (entry("a/", tarfile.DIRTYPE, mode=0o755), b""),
        (entry("a/gone"), b"1"),
        (entry("a/kept"), b"2"),
        (entry("b/old"), b"3"),
    )
    upper = tar_of(
        (entry("a/.wh.gone"), b""), (entry("b/.wh..wh..opq"), b""), (entry("b/new"), b"4")
    )
    digest = put_image(state, lower, upper)
    unpack(digest)
    tree = rootfs(state, digest)
    assert sorted(os.listdir(tree / "a")) == ["kept"]
    assert sorted(os.listdir(tree / "b")) == ["new"]


@root
@pytest.mark.parametrize("which", ["manifest", "configuration", "layer"])
def test_a_blob_that_is_not_what_its_name_says_is_refused(state: Path, which: str) -> None:
    layer = tar_of((entry("x"), b"x"))
    digest = put_image(state, layer)
    raw = {
        "manifest": (state / "images/blobs/sha256" / digest.removeprefix("sha256:")).read_bytes(),
        "configuration": config_of(layer),
        "layer": layer,
    }[which]
    put_blob(
        state, raw, raw.replace(b"linux", b"Linux") if which == "configuration" else raw + b" "
    )
    with pytest.raises(DigestMismatch, match=which):
        unpack(digest)
    with pytest.raises(FileNotFoundError):
        images.mount(digest)
    put_blob(state, raw)
    unpack(digest)
    os.close(images.mount(digest))


@root
@pytest.mark.parametrize(
    "hostile",
    [
        [(entry("../escaped"), b"x")],
        [(entry("/escaped"), b"x")],
        [(entry("x", tarfile.LNKTYPE, "../../escaped"), b"")],
        [(entry("x", uid=65_536), b"")],
        [(entry("proc", tarfile.SYMTYPE, "/"), b"")],
    ],
    ids=["dotdot", "absolute", "hard link", "owner", "mount point"],
)
def test_an_unsafe_layer_is_refused_whole(
    state: Path, hostile: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    digest = put_image(state, tar_of(*hostile))
    with pytest.raises(ValueError, match="layer"):
        unpack(digest)
    with pytest.raises(FileNotFoundError):
        images.mount(digest)


@root
def test_a_link_out_of_the_root_is_followed_inside_it_only(state: Path) -> None:
    outside = state / "outside"
    outside.mkdir(mode=0o777)
    layer = tar_of(
        (entry("door", tarfile.SYMTYPE, str(outside)), b""), (entry("door/written"), b"x")
    )
    digest = put_image(state, layer)
    with pytest.raises(ValueError, match="layer"):
        unpack(digest)
    assert list(outside.iterdir()) == []


@root
def test_the_mount_is_read_only_without_devices_and_set_uid(state: Path) -> None:
    digest = put_image(state, tar_of((entry("file"), b"x")))
    unpack(digest)
    detached = images.mount(digest)
    try:
        flags = os.fstatvfs(detached).f_flag
        assert flags & os.ST_RDONLY
        assert flags & os.ST_NOSUID
        assert flags & os.ST_NODEV
        with pytest.raises(OSError, match="Read-only"):
            os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=detached)
    finally:
        os.close(detached)


@root
def test_a_dropped_image_is_gone_and_dropping_it_again_is_no_error(state: Path) -> None:
    digest = put_image(state, tar_of((entry("file"), b"x")))
    unpack(digest)
    images.drop(digest)
    images.drop(digest)
    assert list((state / "unpacked").iterdir()) == []


@root
def test_a_half_unpacked_image_is_no_image_and_is_replaced(state: Path) -> None:
    digest = put_image(state, tar_of((entry("file"), b"x")))
    partial = state / "unpacked" / f"{digest.removeprefix('sha256:')}.partial"
    (partial / "rootfs").mkdir(parents=True, mode=0o700)
    (state / "unpacked").chmod(0o700)
    (partial / "rootfs" / "leftover").write_text("x")
    with pytest.raises(FileNotFoundError):
        images.mount(digest)
    unpack(digest)
    assert not (rootfs(state, digest) / "leftover").exists()


def as_a_link(blob: Path) -> None:
    blob.symlink_to(blob.rename(blob.with_name("kept")))


def as_a_fifo(blob: Path) -> None:
    blob.unlink()
    os.mkfifo(blob)


def with_a_second_name(blob: Path) -> None:
    os.link(blob, blob.with_name("second"))


def as_another_users(blob: Path) -> None:
    os.chown(blob, 54_321, 0)


def as_a_directory(blob: Path) -> None:
    blob.unlink()
    blob.mkdir()


@root
@pytest.mark.case("DMN-20", "DMN-22")
@pytest.mark.parametrize("which", ["manifest", "configuration", "layer"])
@pytest.mark.parametrize(
    "changed", [as_a_link, as_a_fifo, with_a_second_name, as_another_users, as_a_directory]
)
def test_a_blob_that_is_no_plain_file_of_the_stores_owner_is_refused(
    state: Path, changed: Callable[[Path], None], which: str
) -> None:
    layer = tar_of((entry("file"), b"x"))
    digest = put_image(state, layer)
    name = {"manifest": digest, "configuration": sha256(config_of(layer)), "layer": sha256(layer)}
    changed(state / "images/blobs/sha256" / name[which].removeprefix("sha256:"))
    with pytest.raises((OSError, ValueError), match=r"regular|symbolic"):
        unpack(digest)
    assert not list((state / "unpacked").iterdir())


def in_the_place_of_the_folder(state: Path, private: Path) -> None:
    shutil.rmtree(state / "images/blobs/sha256")
    (state / "images/blobs/sha256").symlink_to(private / "sha256")


def in_the_place_of_its_parent(state: Path, private: Path) -> None:
    shutil.rmtree(state / "images/blobs")
    (state / "images/blobs").symlink_to(private)


def in_the_place_of_the_store(state: Path, private: Path) -> None:
    shutil.rmtree(state / "images")
    (state / "private-store").mkdir()
    (state / "images").symlink_to("private-store")
    (state / "private-store/blobs").symlink_to(private)


@root
@pytest.mark.case("DMN-20")
@pytest.mark.parametrize(
    "linked", [in_the_place_of_the_folder, in_the_place_of_its_parent, in_the_place_of_the_store]
)
def test_a_link_in_the_store_never_has_a_private_image_unpacked(
    state: Path, tmp_path_factory: pytest.TempPathFactory, linked: Callable[[Path, Path], None]
) -> None:
    digest = put_image(state, tar_of((entry("secret"), b"of root")))
    elsewhere = tmp_path_factory.mktemp("private", numbered=True)
    private = shutil.copytree(state / "images/blobs", elsewhere / "blobs")
    unpack(digest)  # the control: it is a good image where it may be read
    images.drop(digest)
    linked(state, private)
    with pytest.raises(OSError, match=r"symbolic|directory"):
        unpack(digest)
    assert not list((state / "unpacked").iterdir())


@root
@pytest.mark.case("DMN-20")
def test_a_folder_of_blobs_that_is_another_users_is_refused(state: Path) -> None:
    digest = put_image(state, tar_of((entry("file"), b"x")))
    os.chown(state / "images/blobs/sha256", 54_321, 0)
    with pytest.raises(hostpaths.UntrustedDirectory):
        unpack(digest)
    os.chown(state / "images", 54_321, 0)  # the control: a store that is that user's whole
    for blob in (state / "images/blobs/sha256").iterdir():
        os.chown(blob, 54_321, 0)
    unpack(digest)


@root
def test_a_state_directory_that_others_may_change_is_refused(state: Path) -> None:
    digest = put_image(state, tar_of((entry("file"), b"x")))
    unpack(digest)
    state.chmod(0o777)
    with pytest.raises(hostpaths.UntrustedDirectory):
        images.mount(digest)
    state.chmod(0o700)
    (state / "unpacked").rename(state / "elsewhere")
    (state / "unpacked").symlink_to(state / "elsewhere")
    with pytest.raises(OSError, match=r"symbolic|directory"):
        images.mount(digest)
