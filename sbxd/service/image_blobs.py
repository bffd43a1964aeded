"""The image store's directory: an OCI layout, its blobs and its index. Blocking: run in a thread.

    index.json, oci-layout, blobs/sha256/<digits>   the layout
    ingress/<random>/                               one import that is under way
    unpacking/<digits>                              one that may be unpacked and not listed

Invariants: `index.json` is replaced atomically and lists only images whose blobs are complete; a
blob has its name only once its content has that digest and is on the disk; what `unpacking` names
was written down before the mechanism was asked.
"""

import errno
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sbxd.oci import documents, media
from sbxd.oci.documents import DOCUMENT_BYTES_MAX, Descriptor, Index


@dataclass(frozen=True)
class Contents:
    """What an image consists of. blobs: digest to size, the manifest and the configuration too."""

    layers: int
    blobs: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        """Of all blobs, packed as they are."""
        return sum(self.blobs.values())


class BlobStore:
    """directory: owned by the daemon. Not thread-safe: the caller takes turns."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._blobs = directory / "blobs" / "sha256"
        self._unpacking = directory / "unpacking"
        self._entries: tuple[Descriptor, ...] = ()
        self._contents: dict[str, Contents] = {}  # of every listed image

    @property
    def entries(self) -> tuple[Descriptor, ...]:
        """The images that are listed, by their manifests."""
        return self._entries

    def make_layout(self) -> None:
        """Make what is missing and remove what killed imports have left. Raises OSError."""
        for folder in (self._blobs, self._directory / "ingress", self._unpacking):
            folder.mkdir(parents=True, exist_ok=True)
        for leftover in (self._directory / "ingress").iterdir():
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        for leftover in self._directory.glob(".index.json.*"):
            leftover.unlink()
        layout = self._directory / "oci-layout"
        if not layout.exists():
            _write_atomically(layout, b'{"imageLayoutVersion":"1.0.0"}')

    def open_ingress(self, size_bytes: int) -> Path:
        """A fresh folder for one import of this size. Raises OSError, with ENOSPC when the file
        system has no room for it."""
        free = os.statvfs(self._directory)
        if size_bytes > free.f_bavail * free.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        folder = self._directory / "ingress" / os.urandom(8).hex()
        folder.mkdir()
        return folder

    def read_index(self) -> Sequence[str]:
        """Load the index; the problems found, each with its fix where there is one."""
        path = self._directory / "index.json"
        if not path.exists():
            return []
        try:
            entries = documents.index(path.read_bytes()).manifests
        except documents.InvalidImage as damage:
            return [
                f"the store's index is damaged, so no image is known ({damage}): "
                "restore it, or import the images again"
            ]
        problems, good = [], []
        for entry in entries:
            problem = self._damage(entry)
            if problem is None:
                good.append(entry)
            else:
                problems.append(f"image {entry.digest} is ignored: {problem}")
        self._entries = tuple(good)
        return problems

    def commit(self, folder: Path, names: Iterable[str], manifest_raw: bytes) -> None:
        """Take the blobs of an ingress folder, each named by its digits, and the manifest."""
        for name in names:
            os.rename(folder / name, self._blob(f"sha256:{name}"))
        _write_atomically(self._blob(digest_of(manifest_raw)), manifest_raw)
        _fsync_directory(self._blobs)

    def replace_index(self, entries: Iterable[Descriptor]) -> None:
        """List these images, and no others."""
        index = Index(schema_version=2, media_type=media.INDEX, manifests=tuple(entries))
        contents = {
            each.digest: self._contents.get(each.digest) or self._read(each.digest)
            for each in index.manifests
        }
        _write_atomically(self._directory / "index.json", canonical(index))
        _fsync_directory(self._directory)
        self._entries, self._contents = index.manifests, contents

    def collect(self, spared: Collection[str]) -> None:
        """Remove every blob that no listed image needs, but those spared (digests)."""
        needed = {digest for each in self._contents.values() for digest in each.blobs}
        needed.update(spared)
        for blob in self._blobs.iterdir():
            if f"sha256:{blob.name}" not in needed:
                blob.unlink()

    def contents(self, digest: str) -> Contents:
        """Of a listed image. Reads nothing."""
        return self._contents[digest]

    def unshared_bytes(self, digest: str) -> int:
        """The bytes of those blobs that no other listed image needs. Reads nothing."""
        needed = Counter(blob for each in self._contents.values() for blob in each.blobs)
        blobs = self._contents[digest].blobs
        return sum(size for blob, size in blobs.items() if needed[blob] == 1)

    # --- images that may be unpacked without being listed ---------------------------------------

    def begin_unpacking(self, digest: str) -> None:
        """Write down that the mechanism is about to be asked."""
        (self._unpacking / digest.removeprefix("sha256:")).touch()
        _fsync_directory(self._unpacking)

    def end_unpacking(self, digest: str) -> None:
        """The image is listed now, or its unpacked form is gone."""
        with suppress(FileNotFoundError):
            (self._unpacking / digest.removeprefix("sha256:")).unlink()

    def unpacked_in_doubt(self) -> tuple[str, ...]:
        """Digests that were begun and neither listed nor removed."""
        listed = {entry.digest for entry in self._entries}
        found = sorted(f"sha256:{path.name}" for path in self._unpacking.iterdir())
        return tuple(digest for digest in found if digest not in listed)

    # --- parts ----------------------------------------------------------------------------------

    def _read(self, digest: str) -> Contents:
        """What a manifest says, verified. Raises OSError, ValueError."""
        path = self._blob(digest)
        if path.stat().st_size > DOCUMENT_BYTES_MAX:
            raise ValueError("the manifest is too large")
        raw = path.read_bytes()
        if digest_of(raw) != digest:
            raise ValueError("the manifest's digest is another")
        manifest = documents.manifest(raw)
        blobs = {each.digest: each.size for each in (manifest.config, *manifest.layers)}
        return Contents(layers=len(manifest.layers), blobs={**blobs, digest: len(raw)})

    def _damage(self, entry: Descriptor) -> str | None:
        try:
            contents = self._read(entry.digest)
        except (OSError, ValueError) as problem:
            return f"its manifest cannot be read ({type(problem).__name__})"
        for digest, size in contents.blobs.items():
            path = self._blob(digest)
            if not path.is_file() or path.stat().st_size != size:
                return f"its blob {digest} is missing or has another size"
        self._contents[entry.digest] = contents
        return None

    def _blob(self, digest: str) -> Path:
        algorithm, _, value = digest.partition(":")
        if algorithm != "sha256" or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            raise ValueError("not a sha256 digest")
        return self._blobs / value


def digest_of(raw: bytes) -> str:
    """The digest of a document."""
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def canonical(document: object) -> bytes:
    """The same bytes for the same document."""
    return msgspec.json.encode(document, order="sorted")


def create_exclusive(path: Path) -> int:
    """A descriptor of a new file, for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def write_all(file: int, raw: bytes) -> None:
    """Write every byte."""
    view = memoryview(raw)
    while view:
        view = view[os.write(file, view) :]


def _write_atomically(path: Path, raw: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    file = create_exclusive(partial)
    try:
        write_all(file, raw)
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(partial, path)


def _fsync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
