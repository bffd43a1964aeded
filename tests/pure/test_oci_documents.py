"""Documents of images are decoded strictly, and the choice among images is never a guess."""

import json
from collections.abc import Callable

import pytest

from sbxd.oci import documents, media
from sbxd.oci.choose import choose, choose_saved
from sbxd.oci.documents import (
    DOCUMENT_BYTES_MAX,
    LAYERS_MAX,
    Descriptor,
    InvalidImage,
    Platform,
    SavedImage,
)

DIGEST = "sha256:" + "a" * 64
Document = dict[str, object]


def descriptor(media_type: str = media.LAYER, **changed: object) -> Document:
    return {"mediaType": media_type, "digest": DIGEST, "size": 10, **changed}


def manifest(**changed: object) -> Document:
    return {
        "schemaVersion": 2,
        "mediaType": media.MANIFEST,
        "config": descriptor(media.CONFIG),
        "layers": [descriptor()],
        "annotations": {"kept": "yes"},
        **changed,
    }


def nested(depth: int) -> bytes:
    return b'{"schemaVersion":2,"x":' + b"[" * depth + b"]" * depth + b"}"


def test_an_honest_manifest_is_decoded_with_its_annotations() -> None:
    found = documents.manifest(json.dumps(manifest(subject=descriptor(), unknown=[1])).encode())
    assert found.annotations == {"kept": "yes"}
    assert found.layers[0].size == 10


@pytest.mark.parametrize("docker", [False, True])
def test_both_families_of_media_types_are_understood(docker: bool) -> None:
    family = "application/vnd.docker"
    kinds = (
        (
            f"{family}.distribution.manifest.v2+json",
            f"{family}.container.image.v1+json",
            f"{family}.image.rootfs.diff.tar.gzip",
        )
        if docker
        else (media.MANIFEST, media.CONFIG, f"{media.LAYER}+zstd")
    )
    raw = json.dumps(
        manifest(mediaType=kinds[0], config=descriptor(kinds[1]), layers=[descriptor(kinds[2])])
    ).encode()
    assert documents.manifest(raw).media_type == kinds[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"schemaVersion": 1},
        {"layers": []},
        {"layers": [descriptor()] * (LAYERS_MAX + 1)},
        {"layers": [descriptor("application/vnd.oci.image.layer.v1.tar+encrypted")]},
        {"layers": [descriptor("application/vnd.oci.image.layer.nondistributable.v1.tar")]},
        {"config": descriptor("application/vnd.cncf.helm.config.v1+json")},
        {"mediaType": media.INDEX},
        {"manifests": []},
        {"layers": [descriptor(digest="sha256:../../etc/passwd")]},
        {"layers": [descriptor(digest=DIGEST + "\n")]},
        {"layers": [descriptor(digest="sha512:" + "a" * 128)]},
        {"layers": [descriptor(size=-1)]},
        {"layers": [descriptor(size=2**50)]},
        {"layers": [descriptor(size=1.5)]},
        {"annotations": {str(n): "" for n in range(2000)}},
        {"annotations": {"x": "y" * 100_000}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_manifest_that_is_wrong_or_ambiguous_is_refused(changed: Document) -> None:
    with pytest.raises(InvalidImage):
        documents.manifest(json.dumps(manifest(**changed)).encode())


@pytest.mark.parametrize("read", [documents.manifest, documents.index, documents.unambiguous])
@pytest.mark.parametrize(
    "raw",
    [nested(100_000), b" " * (DOCUMENT_BYTES_MAX + 1), b"{", b"\xff\xfe", b"[]x"],
    ids=["deep", "large", "cut", "bytes", "trailing"],
)
def test_a_document_that_is_a_weapon_is_refused(read: Callable[..., object], raw: bytes) -> None:
    arguments = (raw, "x") if read is documents.unambiguous else (raw,)
    with pytest.raises(InvalidImage):
        read(*arguments)


def test_a_key_that_is_there_twice_is_refused() -> None:
    documents.unambiguous(b'{"a":{"b":1},"b":[{"a":1}]}', "document")
    for raw in (b'{"a":1,"a":2}', b'{"x":[{"a":1,"a":1}]}'):
        with pytest.raises(InvalidImage, match="twice"):
            documents.unambiguous(raw, "document")


def test_a_configuration_counts_the_layers_of_its_manifest() -> None:
    raw = json.dumps(
        {"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": [DIGEST]}}
    ).encode()
    assert documents.config(raw, 1).architecture == "amd64"
    with pytest.raises(InvalidImage, match="other layers"):
        documents.config(raw, 2)


# --- the choice ---------------------------------------------------------------------------------


def offer(
    digit: str,
    architecture: str | None = "amd64",
    *,
    variant: str = "",
    name: str = "",
    media_type: str = media.MANIFEST,
    attestation: bool = False,
) -> Descriptor:
    annotations = {"org.opencontainers.image.ref.name": name} if name else {}
    if attestation:
        annotations["vnd.docker.reference.type"] = "attestation-manifest"
    return Descriptor(
        media_type=media_type,
        digest=f"sha256:{digit * 64}",
        size=1,
        annotations=annotations,
        platform=None
        if architecture is None
        else Platform(architecture=architecture, os="linux", variant=variant),
    )


def test_the_image_of_this_machine_is_chosen() -> None:
    offered = [
        offer("1", "arm64"),
        offer("2"),
        offer("3", attestation=True),
        offer("4", media_type="application/vnd.example+json"),
    ]
    assert choose(offered, "amd64") == offered[1]
    assert choose(offered, "arm64") == offered[0]
    with pytest.raises(InvalidImage, match=r"linux/amd64.*linux/arm64"):
        choose(offered, "riscv64")


def test_of_variants_the_plain_one_is_chosen() -> None:
    offered = [offer("1", variant="v3"), offer("2"), offer("3", variant="v2")]
    assert choose(offered, "amd64") == offered[1]


def test_of_several_images_one_must_be_named() -> None:
    offered = [offer("1", None, name="a:1"), offer("2", None, name="b:2")]
    with pytest.raises(InvalidImage, match=r"name one of a:1, b:2"):
        choose(offered, "amd64")
    assert choose(offered, "amd64", "b:2") == offered[1]
    assert choose(offered, "amd64", offered[0].digest) == offered[0]
    with pytest.raises(InvalidImage, match="there are: a:1, b:2"):
        choose(offered, "amd64", "c")
    with pytest.raises(InvalidImage, match="no image"):
        choose([], "amd64")


def test_of_several_saved_images_one_must_be_named() -> None:
    saved = [
        SavedImage(config="1.json", repo_tags=("a:1", "a:2"), layers=("x",)),
        SavedImage(config="2.json", repo_tags=None, layers=("x",)),
    ]
    assert choose_saved(saved[1:]) == saved[1]
    assert choose_saved(saved, "a:2") == saved[0]
    for offered, reference in ((saved, None), (saved, "b"), ([], None)):
        with pytest.raises(InvalidImage):
            choose_saved(offered, reference)
