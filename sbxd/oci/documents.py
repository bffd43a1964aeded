"""The JSON documents of OCI and docker images, decoded strictly, and what they must agree on.

They are written by whoever made the image. So: sizes and counts are bounded before and while a
document is decoded, an ambiguous document is refused (the same key twice; a manifest that is an
index at the same time), and nothing is taken from a document whose digest was not checked first.

Invariants: pure; every refusal is InvalidImage, also one for depth.
"""

import json
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from sbxd.oci.media import CONFIG_TYPES, INDEX_TYPES, MANIFEST_TYPES, compression_of

DOCUMENT_BYTES_MAX = 4 * 1024 * 1024
LAYERS_MAX = 128
MANIFESTS_MAX = 1024
BLOB_BYTES_MAX = 2**40

_T = TypeVar("_T")

DigestText = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
_Text = Annotated[str, Meta(max_length=4096)]
_Annotation = Annotated[str, Meta(max_length=65_536)]
_Annotations = Annotated[dict[_Text, _Annotation], Meta(max_length=1024)]


class InvalidImage(ValueError):
    """What the image says of itself is wrong, too large or ambiguous. The text is for people."""


class Platform(Struct, frozen=True, kw_only=True):
    architecture: _Text = ""
    os: _Text = ""
    variant: _Text = ""


class Descriptor(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An OCI content descriptor."""

    media_type: _Text
    digest: DigestText
    size: Annotated[int, Meta(ge=0, le=BLOB_BYTES_MAX)]
    annotations: _Annotations = {}
    platform: Platform | None = None


class Manifest(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An OCI or docker image manifest. Anything of an index in it is a refusal."""

    schema_version: Annotated[int, Meta(ge=2, le=2)]
    media_type: _Text = ""
    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], Meta(min_length=1, max_length=LAYERS_MAX)]
    annotations: _Annotations = {}
    manifests: msgspec.UnsetType | msgspec.Raw = msgspec.UNSET


class Index(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An OCI index or a docker manifest list. Anything of a manifest in it is a refusal."""

    schema_version: Annotated[int, Meta(ge=2, le=2)]
    media_type: _Text = ""
    manifests: Annotated[tuple[Descriptor, ...], Meta(max_length=MANIFESTS_MAX)]
    layers: msgspec.UnsetType | msgspec.Raw = msgspec.UNSET
    config: msgspec.UnsetType | msgspec.Raw = msgspec.UNSET


class RootFileSystem(Struct, frozen=True, kw_only=True):
    diff_ids: Annotated[tuple[DigestText, ...], Meta(min_length=1, max_length=LAYERS_MAX)]


class Config(Struct, frozen=True, kw_only=True):
    """An image configuration, as far as it is used: the digests of the unpacked layers."""

    architecture: _Text
    os: _Text
    rootfs: RootFileSystem


class SavedImage(Struct, frozen=True, kw_only=True, rename="pascal"):
    """One image of a docker-archive's manifest.json; the names are those of the archive."""

    config: _Text
    repo_tags: Annotated[tuple[_Text, ...], Meta(max_length=1024)] | None = None
    layers: Annotated[tuple[_Text, ...], Meta(min_length=1, max_length=LAYERS_MAX)]


class Layout(Struct, frozen=True, kw_only=True, rename="camel"):
    image_layout_version: _Text


def decode(raw: bytes, type: type[_T], what: str) -> _T:
    """One document. Raises InvalidImage."""
    if len(raw) > DOCUMENT_BYTES_MAX:
        raise InvalidImage(f"the {what} is too large")
    try:
        return msgspec.json.decode(raw, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise InvalidImage(f"the {what} is not what it should be: {problem}"[:300]) from None
    except RecursionError:
        raise InvalidImage(f"the {what} is nested too deeply") from None


def unambiguous(raw: bytes, what: str) -> None:
    """Refuse a document that holds a key twice: programs disagree on which one counts.

    Raises InvalidImage.
    """

    def once(pairs: list[tuple[str, object]]) -> None:
        if len({key for key, _ in pairs}) != len(pairs):
            raise InvalidImage(f"the {what} holds a key twice")

    if len(raw) > DOCUMENT_BYTES_MAX:
        raise InvalidImage(f"the {what} is too large")
    try:
        json.loads(raw, object_pairs_hook=once)
    except InvalidImage:
        raise
    except ValueError:
        raise InvalidImage(f"the {what} is no JSON") from None
    except RecursionError:
        raise InvalidImage(f"the {what} is nested too deeply") from None


def manifest(raw: bytes) -> Manifest:
    """A manifest whose layers can be unpacked, as far as it says. Raises InvalidImage."""
    found = decode(raw, Manifest, "manifest")
    if found.manifests is not msgspec.UNSET:
        raise InvalidImage("the manifest is an index at the same time")
    if found.media_type and found.media_type not in MANIFEST_TYPES:
        raise InvalidImage(f"the manifest is of another kind ({found.media_type[:100]})")
    if found.config.media_type not in CONFIG_TYPES:
        raise InvalidImage(
            f"not an image that can be run: its configuration is {found.config.media_type[:100]}"
        )
    for layer in found.layers:
        if compression_of(layer.media_type) is None:
            raise InvalidImage(
                f"a layer is neither a tar nor one packed with gzip or zstd "
                f"({layer.media_type[:100]})"
            )
    return found


def index(raw: bytes, what: str = "index") -> Index:
    """Raises InvalidImage."""
    found = decode(raw, Index, what)
    if found.layers is not msgspec.UNSET or found.config is not msgspec.UNSET:
        raise InvalidImage(f"the {what} is a manifest at the same time")
    if found.media_type and found.media_type not in INDEX_TYPES:
        raise InvalidImage(f"the {what} is of another kind ({found.media_type[:100]})")
    return found


def saved_images(raw: bytes) -> tuple[SavedImage, ...]:
    """The manifest.json of a docker-archive. Raises InvalidImage."""
    found = decode(raw, tuple[SavedImage, ...], "manifest.json")
    if len(found) > MANIFESTS_MAX:
        raise InvalidImage("the manifest.json names too many images")
    return found


def config(raw: bytes, layers: int) -> Config:
    """A configuration for this many layers. Raises InvalidImage."""
    found = decode(raw, Config, "configuration")
    if len(found.rootfs.diff_ids) != layers:
        raise InvalidImage("the configuration counts other layers than the manifest")
    return found
