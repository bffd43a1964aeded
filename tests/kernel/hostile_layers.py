"""Layers that are attacks, each with a harmless one beside it that differs in the attack alone."""

import tarfile
from collections.abc import Mapping
from dataclasses import dataclass

from tests.kernel.image_layers import entry, tar_of

Member = tuple[tarfile.TarInfo, bytes]
FOLDER = (entry("folder", tarfile.DIRTYPE, mode=0o755), b"")
FILE = (entry("folder/file"), b"text")


def raw_of(*members: Member) -> bytes:
    """Members without an end mark, for a layer that is put together by hand."""
    return tar_of(*members).rstrip(b"\0") + bytes(-len(tar_of(*members).rstrip(b"\0")) % 512)


def header(name: str, kind: bytes, size: int, content: bytes = b"") -> bytes:
    """One header as it is asked for, and padded content that need not agree with it."""
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    block = member.tobuf(tarfile.GNU_FORMAT)[-512:]
    return block + content + bytes(-len(content) % 512)


def pax(*records: tuple[str, str], body: bytes | None = None) -> bytes:
    """An extended header."""
    raw = b""
    for key, value in records:
        text = f" {key}={value}\n".encode()
        length = len(text) + 1
        while len(str(length)) + len(text) != length:
            length += 1
        raw += str(length).encode() + text
    raw = raw if body is None else body
    return header("PaxHeaders/x", b"x", len(raw), raw)


END = bytes(1024)
ONE = raw_of((entry("plain"), b"x"))


@dataclass(frozen=True)
class Attack:
    """A hostile layer, what the refusal says, and the harmless layer beside it."""

    layer: bytes
    says: str
    neighbour: bytes


