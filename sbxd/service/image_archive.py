"""An archive of images (an OCI layout as a tar, or what `docker save` writes), taken apart.

The archive lies on the disk, is walked once by its headers, and only what the chosen image needs
is copied out of it, hashed on the way. Everything in it is the claim of whoever made it.

Invariants: a blob is admitted when its digest and its size are those that the document naming it
says, and the outermost name is the manifest's own digest; no path of the archive becomes a path of
this host (blobs are written under their digests alone); what is held in memory is bounded by the
documents' cap. Blocking: run it in a thread.
"""

import hashlib
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from sbxd.oci import documents, media
from sbxd.oci.choose import NESTED_MAX, choose, choose_saved
from sbxd.oci.documents import DOCUMENT_BYTES_MAX, Descriptor, InvalidImage, Manifest
from sbxd.oci.media import Compression, compression_of
from sbxd.oci.tar import BadArchive, Kind, TarReader, safe_parts

MEMBERS_MAX = 20_000
_CHUNK_BYTES = 256 * 1024
_LAYOUT = "oci-layout"
_INDEX = "index.json"
_SAVED = "manifest.json"
_LAYOUT_VERSION = "1.0.0"


@dataclass(frozen=True)
class Taken:
    """An image whose blobs are complete. `blobs` are files in the folder that was given, each
    under the hexadecimal digits of its digest; the manifest is not among them."""

    manifest_raw: bytes
    manifest: Manifest
    blobs: tuple[str, ...]


@dataclass(frozen=True)
class _Member:
    at: int
    size: int
    link: str | None  # of a link: the name that it leads to


