"""A corpus of hostile layers. Each is refused whole or laid harmlessly, what it aims at outside is
untouched, and beside each a neighbour that differs in the attack alone unpacks."""

import errno
import gzip
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from sbxd.launcher import unpacker
from sbxd.launcher.kernel import hostpaths, image_layers, image_tar, images
from sbxd.launcher.unpacker import DigestMismatch
from sbxd.oci.media import Compression
from tests.kernel.hostile_layers import ATTACKS, END, FILE, FOLDER, Member, header
from tests.kernel.image_layers import (
    config_of,
    descriptor,
    entry,
    put_blob,
    put_image,
    put_packed,
    rootfs,
    tar_of,
    unpack,
)

pytestmark = pytest.mark.needs("root", "systemd")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hostpaths, "STATE_DIRECTORY", str(tmp_path))
    (tmp_path / "images" / "blobs" / "sha256").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_layer_is_refused_whole_and_its_neighbour_unpacks(name: str, state: Path) -> None:
    attack = ATTACKS[name]
    digest = put_image(state, attack.layer)
    with pytest.raises(ValueError, match=f"layer 1.*{attack.says}"):
        unpack(digest)
    assert list((state / "unpacked").iterdir()) == []
    with pytest.raises(FileNotFoundError):
        images.mount(digest)
    assert {path.name for path in state.iterdir()} == {"images", "unpacked"}
    unpack(put_image(state, attack.neighbour))


def test_links_may_point_anywhere_and_are_never_followed(state: Path) -> None:
    target = state / "target"
    target.write_text("untouched")
    layer = tar_of(
        (entry("link", tarfile.SYMTYPE, str(target)), b""),
        (entry("link"), b"replaced"),
        (entry("other", tarfile.SYMTYPE, str(target)), b""),
        (entry("other", tarfile.DIRTYPE, mode=0o777), b""),
        (entry("last", tarfile.DIRTYPE, mode=0o777), b""),
        (entry("last", tarfile.SYMTYPE, str(target)), b""),
    )
    tree = rootfs(state, unpacked(state, layer))
    assert (tree / "link").read_text() == "replaced"
    assert (tree / "other").is_dir()
    assert os.readlink(tree / "last") == str(target)
    assert target.read_text() == "untouched"
    assert stat.S_IMODE(target.stat().st_mode) != 0o777


def unpacked(state: Path, *layers: bytes) -> str:
    digest = put_image(state, *layers)
    unpack(digest)
    return digest


@pytest.mark.case("ESC-18")
def test_set_uid_bits_capabilities_and_attributes_are_dropped(state: Path) -> None:
    member = entry("su", mode=0o6755)
    member.pax_headers = {
        "SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20",
        "SCHILY.xattr.user.note": "x",
        "LIBARCHIVE.xattr.user.other": "eA==",
    }
    tree = rootfs(state, unpacked(state, pax_tar(member)))
    assert stat.S_IMODE((tree / "su").stat().st_mode) == 0o755
    assert os.listxattr(tree / "su") == []


