"""No environment reads, writes, lists or stats the workspace of another.

Source: gate.sandbox.workspace_isolated, CASES FS-15, LIF-12. Each way in is tried against a
neighbour that really has the file, and against the own workspace as the control.
"""

import secrets

import msgspec
import pytest
import trio

from sbxd.client.remote import connect
from sbxd.client.workspace import RemoteWorkspace
from sbxd.port.errors import (
    ExecutionRejected,
    SandboxEscapeSuspected,
    WorkspaceError,
    WorkspaceEscape,
)
from sbxd.port.ids import TenantId
from tests.redteam.live import (
    WORKER_SOCKET,
    Live,
    default_image,
    live,
    specification,
    wait_process_on_the_host,
)

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.workspace_isolated"),
]

SEARCH = """
import pathlib
marker = ({halves[0]!r} + {halves[1]!r}).encode()  # so that it does not find itself
hits, looked = [], 0
for base in ("/", "/proc/self/root", "/proc/1/root", "/proc/self/cwd"):
    for folder, folders, files in os.walk(base, followlinks=False):
        folders[:] = [f for f in folders if (folder, f) not in (("/", "proc"), ("/", "usr"))]
        for name in files:
            path = os.path.join(folder, name)
            looked += 1
            if marker in os.fsencode(name):
                hits.append(path)
                continue
            try:
                if stat.S_ISREG(os.stat(path).st_mode) and os.path.getsize(path) < 1 << 20:
                    with open(path, "rb") as file:
                        if marker in file.read():
                            hits.append(path)
            except OSError:
                pass
answer([sorted(set(hits)), looked])
"""


@pytest.mark.case("FS-15")
@pytest.mark.parametrize("tenants", [("tenant-1", "tenant-1"), ("tenant-1", "tenant-2")])
async def test_a_neighbours_file_is_nowhere_to_be_found(tenants: tuple[str, str]) -> None:
    marker = f"secret-{secrets.token_hex(8)}"
    async with live(tenant=tenants[0]) as victim, live(tenant=tenants[1]) as attacker:
        await victim.workspace.write(f"{marker}.txt", marker.encode())
        hits, looked = await attacker.look(SEARCH.format(halves=(marker[:12], marker[12:])))
        own, _ = await victim.look(SEARCH.format(halves=(marker[:12], marker[12:])))
        assert any(path.startswith("/workspace/") for path in own), "the control finds its own"
    assert hits == []
    assert looked > 100


@pytest.mark.case("FS-15")
@pytest.mark.parametrize("tenants", [("tenant-1", "tenant-1"), ("tenant-1", "tenant-2")])
async def test_a_path_or_a_planted_link_leads_nowhere(tenants: tuple[str, str]) -> None:
    async with live(tenant=tenants[0]) as victim, live(tenant=tenants[1]) as attacker:
        await victim.workspace.write("mine", b"secret")
        identity = victim.handle.environment_id
        host = await _host_paths(victim)
        for number, target in enumerate(host):
            await attacker.run("ln", "-s", target, f"link-{number}")
            shown = await attacker.run("cat", f"link-{number}")
            assert shown.exit_code != 0
            assert shown.stdout == b""
            with pytest.raises((WorkspaceError, WorkspaceEscape)):
                await attacker.workspace.read(f"link-{number}")
            with pytest.raises((WorkspaceError, WorkspaceEscape)):
                await attacker.workspace.read(f"link-{number}/mine")
            with pytest.raises((WorkspaceError, WorkspaceEscape)):
                await attacker.workspace.listdir(f"link-{number}")
            with pytest.raises((WorkspaceError, WorkspaceEscape)):
                await attacker.workspace.write(f"link-{number}/planted", b"x")
        for path in (f"../{identity}/mine", f"/var/lib/sbxd/volumes/{identity}/mine", "../mine"):
            with pytest.raises((WorkspaceError, WorkspaceEscape)):
                await attacker.workspace.read(path)
        assert await victim.workspace.read("mine") == b"secret", "the control"
        assert [entry.path for entry in await victim.workspace.listdir(".")] == ["mine"]


