"""What the kernel and systemd hold that is sbxd's, read from them and never from sbxd's books.

`wait_settled` looks again and again (each look is a round trip and a systemctl), bounded, until
the reserve is full: a test compares two settled inventories, in which only the reserve's slots
may stand.
"""

import fcntl
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from tests.pacing import next_look
from tests.redteam.live import admin

CGROUP = Path("/sys/fs/cgroup")
STATE = Path("/var/lib/sbxd")
LOOP_GET_STATUS64 = 0x4C05  # loop(4); begins with the device of the backing file
UID_RANGE = range(1879048192, 2147483647)
WAL_HEADER_BYTES = 32  # fileformat2.html of SQLite; new with each beginning of the log
COPIES_MAX = 100


@dataclass(frozen=True)
class Kernel:
    """How many of each kind of thing exist."""

    scopes: int
    cgroups: int
    processes: int
    zombies: int
    volumes: int
    volume_mounts: int
    loop_devices: int
    network_namespaces: int
    leftovers: tuple[str, ...]

    def report(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def take() -> Kernel:
    """The inventory now."""
    units = subprocess.run(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "sbx-*.scope"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    slice_directory = CGROUP / "sbx.slice"
    cgroups = (
        [d for d in slice_directory.rglob("*") if d.is_dir()] if slice_directory.exists() else []
    )
    seen: Counter[str] = Counter()
    networks = set()
    mounts = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "status").read_text()
            uid = int(status.split("\nUid:\t")[1].split("\t")[0])
            if uid not in UID_RANGE:
                continue
            seen["zombies" if "\nState:\tZ" in status else "processes"] += 1
            networks.add(os.readlink(entry / "ns/net"))
            for line in (entry / "mountinfo").read_text().splitlines():
                fields = line.split(" ")
                if fields[4] == "/workspace":
                    mounts.add(fields[2])
        except OSError:  # it ended while we looked; its mounts are then EINVAL
            continue
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if "/volumes/" in line:
            seen["host_mounts"] += 1
    # Of the dead, too, until they are erased.
    held = [*(STATE / "volumes").glob("*"), *(STATE / "volumes" / "erasing").glob("*")]
    volumes = [each for each in held if each.name != "erasing"]
    leftovers = tuple(
        sorted(
            [f"host mount x{seen['host_mounts']}"] * bool(seen["host_mounts"])
            + [f"failed unit {u.split()[0]}" for u in units if " failed " in u]
            + [
                f"image mount {m}"
                for m in Path("/proc/self/mountinfo").read_text().splitlines()
                if "/sbx-" in m
            ]
        )
    )
    return Kernel(
        scopes=sum(1 for unit in units if unit.strip()),
        cgroups=sum(1 for d in cgroups if d.name.endswith(".scope")),
        processes=seen["processes"],
        zombies=seen["zombies"],
        volumes=len(volumes),
        volume_mounts=len(mounts),
        loop_devices=_own_loop_devices(),
        network_namespaces=len(networks),
        leftovers=leftovers,
    )


@dataclass(frozen=True)
class Resident:
    """One process that is sbxd's: in a sandbox's cgroup, or with a uid of a sandbox.

    environment_id, place: of its cgroup, which is below the scope; both "" when it is in none.
    """

    pid: int
    name: str
    state: str
    environment_id: str
    place: str

    def __str__(self) -> str:
        where = f"{self.environment_id} {self.place}" if self.environment_id else "no sandbox"
        return f"process {self.pid} ({self.name}, {self.state}) in {where}"


_OF_SCOPE = re.compile(r"/sbx-([0-9a-f]{32})\.scope(?:/(\S*))?")


def residents() -> list[Resident]:
    """Every one, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = dict(
                line.split(":\t", 1) for line in (entry / "status").read_text().splitlines()
            )
            group = (entry / "cgroup").read_text()
        except OSError:  # it ended while we looked
            continue
        scope = _OF_SCOPE.search(group)
        if scope is None and int(status["Uid"].split("\t")[0]) not in UID_RANGE:
            continue
        environment_id, place = ("", "") if scope is None else (scope[1], scope[2] or "")
        found.append(
            Resident(int(entry.name), status["Name"], status["State"], environment_id, place)
        )
    return found


def out_of_place(found: list[Resident], slots: set[str]) -> list[str]:
    """What is not exactly the processes of so many idle slots, one by one.

    An idle slot is its init, its steward and the parked process of its first command, each alone
    in its leaf; where the guest has a kernel of its own, its steward and one leaf with that kernel.
    """
    wrong = [
        str(each) for each in found if each.environment_id not in slots or each.state[0] in "ZX"
    ]
    for slot in sorted(slots):
        here = [each for each in found if each.environment_id == slot]
        places = Counter(re.sub(r"^box/exec-\d+$", "exec", each.place) for each in here)
        leaves = {each.place for each in here if each.place.startswith("box/exec-")}
        has_own_kernel = places["box/init"] == 0 and places["exec"] > 1
        expected = Counter({"box/steward": 1, "exec": places["exec"] if has_own_kernel else 1})
        if not has_own_kernel:
            expected["box/init"] = 1
        if places != expected or len(leaves) != 1:
            wrong.append(f"slot {slot} holds " + ("; ".join(map(str, here)) or "no process"))
    return wrong


def _own_loop_devices() -> int:
    """Loop devices on images of this state directory: other lanes of one kernel have theirs."""
    if not (STATE / "volumes").exists():
        return 0
    own = os.stat(STATE / "volumes").st_dev
    found = 0
    for entry in Path("/sys/block").glob("loop*/loop"):
        try:
            device = os.open(f"/dev/{entry.parent.name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # released since it was listed
            continue
        try:
            information = fcntl.ioctl(device, LOOP_GET_STATUS64, bytes(232))
        except OSError:
            continue
        finally:
            os.close(device)
        found += int.from_bytes(information[:8], sys.byteorder) == own
    return found


async def wait_settled(*, within_seconds: float = 90) -> Kernel:
    """The inventory once no environment is live and the reserve is full and nothing moves."""
    with trio.fail_after(within_seconds):
        previous = None
        while True:
            async with admin() as client:
                described = await client.describe()
            now = take()
            if (
                described.environments == 0
                and described.reserve_ready == described.reserve_target
                and now == previous
                # What is dead counts until its parent has reaped it.
                and now.zombies == 0
                and now.scopes == described.reserve_target
                and now.volumes == described.reserve_target
                # None where volumes are quotas. The kernel releases a loop device a moment after
                # the last mount of it is gone.
                and now.loop_devices in (0, described.reserve_target)
            ):
                return now
            previous = now
            await next_look()


def journal_states() -> dict[str, str]:
    """What the creation journal says of each environment id, read from a copy of it."""
    with tempfile.TemporaryDirectory() as directory:
        database, log = _journal_at_one_time()
        (Path(directory) / "journal.sqlite").write_bytes(database)
        (Path(directory) / "journal.sqlite-wal").write_bytes(log)
        with closing(sqlite3.connect(Path(directory) / "journal.sqlite")) as connection:
            return dict(connection.execute("SELECT environment_id, state FROM environments"))


def _journal_at_one_time() -> tuple[bytes, bytes]:
    """The database and its log, of which neither was begun anew while they were read: the daemon
    may be moving the one into the other."""
    database, log = STATE / "journal" / "journal.sqlite", STATE / "journal" / "journal.sqlite-wal"
    for _ in range(COPIES_MAX):
        before, after = database.read_bytes(), _content(log)
        if (before, after[:WAL_HEADER_BYTES]) == (
            database.read_bytes(),
            _content(log)[:WAL_HEADER_BYTES],
        ):
            return before, after
    raise AssertionError("the journal is never at rest")


def _content(path: Path) -> bytes:
    """Nothing of a file that is not there."""
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def quarantined_ids() -> set[str]:
    """Every id that the journal calls quarantined; of no journal, none."""
    if not (STATE / "journal" / "journal.sqlite").exists():
        return set()
    return {name for name, state in journal_states().items() if state == "QUARANTINED"}


def quarantined_after_a_pass() -> set[str]:
    """As `quarantined_ids`, once the reaper has tried again to prove each of them gone."""

    async def one_pass() -> None:
        async with admin() as client:
            await client.reap()

    trio.run(one_pass)
    return quarantined_ids()
