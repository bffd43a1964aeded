"""Archives of images: what an honest one becomes, and a corpus of hostile ones, each of which is
refused with nothing left, beside a neighbour that is taken."""

import gzip
import io
import json
import os
import platform
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from sbxd.oci import media
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    UnavailableCode,
)
from sbxd.service.image_archive import Archive
from sbxd.service.images import ImageStore
from sbxd.wire.descriptions import ImageHold, ImageInfo
from sbxd.wire.messages import ImageFormat, ImageImport
from tests.service.image_archives import (
    Document,
    LayoutDraft,
    config_of,
    descriptor,
    digest,
    encode,
    layer_of,
    saved,
    tar_of,
)
from tests.service.test_images import Bench, pieces

HERE = media.ARCHITECTURES[platform.machine()]
ELSEWHERE = "arm64" if HERE == "amd64" else "amd64"
ONE, TWO = layer_of("one"), layer_of("two")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "images")


async def put(
    store: ImageStore, raw: bytes, reference: str | None = None, expected: str | None = None
) -> ImageInfo:
    request = ImageImport(
        request_id=1,
        size_bytes=len(raw),
        format=ImageFormat.ARCHIVE,
        reference=reference,
        expected_digest=expected,
        label="note",
    )
    return await store.import_image(request, pieces(raw, 5000))


def layout(*layers: bytes) -> tuple[LayoutDraft, bytes]:
    """A layout with one image for this machine, and its manifest."""
    draft = LayoutDraft()
    manifest = draft.image(*layers, architecture=HERE)
    draft.offer(manifest)
    return draft, manifest


async def test_an_oci_image_keeps_its_own_digest_and_every_byte_of_its_documents(
    bench: Bench,
) -> None:
    store = await bench.opened()
    draft, manifest = layout(ONE, TWO)
    draft.blob(b"nobody names this")
    found = await put(store, draft.tar(), expected=digest(manifest))
    assert found.digest == digest(manifest)
    assert (found.layers, found.label) == (2, "note")
    assert bench.unpacker.usable == [found.digest]
    wanted = {digest(each).removeprefix("sha256:") for each in (manifest, ONE, TWO)}
    config = config_of(ONE, TWO, architecture=HERE)
    assert bench.blobs() == wanted | {digest(config).removeprefix("sha256:")}
    assert bench.ingress() == []
    assert (await bench.opened()).known() == {found.digest}


async def test_layers_that_images_share_are_kept_once_and_until_the_last_one_goes(
    bench: Bench,
) -> None:
    store = await bench.opened()
    first = await put(store, layout(ONE)[0].tar())
    second = await put(store, layout(ONE, TWO)[0].tar())
    one, two = await store.list()
    assert one.unshared_bytes == one.size_bytes - len(ONE)
    assert two.unshared_bytes == two.size_bytes - len(ONE)
    await store.remove(first.digest)
    assert digest(ONE).removeprefix("sha256:") in bench.blobs()
    await store.remove(second.digest)
    assert bench.blobs() == set()


async def test_of_an_index_of_platforms_this_machines_image_is_taken(bench: Bench) -> None:
    store = await bench.opened()
    draft = LayoutDraft()
    here = draft.image(ONE, architecture=HERE)
    there = draft.image(TWO, architecture=ELSEWHERE)
    inner = draft.blob(
        encode(
            {
                "schemaVersion": 2,
                "mediaType": media.INDEX,
                "manifests": [
                    descriptor(media.MANIFEST, raw, platform={"os": "linux", "architecture": name})
                    for raw, name in ((there, ELSEWHERE), (here, HERE))
                ],
            }
        )
    )
    draft.offer(inner, media.INDEX)
    assert (await put(store, draft.tar())).digest == digest(here)


async def test_a_named_image_of_several_is_taken_and_an_unnamed_one_is_not_guessed(
    bench: Bench,
) -> None:
    store = await bench.opened()
    draft = LayoutDraft()
    made = {}
    for name, layer in (("a:1", ONE), ("b:2", TWO)):
        made[name] = draft.image(layer, architecture=HERE)
        draft.offer(made[name], annotations={"org.opencontainers.image.ref.name": name})
    with pytest.raises(ExecutionRejected, match=r"name one of a:1, b:2"):
        await put(store, draft.tar())
    assert (await put(store, draft.tar(), "b:2")).digest == digest(made["b:2"])


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
async def test_a_docker_archive_becomes_one_image_whatever_the_order_of_its_files(
    packed: bool, bench: Bench, tmp_path: Path
) -> None:
    files = saved(ONE, TWO, architecture=HERE)
    if packed:
        files["0/layer.tar"] = gzip.compress(ONE, mtime=0)
    first = await put(await bench.opened(), tar_of(files))
    other = Bench(tmp_path / "other")
    second = await put(await other.opened(), tar_of(dict(reversed(files.items()))))
    assert first.digest == second.digest
    raw = (bench.folder / "blobs" / "sha256" / first.digest.removeprefix("sha256:")).read_bytes()
    kinds = [layer["mediaType"] for layer in json.loads(raw)["layers"]]
    assert kinds == [media.LAYER + "+gzip" * packed, media.LAYER]


