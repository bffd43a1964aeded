"""The launcher on a real systemd: its client's end, its own end, and what it says of the host."""

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sbxd.launcher import channel
from sbxd.launcher.kernel import hostpaths, inventory
from sbxd.launcher.requests import (
    LEAF_DESCRIPTORS,
    PREPARED_DESCRIPTORS,
    Acknowledged,
    CgroupLimits,
    Died,
    Failed,
    ImageDrop,
    ImageUnpack,
    Inventory,
    InventoryIs,
    LauncherReply,
    LauncherRequest,
    Leaf,
    Prepare,
    Prepared,
    Probe,
    Probed,
    VolumeSize,
)
from sbxd.port.ids import EnvironmentId
from tests.kernel import launcher_subject as subject
from tests.kernel.launcher_subject import Launcher
from tests.pacing import LOOK_SECONDS

pytestmark = pytest.mark.needs("cgroup2", "idmap", "image", "loop", "root", "systemd")

LIMITS = CgroupLimits(cpu_millicores=1000, memory_bytes=96 << 20, pids_max=32)
VOLUME = VolumeSize(workspace_bytes=32 << 20, inodes_max=1024)


@pytest.fixture(scope="module")
def image() -> str:
    return subject.unpacked_image()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with subject.launcher(tmp_path) as running:
        yield running


class Client:
    """A daemon without manners."""

    def __init__(self, launcher: Launcher) -> None:
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(subject.WAIT_SECONDS)
        self.channel.connect(launcher.socket)
        self.held: list[int] = []

    def ask(self, request: LauncherRequest) -> tuple[LauncherReply, int]:
        """The reply, and how many descriptors came with it. They are held until `close`: init
        and the steward end with their channels."""
        channel.send(self.channel, channel.encode(request))
        while True:
            raw, descriptors = channel.receive(self.channel)
            self.held += descriptors
            reply = channel.decode_reply(raw)
            if not isinstance(reply, Died):
                return reply, len(descriptors)

    def close(self) -> None:
        self.channel.close()
        channel.close_all(self.held)


def prepare(image: str, environment_id: EnvironmentId) -> Prepare:
    return Prepare(
        ticket=1,
        environment_id=environment_id,
        image_digest=image,
        volume=VOLUME,
        limits=LIMITS,
        back_stop_seconds=600,
    )


def gone(environment_id: str) -> bool:
    """Whether nothing is left. (A loop device is freed some moments after its last mount.)"""
    return not inventory.take()[1].get(environment_id, set()) - {"mount"}


def wait_for(holds: Callable[[], bool]) -> None:
    """Until something is so that nothing tells of."""
    deadline = time.monotonic() + subject.WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        select.poll().poll(LOOK_SECONDS * 1000)


def wait_until_gone(environment_id: str) -> None:
    wait_for(lambda: gone(environment_id))


def test_a_slot_comes_with_every_descriptor_and_every_step(launcher: Launcher, image: str) -> None:
    client, environment_id = Client(launcher), subject.fresh_id()
    reply, descriptors = client.ask(prepare(image, environment_id))
    assert isinstance(reply, Prepared)
    assert descriptors == len(PREPARED_DESCRIPTORS) + len(LEAF_DESCRIPTORS)
    assert reply.scope == f"sbx-{environment_id}.scope"
    assert [step.name for step in reply.steps][:4] == ["apparmor", "uid_block", "anchor", "volume"]
    assert all(step.duration_us >= 0 for step in reply.steps)
    client.close()
    wait_until_gone(environment_id)


@pytest.mark.parametrize("delay_ms", [0, 5, 20, 40, 60, 100])
def test_a_client_that_vanishes_during_a_preparation_leaves_nothing(
    launcher: Launcher, image: str, delay_ms: int
) -> None:
    client, environment_id = Client(launcher), subject.fresh_id()
    channel.send(client.channel, channel.encode(prepare(image, environment_id)))
    client.channel.settimeout(delay_ms / 1000 or 0.001)
    with suppress(TimeoutError):
        client.channel.recv(1)
    client.close()
    second = Client(launcher)
    reply, _ = second.ask(Inventory(ticket=1))  # answered when the first one's are gone
    assert isinstance(reply, InventoryIs)
    assert gone(environment_id)
    second.close()


