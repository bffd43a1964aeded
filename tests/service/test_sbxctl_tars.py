"""What `sbxctl image import` sends of hostile files and folders. It keeps nothing of them."""

import gzip
import io
import lzma
import os
import re
import struct
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sbxctl import tars
from sbxctl.archive import Prepared, prepared
from sbxd.oci.documents import InvalidImage
from sbxd.oci.tar import ENTRY_BYTES_MAX, BadArchive, TarReader
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.service.image_archive import Archive
from sbxd.wire.messages import ImageFormat

SECRET = b"of another user"


def packed(source: Path) -> bytes:
    with prepared(source, ImageFormat.ROOTFS) as found:
        raw = b"".join(found.pieces())
        assert len(raw) == found.size
        return raw


def a_tree(root: Path) -> Path:
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "usr" / "bin" / "tool").write_bytes(b"\x7fELF" * 5000)
    os.link(root / "usr" / "bin" / "tool", root / "usr" / "bin" / "same")
    (root / "bin").symlink_to("usr/bin")
    (root / ("long" * 50)).write_bytes(b"x")
    (root / "\udcff").write_bytes(b"no text")
    (root / "empty").touch()
    os.mkfifo(root / "pipe")
    return root


def as_tarfile_packs(directory: Path) -> bytes:
    """The digest of an imported directory is that of these bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        names = sorted(
            os.path.join(folder, name)
            for folder, folders, files in os.walk(directory)
            for name in (*folders, *files)
        )
        for name in names:
            member = archive.gettarinfo(name, arcname=os.path.relpath(name, directory))
            member.uname = member.gname = ""
            if member.isreg():
                with open(name, "rb") as content:
                    archive.addfile(member, content)
            else:
                archive.addfile(member)
    return out.getvalue()


def test_a_directory_is_packed_as_the_standard_library_would(tmp_path: Path) -> None:
    assert packed(a_tree(tmp_path / "root")) == as_tarfile_packs(tmp_path / "root")


# --- bombs --------------------------------------------------------------------------------------


@pytest.fixture
def no_temporary_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AssertionError("a temporary file")

    for name in ("TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile", "mkstemp"):
        monkeypatch.setattr(tempfile, name, fails)


@pytest.mark.case("FS-17")
@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
@pytest.mark.usefixtures("no_temporary_file")
def test_what_unpacks_to_more_than_an_image_may_take_is_refused_and_stored_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(tars, "UNPACKED_BYTES_MAX", 2**20)
    small, bomb = tmp_path / "small", tmp_path / "bomb"
    small.write_bytes(pack(bytes(2**20)))
    bomb.write_bytes(pack(bytes(2**20 + 1)))
    assert packed(small) == bytes(2**20), "the control"
    with (
        pytest.raises(ExecutionRejected, match="more than") as caught,
        prepared(bomb, ImageFormat.ROOTFS),
    ):
        pass
    assert caught.value.code is RejectedCode.INVALID_IMAGE


@pytest.mark.usefixtures("no_temporary_file")
def test_a_file_with_a_huge_hole_is_announced_and_not_copied(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with (tmp_path / "root" / "hole").open("wb") as file:
        file.truncate(2**40)
    with prepared(tmp_path / "root", ImageFormat.ROOTFS) as found:
        assert found.size > 2**40
    (tmp_path / "root" / "hole").write_bytes(b"x")
    assert b"hole" in packed(tmp_path / "root"), "the control"


@pytest.mark.parametrize(
    "raw",
    [
        gzip.compress(b"x" * 4096)[:-9],
        gzip.compress(b"x" * 4096)[:20] + b"\xff" * 40,
        lzma.compress(b"x" * 4096)[:-9],
        lzma.compress(b"x" * 4096)[:20] + b"\xff" * 40,
        b"\x1f\x8b",
        b"\xfd7",
    ],
    ids=["gzip cut", "gzip damaged", "xz cut", "xz damaged", "gzip magic", "xz magic"],
)
def test_what_is_damaged_is_an_invalid_image(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(ExecutionRejected) as caught, prepared(tmp_path / "x", ImageFormat.ROOTFS):
        pass
    assert caught.value.code is RejectedCode.INVALID_IMAGE


def test_streams_one_after_another_are_one_tar(tmp_path: Path) -> None:
    for name, pack in (("a", gzip.compress), ("b", lzma.compress)):
        (tmp_path / name).write_bytes(pack(b"x" * 100_000) + pack(b"y" * 100_000) + bytes(8))
        assert packed(tmp_path / name) == b"x" * 100_000 + b"y" * 100_000


def test_an_xz_that_needs_gigabytes_of_memory_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**20, "mode": lzma.MODE_FAST, "nice_len": 8,
                "mf": lzma.MF_HC3, "depth": 1}]  # fmt: skip
    (tmp_path / "x").write_bytes(lzma.compress(b"x" * 1000, filters=filters))
    assert packed(tmp_path / "x") == b"x" * 1000, "the control"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tars, "_XZ_MEMORY_MAX", 2**19)
        with pytest.raises(ExecutionRejected, match="memory"):
            packed(tmp_path / "x")


# --- a folder that changes meanwhile ------------------------------------------------------------


def send(found: Prepared, sent: bytearray) -> None:
    for piece in found.pieces():
        sent += piece


def by_a_link(root: Path, secret: Path) -> None:
    (root / "folder" / "file").unlink()
    (root / "folder" / "file").symlink_to(secret / "file")


def by_a_hard_link(root: Path, secret: Path) -> None:
    (root / "folder" / "file").unlink()
    os.link(secret / "file", root / "folder" / "file")


def by_a_folder_behind_a_link(root: Path, secret: Path) -> None:
    (root / "folder").rename(root / "away")
    (root / "folder").symlink_to(secret)


def by_a_pipe(root: Path, secret: Path) -> None:
    del secret
    (root / "folder" / "file").unlink()
    os.mkfifo(root / "folder" / "file")


def by_nothing(root: Path, secret: Path) -> None:
    del secret
    (root / "folder" / "file").unlink()


def by_a_directory(root: Path, secret: Path) -> None:
    del secret
    (root / "folder" / "file").unlink()
    (root / "folder" / "file").mkdir()


def by_more(root: Path, secret: Path) -> None:
    del secret
    with (root / "folder" / "file").open("ab") as file:
        file.write(b"more")


@pytest.mark.case("FS-16")
@pytest.mark.parametrize(
    "replaced",
    [
        by_a_link, by_a_hard_link, by_a_folder_behind_a_link, by_a_pipe, by_nothing,
        by_a_directory, by_more,
    ],
)  # fmt: skip
def test_a_file_that_is_replaced_after_it_was_measured_is_never_sent(
    tmp_path: Path, replaced: Callable[[Path, Path], None]
) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    for folder in (root / "folder", secret):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(SECRET)
    (root / "folder" / "file").write_bytes(b"x" * len(SECRET))
    sent = bytearray()
    with prepared(root, ImageFormat.ROOTFS) as found:
        replaced(root, secret)
        with pytest.raises(ExecutionRejected, match="changed while it was read") as caught:
            send(found, sent)
    assert caught.value.code is RejectedCode.INVALID_IMAGE
    assert SECRET not in sent


@pytest.mark.case("FS-16")
def test_a_layouts_blob_that_is_replaced_by_a_link_is_never_sent(tmp_path: Path) -> None:
    layout, secret = tmp_path / "layout", tmp_path / "secret"
    (layout / "blobs" / "sha256").mkdir(parents=True)
    secret.write_bytes(SECRET)
    for name in ("oci-layout", "index.json", "blobs/sha256/aa"):
        (layout / name).write_bytes(b"x" * len(SECRET))
    sent = bytearray()
    with prepared(layout, None) as found:
        (layout / "blobs/sha256/aa").unlink()
        (layout / "blobs/sha256/aa").symlink_to(secret)
        with pytest.raises(ExecutionRejected, match="changed while it was read"):
            send(found, sent)
    assert SECRET not in sent


def test_blobs_behind_a_link_are_refused(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    layout.mkdir()
    (layout / "oci-layout").write_text("{}")
    (layout / "blobs").symlink_to(tmp_path)
    with pytest.raises(ExecutionRejected, match="is a link"), prepared(layout, None):
        pass


# --- numbers ------------------------------------------------------------------------------------

# Of a header: where each number stands, and how long it is.
NUMBERS = {
    "mode": (100, 8), "uid": (108, 8), "gid": (116, 8), "size": (124, 12), "mtime": (136, 12),
    "devmajor": (329, 8), "devminor": (337, 8),
}  # fmt: skip
PAX_NUMBERS = ("size", "uid", "gid", "mtime", "ctime", "atime", "SCHILY.devmajor")
VALUES = (2**33, 2**40, 2**40 + 1, 2**61, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def with_check_sum(header: bytes) -> bytes:
    blank = header[:148] + b" " * 8 + header[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


def with_number(field: str, raw: bytes) -> bytes:
    member = tarfile.TarInfo("etc")
    header = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
    at, length = NUMBERS[field]
    header[at : at + length] = raw.ljust(length, b"\0")[:length]
    return with_check_sum(bytes(header)) + bytes(1024)


def base_256(value: int, length: int) -> bytes:
    return b"\x80" + struct.pack(">Q", value)[-(length - 1) :].rjust(length - 1, b"\0")


def with_pax(field: str, text: bytes) -> bytes:
    record = b" %s=%s\n" % (field.encode(), text)
    length = len(record) + 2
    record = b"%d" % (length if len(b"%d" % length) == 2 else length + 1) + record
    extended = tarfile.TarInfo("pax")
    extended.type, extended.size = tarfile.XHDTYPE, len(record)
    header = extended.tobuf(tarfile.USTAR_FORMAT)
    entry = tarfile.TarInfo("etc").tobuf(tarfile.USTAR_FORMAT)
    return header + record.ljust(512, b"\0") + entry + bytes(1024)


HOSTILE = {
    **{
        f"{field}={value:#x}": with_number(field, base_256(value, NUMBERS[field][1]))
        for field in NUMBERS
        for value in VALUES
        if value < 2 ** (8 * (NUMBERS[field][1] - 1))
    },
    **{
        f"{field}: {raw!r}": with_number(field, raw)
        for field in NUMBERS
        for raw in (b"7" * 12, b"\xff" * 12, b"-1", b"0x10", b"9", b"1 1", b"\x80" + b"\xff" * 11)
    },
    **{
        f"pax {field}={text[:24]!r}": with_pax(field, text)
        for field in PAX_NUMBERS
        for text in (*(b"%d" % value for value in VALUES), b"-1", b"1e9", b"9" * 40, b"", b"0x1")
    },
}


def read_all(raw: bytes) -> None:
    stream = io.BytesIO(raw)
    reader = TarReader(stream.read)
    while reader.next() is not None:
        while reader.read(4096):
            pass


def told(reads: Callable[[], object], refusal: type[Exception]) -> str:
    """How it ended; anything but that refusal is a failure of the test."""
    try:
        reads()
    except refusal:
        return "refused"
    return "read"


def looks(path: Path) -> None:
    with prepared(path, None):
        pass


@pytest.mark.case("FS-17")
@pytest.mark.parametrize("field", [*NUMBERS, *(f"pax {name}" for name in PAX_NUMBERS)])
def test_no_number_of_a_header_is_more_than_a_refusal(tmp_path: Path, field: str) -> None:
    of_the_field = {
        name: raw for name, raw in HOSTILE.items() if re.split("[=:]", name)[0] == field
    }
    assert len(of_the_field) > 5
    for name, raw in of_the_field.items():
        plain, packed_too = tmp_path / "x.tar", tmp_path / "x.tar.gz"
        plain.write_bytes(raw)
        packed_too.write_bytes(gzip.compress(raw, 1))
        ends = {told(partial(read_all, raw), BadArchive)}
        for each in (plain, packed_too):
            told(partial(looks, each), ExecutionRejected)
        with plain.open("rb") as file:
            ends.add(told(partial(Archive, file), InvalidImage))
        if field in ("size", "pax size"):
            assert ends == {"refused"}, name


def test_the_largest_entry_is_bounded_and_a_good_one_is_read() -> None:
    read_all(with_number("size", b"0000000\0"))
    header = with_number("size", base_256(ENTRY_BYTES_MAX, 12))
    assert TarReader(io.BytesIO(header).read).next() is not None
    header = with_number("size", base_256(ENTRY_BYTES_MAX + 1, 12))
    with pytest.raises(BadArchive, match="too large"):
        TarReader(io.BytesIO(header).read).next()