def pax_tar(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            archive.addfile(member)
    return out.getvalue()


def test_devices_and_fifos_are_left_out_and_what_they_replace_goes(state: Path) -> None:
    layer = tar_of(
        (entry("a"), b"x"),
        (entry("a", tarfile.BLKTYPE), b""),
        (entry("b", tarfile.CHRTYPE), b""),
        (entry("c", tarfile.FIFOTYPE), b""),
        (entry("d"), b"kept"),
    )
    tree = rootfs(state, unpacked(state, layer))
    assert {path.name for path in tree.iterdir()} == {"d", *image_tar.MOUNT_POINTS}


def test_names_that_are_not_utf_8_are_kept_as_they_are(state: Path) -> None:
    name = b"\xff\xfe-\x01name"
    member = entry("x")
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[: len(name)] = name
    block[148:156] = b"        "
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    tree = rootfs(state, unpacked(state, bytes(block) + END))
    assert name in os.listdir(os.fsencode(tree))


def test_the_last_of_duplicate_entries_counts(state: Path) -> None:
    layer = tar_of(
        (entry("x", tarfile.DIRTYPE, mode=0o755), b""),
        (entry("x/deep/file"), b"1"),
        (entry("x"), b"2"),
        (entry("y"), b"3"),
        (entry("y", tarfile.DIRTYPE, mode=0o700), b""),
        (entry("y/file"), b"4"),
        (entry("z"), b"5"),
        (entry("z", tarfile.LNKTYPE, "z"), b""),
    )
    tree = rootfs(state, unpacked(state, layer))
    assert (tree / "x").read_text() == "2"
    assert (tree / "y" / "file").read_text() == "4"
    assert stat.S_IMODE((tree / "y").stat().st_mode) == 0o700
    assert (tree / "z").read_text() == "5"


# --- whiteouts ----------------------------------------------------------------------------------

LOWER = tar_of(
    (entry("d", tarfile.DIRTYPE, mode=0o755), b""),
    (entry("d/old"), b"lower"),
    (entry("d/sub", tarfile.DIRTYPE, mode=0o755), b""),
    (entry("d/sub/old"), b"lower"),
    (entry("e/old"), b"lower"),
    (entry("outside"), b"lower"),
    (entry("way", tarfile.SYMTYPE, "/etc"), b""),
)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_an_opaque_whiteout_hides_what_is_below_and_nothing_of_its_own_layer(
    first: bool, state: Path
) -> None:
    opaque = (entry("d/.wh..wh..opq"), b"")
    own: list[Member] = [(entry("d/new"), b"own"), (entry("d/sub/new"), b"own")]
    upper = tar_of(*([opaque, *own] if first else [*own, opaque]))
    tree = rootfs(state, unpacked(state, LOWER, upper))
    assert sorted(os.listdir(tree / "d")) == ["new", "sub"]
    assert os.listdir(tree / "d" / "sub") == ["new"]
    assert (tree / "e" / "old").read_text() == "lower"
    assert (tree / "outside").read_text() == "lower"


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_whiteout_hides_one_name_and_never_its_own_layers(first: bool, state: Path) -> None:
    whiteouts: list[Member] = [(entry("d/.wh.sub"), b""), (entry("d/.wh.old"), b"")]
    own: list[Member] = [(entry("d/old"), b"own")]
    upper = tar_of(*(whiteouts + own if first else own + whiteouts))
    tree = rootfs(state, unpacked(state, LOWER, upper))
    assert os.listdir(tree / "d") == ["old"]
    assert (tree / "d" / "old").read_text() == "own"


def test_a_whiteout_of_what_is_not_there_is_nothing(state: Path) -> None:
    upper = tar_of((entry("none/.wh.x"), b""), (entry("d/.wh.none"), b""), (entry(".wh.way"), b""))
    tree = rootfs(state, unpacked(state, LOWER, upper))
    assert not (tree / "way").is_symlink()
    assert (tree / "d" / "old").read_text() == "lower"


def test_a_whiteout_behind_a_link_that_leaves_the_root_is_refused(state: Path) -> None:
    digest = put_image(state, LOWER, tar_of((entry("way/.wh.passwd"), b"")))
    with pytest.raises(ValueError, match=r"layer 2.*leaves the root"):
        unpack(digest)


def test_an_upper_directory_in_place_of_a_lower_link_holds_what_is_put_there(state: Path) -> None:
    upper = tar_of((entry("way", tarfile.DIRTYPE, mode=0o755), b""), (entry("way/x"), b"x"))
    tree = rootfs(state, unpacked(state, LOWER, upper))
    assert os.listdir(tree / "way") == ["x"]


def test_depth_cannot_be_gained_by_links(state: Path) -> None:
    """Else whoever removes the tree would have to recurse further than it can."""
    deep = "/".join("a" * 1 for _ in range(100))
    members: list[Member] = [
        (entry(f"{deep}/x"), b""),
        (entry("door", tarfile.SYMTYPE, deep), b""),
    ]
    unpack(put_image(state, tar_of(*members, (entry("door/b/c"), b""))))
    hostile = put_image(state, tar_of(*members, (entry(f"door/{deep}/y"), b"")))
    with pytest.raises(ValueError, match="deep"):
        unpack(hostile)
    assert len(list((state / "unpacked").iterdir())) == 1


# --- bombs --------------------------------------------------------------------------------------


def bomb(packed_bytes: int) -> bytes:
    """gzip of far more zeros than anybody unpacks here, made without holding them."""
    member = header("zeros", b"0", 2**36)
    packer = zlib.compressobj(9, wbits=31)
    out = packer.compress(member)
    while len(out) < packed_bytes:
        out += packer.compress(bytes(2**20))
    return out + packer.flush()


def test_a_bomb_is_stopped_by_what_it_announces(state: Path) -> None:
    packed = bomb(20_000)
    digest = put_packed(state, packed, compression=Compression.GZIP, config=config_of(b"x"))
    with pytest.raises(ValueError, match="too large"):
        unpack(digest)
    assert list((state / "unpacked").iterdir()) == []


def test_a_bomb_that_announces_little_is_stopped_by_what_it_gives(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros behind the end mark are no entry, and are counted all the same."""
    monkeypatch.setattr(image_tar, "BYTES_MAX", 8 * 2**20)
    for size, fits in ((2**20, True), (64 * 2**20, False)):
        layer = tar_of((entry("x"), b"x")) + bytes(size)
        digest = put_image(state, layer, compression=Compression.GZIP)
        if fits:
            unpack(digest)
        else:
            with pytest.raises(ValueError, match="too large"):
                unpack(digest)


@pytest.mark.parametrize("what", ["entries", "bytes"])
def test_an_image_may_take_only_so_much_over_all_its_layers(
    what: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "entries":
        monkeypatch.setattr(image_tar, "ENTRIES_MAX", 10)
        layers = [tar_of(*((entry(f"{n}-{i}"), b"") for i in range(4))) for n in range(3)]
    else:
        monkeypatch.setattr(image_tar, "BYTES_MAX", 200_000)
        layers = [tar_of((entry(f"{n}"), bytes(80_000))) for n in range(3)]
    unpack(put_image(state, *layers[:2]))
    with pytest.raises(ValueError, match=r"layer 3 is refused.*too large"):
        unpack(put_image(state, *layers))


def test_a_layer_that_is_listed_in_a_row_is_laid_once(state: Path) -> None:
    """128 times the same: it would not fit 128 times."""
    layer = tar_of((entry("large"), bytes(2**20)), (entry("small"), b"x"))
    digest = put_image(state, *[layer] * 128)
    asked: list[str] = []
    of_the_store = hostpaths.open_blob

    def noted(blobs: int, name: str) -> int:
        asked.append(name)
        return of_the_store(blobs, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostpaths, "open_blob", noted)
        unpack(digest)
    assert len(asked) == 3, "the manifest, the configuration and one layer"
    assert (rootfs(state, digest) / "small").read_bytes() == b"x"


def test_layers_that_are_listed_again_cost_no_more_than_the_image_once_more(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_layers, "_AGAIN_BYTES", 100_000)
    large = tar_of((entry("large"), bytes(2**20)))
    small = tar_of((entry("small"), b"x"), (entry(".wh.large"), b""))
    unpack(put_image(state, large, small, large))  # the control: an honest image may
    with pytest.raises(ValueError, match=r"layer 5, which is listed again, is .*too large"):
        unpack(put_image(state, *[large, small] * 64))


def test_a_layer_that_is_listed_again_is_laid_over_what_came_between(state: Path) -> None:
    lower = tar_of((entry("file"), b"first"))
    upper = tar_of((entry("file"), b"second"))
    assert (rootfs(state, unpacked(state, lower, upper, lower)) / "file").read_bytes() == b"first"
    assert (rootfs(state, unpacked(state, lower, lower, upper)) / "file").read_bytes() == b"second"


def test_an_image_never_takes_all_that_is_free(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacker, "_FREE_SHARE", 0.0)
    digest = put_image(state, tar_of((entry("x"), b"x")))
    with pytest.raises(ValueError, match="too large"):
        unpack(digest)
    monkeypatch.undo()
    monkeypatch.setattr(hostpaths, "STATE_DIRECTORY", str(state))
    unpack(digest)


@pytest.mark.parametrize("what", ["bytes_kept", "entries_kept"])
def test_what_others_take_of_the_disk_meanwhile_is_not_this_images(
    what: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that are unpacked side by side had both been promised the same free space."""
    digest = put_image(state, tar_of((entry("x"), b"x")))
    of_the_disk = image_tar.room_of
    taken = {"value": 2**60}
    monkeypatch.setattr(
        unpacker, "room_of", lambda *given: of_the_disk(*given)._replace(**{what: taken["value"]})
    )
    with pytest.raises(OSError, match="No space left") as caught:
        unpack(digest)
    assert caught.value.errno == errno.ENOSPC
    assert not list((state / "unpacked").glob("*"))
    taken["value"] = 1
    unpack(digest)


def test_a_zstd_frame_that_needs_gigabytes_of_memory_is_refused(state: Path) -> None:
    layer = tar_of((entry("x"), os.urandom(1000)))
    packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    frame = bytearray(packer.compress(layer) + packer.flush())
    assert not frame[4] & 0x20, "the frame says how large its window is"
    frame[5] = (31 - 10) << 3  # 2 GiB
    packed = bytes(frame)
    digest = put_packed(state, packed, compression=Compression.ZSTD, config=config_of(layer))
    with pytest.raises(ValueError, match="zstd"):
        unpack(digest)
    unpack(put_image(state, layer, compression=Compression.ZSTD))


# --- what the blobs say -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-20],
        lambda raw: raw[:100] + bytes([raw[100] ^ 0xFF]) + raw[101:],
        lambda raw: raw + b"garbage",
        lambda raw: b"",
    ],
    ids=["cut", "flipped", "trailing", "empty"],
)
def test_a_damaged_packed_layer_is_refused(damage: Callable[[bytes], bytes], state: Path) -> None:
    layer = tar_of((entry("x"), os.urandom(4000)))
    packed = gzip.compress(layer, mtime=0)
    hostile = put_packed(
        state, damage(packed), compression=Compression.GZIP, config=config_of(layer)
    )
    with pytest.raises(ValueError, match="layer 1 is refused"):
        unpack(hostile)
    members = packed + gzip.compress(b"") + bytes(700)
    unpack(put_packed(state, members, compression=Compression.GZIP, config=config_of(layer)))