@pytest.mark.parametrize("raw", [b"\xc1", b"", b"\0" * 70_000], ids=["garbage", "empty", "long"])
def test_a_client_that_breaks_the_protocol_loses_everything(
    launcher: Launcher, image: str, raw: bytes
) -> None:
    client, environment_id = Client(launcher), subject.fresh_id()
    client.ask(prepare(image, environment_id))
    client.channel.send(raw)
    assert client.channel.recv(1) == b""
    wait_until_gone(environment_id)
    client.close()
    assert launcher.process.poll() is None


def test_an_illegal_verb_is_refused_and_touches_nothing(launcher: Launcher, image: str) -> None:
    client, environment_id = Client(launcher), subject.fresh_id()
    client.ask(prepare(image, environment_id))
    leaf = Leaf(ticket=2, environment_id=environment_id, number=2, limits=LIMITS)
    reply, descriptors = client.ask(leaf)
    assert isinstance(reply, Failed)
    assert (reply.step, descriptors) == ("legality", 0)
    box = Path(hostpaths.scope_directory(environment_id)) / "box"
    assert not (box / "exec-2").exists()
    reply, _ = client.ask(prepare(image, environment_id))
    assert isinstance(reply, Failed)
    assert reply.step == "legality"
    assert (box / "exec-1").exists()
    client.close()


def test_sigterm_ends_all_environments_and_then_the_launcher(
    launcher: Launcher, image: str
) -> None:
    client, environment_id = Client(launcher), subject.fresh_id()
    client.ask(prepare(image, environment_id))
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(subject.WAIT_SECONDS) == 0
    assert gone(environment_id)
    client.close()


def test_the_launcher_reaps_all_that_it_starts(launcher: Launcher, image: str) -> None:
    client = Client(launcher)
    for _ in range(3):
        environment_id = subject.fresh_id()
        reply, _ = client.ask(prepare(image, environment_id))
        assert isinstance(reply, Prepared)
        wait_for(lambda: len(launcher.helpers()) >= 2)  # init and the steward are its own now
        client.close()
        wait_until_gone(environment_id)
        client = Client(launcher)
        client.ask(Inventory(ticket=1))
    client.close()
    wait_for(lambda: not launcher.helpers())


def test_the_launcher_is_small(launcher: Launcher) -> None:
    status = Path(f"/proc/{launcher.process.pid}/status").read_text().splitlines()
    (anonymous,) = (int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    assert anonymous < 18 * 1024, "kB that every fork has to copy the page tables of"


def test_a_probe_names_every_facility_and_the_fix_of_each_that_is_missing(
    launcher: Launcher,
) -> None:
    client = Client(launcher)
    reply, _ = client.ask(Probe(ticket=1))
    client.close()
    assert isinstance(reply, Probed)
    items = {item.name: item for item in reply.items}
    for name in ("kernel", "systemd", "cgroup2", "clone_into_cgroup", "user_namespaces"):
        assert items[name].state == "ok", items[name]
    assert items["idmapped_mounts"].state == "ok"
    assert items["guest_program"].state == "ok"
    assert all(item.fix for item in reply.items if item.state != "ok")
    has = Path(hostpaths.CGROUP_ROOT, "cgroup.controllers").read_text().split()
    for controller in ("cpu", "memory", "pids"):
        assert (items[f"cgroup.{controller}"].state == "ok") == (controller in has)


def test_a_drop_of_an_image_in_use_is_refused(launcher: Launcher, image: str) -> None:
    client, environment_id = Client(launcher), subject.fresh_id()
    assert client.ask(ImageUnpack(ticket=1, image_digest=image))[0] == Acknowledged(ticket=1)
    client.ask(prepare(image, environment_id))
    reply, _ = client.ask(ImageDrop(ticket=2, image_digest=image))
    assert isinstance(reply, Failed)
    assert reply.step == "legality"
    client.close()
    wait_until_gone(environment_id)
    assert os.path.isdir(hostpaths.unpacked_directory())
