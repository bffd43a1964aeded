"""What an environment writes to the disk is held to the operator's ceilings, and counted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from sbxd.launcher.kernel import hostpaths
from sbxd.mechanism.namespaces_sandbox import NamespacesSandbox
from sbxd.port.limits import IoCeilings
from tests.kernel import launcher_subject as subject
from tests.kernel.launcher_subject import Launcher

pytestmark = pytest.mark.needs("cgroup2", "idmap", "image", "loop", "root", "systemd")


@pytest.fixture(scope="module")
def image() -> str:
    return subject.unpacked_image()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with subject.launcher(tmp_path_factory.mktemp("launcher")) as running:
        yield running


def box(slot: NamespacesSandbox) -> Path:
    return Path(hostpaths.scope_directory(slot.environment_id)) / "box"


CEILING = IoCeilings(write_bytes=1 << 20, write_operations=5000)
# Four MiB, each piece on the disk before the next.
WRITER = (
    "python3",
    "-c",
    "import os\nf = os.open('f', os.O_CREAT | os.O_WRONLY)\n"
    "for _ in range(16):\n os.write(f, bytes(2**18)); os.fsync(f)",
)


@pytest.mark.needs("io")
@pytest.mark.case("RES-11")
async def test_a_storm_of_flushes_is_held_to_the_ceiling_and_a_neighbour_is_served(
    launcher: Launcher, image: str
) -> None:
    async with (
        subject.mechanism(launcher, CEILING) as opened,
        subject.sandbox(opened, image) as stormy,
        subject.sandbox(opened, image) as neighbour,
    ):
        storm = (
            "import os\nf = os.open('f', os.O_CREAT | os.O_WRONLY)\n"
            "while True:\n os.pwrite(f, bytes(2**18), 0); os.fsync(f); os.sync()"
        )
        begun = trio.current_time()
        running = await subject.start(stormy, "python3", "-c", storm)
        await subject.until(lambda: (running.counters().disk_written_bytes or 0) > 2 << 20)
        served = await subject.run(neighbour, *WRITER[:2], WRITER[2].replace("16", "2"))
        lasted = trio.current_time() - begun
        written = running.counters().disk_written_bytes
        running.kill()
        await running.wait_empty()
        await running.aclose()
    assert served.end.exit_code == 0
    assert written is not None
    # What the kernel lets through at once, and the file system's own records, are on top.
    assert written <= (lasted + 2) * 1.5 * 2**20, f"{written} bytes in {lasted} s"


@pytest.mark.needs("io")
async def test_writing_is_held_to_the_ceiling_and_counted(launcher: Launcher, image: str) -> None:
    seconds = {}
    for ceiling in (CEILING, None):
        async with (
            subject.mechanism(launcher, ceiling) as opened,
            subject.sandbox(opened, image) as slot,
        ):
            line = (box(slot) / "io.max").read_text()
            assert ("wbps=1048576" in line) == (ceiling is not None)
            assert slot.unenforced_limits == ()
            begun = trio.current_time()
            done = await subject.run(slot, *WRITER)
            seconds[ceiling] = trio.current_time() - begun
            assert done.end.exit_code == 0, done
            assert done.counters.disk_written_bytes is not None
            assert 4 << 20 <= done.counters.disk_written_bytes < 8 << 20
            read_only = await subject.run(slot, "true")
            assert read_only.counters.disk_written_bytes == 0, "a leaf counts from zero"
    # Four seconds by arithmetic, but for what the kernel lets through at once.
    assert seconds[CEILING] > 2.5
    assert seconds[None] < seconds[CEILING], "the control was as slow: it proves nothing"


async def test_a_ceiling_without_a_controller_is_reported(launcher: Launcher, image: str) -> None:
    has = "io" in (Path(hostpaths.CGROUP_ROOT) / "cgroup.controllers").read_text().split()
    async with (
        subject.mechanism(launcher, CEILING) as opened,
        subject.sandbox(opened, image) as slot,
    ):
        assert ("io" in slot.unenforced_limits) == (not has)
        done = await subject.run(slot, "true")
        assert (done.counters.disk_written_bytes is None) == (not has)
