"""A command that dumps all that it can see shows no credential, and no value of its host.

Source: gate.sandbox.no_credential_reaches. The values are planted on the host where credentials
live (the service's own, root's files, another process' environment), and the control is one that
is planted inside, which the same search finds.
"""

import os
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.redteam.live import live

pytestmark = [
    pytest.mark.needs("daemon", "root"),
    pytest.mark.gate("gate.sandbox.no_credential_reaches"),
]

CREDENTIAL = Path("/etc/sbxd/service-credential")

DUMP = """
import hashlib, re
needles = [n.encode() for n in {needles!r}]
hits, files, size, denied = {{}}, 0, 0, 0

def search(where, content):
    for needle in needles:
        if needle in content:
            hits.setdefault(needle.decode(), []).append(where)

search("environ", repr(dict(os.environ)).encode())
search("argv", repr(sys.argv[:1]).encode())
search("uname", repr(os.uname()).encode())
for folder, folders, names in os.walk("/", followlinks=False):
    folders[:] = [f for f in folders if os.path.join(folder, f) != "/proc/thread-self"]
    for name in names:
        path = os.path.join(folder, name)
        search(path, os.fsencode(path))
        try:
            if os.path.islink(path):
                search(path, os.fsencode(os.readlink(path)))
                continue
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            denied += 1
            continue
        try:
            content = os.read(descriptor, 4 << 20)
        except OSError:
            content = b""
        finally:
            os.close(descriptor)
        if path.endswith(("/cmdline", "/mem", "/stack")) and path.startswith("/proc/"):
            continue  # the search's own program holds what it searches for
        files += 1
        size += len(content)
        search(path, content)
answer([hits, files, size])
"""


@dataclass(frozen=True)
class Planted:
    """values: what must not be found inside."""

    values: tuple[str, ...]


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Planted]:
    """Credentials where a host has them; the files and the process go with the test."""
    token = secrets.token_hex(16)
    values = [f"sk-live-{token}", f"AKIA{token.upper()}", f"postgres://u:{token}@db/x"]
    only_root = tmp_path / "credentials"
    only_root.write_text("\n".join(values))
    only_root.chmod(0o600)
    readable = Path("/etc") / f"sbxd-test-{token[:8]}"
    readable.write_text(f"world-readable-{token}")
    temporary = Path("/tmp") / f"sbxd-test-{token[:8]}"
    temporary.write_text(f"in-tmp-{token}")
    holder = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "DATABASE_URL": values[2], "API_KEY": values[0]}
    )
    credential = CREDENTIAL.read_text().strip()
    try:
        yield Planted((*values, f"world-readable-{token}", f"in-tmp-{token}", credential))
    finally:
        holder.kill()
        holder.wait()
        readable.unlink()
        temporary.unlink()


async def test_no_planted_value_is_seen_by_a_dump_of_everything(planted: Planted) -> None:
    assert all(len(value) >= 8 for value in planted.values), "too short to be searched for"
    control = f"control-{secrets.token_hex(8)}"
    async with live() as environment:
        await environment.workspace.write("note", f"here is {control}".encode())
        # The needles travel in halves, so that the search does not find its own program.
        needles = [*planted.values, control]
        halves = [(value[: len(value) // 2], value[len(value) // 2 :]) for value in needles]
        source = DUMP.replace("{needles!r}", repr(halves)).replace("{{", "{").replace("}}", "}")
        source = source.replace("n.encode() for n in", "(a + b).encode() for a, b in")
        hits, files, size = await environment.look(source)
    found = {needle: places for needle, places in hits.items() if needle != control}
    assert found == {}
    assert "/workspace/note" in hits[control], "the control: what is there is found"
    assert files > 500, "the search looked at too little"
    assert size > 10_000_000


async def test_the_hosts_own_names_and_users_are_not_shown() -> None:
    """Its hostname, its machine id and its boot id."""
    hostname, machine_id = os.uname().nodename, _machine_id()
    assert hostname
    assert len(machine_id) == 32, "the control: there is something to hide"
    async with live() as environment:
        found = await environment.look(
            """
answer([os.uname().nodename, os.path.exists("/etc/machine-id") and open("/etc/machine-id").read(),
        attempt(open, "/proc/sys/kernel/random/boot_id"), open("/etc/hostname").read()
        if os.path.exists("/etc/hostname") else ""])
"""
        )
    assert hostname not in found[0]
    assert machine_id not in str(found[1])
    assert found[2] in ("ENOENT", "EACCES")
    assert hostname not in found[3]


def _machine_id() -> str:
    return Path("/etc/machine-id").read_text().strip()
