"""The tar reader agrees with the standard library on what honest tools write."""

import io
import tarfile
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbxd.oci.tar import (
    HEADER_BYTES_MAX,
    BadArchive,
    Entry,
    Kind,
    TarReader,
    safe_parts,
)

_KINDS = {
    tarfile.REGTYPE: Kind.FILE,
    tarfile.DIRTYPE: Kind.DIRECTORY,
    tarfile.SYMTYPE: Kind.SYMLINK,
    tarfile.LNKTYPE: Kind.HARDLINK,
    tarfile.FIFOTYPE: Kind.DEVICE,
    tarfile.CHRTYPE: Kind.DEVICE,
}
_names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=300
).filter(lambda name: name.strip("/") != "")


def read_all(
    raw: bytes, *, step: int | None = None, seek: bool = False
) -> list[tuple[Entry, bytes]]:
    stream = io.BytesIO(raw)

    def pieces(size: int) -> bytes:
        return stream.read(size if step is None else min(size, step))

    def skip(size: int) -> None:
        stream.seek(size, 1)

    reader = TarReader(pieces, skip=skip if seek else None)
    found = []
    while (entry := reader.next()) is not None:
        content = b""
        while not seek and (piece := reader.read(1000)):
            content += piece
        found.append((entry, content))
    return found


@st.composite
def members(draw: st.DrawFn) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(draw(_names))
    member.type = draw(st.sampled_from(sorted(_KINDS)))
    if member.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        member.linkname = draw(_names)
    content = draw(st.binary(max_size=3000)) if member.type == tarfile.REGTYPE else b""
    member.size = len(content)
    member.mode = draw(st.integers(0, 0o7777))
    member.uid, member.gid = draw(st.integers(0, 2**32)), draw(st.integers(0, 2**32))
    member.mtime = draw(
        st.integers(0, 2**33) | st.integers(0, 2**33).map(lambda whole: whole + 0.5)
    )
    return member, content


@given(st.lists(members(), max_size=5), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
@example([], tarfile.PAX_FORMAT)
def test_what_the_standard_library_writes_is_read_back(
    written: list[tuple[tarfile.TarInfo, bytes]], format: int
) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, encoding="utf-8") as archive:
        for member, content in written:
            archive.addfile(member, io.BytesIO(content))
    with tarfile.open(fileobj=io.BytesIO(out.getvalue()), encoding="utf-8") as archive:
        expected = archive.getmembers()
    found = read_all(out.getvalue())
    assert len(found) == len(written)
    for (entry, content), other, (_, text) in zip(found, expected, written, strict=True):
        is_folder = entry.kind is Kind.DIRECTORY
        assert entry.name.rstrip(b"/") == other.name.encode().rstrip(b"/") or is_folder
        assert entry.kind is _KINDS[other.type]
        assert (entry.mode, entry.uid, entry.gid) == (other.mode, other.uid, other.gid)
        assert entry.mtime == int(other.mtime)
        assert content == text
        if entry.kind in (Kind.SYMLINK, Kind.HARDLINK):
            assert entry.link == other.linkname.encode()
    assert [e for e, _ in read_all(out.getvalue(), step=7)] == [e for e, _ in found]
    assert [e for e, _ in read_all(out.getvalue(), seek=True)] == [e for e, _ in found]


@given(st.binary(max_size=4000))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        read_all(raw)
    except BadArchive:
        return
    assert raw.count(0) == len(raw), "by chance only nothing at all is an archive"


@given(st.data())
def test_a_damaged_archive_is_read_or_refused(data: st.DataObject) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("a", "b" * 150, "ü"):
            member = tarfile.TarInfo(name)
            member.size = 600
            archive.addfile(member, io.BytesIO(bytes(600)))
    raw = bytearray(out.getvalue())
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_all(bytes(raw))
    except BadArchive:
        return


def test_a_header_is_never_held_that_is_larger_than_the_cap() -> None:
    member = tarfile.TarInfo("x")
    member.type, member.size = b"x", HEADER_BYTES_MAX + 1
    asked = []
    stream = io.BytesIO(member.tobuf(tarfile.GNU_FORMAT))

    def read(size: int) -> bytes:
        asked.append(size)
        return stream.read(size)

    with pytest.raises(BadArchive, match="too large"):
        TarReader(read).next()
    assert max(asked) <= 512


def test_the_old_way_to_write_a_directory_and_a_prefix_are_understood() -> None:
    old = tarfile.TarInfo("folder/")
    old.type = tarfile.AREGTYPE
    raw = bytearray(old.tobuf(tarfile.USTAR_FORMAT))
    long = tarfile.TarInfo("p" * 90 + "/" + "n" * 90)
    found = read_all(bytes(raw) + long.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    assert [entry.kind for entry, _ in found] == [Kind.DIRECTORY, Kind.FILE]
    assert found[1][0].name == b"p" * 90 + b"/" + b"n" * 90


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (b"./usr//bin/./env", (b"usr", b"bin", b"env")),
        (b"./", ()),
        (b"..x/y..", (b"..x", b"y..")),
        (b"\xff", (b"\xff",)),
    ],
)
def test_a_name_becomes_its_parts(name: bytes, parts: tuple[bytes, ...]) -> None:
    assert safe_parts(name) == parts


@pytest.mark.parametrize(
    "name",
    [b"/etc/passwd", b"../x", b"a/../../x", b"a/..", b"a/" * 200, b"a" * 300, b"a/b" * 2000],
)
def test_a_name_that_could_leave_the_root_or_break_a_walk_is_refused(name: bytes) -> None:
    with pytest.raises(BadArchive):
        safe_parts(name)


def _field(at: int, value: bytes) -> Callable[[bytearray], None]:
    def change(block: bytearray) -> None:
        block[at : at + len(value)] = value
        block[148:156] = b" " * 8
        block[148:156] = f"{sum(block):06o}\0 ".encode()

    return change


@pytest.mark.parametrize(
    "change",
    [
        _field(124, b"\xff" * 12),  # size: negative
        _field(124, b"\x80\x01" + bytes(10)),  # size: more than 8 bytes
        _field(124, b"0000000000x\0"),
        _field(108, b"-000001\0"),
        _field(156, b"Z"),
    ],
    ids=["negative", "huge", "letter", "minus", "type"],
)
def test_a_number_or_type_that_means_nothing_is_refused(
    change: Callable[[bytearray], None],
) -> None:
    block = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    read_all(bytes(block) + bytes(1024))  # the control
    change(block)
    with pytest.raises(BadArchive):
        read_all(bytes(block) + bytes(1024))
