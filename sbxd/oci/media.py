"""Media types of images that are understood, and how a layer of each is packed."""

from enum import StrEnum

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
_DOCKER = "application/vnd.docker"

MANIFEST_TYPES = frozenset({MANIFEST, f"{_DOCKER}.distribution.manifest.v2+json"})
INDEX_TYPES = frozenset({INDEX, f"{_DOCKER}.distribution.manifest.list.v2+json"})
CONFIG_TYPES = frozenset({CONFIG, f"{_DOCKER}.container.image.v1+json"})
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # of uname(2), as images name them


class Compression(StrEnum):
    """How a layer is packed."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


_LAYERS = {
    LAYER: Compression.NONE,
    f"{LAYER}+gzip": Compression.GZIP,
    f"{LAYER}+zstd": Compression.ZSTD,
    f"{_DOCKER}.image.rootfs.diff.tar": Compression.NONE,
    f"{_DOCKER}.image.rootfs.diff.tar.gzip": Compression.GZIP,
    f"{_DOCKER}.image.rootfs.diff.tar.zstd": Compression.ZSTD,
}


def compression_of(media_type: str) -> Compression | None:
    """None for what is no layer, or one that is encrypted or must be fetched from elsewhere."""
    return _LAYERS.get(media_type)


def layer_type(magic: bytes) -> str:
    """The media type of a layer that begins with these bytes."""
    if magic.startswith(b"\x1f\x8b"):
        return f"{LAYER}+gzip"
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return f"{LAYER}+zstd"
    return LAYER
