"""Images come and go beside each other: what one import is at keeps nobody else waiting, and what
fails or goes meanwhile takes nothing of it."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from sbxd.mechanism.protocol import MechanismError
from sbxd.port.errors import ExecutionUnavailable
from sbxd.service.images import UNPACKINGS_MAX
from tests.service.image_archives import digest
from tests.service.test_image_archive import ONE, TWO, layout, put
from tests.service.test_images import Bench, MemoryUnpacker

WITHIN_SECONDS = 60


@dataclass
class GatedUnpacker(MemoryUnpacker):
    """Unpacks what `held` names only once it is told to."""

    held: set[str] = field(default_factory=set)
    asked: defaultdict[str, trio.Event] = field(default_factory=lambda: defaultdict(trio.Event))
    go: defaultdict[str, trio.Event] = field(default_factory=lambda: defaultdict(trio.Event))
    under_way: set[str] = field(default_factory=set)
    most: int = 0
    busy: trio.Event = field(default_factory=trio.Event)  # as many as may be are under way

    def __post_init__(self) -> None:
        super().__init__()

    async def unpack_image(self, image_digest: str) -> None:
        self.under_way.add(image_digest)
        self.most = max(self.most, len(self.under_way))
        if len(self.under_way) == UNPACKINGS_MAX:
            self.busy.set()
        try:
            if image_digest in self.held:
                self.asked[image_digest].set()
                await self.go[image_digest].wait()
            await super().unpack_image(image_digest)
        finally:
            self.under_way.discard(image_digest)

    async def drop_image(self, image_digest: str) -> None:
        assert image_digest not in self.under_way, "the launcher would refuse this"
        await super().drop_image(image_digest)


@pytest.fixture
def unpacker() -> GatedUnpacker:
    return GatedUnpacker()


@pytest.fixture
def bench(tmp_path: Path, unpacker: GatedUnpacker) -> Bench:
    return Bench(tmp_path / "images", unpacker)


BASE, SLOW = layout(ONE), layout(ONE, TWO)
SLOW_DIGEST = digest(SLOW[1])


async def test_while_one_is_unpacked_others_are_imported_listed_and_removed(
    bench: Bench, unpacker: GatedUnpacker
) -> None:
    store = await bench.opened()
    unpacker.held = {SLOW_DIGEST}
    with trio.fail_after(WITHIN_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, store, SLOW[0].tar())
            await unpacker.asked[SLOW_DIGEST].wait()
            base = await put(store, BASE[0].tar())
            assert [each.digest for each in await store.list()] == [base.digest]
            assert store.known() == {base.digest}
            # They share a layer, which the one that goes does not take with it.
            await store.remove(base.digest)
            assert await store.list() == ()
            unpacker.go[SLOW_DIGEST].set()
    assert store.known() == {SLOW_DIGEST}
    assert (await bench.opened()).known() == {SLOW_DIGEST}, "every blob of it is there"


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_an_import_that_ends_badly_takes_nothing_of_one_that_is_unpacked_beside_it(
    how: str, bench: Bench, unpacker: GatedUnpacker
) -> None:
    store = await bench.opened()
    bad = digest(BASE[1])
    unpacker.held = {SLOW_DIGEST, bad}
    with trio.fail_after(WITHIN_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, store, SLOW[0].tar())
            await unpacker.asked[SLOW_DIGEST].wait()
            async with trio.open_nursery() as other:

                @other.start_soon
                async def end_badly() -> None:
                    with pytest.raises(ExecutionUnavailable):
                        await put(store, BASE[0].tar())

                await unpacker.asked[bad].wait()
                if how == "is cancelled":
                    other.cancel_scope.cancel()
                else:
                    unpacker.failing = True
                    unpacker.go[bad].set()
            unpacker.failing = False
            assert unpacker.dropped == [bad]
            unpacker.go[SLOW_DIGEST].set()
    assert (await bench.opened()).known() == {SLOW_DIGEST}


async def test_a_daemon_that_is_killed_meanwhile_keeps_what_was_listed_and_nothing_else(
    bench: Bench, unpacker: GatedUnpacker
) -> None:
    store = await bench.opened()
    unpacker.held = {SLOW_DIGEST}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(put, store, SLOW[0].tar())
        with trio.fail_after(WITHIN_SECONDS):
            await unpacker.asked[SLOW_DIGEST].wait()
            base = await put(store, BASE[0].tar())
        unpacker.under_way.clear()  # the launcher went too
        later = Bench(bench.folder)
        assert (await later.opened()).known() == {base.digest}
        assert later.unpacker.dropped == [SLOW_DIGEST]
        wanted = {path.removeprefix("blobs/sha256/") for path in BASE[0].blobs}
        assert later.blobs() == wanted
        nursery.cancel_scope.cancel()


async def test_an_image_is_not_removed_while_it_is_imported_once_more(
    bench: Bench, unpacker: GatedUnpacker
) -> None:
    store = await bench.opened()
    await put(store, SLOW[0].tar())
    unpacker.held = {SLOW_DIGEST}
    over: list[str] = []
    with trio.fail_after(WITHIN_SECONDS):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def again() -> None:
                await put(store, SLOW[0].tar())
                over.append("import")

            await unpacker.asked[SLOW_DIGEST].wait()

            @nursery.start_soon
            async def remove() -> None:
                await store.remove(SLOW_DIGEST)
                over.append("removal")

            await trio.testing.wait_all_tasks_blocked()
            assert over == []
            unpacker.go[SLOW_DIGEST].set()
    # What the import leaves is tidied up after its turn, so either may be over first; the image
    # was dropped after it had been unpacked again (`drop_image` holds that), and it is gone.
    assert sorted(over) == ["import", "removal"]
    assert unpacker.usable == [SLOW_DIGEST] * 2
    assert unpacker.dropped == [SLOW_DIGEST]
    assert (store.known(), bench.blobs()) == (frozenset(), set())


async def test_only_so_many_are_unpacked_at_a_time(bench: Bench, unpacker: GatedUnpacker) -> None:
    store = await bench.opened()
    images = [layout(ONE, *[TWO] * times) for times in range(UNPACKINGS_MAX + 1)]
    names = [digest(manifest) for _, manifest in images]
    unpacker.held = set(names)
    with trio.fail_after(WITHIN_SECONDS):
        async with trio.open_nursery() as nursery:
            for draft, _ in images:
                nursery.start_soon(put, store, draft.tar())
            await unpacker.busy.wait()
            for name in names:
                unpacker.go[name].set()
    assert unpacker.most == UNPACKINGS_MAX
    assert store.known() == set(names)


async def test_what_could_not_be_dropped_is_left_alone_while_it_is_imported_anew(
    bench: Bench, unpacker: GatedUnpacker
) -> None:
    store = await bench.opened()
    unpacker.failing = unpacker.keeping = True
    with pytest.raises(ExecutionUnavailable):
        await put(store, SLOW[0].tar())
    unpacker.failing = unpacker.keeping = False
    unpacker.held = {SLOW_DIGEST}
    marker = bench.folder / "unpacking" / SLOW_DIGEST.removeprefix("sha256:")
    with trio.fail_after(WITHIN_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, store, SLOW[0].tar())
            await unpacker.asked[SLOW_DIGEST].wait()
            unpacker.failure = MechanismError("image_unpack", 0)
            bad = digest(BASE[1])
            unpacker.held.add(bad)
            async with trio.open_nursery() as other:

                @other.start_soon
                async def end_badly() -> None:
                    with pytest.raises(Exception, match="does not unpack"):
                        await put(store, BASE[0].tar())

                await unpacker.asked[bad].wait()
                unpacker.failing = True
                unpacker.go[bad].set()
            unpacker.failing = False
            assert unpacker.dropped == [bad]
            assert marker.exists()
            unpacker.go[SLOW_DIGEST].set()
    assert not marker.exists()
    assert store.known() == {SLOW_DIGEST}