async def test_an_older_archives_link_to_a_layer_is_followed_within_the_archive(
    bench: Bench,
) -> None:
    files: dict[str, bytes | tuple[bytes, str]] = {**saved(ONE, ONE, architecture=HERE)}
    files["1/layer.tar"] = (tarfile.SYMTYPE, "../0/layer.tar")
    assert (await put(await bench.opened(), tar_of(files))).layers == 2


async def test_an_archive_that_is_both_is_read_as_an_oci_layout(bench: Bench) -> None:
    draft, manifest = layout(ONE)
    files = {**saved(TWO, architecture=HERE), **draft.files()}
    assert (await put(await bench.opened(), tar_of(files))).digest == digest(manifest)


# --- the corpus ---------------------------------------------------------------------------------

Files = dict[str, bytes | tuple[bytes, str]]


def oci_files() -> Files:
    return {**layout(ONE, TWO)[0].files()}


def saved_files() -> Files:
    return {**saved(ONE, TWO, architecture=HERE)}


def blob_name(raw: bytes) -> str:
    return f"blobs/sha256/{digest(raw).removeprefix('sha256:')}"


def index_with(**changed: object) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        raw = files["index.json"]
        assert isinstance(raw, bytes)
        files["index.json"] = encode({**json.loads(raw), **changed})

    return change


def replaced(**names: bytes | tuple[bytes, str]) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files.update({name.replace("__", "/"): content for name, content in names.items()})

    return change


def manifest_with(**changed: object) -> Callable[[Files], None]:
    """The index offers a manifest that differs, with its right digest."""

    def change(files: Files) -> None:
        raw = files[blob_name(layout(ONE, TWO)[1])]
        assert isinstance(raw, bytes)
        other = encode({**json.loads(raw), **changed})
        files[blob_name(other)] = other
        index_with(manifests=[descriptor(media.MANIFEST, other)])(files)

    return change


def flipped(raw: bytes) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files[blob_name(raw)] = raw[:-1] + bytes([raw[-1] ^ 1])

    return change


def longer(raw: bytes) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files[blob_name(raw)] = raw + b"\0"

    return change


def saved_with(**changed: object) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        raw = files["manifest.json"]
        assert isinstance(raw, bytes)
        files["manifest.json"] = encode([{**json.loads(raw)[0], **changed}])

    return change


def nested_index(files: Files) -> None:
    """Each index offers the next one."""
    inner: Document = descriptor(media.MANIFEST, layout(ONE, TWO)[1])
    for _ in range(10):
        raw = encode({"schemaVersion": 2, "manifests": [inner]})
        files[blob_name(raw)] = raw
        inner = descriptor(media.INDEX, raw)
    index_with(manifests=[inner])(files)