async def _host_paths(victim: Live) -> list[str]:
    identity = victim.handle.environment_id
    return [
        "/var/lib/sbxd",
        f"/var/lib/sbxd/volumes/{identity}",
        f"/var/lib/sbxd/volumes/sbx-{identity}",
        "/proc/1/root/workspace/mine",
        "/proc/self/root/../workspace/../../mine",
        "../../../../../../etc/shadow",
    ]


@pytest.mark.case("ESC-09", "FS-15")
async def test_a_neighbours_pid_on_the_host_gives_no_way_in() -> None:
    marker = f"marker-{secrets.token_hex(8)}"
    async with live() as victim, live() as attacker, trio.open_nursery() as nursery:
        await victim.workspace.write("mine", b"secret")

        async def sleep() -> None:
            await victim.run("python3", "-c", "import time; time.sleep(600)", marker)

        nursery.start_soon(sleep)
        pid = (await wait_process_on_the_host(marker)).name
        source = f"""
found = []
for pid in ({pid}, 1, 2, 3):
    if pid != os.getpid():
        for way in ("root/workspace/mine", "cwd/mine", "fd/1", "map_files"):
            found.append(attempt(os.stat, f"/proc/{{pid}}/{{way}}"))
open("/workspace/own", "w").close()
answer([found, attempt(os.stat, f"/proc/{{os.getpid()}}/root/workspace/own")])
"""
        found, control = await attacker.look(source)
        nursery.cancel_scope.cancel()
    assert found
    assert set(found) <= {"ENOENT", "EACCES"}
    assert control == "ok"


@pytest.mark.case("FS-15")
async def test_two_environments_have_other_uids_on_the_host_and_other_file_systems() -> None:
    found = []
    async with live() as one, live() as other, trio.open_nursery() as nursery:
        for environment in (one, other):
            marker = f"marker-{secrets.token_hex(8)}"

            async def sleep(environment: Live = environment, marker: str = marker) -> None:
                await environment.run("python3", "-c", "import time; time.sleep(600)", marker)

            nursery.start_soon(sleep)
            process = await wait_process_on_the_host(marker)
            uid = (process / "status").read_text().split("\nUid:\t")[1].split("\t")[0]
            mounts = (process / "mountinfo").read_text().splitlines()
            (workspace,) = [line.split() for line in mounts if line.split()[4] == "/workspace"]
            found.append((uid, (workspace[2], workspace[3])))
        nursery.cancel_scope.cancel()
    (uid, place), (other_uid, other_place) = found
    assert uid != other_uid
    assert place != other_place, "one directory of one file system is both workspaces"


async def test_a_handle_of_another_tenant_opens_nothing_and_ends_what_it_names() -> None:
    async with live(tenant="tenant-1") as victim:
        await victim.workspace.write("mine", b"secret")
        forged = msgspec.structs.replace(victim.handle, tenant_id=TenantId("tenant-2"))
        with pytest.raises(SandboxEscapeSuspected):
            await RemoteWorkspace(victim.remote.channel, forged).read("mine")
        with pytest.raises((ExecutionRejected, SandboxEscapeSuspected)):
            await victim.workspace.read("mine")
    async with live(tenant="tenant-1") as control:
        await control.workspace.write("mine", b"ok")
        assert await control.workspace.read("mine") == b"ok"


async def test_nothing_of_an_environment_is_in_the_one_that_follows_it() -> None:
    marker = f"residue-{secrets.token_hex(8)}"
    leave = f"""
for place in ("/workspace", "/tmp", "/dev/shm"):
    with open(place + "/{marker}", "w") as file:
        file.write("{marker}")
answer(len(os.listdir("/tmp")))
"""
    look = f"""
found = []
for place in ("/workspace", "/tmp", "/dev/shm"):
    found += [name for name in os.listdir(place)]
with open("/workspace/raw", "wb") as file:
    file.truncate(1 << 20)
    file.seek(0)
blocks = open("/workspace/raw", "rb").read()
answer([found, {marker!r}.encode() in blocks])
"""
    image = await default_image()
    async with connect(WORKER_SOCKET, client_name="residue") as remote:
        for _ in range(6):
            handle = await remote.provision(specification(image))
            environment = Live(remote, handle)
            found, residue = await environment.look(look)
            assert [name for name in found if name != "raw"] == []
            assert not residue
            assert await environment.look(leave) == 1, "the control: it is there to be found"
            await remote.destroy(handle)