ATTACKS: Mapping[str, Attack] = {
    "a name with dots": Attack(
        tar_of((entry("folder/../../escaped"), b"x")), r"\.\.", tar_of((entry("folder/..x"), b"x"))
    ),
    "an absolute name": Attack(
        tar_of((entry("/escaped"), b"x")), "absolute", tar_of((entry("./escaped"), b"x"))
    ),
    "through an absolute link": Attack(
        tar_of((entry("door", tarfile.SYMTYPE, "/etc"), b""), (entry("door/passwd"), b"x")),
        "leaves the root",
        tar_of((entry("etc/", tarfile.DIRTYPE, mode=0o755), b""),
               (entry("door", tarfile.SYMTYPE, "etc"), b""), (entry("door/passwd"), b"x")),
    ),
    "through an escaping link": Attack(
        tar_of(FOLDER, (entry("folder/door", tarfile.SYMTYPE, "../../.."), b""),
               (entry("folder/door/x"), b"x")),
        "leaves the root",
        tar_of(FOLDER, (entry("folder/door", tarfile.SYMTYPE, ".."), b""),
               (entry("folder/door/x"), b"x")),
    ),
    "through a dangling link": Attack(
        tar_of((entry("door", tarfile.SYMTYPE, "nowhere"), b""), (entry("door/x"), b"x")),
        "leads nowhere",
        tar_of((entry("door", tarfile.SYMTYPE, "nowhere"), b"")),
    ),
    "through a link to itself": Attack(
        tar_of((entry("door", tarfile.SYMTYPE, "door"), b""), (entry("door/x"), b"x")),
        "leads nowhere",
        tar_of((entry("door", tarfile.SYMTYPE, "door"), b"")),
    ),
    "below a file": Attack(
        tar_of((entry("file"), b"x"), (entry("file/x"), b"x")),
        "not a directory",
        tar_of((entry("file"), b"x"), (entry("file2/x"), b"x")),
    ),
    "a hard link out": Attack(
        tar_of((entry("x", tarfile.LNKTYPE, "../../etc/passwd"), b"")),
        r"\.\.",
        tar_of(FOLDER, FILE, (entry("x", tarfile.LNKTYPE, "folder/file"), b"")),
    ),
    "an absolute hard link": Attack(
        tar_of((entry("x", tarfile.LNKTYPE, "/etc/passwd"), b"")),
        "absolute",
        tar_of(FOLDER, FILE, (entry("x", tarfile.LNKTYPE, "./folder/file"), b"")),
    ),
    "a hard link to a link": Attack(
        tar_of((entry("s", tarfile.SYMTYPE, "/etc/shadow"), b""),
               (entry("x", tarfile.LNKTYPE, "s"), b"")),
        "not a file",
        tar_of((entry("s"), b"x"), (entry("x", tarfile.LNKTYPE, "s"), b"")),
    ),
    "a hard link behind a link": Attack(
        tar_of((entry("door", tarfile.SYMTYPE, "/etc"), b""),
               (entry("x", tarfile.LNKTYPE, "door/passwd"), b"")),
        "leaves the root",
        tar_of(FOLDER, FILE, (entry("door", tarfile.SYMTYPE, "folder"), b""),
               (entry("x", tarfile.LNKTYPE, "door/file"), b"")),
    ),
    "a hard link to a device": Attack(
        tar_of((entry("null", tarfile.CHRTYPE), b""), (entry("x", tarfile.LNKTYPE, "null"), b"")),
        "not there",
        tar_of((entry("null", tarfile.CHRTYPE), b""), (entry("x"), b"")),
    ),
    "a whiteout of the parent": Attack(
        tar_of(FOLDER, (entry("folder/.wh..."), b"")), "whiteout", tar_of(FOLDER)
    ),
    "a whiteout of nothing": Attack(
        tar_of((entry(".wh."), b"")), "whiteout", tar_of((entry(".wh.x"), b""))
    ),
    "an owner outside": Attack(
        tar_of((entry("x", uid=65_536), b"")), "owner", tar_of((entry("x", uid=65_535), b""))
    ),
    "a name too deep": Attack(
        tar_of((entry("a/" * 128 + "x"), b"")), "deep", tar_of((entry("a/" * 127 + "x"), b""))
    ),
    "a part too long": Attack(
        tar_of((entry("a" * 256), b"")), "too long", tar_of((entry("a" * 255), b""))
    ),
    "a link too long": Attack(
        tar_of((entry("x", tarfile.SYMTYPE, "a/" * 2048), b"")),
        "too long",
        tar_of((entry("x", tarfile.SYMTYPE, "a/" * 2000), b"")),
    ),
    "a mount point that is a link": Attack(
        tar_of((entry("proc", tarfile.SYMTYPE, "/"), b"")),
        "not a directory",
        tar_of((entry("proc", tarfile.DIRTYPE, mode=0o755), b"")),
    ),
    "a sparse file": Attack(
        header("x", b"S", 0) + END, "sparse", header("x", b"0", 0) + END
    ),
    "a sparse file by records": Attack(
        pax(("GNU.sparse.major", "1"), ("GNU.sparse.realsize", str(2**50))) + ONE + END,
        "sparse",
        pax(("comment", "x")) + ONE + END,
    ),
    "an announced terabyte": Attack(
        header("x", b"0", 2**40) + END, "too large", header("x", b"0", 3, b"abc") + END
    ),
    "a terabyte by a record": Attack(
        pax(("size", str(2**40))) + ONE + END, "too large", pax(("size", "1")) + ONE + END
    ),
    "a negative size": Attack(
        pax(("size", "-1")) + ONE + END, "number", pax(("size", "1")) + ONE + END
    ),
    "a header of gigabytes": Attack(
        header("x", b"x", 2**33) + END, "too large", pax(("comment", "y" * 10_000)) + ONE + END
    ),
    "a name of gigabytes": Attack(
        header("x", b"L", 2**33) + END,
        "too large",
        header("x", b"L", 300, b"nn/" * 99 + b"nnn") + ONE + END,
    ),
    "headers without end": Attack(
        pax(("comment", "x")) * 10 + ONE + END, "type", pax(("comment", "x")) + ONE + END
    ),
    "a record that does not add up": Attack(
        pax(body=b"99 path=x\n") + ONE + END, "add up", pax(body=b"10 path=x\n") + ONE + END
    ),
    "a NUL in a record": Attack(
        pax(("path", "a\0b")) + ONE + END, "NUL", pax(("path", "ab")) + ONE + END
    ),
    "a global header that renames": Attack(
        header("g", b"g", 10, b"10 path=x\n") + ONE + END,
        "global",
        header("g", b"g", 13, b"13 comment=x\n") + ONE + END,
    ),
    "an unknown type": Attack(
        header("x", b"V", 0) + END, "type", header("x", b"7", 0) + END
    ),
    "a second archive behind the end": Attack(
        ONE + END + ONE + END, "follows", ONE + END + END
    ),
    "no end": Attack(ONE, "end mark", ONE + END),
    "cut within a file": Attack(
        header("x", b"0", 5000, b"abc"), "within", header("x", b"0", 3, b"abc") + END
    ),
    "no tar": Attack(b"\x7fELF" + bytes(range(256)) * 8, "header", ONE + END),
}  # fmt: skip