def test_a_layer_that_unpacks_to_something_else_is_refused(state: Path) -> None:
    layer = tar_of((entry("x"), b"x"))
    other = tar_of((entry("x"), b"y"))
    digest = put_image(state, layer, compression=Compression.GZIP, config=config_of(other))
    with pytest.raises(ValueError, match="not what the configuration says"):
        unpack(digest)
    unpack(put_image(state, layer, compression=Compression.GZIP))


def test_a_blob_of_another_size_than_the_manifest_says_is_refused(state: Path) -> None:
    import msgspec

    layer = tar_of((entry("x"), b"x"))
    config = config_of(layer)
    put_image(state, layer)
    wrong = {**descriptor("application/vnd.oci.image.layer.v1.tar", layer), "size": 5}
    manifest = {
        "schemaVersion": 2,
        "config": descriptor("application/vnd.oci.image.config.v1+json", config),
        "layers": [wrong],
    }
    with pytest.raises(DigestMismatch):
        unpack(put_blob(state, msgspec.json.encode(manifest)))


# --- killed, and shared -------------------------------------------------------------------------


def test_an_unpacker_that_is_killed_leaves_nothing_that_is_used(state: Path) -> None:
    digest = put_image(state, tar_of(FOLDER, FILE))
    kept = unpacker._feed

    def killed(*arguments: object) -> object:
        kept(*arguments)  # type: ignore[arg-type]
        os._exit(9)

    pid = os.fork()
    if pid == 0:
        try:
            unpacker._feed = killed  # type: ignore[assignment]
            unpack(digest)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert [path.name.endswith(".partial") for path in (state / "unpacked").iterdir()] == [True]
    with pytest.raises(FileNotFoundError):
        images.mount(digest)
    unpack(digest)
    os.close(images.mount(digest))
    images.drop(digest)
    assert list((state / "unpacked").iterdir()) == []


def test_every_mount_of_an_image_is_the_same_files_and_none_can_be_written(state: Path) -> None:
    digest = unpacked(state, tar_of(FOLDER, FILE))
    mounts = [images.mount(digest) for _ in range(3)]
    try:
        found = {
            (found.st_dev, found.st_ino)
            for each in mounts
            for found in [os.stat("folder/file", dir_fd=each)]
        }
        assert len(found) == 1, "one copy for all"
        for each in mounts:
            with pytest.raises(OSError, match="Read-only"):
                os.open("folder/file", os.O_WRONLY, dir_fd=each)
    finally:
        for each in mounts:
            os.close(each)
    os.close(os.open(rootfs(state, digest) / "folder" / "file", os.O_WRONLY))  # the control
