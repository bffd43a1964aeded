"""What the confined process does that unpacks an image: it reads everything that the image says.

The manifest, the configuration and the layers come over one channel: it asks for a blob by its
digest and gets its size and its bytes, which the asked has hashed on the way. In the end it says
how it went. Nothing that is read here is looked at by anybody with more rights.

    blob DIGEST        ->  8 bytes: the size; then so many bytes
    done | errno N | refused TEXT

Invariants: what a layer unpacks to has the digest that the configuration states; an image takes no
more than its room over all its layers; a layer that is listed again, other than next to itself,
where it changes nothing, costs no more than the image's own size once more.
"""

import errno
import os
import re
from typing import IO, Final, cast

from sbxd.launcher.kernel.image_names import add_names
from sbxd.launcher.kernel.image_stream import LayerStream
from sbxd.launcher.kernel.image_tar import Extractor, Room, add_mount_points
from sbxd.oci import documents
from sbxd.oci.documents import DOCUMENT_BYTES_MAX, LAYERS_MAX, Descriptor, InvalidImage
from sbxd.oci.media import compression_of
from sbxd.oci.tar import BadArchive, TarReader

BLOBS_MAX: Final = LAYERS_MAX + 2  # besides the layers: the manifest, the configuration
SIZE_BYTES: Final = 8
REPORT_BYTES_MAX: Final = 512
DONE: Final = b"done"
ASKED: Final = re.compile(rb"blob (sha256:[0-9a-f]{64})")
FAILED: Final = re.compile(rb"errno ([0-9]{1,4})")
REFUSED: Final = b"refused "
_AGAIN_BYTES: Final = 64 * 1024**2  # what layers that are listed again may take in any case


def serve(image_digest: str, room: Room, channel_fd: int, root_fd: int) -> int:
    """Lay the image into the directory `root_fd`, and say how it went; the exit status."""
    try:
        _lay(image_digest, room, channel_fd, root_fd)
        said = DONE
    except (BadArchive, InvalidImage) as problem:
        said = REFUSED + str(problem).encode("ascii", "replace")
    except MemoryError:
        said = REFUSED + b"it is damaged or needs too much memory"
    except OSError as problem:
        said = b"errno %d" % (problem.errno or 0)
    os.write(channel_fd, said[:REPORT_BYTES_MAX])
    return 0


class _Blob:
    """The bytes of one blob, as a stream."""

    def __init__(self, channel: int, digest: str) -> None:
        self._channel = channel
        os.write(channel, b"blob " + digest.encode("ascii"))
        self._left = SIZE_BYTES
        raw = b""
        while len(raw) < SIZE_BYTES:
            raw += self.read(SIZE_BYTES)
        self.size = self._left = int.from_bytes(raw, "big")

    def read(self, size: int) -> bytes:
        """At most `size` bytes, b"" at its end."""
        if not (wanted := min(size, self._left)):
            return b""
        if not (piece := os.read(self._channel, wanted)):
            raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
        self._left -= len(piece)
        return piece


def _document(channel: int, digest: str, what: str) -> bytes:
    blob = _Blob(channel, digest)
    if blob.size > DOCUMENT_BYTES_MAX:
        raise InvalidImage(f"the {what} is too large")
    raw = bytearray()
    while piece := blob.read(DOCUMENT_BYTES_MAX):
        raw += piece
    return bytes(raw)


def _lay(image_digest: str, room: Room, channel: int, root: int) -> None:
    manifest = documents.manifest(_document(channel, image_digest, "manifest"))
    raw = _document(channel, manifest.config.digest, "configuration")
    config = documents.config(raw, len(manifest.layers))
    laid: set[str] = set()
    again_left = _AGAIN_BYTES
    before = None
    for number, pair in enumerate(zip(manifest.layers, config.rootfs.diff_ids, strict=True), 1):
        blob, unpacked = pair
        if (blob.digest, unpacked) == before:
            continue
        before = (blob.digest, unpacked)
        is_first = blob.digest not in laid
        bounded = room if is_first else room._replace(size_bytes=min(room.size_bytes, again_left))
        try:
            entries, size = _layer(channel, root, blob, unpacked, bounded, lowest=not laid)
        except (BadArchive, MemoryError) as problem:
            which = f"layer {number}" if is_first else f"layer {number}, which is listed again,"
            reason = str(problem) or "it is damaged or needs too much memory"
            raise BadArchive(f"{which} is refused: {reason}") from None
        room = room._replace(entries=room.entries - entries, size_bytes=room.size_bytes - size)
        again_left += size if is_first else -size
        laid.add(blob.digest)
    try:
        add_mount_points(root)
        add_names(root)
    except BadArchive as problem:
        raise BadArchive(f"layer {len(manifest.layers)} is refused: {problem}") from None


def _layer(
    channel: int, root: int, layer: Descriptor, unpacked: str, room: Room, *, lowest: bool
) -> tuple[int, int]:
    """Lay one layer; how many entries and bytes it took."""
    blob = _Blob(channel, layer.digest)
    if blob.size != layer.size:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
    compression = compression_of(layer.media_type)
    assert compression is not None  # documents.manifest has looked
    stream = LayerStream(cast(IO[bytes], blob), compression, room.size_bytes)
    extractor = Extractor(root, room, lowest=lowest)
    extractor.extract(TarReader(stream.read))
    if stream.finish() != unpacked:
        raise BadArchive("unpacked it is not what the configuration says")
    return extractor.entries, extractor.size_bytes