CONFIG = config_of(ONE, TWO, architecture=HERE)
OCI_ATTACKS: dict[str, tuple[Callable[[Files], None], str]] = {
    "a flipped layer": (flipped(TWO), "not what its name says"),
    "a longer layer": (longer(TWO), "not what its name says"),
    "a flipped configuration": (flipped(CONFIG), "not what its name says"),
    "a flipped manifest": (flipped(layout(ONE, TWO)[1]), "not what its name says"),
    "a layer that is missing": (lambda f: f.__delitem__(blob_name(ONE)), "does not hold"),
    "a layer that is a link out": (
        lambda f: f.update({blob_name(ONE): (tarfile.SYMTYPE, "/etc/passwd")}),
        "does not hold",
    ),
    "a layer that is a link to itself": (
        lambda f: f.update({blob_name(ONE): (tarfile.SYMTYPE, blob_name(ONE)[13:])}),
        "link",
    ),
    "a digest that is a path": (
        index_with(
            manifests=[{**descriptor(media.MANIFEST, b""), "digest": "sha256:../../index.json"}]
        ),
        "index",
    ),
    "an index that nests": (nested_index, "nested"),
    "an index that is deep": (
        replaced(**{"index.json": b'{"schemaVersion":2,"x":' + b"[" * 100_000}),
        "JSON|nested",
    ),
    "an index that is huge": (replaced(**{"index.json": b" " * (5 * 2**20)}), "too large"),
    "an index of too many": (
        index_with(manifests=[descriptor(media.MANIFEST, b"x")] * 2000), "index"
    ),
    "an index with a key twice": (
        replaced(**{"index.json": b'{"schemaVersion":2,"manifests":[],"manifests":[]}'}), "twice"
    ),
    "an index that is a manifest too": (index_with(layers=[]), "same time"),
    "a manifest that is an index too": (manifest_with(manifests=[]), "same time"),
    "a manifest of another kind": (manifest_with(mediaType=media.INDEX), "another kind"),
    "a manifest without layers": (manifest_with(layers=[]), "manifest"),
    "a layer from elsewhere": (
        manifest_with(
            layers=[
                descriptor("application/vnd.oci.image.layer.nondistributable.v1.tar", ONE),
                descriptor(media.LAYER, TWO),
            ]
        ),
        "neither a tar",
    ),
    "fewer layers than the configuration": (
        manifest_with(layers=[descriptor(media.LAYER, ONE)]), "counts other layers"
    ),
    "an artifact that is no image": (
        manifest_with(config=descriptor("application/vnd.cncf.helm.config.v1+json", CONFIG)),
        "not an image",
    ),
    "another layout version": (
        replaced(**{"oci-layout": b'{"imageLayoutVersion":"9"}'}), "version"
    ),
    "a name that leaves": (replaced(**{"..__x": b""}), "refused"),
    "an absolute name": (replaced(__etc__passwd=b""), "absolute"),
    "a device": (replaced(x=(tarfile.CHRTYPE, "")), "device"),
    "a control character in a name": (
        index_with(
            manifests=[
                descriptor(media.MANIFEST, raw, annotations={
                    "org.opencontainers.image.ref.name": f"\x1b[2J{number}"})
                for number, raw in enumerate((ONE, TWO))
            ]
        ),
        "name one of",
    ),
}  # fmt: skip
SAVED_ATTACKS: dict[str, tuple[Callable[[Files], None], str]] = {
    "a layer that is another": (
        lambda f: f.update({"1/layer.tar": ONE}), "not what the configuration says"
    ),
    "a configuration that is another": (
        lambda f: f.update(
            {next(n for n in f if n.endswith(".json")): config_of(TWO, ONE, architecture=HERE)}
        ),
        "not what its name says",
    ),
    "a path that leaves": (
        saved_with(Layers=["../../../etc/passwd", "1/layer.tar"]), "does not hold"
    ),
    "an absolute path": (saved_with(Layers=["/etc/passwd", "1/layer.tar"]), "does not hold"),
    "a configuration that is a path": (saved_with(Config="/etc/shadow"), "does not hold"),
    "fewer layers": (saved_with(Layers=["0/layer.tar"]), "counts other layers"),
    "a link that leaves": (
        lambda f: f.update({"1/layer.tar": (tarfile.SYMTYPE, "../../../../etc/passwd")}),
        "does not hold",
    ),
    "a link to a link": (
        lambda f: f.update({"1/layer.tar": (tarfile.SYMTYPE, "a"), "1/a": (tarfile.SYMTYPE, "b"),
                            "1/b": (tarfile.SYMTYPE, "../0/layer.tar")}),
        "link",
    ),
    "no list": (lambda f: f.update({"manifest.json": b'{"Config":1}'}), "manifest.json"),
    "an empty list": (lambda f: f.update({"manifest.json": b"[]"}), "no image"),
}  # fmt: skip
CORPUS = [
    *(pytest.param(oci_files, *each, id=f"oci: {name}") for name, each in OCI_ATTACKS.items()),
    *(
        pytest.param(saved_files, *each, id=f"docker: {name}")
        for name, each in SAVED_ATTACKS.items()
    ),
]


@pytest.mark.parametrize(("make", "attack", "says"), CORPUS)
async def test_a_hostile_archive_is_refused_and_leaves_nothing_and_its_neighbour_is_taken(
    make: Callable[[], Files], attack: Callable[[Files], None], says: str, bench: Bench
) -> None:
    store = await bench.opened()
    hostile = make()
    attack(hostile)
    with pytest.raises(ExecutionRejected, match=says) as caught:
        await put(store, tar_of(hostile))
    assert caught.value.code is RejectedCode.INVALID_IMAGE
    assert caught.value.detail.isprintable()
    assert str(bench.folder) not in caught.value.detail
    assert (bench.blobs(), bench.ingress(), store.known()) == (set(), [], frozenset())
    assert bench.unpacker.usable == []
    await put(store, tar_of(make()))
    assert len(store.known()) == 1


async def test_an_image_for_another_machine_is_refused_by_name(bench: Bench) -> None:
    store = await bench.opened()
    for raw in (tar_of(saved(ONE, architecture=ELSEWHERE)), foreign_layout()):
        with pytest.raises(ExecutionRejected, match=f"linux/{ELSEWHERE}.*linux/{HERE}"):
            await put(store, raw)


def foreign_layout() -> bytes:
    draft = LayoutDraft()
    draft.offer(draft.image(ONE, architecture=ELSEWHERE))
    return draft.tar()


