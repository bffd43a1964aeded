"""Every launcher verb with its n-th effect failing, for every n until the verb has no more.

Each time the verb is answered, once; the launcher lives; what it was about can be destroyed, and
then nothing of it is left: no scope, no cgroup, no process, no volume, no uid block.
"""

import itertools
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sbxd.launcher.kernel import hostpaths
from sbxd.launcher.requests import (
    Acknowledged,
    Assign,
    Destroy,
    DropLeaf,
    Failed,
    ImageDrop,
    ImageUnpack,
    Inventory,
    InventoryIs,
    LauncherReply,
    LauncherRequest,
    Leaf,
    LeafMade,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Share,
    Weight,
)
from sbxd.port.ids import EnvironmentId
from tests.kernel import launcher_subject as subject
from tests.kernel.image_layers import entry, put_image, tar_of
from tests.kernel.launcher_subject import Launcher
from tests.kernel.test_launcher_lab import LIMITS, VOLUME, Client, prepare, wait_until_gone

pytestmark = pytest.mark.needs("cgroup2", "idmap", "image", "loop", "root", "systemd")

FAULTS = ("ENOSPC", "EMFILE", "EBUSY", "EIO", "ETIMEDOUT", "KILL")
# A verb that the loop carries out itself has no child that could be killed.
WITHOUT_KILL = FAULTS[:-1]
EFFECTS_MAX = 400


@dataclass
class Bench:
    """A launcher that can be armed, and its client."""

    launcher: Launcher
    client: Client
    armed: Path
    image: str
    nonce: int = 0

    def ask(self, request: LauncherRequest) -> LauncherReply:
        reply, _ = self.client.ask(request)
        return reply

    def ask_armed(
        self, request: LauncherRequest, number: int, what: str
    ) -> tuple[LauncherReply, bool]:
        """The reply, and whether the fault has happened."""
        self.nonce += 1
        partial = self.armed.with_suffix(".partial")
        partial.write_text(f"{self.nonce} {number} {what}")
        partial.rename(self.armed)
        reply = self.ask(request)
        happened = not self.armed.exists()
        self.armed.unlink(missing_ok=True)
        assert self.launcher.process.poll() is None, "the launcher is gone"
        return reply, happened

    def prepared(self) -> EnvironmentId:
        environment_id = subject.fresh_id()
        reply = self.ask(prepare(self.image, environment_id))
        assert isinstance(reply, Prepared), reply
        return environment_id

    def destroyed(self, environment_id: EnvironmentId) -> None:
        """Destroy it unarmed: that must succeed, and leave nothing."""
        reply = self.ask(Destroy(ticket=2, environment_id=environment_id))
        assert isinstance(reply, Acknowledged), reply
        wait_until_gone(environment_id)
        self.forget()

    def forget(self) -> None:
        """Close what came with the replies so far."""
        for descriptor in self.client.held:
            os.close(descriptor)
        self.client.held.clear()


@contextmanager
def bench(directory: Path) -> Iterator[Bench]:
    image = subject.unpacked_image()
    armed = directory / "armed"
    program = ("-m", "tests.kernel.faulty_launcher", str(armed))
    with subject.launcher(directory, program) as launcher:
        client = Client(launcher)
        try:
            yield Bench(launcher, client, armed, image)
        finally:
            client.close()


def every_effect(
    one: Bench,
    faults: tuple[str, ...],
    request: Callable[[], LauncherRequest],
    success: type[LauncherReply],
    afterwards: Callable[[LauncherReply], None],
) -> int:
    """Try number 1, 2, … each with the next kind of fault, until none happens. Returns how many
    happened."""
    kinds = itertools.cycle(faults)
    for number in range(1, EFFECTS_MAX):
        what = next(kinds)
        reply, happened = one.ask_armed(request(), number, what)
        assert isinstance(reply, success | Failed), (number, what, reply)
        afterwards(reply)
        if not happened:
            assert isinstance(reply, success), (number, what, reply)
            return number - 1
        if isinstance(reply, success):
            print(f"effect {number} failed with {what} and the verb went on")
    raise AssertionError("a verb without an end")


def built_like(reply: LauncherReply) -> tuple[object, ...]:
    """What a slot enforces, and how it came about."""
    assert isinstance(reply, Prepared)
    return reply.unenforced, reply.volume_kind, [step.name for step in reply.steps]


def test_a_preparation_that_fails_anywhere_leaves_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        ids = [subject.fresh_id()]
        unharmed = one.ask(prepare(one.image, ids[-1]))
        one.destroyed(ids[-1])
        assert isinstance(unharmed, Prepared)

        def request() -> Prepare:
            ids.append(subject.fresh_id())
            return prepare(one.image, ids[-1])

        def afterwards(reply: LauncherReply) -> None:
            if isinstance(reply, Failed):
                # It is answered when nothing is left.
                wait_until_gone(ids[-1])
            else:
                # What goes on in spite of a fault is no less than without.
                assert built_like(reply) == built_like(unharmed)
            one.destroyed(ids[-1])

        assert every_effect(one, FAULTS, request, Prepared, afterwards) > 50


