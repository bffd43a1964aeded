"""Tenants who leave a canary wherever they can, and look for everybody else's.

Each hand-out of the pool gets one: a program looks first at all that a fresh sandbox shows (names
and contents of files, blocks of the volume that nobody has written, memory that nobody has
touched, processes, variables, System V objects, abstract sockets), then fills the same places
with its own canary and ends. A canary of another tenant, or a byte that is not zero where nothing
was written, is a leak. So is a value that two of them share and that is to be each one's own
(CASES LIF-11).
"""

import json
import secrets
import subprocess
from dataclasses import dataclass, field

from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.port.command import ExecutionCommand
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.limits import MIB

# What each sandbox has for itself. The host's name is not among them: it is the same on purpose.
UNIQUE = ("random", "uuid", "prng", "hash_seed", "at_random", "tls", "stack", "library")

PROGRAM = r"""
import ctypes, json, mmap, os, re, socket, sys, uuid, random

own = ("SBXCANARY-" + sys.argv[1]).encode()
size = int(sys.argv[2])
WORD = re.compile(rb"SBXCANARY-[0-9a-f]{32}")
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
seen, looked, dirty = {}, {}, {}


def look(where, data):
    looked[where] = looked.get(where, 0) + len(data)
    for word in WORD.findall(data):
        if word != own:
            seen.setdefault(where, set()).add(word.decode())


def look_blank(where, data):
    look(where, data)
    if data.count(0) != len(data):
        dirty[where] = len(data) - data.count(0)


def contents(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 22)
    except OSError:
        return b""


def look_at_files():
    for base in ("/workspace", "/tmp", "/dev/shm", "/var/tmp", "/run", "/proc/self/cwd"):
        for folder, folders, files in os.walk(base):
            for name in folders + files:
                path = os.path.join(folder, name)
                look(base, os.fsencode(name))
                try:
                    for key in os.listxattr(path, follow_symlinks=False):
                        look(base, key.encode() + os.getxattr(path, key, follow_symlinks=False))
                except OSError:
                    pass
                if os.path.isfile(path):
                    look(base, contents(path))


def look_at_processes():
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            for name in ("cmdline", "environ", "comm", "maps", "mountinfo"):
                look("processes", contents(f"/proc/{entry}/{name}"))
    for name in ("/proc/net/unix", "/proc/sysvipc/shm", "/proc/sysvipc/msg", "/proc/keys"):
        look("processes", contents(name))
    look("environment", "\0".join(f"{k}={v}" for k, v in os.environ.items()).encode())
    look("descriptors", "\0".join(os.readlink(f"/proc/self/fd/{n}")
                                  for n in os.listdir("/proc/self/fd") if int(n) > 2
                                  and os.path.lexists(f"/proc/self/fd/{n}")).encode())
    look("stdin", sys.stdin.buffer.read())


def look_at_blank_places():
    with mmap.mmap(-1, 16 << 20) as memory:
        look_blank("memory", memory[:])
    for place in ("/workspace/blank", "/tmp/blank", "/dev/shm/blank"):
        with open(place, "w+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError:
                os.ftruncate(file.fileno(), size)
            file.seek(0)
            while piece := file.read(1 << 20):
                look_blank(place, piece)
        os.unlink(place)


def shared(flags):
    number = libc.shmget(0x5B5B5B, 65536, flags)
    if number < 0:
        return None
    at = libc.shmat(number, None, 0)
    return None if at in (None, 2**64 - 1) else at


def look_at_system_v():
    at = shared(0)
    look("system_v", b"" if at is None else ctypes.string_at(at, 65536))
    if libc.msgget(0x5B5B5B, 0) >= 0:
        seen.setdefault("system_v", set()).add("a message queue")
    end = socket.socket(socket.AF_UNIX)
    if end.connect_ex(b"\0sbxcanary") == 0:
        seen.setdefault("abstract", set()).add("a listener")
    end.close()


def plant():
    filling = own * (1 << 16)
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        for number in range(3):
            name = os.path.join(folder, f"{own.decode()}-{number}")
            try:
                with open(name, "wb") as file:
                    for _ in range(max(size // (3 * len(filling)), 1)):
                        file.write(filling)
                    file.flush()
                    os.fsync(file.fileno())
                os.setxattr(name, "user.canary", own)
            except OSError:
                pass
        os.unlink(os.path.join(folder, f"{own.decode()}-1"))  # its blocks are free again
    os.environ["CANARY"] = own.decode()
    at = shared(0o1600)
    if at is not None:
        ctypes.memmove(at, own * 500, len(own) * 500)
    libc.msgget(0x5B5B5B, 0o1600)
    kept.append(bytearray(filling * 4))
    end = socket.socket(socket.AF_UNIX)
    try:
        end.bind(b"\0sbxcanary")
        end.listen(1)
    except OSError:
        pass
    if os.fork() == 0:  # left behind, with the canary among its arguments
        for number in (0, 1, 2):
            os.close(number)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(99)",
                                  own.decode()])


kept = []
look_at_files()
look_at_processes()
look_at_blank_places()
look_at_system_v()
plant()
try:
    import ssl
    tls = ssl.RAND_bytes(16).hex()
except ImportError:
    tls = os.urandom(16).hex()
libc.getauxval.restype = ctypes.c_void_p
print(json.dumps({
    "seen": {where: sorted(words) for where, words in seen.items()},
    "dirty": dirty, "looked": looked,
    "hostname": socket.gethostname(),
    "unique": {
        "random": os.urandom(16).hex(), "uuid": str(uuid.uuid4()), "prng": random.random(),
        "hash_seed": hash("a"), "at_random": ctypes.string_at(libc.getauxval(25), 16).hex(),
        "tls": tls, "stack": libc.getauxval(25),
        "library": ctypes.cast(libc.getpid, ctypes.c_void_p).value,
    },
}))
"""


