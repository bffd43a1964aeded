"""Archives and packed streams are found by what a reader would open, wherever its magic stands."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.policy.archives import ARCHIVES, ArchiveScanner, refused_archives
from sbxd.port.artifact import ContentFlag

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
MEBIBYTE = 1024 * 1024


def zipped(comment: bytes = b"") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a.txt", "a" * 100)
        archive.comment = comment
    return made.getvalue()


def tarred(kind: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=kind) as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"a"))
    return made.getvalue()


def oldest_tar() -> bytes:
    """Of before there was a magic: a name, a size and a sum."""
    header = bytearray(512)
    header[:5] = b"a.txt"
    header[100:107] = b"0000644"
    header[124:135] = b"00000000001"
    header[148:156] = b" " * 8
    header[148:155] = b"%06o\0" % sum(header)
    return bytes(header) + b"a" + bytes(1535)


ZIP, TAR = ContentFlag.ARCHIVE_ZIP, ContentFlag.ARCHIVE_TAR
MADE: list[tuple[str, bytes, ContentFlag]] = [
    ("zip", zipped(), ZIP),
    ("empty zip", b"PK\x05\x06" + bytes(18), ZIP),
    ("spanned zip", b"PK\x07\x08PK\x03\x04" + bytes(40), ZIP),
    ("zip behind a picture", PNG + zipped(), ZIP),
    ("zip behind 3 MiB", bytes(3 * MEBIBYTE) + zipped(), ZIP),
    ("zip with the longest comment", PNG + zipped(b"c" * 65_535), ZIP),
    ("zip with something behind it", PNG + zipped() + bytes(60_000), ZIP),
    ("tar", tarred(tarfile.USTAR_FORMAT), TAR),
    ("GNU tar", tarred(tarfile.GNU_FORMAT), TAR),
    ("pax tar", tarred(tarfile.PAX_FORMAT), TAR),
    ("oldest tar", oldest_tar(), TAR),
    ("gzip", gzip.compress(b"a"), ContentFlag.ARCHIVE_GZIP),
    ("bzip2", bz2.compress(b"a"), ContentFlag.ARCHIVE_BZIP2),
    ("empty bzip2", bz2.compress(b""), ContentFlag.ARCHIVE_BZIP2),
    ("xz", lzma.compress(b"a"), ContentFlag.ARCHIVE_XZ),
    ("zstd", b"\x28\xb5\x2f\xfd" + bytes(9), ContentFlag.ARCHIVE_ZSTD),
    ("skippable zstd", b"\x52\x2a\x4d\x18" + bytes(9), ContentFlag.ARCHIVE_ZSTD),
    ("lz4", b"\x04\x22\x4d\x18" + bytes(9), ContentFlag.ARCHIVE_LZ4),
    ("compress", b"\x1f\x9d\x90" + bytes(9), ContentFlag.ARCHIVE_COMPRESS),
    ("7z", b"7z\xbc\xaf\x27\x1c" + bytes(30), ContentFlag.ARCHIVE_7Z),
    ("self-extracting 7z", b"MZ" + bytes(200_000) + b"7z\xbc\xaf\x27\x1c", ContentFlag.ARCHIVE_7Z),
    ("rar 4", b"Rar!\x1a\x07\x00" + bytes(30), ContentFlag.ARCHIVE_RAR),
    ("rar 5", b"Rar!\x1a\x07\x01\x00" + bytes(30), ContentFlag.ARCHIVE_RAR),
    ("self-extracting rar", b"MZ" + bytes(99_999) + b"Rar!\x1a\x07\x00", ContentFlag.ARCHIVE_RAR),
    ("cab", b"MSCF" + bytes(40), ContentFlag.ARCHIVE_CAB),
    ("iso", bytes(0x8001) + b"CD001\x01" + bytes(2041), ContentFlag.ARCHIVE_ISO9660),
    ("iso, second", bytes(0x8801) + b"CD001\x01" + bytes(2041), ContentFlag.ARCHIVE_ISO9660),
    ("deb", b"!<arch>\ndebian-binary   ", ContentFlag.ARCHIVE_AR),
    ("cpio", b"070701" + b"0" * 104, ContentFlag.ARCHIVE_CPIO),
    ("old cpio", b"070707" + b"0" * 70, ContentFlag.ARCHIVE_CPIO),
    ("binary cpio", b"\xc7\x71" + bytes(24), ContentFlag.ARCHIVE_CPIO),
]
HARMLESS = [
    b"",
    b"PK",
    b"a,b\nPK,1\n070701,2\n",
    b"070707 is a number\n" * 10,
    PNG,
    b"%PDF-1.7\n" + bytes(range(256)) * 300,
    b"BZh9 is how bzip2 begins",
    b"ustar" * 200,
    b"MSCF, Rar! and 7z are names\n",
    bytes(2048),
]


def found(data: bytes, *cuts: int) -> frozenset[ContentFlag]:
    scanner, start = ArchiveScanner(), 0
    for cut in (*cuts, len(data)):
        scanner.feed(data[start:cut])
        start = cut
    return scanner.finish()


@pytest.mark.case("EXP-13")
@pytest.mark.parametrize(("data", "flag"), [m[1:] for m in MADE], ids=[m[0] for m in MADE])
def test_an_archive_is_found(data: bytes, flag: ContentFlag) -> None:
    assert found(data) == {flag}


@pytest.mark.parametrize("data", HARMLESS)
def test_what_is_no_archive_is_not_taken_for_one(data: bytes) -> None:
    assert found(data) == frozenset()


@pytest.mark.case("EXP-13")
def test_a_polyglot_is_all_that_it_is() -> None:
    both = tarred(tarfile.USTAR_FORMAT) + zipped()
    assert found(both) == {TAR, ZIP}
    assert found(gzip.compress(b"a") + zipped()) == {ContentFlag.ARCHIVE_GZIP, ZIP}
    assert refused_archives(found(both), "application/zip", frozenset({"application/zip"})) == {TAR}


@given(st.sampled_from(MADE), st.lists(st.integers(0, 70_000), max_size=6))
def test_the_pieces_change_nothing(made: tuple[str, bytes, ContentFlag], cuts: list[int]) -> None:
    _, data, flag = made
    assert found(data, *sorted(min(cut, len(data)) for cut in cuts)) == {flag}


def test_a_zip_is_found_wherever_its_end_can_be() -> None:
    """To the last byte, and no further: a longer comment than there can be hides none."""
    end = b"PK\x05\x06" + bytes(18)
    for behind in (0, 1, 65_534, 65_535):
        assert found(PNG + end + b"x" * behind) == {ZIP}, behind
    assert found(PNG + end + b"x" * 65_536) == frozenset()
    assert found(PNG + end[:-1]) == frozenset()


@pytest.mark.parametrize(("name", "data", "flag"), MADE, ids=[m[0] for m in MADE])
def test_a_type_allows_what_it_names_and_an_operator_lists_it(
    name: str, data: bytes, flag: ContentFlag
) -> None:
    kinds = found(data)
    assert refused_archives(kinds, "text/csv", frozenset()) == kinds
    assert refused_archives(kinds, "application/octet-stream", frozenset()) == kinds
    everything = frozenset({"application/octet-stream"})
    assert refused_archives(kinds, "application/octet-stream", everything) == frozenset()
    listed = frozenset({"application/zip", "application/epub+zip", "application/x-tar"})
    for kind, allowed in (
        ("application/zip", ZIP),
        ("application/EPUB+zip", ZIP),
        ("application/x-tar; charset=binary", TAR),
    ):
        assert refused_archives(kinds, kind, listed) == kinds - {allowed}


def test_memory_is_bounded_and_flags_of_text_are_left_alone() -> None:
    scanner = ArchiveScanner()
    for _ in range(64):
        scanner.feed(bytes(MEBIBYTE))
    assert sum(len(held) for held in vars(scanner).values()) < 2 * MEBIBYTE
    text = frozenset({ContentFlag.NUL})
    assert refused_archives(text, "text/plain", frozenset()) == frozenset()
    assert ContentFlag.NUL not in ARCHIVES