@pytest.mark.case("LIF-10")
def test_a_destruction_that_fails_anywhere_can_be_repeated(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        ids: list[EnvironmentId] = []

        def request() -> Destroy:
            ids.append(one.prepared())
            return Destroy(ticket=3, environment_id=ids[-1])

        def afterwards(reply: LauncherReply) -> None:
            one.destroyed(ids[-1])

        assert every_effect(one, FAULTS, request, Acknowledged, afterwards) > 10


def test_a_leaf_that_fails_anywhere_costs_at_most_the_environment(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        ids: list[EnvironmentId] = []

        def request() -> Leaf:
            ids.append(one.prepared())
            one.ask(Assign(ticket=4, environment_id=ids[-1], limits=LIMITS, volume=VOLUME))
            return Leaf(ticket=5, environment_id=ids[-1], number=2, limits=LIMITS)

        def afterwards(reply: LauncherReply) -> None:
            one.destroyed(ids[-1])

        assert every_effect(one, WITHOUT_KILL, request, LeafMade, afterwards) > 3


def test_a_leaf_that_is_not_given_back_costs_at_most_the_environment(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        ids: list[EnvironmentId] = []

        def request() -> DropLeaf:
            ids.append(one.prepared())
            one.ask(Assign(ticket=4, environment_id=ids[-1], limits=LIMITS, volume=VOLUME))
            return DropLeaf(ticket=5, environment_id=ids[-1], number=1)

        def afterwards(reply: LauncherReply) -> None:
            one.destroyed(ids[-1])

        assert every_effect(one, WITHOUT_KILL, request, Acknowledged, afterwards) > 0


def test_an_assignment_that_fails_anywhere_costs_at_most_the_environment(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        ids: list[EnvironmentId] = []
        fewer = type(LIMITS)(cpu_millicores=500, memory_bytes=LIMITS.memory_bytes // 2, pids_max=16)

        def request() -> Assign:
            ids.append(one.prepared())
            return Assign(ticket=4, environment_id=ids[-1], limits=fewer, volume=VOLUME)

        def afterwards(reply: LauncherReply) -> None:
            one.destroyed(ids[-1])

        assert every_effect(one, WITHOUT_KILL, request, Acknowledged, afterwards) > 0


def test_a_division_of_the_host_that_fails_anywhere_can_be_repeated(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        environment_id = one.prepared()
        shares = Share(ticket=6, weights=(Weight(environment_id=environment_id, cpu_weight=200),))
        again: list[LauncherReply] = []
        done = every_effect(
            one, FAULTS, lambda: shares, Acknowledged, lambda _reply: again.append(one.ask(shares))
        )
        assert done > 1
        assert {type(reply) for reply in again} == {Acknowledged}
        one.destroyed(environment_id)


@pytest.mark.parametrize(
    ("make", "success"), [(Inventory, InventoryIs), (Probe, Probed)], ids=["inventory", "probe"]
)
def test_a_look_that_fails_anywhere_says_so_or_says_less(
    tmp_path: Path, make: type[Inventory | Probe], success: type[LauncherReply]
) -> None:
    with bench(tmp_path) as one:
        done = every_effect(one, FAULTS, lambda: make(ticket=6), success, lambda _reply: None)
        assert done > 0
        assert isinstance(one.ask(make(ticket=7)), success)


def small_image() -> str:
    """One of each kind of entry, in the store and not unpacked: its digest."""
    layer = tar_of(
        (entry("etc", tarfile.DIRTYPE, mode=0o755), b""),
        (entry("etc/file"), b"x" * 1000),
        (entry("etc/same", tarfile.LNKTYPE, "etc/file"), b""),
        (entry("link", tarfile.SYMTYPE, "etc/file"), b""),
    )
    return put_image(Path(hostpaths.STATE_DIRECTORY), layer)


def whole(one: Bench, image: str) -> None:
    """The image can be unpacked (it is there, or it is not), and then there is all of it."""
    unpacked = one.ask(ImageUnpack(ticket=10, image_digest=image))
    assert isinstance(unpacked, Acknowledged), unpacked
    tree = Path(hostpaths.unpacked_directory()) / image.removeprefix("sha256:") / "rootfs"
    assert (tree / "etc/file").read_bytes() == b"x" * 1000
    assert (tree / "etc/same").stat().st_nlink == 2
    assert os.readlink(tree / "link") == "etc/file"
    assert not list(tree.parent.parent.glob("*.partial"))


def test_an_image_whose_unpacking_fails_anywhere_is_whole_or_not_there(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        image = small_image()

        def request() -> ImageUnpack:
            assert isinstance(one.ask(ImageDrop(ticket=9, image_digest=image)), Acknowledged)
            return ImageUnpack(ticket=11, image_digest=image)

        def afterwards(reply: LauncherReply) -> None:
            whole(one, image)

        assert every_effect(one, FAULTS, request, Acknowledged, afterwards) > 15
        one.ask(ImageDrop(ticket=12, image_digest=image))


def test_an_image_whose_removal_fails_anywhere_can_be_removed_or_unpacked_again(
    tmp_path: Path,
) -> None:
    with bench(tmp_path) as one:
        image = small_image()

        def request() -> ImageDrop:
            whole(one, image)
            return ImageDrop(ticket=9, image_digest=image)

        def afterwards(reply: LauncherReply) -> None:
            whole(one, image)
            assert isinstance(one.ask(ImageDrop(ticket=13, image_digest=image)), Acknowledged)
            name = image.removeprefix("sha256:")
            assert not list(Path(hostpaths.unpacked_directory()).glob(f"{name}*"))

        assert every_effect(one, FAULTS, request, Acknowledged, afterwards) > 3
        one.ask(ImageDrop(ticket=12, image_digest=image))


def test_a_slot_stands_on_an_image_whose_unpacking_failed_once(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        for number, what in ((1, "EIO"), (5, "KILL")):
            dropped = one.ask(ImageDrop(ticket=9, image_digest=one.image))
            assert isinstance(dropped, Acknowledged)
            unpack = ImageUnpack(ticket=11, image_digest=one.image)
            reply, happened = one.ask_armed(unpack, number, what)
            assert happened
            assert isinstance(reply, Failed)
            assert isinstance(one.ask(unpack), Acknowledged)
            one.destroyed(one.prepared())