@dataclass
class Canaries:
    """What all tenants have seen so far."""

    hand_outs: int = 0
    bytes_looked_at: int = 0
    leaks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    places: set[str] = field(default_factory=set)
    hostnames: set[str] = field(default_factory=set)
    unique: dict[str, list[object]] = field(default_factory=lambda: {name: [] for name in UNIQUE})
    environment_ids: set[str] = field(default_factory=set)

    def note(self, environment_id: str, found: dict[str, dict[str, object]]) -> None:
        """What one tenant's program has printed."""
        self.hand_outs += 1
        self.environment_ids.add(environment_id)
        self.hostnames.add(str(found["hostname"]))
        for where, size in found["looked"].items():
            self.places.add(where)
            self.bytes_looked_at += int(str(size))
        for kind in ("seen", "dirty"):
            for where, what in found[kind].items():
                self.leaks.append(f"{environment_id}: {kind} in {where}: {what}")
        for name in UNIQUE:
            self.unique[name].append(found["unique"][name])

    def repeated(self) -> dict[str, int]:
        """How many sandboxes had a value of this name that another had before."""
        return {name: len(values) - len(set(values)) for name, values in self.unique.items()}


def tenant_command(canary: str, filling_bytes: int = 8 * MIB) -> ExecutionCommand:
    """The program, with this canary as its own."""
    return ExecutionCommand(
        argv=("python3", "-c", PROGRAM, canary, str(filling_bytes)),
        working_directory=".",
        timeout_seconds=120,
        stdin=None,
        maximum_output_bytes=MIB,
    )


async def one_tenant(
    remote: RemoteExecutionEnvironment, handle: EnvironmentHandle, seen: Canaries
) -> None:
    """Look, plant, and give the environment back. Raises the port's errors."""
    try:
        result = await remote.execute(handle, tenant_command(fresh_canary()))
    finally:
        await remote.destroy(handle)
    if result.exit_code != 0:
        said = result.stderr[-300:].decode(errors="replace")
        seen.failures.append(f"exit {result.exit_code}, killed_by {result.killed_by}: {said}")
        return
    seen.note(handle.environment_id, json.loads(result.stdout))


def origins(run_prefix: str) -> list[str]:
    """Where the environments of these runs came from, by the audit log: RESERVE or COLD."""
    subprocess.run(["journalctl", "--sync"], check=True, timeout=60)
    shown = subprocess.run(
        ["journalctl", "--output=json", "--boot", "SBX_EVENT=EnvironmentProvisioned"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    entries = [json.loads(line) for line in shown.stdout.splitlines()]
    return [e["SBX_ORIGIN"] for e in entries if e["SBX_RUN_ID"].startswith(run_prefix)]


def fresh_canary() -> str:
    """What is planted: 32 hex digits."""
    return secrets.token_hex(16)