class Archive:
    """The members of an archive by name. file: seekable, borrowed. Raises InvalidImage."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._members = _walk(file)

    def take(self, folder: Path, architecture: str, reference: str | None) -> Taken:
        """Copy the image that is meant into `folder`. Raises InvalidImage, OSError.

        architecture: of this machine, as images name it.
        """
        if _LAYOUT in self._members and _INDEX in self._members:
            return self._take_layout(folder, architecture, reference)
        if _SAVED in self._members:
            return self._take_saved(folder, architecture, reference)
        raise InvalidImage("neither an OCI layout nor what `docker save` writes")

    # --- OCI layout ---------------------------------------------------------------------------

    def _take_layout(self, folder: Path, architecture: str, reference: str | None) -> Taken:
        layout = documents.decode(self._read(_LAYOUT), documents.Layout, "oci-layout file")
        if layout.image_layout_version != _LAYOUT_VERSION:
            raise InvalidImage(f"an OCI layout of version {layout.image_layout_version[:40]}")
        raw = self._read(_INDEX)
        documents.unambiguous(raw, "index")
        chosen = choose(documents.index(raw).manifests, architecture, reference)
        for _ in range(NESTED_MAX):
            raw = self._document(chosen, "manifest")
            if chosen.media_type in media.MANIFEST_TYPES:
                break
            chosen = choose(documents.index(raw).manifests, architecture)
        else:
            raise InvalidImage("the index is nested too deeply")
        manifest = documents.manifest(raw)
        if manifest.media_type not in ("", chosen.media_type):
            raise InvalidImage("the manifest is of another kind than the index says")
        config_raw = self._document(manifest.config, "configuration")
        config = documents.config(config_raw, len(manifest.layers))
        _require_platform(config, architecture)
        digests = [_hex(manifest.config.digest)]
        _write(folder / digests[0], config_raw)
        for layer in manifest.layers:
            if _hex(layer.digest) not in digests:
                member = self._member(_blob_name(layer.digest))
                copied, size = self._copy(member, folder / _hex(layer.digest))
                if (copied, size) != (layer.digest, layer.size):
                    raise InvalidImage(f"the blob {layer.digest} is not what its name says")
                digests.append(_hex(layer.digest))
        return Taken(raw, manifest, tuple(digests))

    def _document(self, descriptor: Descriptor, what: str) -> bytes:
        raw = self._read(_blob_name(descriptor.digest))
        if len(raw) != descriptor.size or _digest(raw) != descriptor.digest:
            raise InvalidImage(f"the {what} {descriptor.digest} is not what its name says")
        documents.unambiguous(raw, what)
        return raw

    # --- docker-archive -----------------------------------------------------------------------

    def _take_saved(self, folder: Path, architecture: str, reference: str | None) -> Taken:
        raw = self._read(_SAVED)
        documents.unambiguous(raw, _SAVED)
        saved = choose_saved(documents.saved_images(raw), reference)
        config_raw = self._read(saved.config)
        documents.unambiguous(config_raw, "configuration")
        config = documents.config(config_raw, len(saved.layers))
        _require_platform(config, architecture)
        if _claimed(saved.config) not in (None, _digest(config_raw)):
            raise InvalidImage("the configuration is not what its name says")
        config_digest = _digest(config_raw)
        digests = [_hex(config_digest)]
        _write(folder / digests[0], config_raw)
        layers: list[Descriptor] = []
        copied: dict[tuple[_Member, str], Descriptor] = {}
        for name, unpacked in zip(saved.layers, config.rootfs.diff_ids, strict=True):
            member = self._member(name)
            if (again := copied.get((member, unpacked))) is not None:
                layers.append(again)
                continue
            self._file.seek(member.at)
            media_type = media.layer_type(self._file.read(min(4, member.size)))
            partial = folder / "layer"
            digest, size = self._copy(member, partial)
            # A packed layer is compared when it is unpacked.
            if compression_of(media_type) is Compression.NONE and digest != unpacked:
                raise InvalidImage(f"the layer {unpacked} is not what the configuration says")
            partial.rename(folder / _hex(digest))
            digests.append(_hex(digest))
            layers.append(Descriptor(media_type=media_type, digest=digest, size=size))
            copied[member, unpacked] = layers[-1]
        manifest = Manifest(
            schema_version=2,
            media_type=media.MANIFEST,
            config=Descriptor(media_type=media.CONFIG, digest=config_digest, size=len(config_raw)),
            layers=tuple(layers),
        )
        encoded = msgspec.json.encode(manifest, order="sorted")
        return Taken(encoded, manifest, tuple(dict.fromkeys(digests)))

    # --- members ------------------------------------------------------------------------------

    def _member(self, name: str) -> _Member:
        """A file of the archive; a link is followed once, by name and within the archive."""
        for _ in range(2):
            found = self._members.get(name)
            if found is None:
                raise InvalidImage(f"it names {ascii(name)[1:-1][:120]} and does not hold it")
            if found.link is None:
                return found
            name = found.link
        raise InvalidImage("a link in the archive leads to a link")

    def _read(self, name: str) -> bytes:
        member = self._member(name)
        if member.size > DOCUMENT_BYTES_MAX:
            raise InvalidImage(f"{ascii(name)[1:-1][:120]} is too large")
        self._file.seek(member.at)
        raw = self._file.read(member.size)
        if len(raw) != member.size:
            raise InvalidImage("the archive is cut short")
        return raw

    def _copy(self, member: _Member, target: Path) -> tuple[str, int]:
        digest = hashlib.sha256()
        left = member.size
        self._file.seek(member.at)
        with target.open("xb") as out:
            while left > 0:
                piece = self._file.read(min(left, _CHUNK_BYTES))
                if not piece:
                    raise InvalidImage("the archive is cut short")
                digest.update(piece)
                out.write(piece)
                left -= len(piece)
            out.flush()
            os.fsync(out.fileno())
        return f"sha256:{digest.hexdigest()}", member.size


def _walk(file: BinaryIO) -> Mapping[str, _Member]:
    found: dict[str, _Member] = {}
    file.seek(0)

    def skip(size: int) -> None:
        file.seek(size, 1)

    reader = TarReader(file.read, skip=skip)
    try:
        for _ in range(MEMBERS_MAX):
            entry = reader.next()
            if entry is None:
                return found
            name = "/".join(part.decode("ascii") for part in safe_parts(entry.name))
            if entry.kind is Kind.DIRECTORY:
                continue
            if name in found:
                raise InvalidImage(f"the archive holds {ascii(name)[1:-1][:120]} twice")
            link = None
            if entry.kind in (Kind.SYMLINK, Kind.HARDLINK):
                base = posixpath.dirname(name) if entry.kind is Kind.SYMLINK else ""
                link = posixpath.normpath(posixpath.join(base, entry.link.decode("ascii")))
            elif entry.kind is not Kind.FILE:
                raise InvalidImage("the archive holds a device or a FIFO")
            found[name] = _Member(file.tell(), entry.size, link)
    except UnicodeDecodeError:
        raise InvalidImage("a name of the archive is not plain text") from None
    except BadArchive as problem:
        raise InvalidImage(f"the archive is refused: {problem}") from None
    raise InvalidImage("the archive holds too much")


def _require_platform(config: documents.Config, architecture: str) -> None:
    if (config.os, config.architecture) != ("linux", architecture):
        offered = ascii(f"{config.os}/{config.architecture}")[1:-1][:60]
        raise InvalidImage(f"the image is for {offered}, and this machine is linux/{architecture}")


def _claimed(name: str) -> str | None:
    """The digest that the name of a configuration's file claims, if it does."""
    digits = posixpath.basename(name).removesuffix(".json").removeprefix("sha256:")
    return (
        f"sha256:{digits}" if len(digits) == 64 and set(digits) <= set("0123456789abcdef") else None
    )


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{_hex(digest)}"


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _digest(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def _write(path: Path, raw: bytes) -> None:
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
