"""The image store: what an upload becomes, what a failed one leaves, and what damage it notices."""

import hashlib
import io
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio

from sbxd.mechanism.protocol import MechanismError
from sbxd.policy.images import default_image
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    UnavailableCode,
)
from sbxd.service.images import ImageStore
from sbxd.settings import ImageSettings
from sbxd.wire.descriptions import ImageHold, ImageInfo
from sbxd.wire.messages import ImageImport

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
LATER = datetime(2031, 5, 6, tzinfo=UTC)


class MemoryUnpacker:
    """Keeps which digests are usable; fails for those that it is told to."""

    def __init__(self) -> None:
        self.usable: list[str] = []
        self.dropped: list[str] = []
        self.failing = False
        self.keeping = False
        self.failure = MechanismError("unpack", 22)
        self.blocking: trio.Event | None = None

    async def unpack_image(self, image_digest: str) -> None:
        await trio.lowlevel.checkpoint()
        if self.blocking is not None:
            self.blocking.set()
            await trio.sleep_forever()
        if self.failing:
            raise self.failure
        self.usable.append(image_digest)

    async def drop_image(self, image_digest: str) -> None:
        await trio.lowlevel.checkpoint()
        if self.keeping:
            raise MechanismError("legality", 0, "the image is in use")
        self.dropped.append(image_digest)


@dataclass
class Bench:
    """A store in a folder, and what surrounds it."""

    folder: Path
    unpacker: MemoryUnpacker = field(default_factory=MemoryUnpacker)
    used: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    now: datetime = NEW_YEAR
    changes: int = 0
    stuck: bool = False
    store: ImageStore | None = None

    async def opened(self, aliases: dict[str, str] | None = None) -> ImageStore:
        store, problems = await self.opened_with_problems(aliases)
        assert problems == ()
        return store

    async def opened_with_problems(
        self, aliases: dict[str, str] | None = None
    ) -> tuple[ImageStore, tuple[str, ...]]:
        store = ImageStore(
            self.folder,
            self.unpacker,
            settings=ImageSettings(aliases=aliases or {}),
            users=self,
            limiter=trio.CapacityLimiter(2),
            now=lambda: self.now,
        )
        self.store = store
        return store, await store.open()

    def in_use(self, digest: str) -> int:
        return self.used.get(digest, 0)

    def reserved(self, digest: str) -> int:
        return self.slots.get(digest, 0)

    def changed(self) -> None:
        self.changes += 1

    async def wait_free(self, digest: str) -> None:
        """Slots give way only to an image that nobody can ask for any more."""
        assert self.store is not None
        assert digest not in self.store.known()
        await trio.lowlevel.checkpoint()
        if self.stuck:
            await trio.sleep_forever()

    def blobs(self) -> set[str]:
        return {path.name for path in (self.folder / "blobs" / "sha256").iterdir()}

    def ingress(self) -> list[str]:
        return [path.name for path in (self.folder / "ingress").iterdir()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "images")


