"""What the lab's servers serve: a file, a package index, a git repository, an npm package.

Everything is made here from nothing, by hand and without the programs that will read it, so that
a client's success says something of the client and the way, and nothing of a common library.
"""

import base64
import hashlib
import io
import json
import tarfile
import zipfile
import zlib
from pathlib import Path

GREETING = b"hello from the other side\n"
BIG_BYTES = 8 * 1024 * 1024
NPM_HOST = "https://npm.lab-allowed.com"


def write_content(root: Path) -> None:
    """Write all of it below `root`."""
    (root / "files").mkdir(parents=True)
    (root / "files" / "greeting.txt").write_bytes(GREETING)
    (root / "files" / "big.bin").write_bytes(bytes(range(256)) * (BIG_BYTES // 256))
    _write_wheel(root)
    _write_repository(root / "project.git")
    _write_npm_package(root)


def _write_wheel(root: Path) -> None:
    name = "labgreeting-1.0-py3-none-any.whl"
    files = {
        "labgreeting.py": b'GREETING = "installed"\n',
        "labgreeting-1.0.dist-info/METADATA": (
            b"Metadata-Version: 2.1\nName: labgreeting\nVersion: 1.0\n"
        ),
        "labgreeting-1.0.dist-info/WHEEL": (
            b"Wheel-Version: 1.0\nGenerator: lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(
        f"{path},sha256={_urlsafe(hashlib.sha256(data).digest())},{len(data)}\n"
        for path, data in files.items()
    )
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(
            "labgreeting-1.0.dist-info/RECORD", record + "labgreeting-1.0.dist-info/RECORD,,\n"
        )
    index = root / "simple" / "labgreeting"
    index.mkdir(parents=True)
    (index / name).write_bytes(raw.getvalue())
    digest = hashlib.sha256(raw.getvalue()).hexdigest()
    (index / "index.html").write_text(
        f'<!DOCTYPE html><html><body><a href="{name}#sha256={digest}">{name}</a></body></html>\n'
    )


def _urlsafe(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _write_repository(root: Path) -> None:
    """A bare repository for git's plain HTTP protocol, of one commit with one file."""
    blob = _write_object(root, b"blob", b"cloned\n")
    tree = _write_object(root, b"tree", b"100644 README\0" + bytes.fromhex(blob))
    who = b"Lab <lab@lab-allowed.com> 1700000000 +0000"
    commit = _write_object(
        root,
        b"commit",
        b"tree %b\nauthor %b\ncommitter %b\n\nFirst\n" % (tree.encode(), who, who),
    )
    (root / "HEAD").write_text("ref: refs/heads/main\n")
    (root / "info").mkdir()
    (root / "info" / "refs").write_text(f"{commit}\trefs/heads/main\n")
    (root / "objects" / "info").mkdir()
    (root / "objects" / "info" / "packs").write_text("\n")


def _write_object(root: Path, kind: bytes, data: bytes) -> str:
    raw = b"%b %d\0%b" % (kind, len(data), data)
    name = hashlib.sha1(raw, usedforsecurity=False).hexdigest()
    path = root / "objects" / name[:2] / name[2:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zlib.compress(raw))
    return name


def _write_npm_package(root: Path) -> None:
    raw = io.BytesIO()
    files = {
        "package/package.json": b'{"name":"labgreeting","version":"1.0.0","main":"index.js"}',
        "package/index.js": b'module.exports = "installed";\n',
    }
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    package = root / "npm"
    (package / "labgreeting" / "-").mkdir(parents=True)
    (package / "labgreeting" / "-" / "labgreeting-1.0.0.tgz").write_bytes(raw.getvalue())
    integrity = base64.b64encode(hashlib.sha512(raw.getvalue()).digest()).decode()
    about = {
        "name": "labgreeting",
        "dist-tags": {"latest": "1.0.0"},
        "versions": {
            "1.0.0": {
                "name": "labgreeting",
                "version": "1.0.0",
                "dist": {
                    "tarball": f"{NPM_HOST}/npm/labgreeting/-/labgreeting-1.0.0.tgz",
                    "integrity": f"sha512-{integrity}",
                },
            }
        },
    }
    (package / "labgreeting" / "index.html").write_text(json.dumps(about))