@pytest.mark.parametrize("twice", ["index.json", "oci-layout"])
async def test_a_file_that_is_there_twice_is_refused(twice: str, bench: Bench) -> None:
    files = layout(ONE)[0].files()
    whole = tar_of(files)
    doubled = tar_of({twice: files[twice]}).rstrip(b"\0")
    doubled += bytes(-len(doubled) % 512) + whole
    with pytest.raises(ExecutionRejected, match="twice"):
        await put(await bench.opened(), doubled)


async def test_a_root_file_system_is_not_taken_for_an_archive(bench: Bench) -> None:
    with pytest.raises(ExecutionRejected, match="neither an OCI layout nor"):
        await put(await bench.opened(), ONE)


# --- what holds an image, and what a crash leaves -----------------------------------------------


async def test_what_holds_each_image_is_said(bench: Bench) -> None:
    store = await bench.opened()
    first = (await put(store, layout(ONE)[0].tar())).digest
    assert (await store.list())[0].held_by == (ImageHold.DEFAULT,)
    second = (await put(store, layout(TWO)[0].tar())).digest
    assert [image.held_by for image in await store.list()] == [(ImageHold.DEFAULT,), ()]
    bench.used[first], bench.slots[first] = 1, 2
    store = await bench.opened({"name": second})
    assert [image.held_by for image in await store.list()] == [
        (ImageHold.ENVIRONMENT, ImageHold.RESERVE, ImageHold.DEFAULT),
        (ImageHold.ALIAS,),
    ]


async def test_what_a_failed_or_killed_import_unpacked_is_removed(bench: Bench) -> None:
    store = await bench.opened()
    _, manifest = layout(ONE)
    bench.unpacker.failing = True
    with pytest.raises(ExecutionRejected):
        await put(store, layout(ONE)[0].tar(), expected="sha256:" + "0" * 64)
    assert bench.unpacker.dropped == [], "nothing was begun"
    with pytest.raises(Exception, match="does not unpack"):
        await put(store, layout(ONE)[0].tar())
    assert bench.unpacker.dropped == [digest(manifest)]
    bench.unpacker.failing = False
    bench.unpacker.dropped.clear()
    (bench.folder / "unpacking" / ("e" * 64)).touch()  # as a daemon leaves it that is killed
    kept = await put(store, layout(ONE)[0].tar())
    await bench.opened()
    assert bench.unpacker.dropped == ["sha256:" + "e" * 64]
    assert bench.unpacker.usable[-1] == kept.digest


async def test_an_import_that_is_cancelled_while_it_unpacks_is_taken_back(bench: Bench) -> None:
    store = await bench.opened()
    bench.unpacker.blocking = trio.Event()
    draft, manifest = layout(ONE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(put, store, draft.tar())
        await bench.unpacker.blocking.wait()
        nursery.cancel_scope.cancel()
    assert (bench.blobs(), bench.ingress(), store.known()) == (set(), [], frozenset())
    assert bench.unpacker.dropped == [digest(manifest)]


async def test_an_image_that_the_disk_has_no_room_for_is_refused_before_it_is_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await bench.opened()
    raw = layout(ONE)[0].tar()
    real = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=len(raw) // 512, f_frsize=512)
    )
    with pytest.raises(ExecutionUnavailable) as caught:
        await put(store, raw)
    assert caught.value.code is UnavailableCode.CAPACITY
    assert bench.ingress() == []
    monkeypatch.setattr(os, "statvfs", real)
    await put(store, raw)


async def test_a_list_that_is_taken_while_an_image_goes_is_whole(bench: Bench) -> None:
    store = await bench.opened()
    first = await put(store, layout(ONE)[0].tar())
    await put(store, layout(TWO)[0].tar())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.remove, first.digest)
        for _ in range(20):
            assert len(await store.list()) in (1, 2)
    assert len(await store.list()) == 1


def test_a_layer_that_is_named_many_times_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of("x")
    files = saved(*[layer] * 128, architecture=HERE)
    manifest = json.loads(files["manifest.json"])
    manifest[0]["Layers"] = ["0/layer.tar"] * 128
    files = {"0/layer.tar": layer, **files, "manifest.json": json.dumps(manifest).encode()}
    copied: list[Path] = []
    of_the_product = Archive._copy

    def noted(self: Archive, member: object, target: Path) -> tuple[str, int]:
        copied.append(target)
        return of_the_product(self, member, target)  # type: ignore[arg-type]

    monkeypatch.setattr(Archive, "_copy", noted)
    taken = Archive(io.BytesIO(tar_of(files))).take(tmp_path, HERE, None)
    assert len(copied) == 1
    assert len(taken.manifest.layers) == 128
    assert len(taken.blobs) == 2, "the layer and the configuration"