def a_tar(text: str = "hello") -> bytes:
    """A root file system with one file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("etc/motd")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


async def pieces(raw: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(raw), size):
        await trio.lowlevel.checkpoint()
        yield raw[start : start + size]


async def import_tar(
    store: ImageStore,
    size_bytes: int,
    chunks: AsyncIterator[bytes],
    digest: str | None,
    label: str,
) -> ImageInfo:
    request = ImageImport(
        request_id=1, size_bytes=max(size_bytes, 512), expected_digest=digest, label=label
    )
    return await store.import_image(request, chunks)


async def put(store: ImageStore, raw: bytes, digest: str | None = None, label: str = "") -> str:
    return (await import_tar(store, len(raw), pieces(raw), digest, label)).digest


async def test_an_import_is_listed_usable_and_holds_its_three_blobs(bench: Bench) -> None:
    store = await bench.opened()
    raw = a_tar()
    found = await import_tar(store, len(raw), pieces(raw), None, "a note")
    assert store.known() == {found.digest}
    sizes = [path.stat().st_size for path in (bench.folder / "blobs" / "sha256").iterdir()]
    assert len(raw) < found.size_bytes == found.unshared_bytes == sum(sizes)
    assert (found.label, found.layers, found.imported_at) == ("a note", 1, NEW_YEAR)
    assert await store.list() == (found,)
    assert bench.unpacker.usable == [found.digest]
    assert len(bench.blobs()) == 3
    assert hashlib.sha256(raw).hexdigest() in bench.blobs()
    assert found.digest.removeprefix("sha256:") in bench.blobs()
    for blob in (bench.folder / "blobs" / "sha256").iterdir():
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    assert bench.ingress() == []


async def test_the_digest_depends_on_the_bytes_alone(bench: Bench, tmp_path: Path) -> None:
    other = Bench(tmp_path / "elsewhere", now=LATER)
    raw = a_tar()
    first = await put(await bench.opened(), raw, label="one")
    second = await import_tar(await other.opened(), len(raw), pieces(raw, 7), None, "two")
    assert second.digest == first
    assert await put(await bench.opened(), a_tar("other")) != first


async def test_importing_the_same_tar_again_keeps_one_image_with_the_new_label(
    bench: Bench,
) -> None:
    store = await bench.opened()
    raw = a_tar()
    first = await put(store, raw, label="old")
    bench.now = LATER
    assert await put(store, raw, label="new") == first
    (found,) = await store.list()
    assert (found.label, found.imported_at) == ("new", LATER)
    assert len(bench.blobs()) == 3
    assert bench.ingress() == []


async def test_what_was_imported_is_there_after_a_restart(bench: Bench) -> None:
    digest = await put(await bench.opened(), a_tar(), label="kept")
    bench.unpacker.usable.clear()
    store = await bench.opened()
    assert [(image.digest, image.label) for image in await store.list()] == [(digest, "kept")]
    assert bench.unpacker.usable == [digest], "an image that was not unpacked is not usable"


@pytest.mark.parametrize("announced_minus_sent", [1, 5000, -1, -5000])
async def test_an_upload_of_another_size_is_refused_and_leaves_nothing(
    bench: Bench, announced_minus_sent: int
) -> None:
    store = await bench.opened()
    raw = a_tar()
    with pytest.raises(ExecutionRejected) as caught:
        await import_tar(store, len(raw) + announced_minus_sent, pieces(raw), None, "")
    assert caught.value.code is RejectedCode.PROTOCOL
    assert caught.value.field == "size_bytes"
    assert (store.known(), bench.blobs(), bench.ingress()) == (frozenset(), set(), [])
    assert bench.unpacker.usable == []


async def test_no_more_than_the_announced_bytes_are_taken(bench: Bench) -> None:
    store = await bench.opened()
    asked = 0

    async def endless() -> AsyncGenerator[bytes, None]:
        nonlocal asked
        while True:
            await trio.lowlevel.checkpoint()
            asked += 1
            yield bytes(1000)

    async with aclosing(endless()) as chunks:
        with pytest.raises(ExecutionRejected):
            await import_tar(store, 10_000, chunks, None, "")
    assert asked == 11


async def test_an_import_cancelled_in_mid_upload_leaves_no_partial(bench: Bench) -> None:
    store = await bench.opened()
    started = trio.Event()

    async def stalls() -> AsyncIterator[bytes]:
        yield bytes(5000)
        started.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(import_tar, store, 10_000, stalls(), None, "")
        await started.wait()
        assert len(bench.ingress()) == 1, "the control: there is a partial to remove"
        nursery.cancel_scope.cancel()
    assert (bench.ingress(), bench.blobs(), store.known()) == ([], set(), frozenset())
    assert await put(store, a_tar()) in store.known()


async def test_an_import_cancelled_while_it_unpacks_leaves_no_blob(bench: Bench) -> None:
    store = await bench.opened()
    bench.unpacker.blocking = trio.Event()
    raw = a_tar()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(import_tar, store, len(raw), pieces(raw), None, "")
        await bench.unpacker.blocking.wait()
        assert len(bench.blobs()) == 3
        nursery.cancel_scope.cancel()
    assert (bench.blobs(), store.known()) == (set(), frozenset())


async def test_a_failure_of_the_source_leaves_no_partial(bench: Bench) -> None:
    store = await bench.opened()

    async def breaks() -> AsyncIterator[bytes]:
        await trio.lowlevel.checkpoint()
        yield bytes(10)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await import_tar(store, 100, breaks(), None, "")
    assert (bench.ingress(), bench.blobs()) == ([], set())


async def test_an_image_that_does_not_unpack_leaves_no_blob(bench: Bench) -> None:
    store = await bench.opened()
    kept = await put(store, a_tar("good"))
    before = bench.blobs()
    bench.unpacker.failing = True
    raw = a_tar("bad")
    with pytest.raises(ExecutionUnavailable) as caught:
        await import_tar(store, len(raw), pieces(raw), None, "")
    assert caught.value.code is UnavailableCode.SETUP_FAILED
    assert str(bench.folder) not in caught.value.detail
    assert (store.known(), bench.blobs(), bench.ingress()) == (frozenset({kept}), before, [])


async def test_a_known_image_that_does_not_unpack_again_stays(bench: Bench) -> None:
    store = await bench.opened()
    raw = a_tar()
    digest = await put(store, raw)
    before = bench.blobs()
    bench.unpacker.failing = True
    with pytest.raises(ExecutionUnavailable):
        await import_tar(store, len(raw), pieces(raw), None, "")
    assert (store.known(), bench.blobs()) == (frozenset({digest}), before)


async def test_another_digest_than_the_expected_one_stores_nothing(bench: Bench) -> None:
    store = await bench.opened()
    raw = a_tar()
    wrong = "sha256:" + "0" * 64
    with pytest.raises(ExecutionRejected) as caught:
        await import_tar(store, len(raw), pieces(raw), wrong, "")
    assert caught.value.code is RejectedCode.UNKNOWN_IMAGE
    assert (store.known(), bench.blobs(), bench.ingress()) == (frozenset(), set(), [])
    digest = await put(store, raw)
    assert await put(store, raw, digest) == digest, "the expected digest is accepted"


async def test_two_concurrent_imports_of_one_tar_make_one_image(bench: Bench) -> None:
    store = await bench.opened()
    raw = a_tar()
    digests: list[str] = []

    async def one(label: str) -> None:
        digests.append(await put(store, raw, label=label))

    async with trio.open_nursery() as nursery:
        for label in ("a", "b", "c"):
            nursery.start_soon(one, label)
    assert len(set(digests)) == 1
    assert len(digests) == 3
    assert len(await store.list()) == 1
    assert len(bench.blobs()) == 3
    assert bench.ingress() == []


def _remove_layer(bench: Bench, digest: str, layer: str) -> None:
    (bench.folder / "blobs" / "sha256" / layer).unlink()


def _cut_layer(bench: Bench, digest: str, layer: str) -> None:
    (bench.folder / "blobs" / "sha256" / layer).write_bytes(b"short")


def _change_manifest(bench: Bench, digest: str, layer: str) -> None:
    path = bench.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")
    path.write_bytes(path.read_bytes().replace(b"schemaVersion", b"schemaversioN"))


def _remove_manifest(bench: Bench, digest: str, layer: str) -> None:
    (bench.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")).unlink()


@pytest.mark.parametrize(
    "damage",
    [_remove_layer, _cut_layer, _change_manifest, _remove_manifest],
    ids=lambda f: f.__name__.strip("_"),
)
async def test_a_damaged_image_is_a_problem_and_unknown_and_the_others_work(
    bench: Bench, damage: Callable[[Bench, str, str], None]
) -> None:
    store = await bench.opened()
    good = await put(store, a_tar("good"))
    raw = a_tar("damaged")
    bad = await put(store, raw)
    damage(bench, bad, hashlib.sha256(raw).hexdigest())
    bench.unpacker.usable.clear()
    store, problems = await bench.opened_with_problems()
    assert len(problems) == 1
    assert bad in problems[0]
    assert str(bench.folder) not in problems[0]
    assert store.known() == {good}
    assert bench.unpacker.usable == [good]
    assert await put(store, raw) == bad, "importing it again repairs it"
    assert (await bench.opened()).known() == {good, bad}


async def test_the_default_is_the_first_image_that_can_be_used(bench: Bench) -> None:
    store = await bench.opened()
    first, second = await put(store, a_tar("one")), await put(store, a_tar("two"))
    assert default_image(ImageSettings(), store.known_in_order()) == first
    store._unusable.add(first)
    assert default_image(ImageSettings(), store.known_in_order()) == second
    assert [ImageHold.DEFAULT in each.held_by for each in await store.list()] == [False, True]


async def test_an_image_that_no_longer_unpacks_is_a_problem_at_open(bench: Bench) -> None:
    digest = await put(await bench.opened(), a_tar())
    bench.unpacker.failing = True
    store, problems = await bench.opened_with_problems()
    assert [digest in problem for problem in problems] == [True]
    assert store.known() == frozenset()
    bench.unpacker.failing = False
    other = await put(store, a_tar("other"))
    await store.remove(other)
    assert (await bench.opened()).known() == {digest}, "it is kept for a better day"


async def test_a_damaged_index_is_a_problem_and_not_a_crash(bench: Bench) -> None:
    digest = await put(await bench.opened(), a_tar())
    index = bench.folder / "index.json"
    index.write_bytes(index.read_bytes()[:-10])
    store, problems = await bench.opened_with_problems()
    assert len(problems) == 1
    assert store.known() == frozenset()
    assert await put(store, a_tar()) == digest


async def test_an_alias_without_its_image_is_a_problem_that_names_the_fix(bench: Bench) -> None:
    digest = await put(await bench.opened(), a_tar())
    missing = "sha256:" + "1" * 64
    store, problems = await bench.opened_with_problems({"there": digest, "gone": missing})
    assert len(problems) == 1
    assert "'gone'" in problems[0]
    assert missing in problems[0]
    assert "sbxctl image import" in problems[0]
    assert [image.aliases for image in await store.list()] == [("there",)]


async def test_an_image_in_use_is_not_removed(bench: Bench) -> None:
    store = await bench.opened()
    digest = await put(store, a_tar())
    bench.used[digest] = 2
    with pytest.raises(ExecutionRejected) as caught:
        await store.remove(digest)
    assert caught.value.code is RejectedCode.IMAGE_IN_USE
    assert (store.known(), bench.unpacker.dropped) == (frozenset({digest}), [])
    bench.used.clear()
    await store.remove(digest)
    assert (store.known(), bench.blobs()) == (frozenset(), set())
    assert bench.unpacker.dropped == [digest]
    assert (await bench.opened()).known() == frozenset()


async def test_an_image_with_an_alias_is_not_removed_and_the_alias_is_named(bench: Bench) -> None:
    digest = await put(await bench.opened(), a_tar())
    store = await bench.opened({"python": digest})
    with pytest.raises(ExecutionRejected) as caught:
        await store.remove(digest)
    assert "'python'" in caught.value.detail
    assert store.known() == {digest}


async def test_removing_one_image_keeps_the_blobs_of_the_others(bench: Bench) -> None:
    store = await bench.opened()
    kept = await put(store, a_tar("kept"))
    before = bench.blobs()
    await store.remove(await put(store, a_tar("gone")))
    assert bench.blobs() == before
    assert (await bench.opened()).known() == {kept}


@pytest.mark.parametrize("digest", ["sha256:" + "2" * 64, "latest", "../../etc/passwd", ""])
async def test_removing_what_is_not_in_the_store_is_refused(bench: Bench, digest: str) -> None:
    store = await bench.opened()
    with pytest.raises(ExecutionRejected) as caught:
        await store.remove(digest)
    assert caught.value.code is RejectedCode.UNKNOWN_IMAGE


async def test_leftovers_of_an_upload_are_removed_at_open(bench: Bench) -> None:
    digest = await put(await bench.opened(), a_tar())
    (bench.folder / "ingress" / "0011.partial").write_bytes(b"half")
    await bench.opened()
    assert bench.ingress() == []
    assert digest.removeprefix("sha256:") in bench.blobs()


async def test_blobs_that_a_killed_import_left_are_removed_at_open(bench: Bench) -> None:
    """A daemon that dies between the blobs and the index leaves blobs that no image needs."""
    await put(await bench.opened(), a_tar())
    before = bench.blobs()
    (bench.folder / "blobs" / "sha256" / ("f" * 64)).write_bytes(b"orphan")
    (bench.folder / "blobs" / "sha256" / f".{'e' * 64}.0011").write_bytes(b"half")
    (bench.folder / ".index.json.0011").write_bytes(b"half")
    await bench.opened()
    assert bench.blobs() == before
    assert not (bench.folder / ".index.json.0011").exists()


async def test_an_image_whose_slots_do_not_give_way_stays(
    bench: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    store = await bench.opened()
    digest = await put(store, a_tar())
    bench.stuck = True
    with pytest.raises(ExecutionRejected) as caught:
        await store.remove(digest)
    assert caught.value.code is RejectedCode.IMAGE_IN_USE
    assert store.known() == {digest}
    assert bench.unpacker.dropped == []


async def test_whoever_stands_on_images_is_told_of_every_change(bench: Bench) -> None:
    store = await bench.opened()
    digest = await put(store, a_tar())
    assert bench.changes == 1
    await store.remove(digest)
    assert bench.changes == 2
    assert store.known() == frozenset()
