"""Calls that are there and are refused by what they are asked to do.

One table: what the filter answers inside, and what the same program gets outside a sandbox, as
root, where that shows that the filter and nothing else refused. Numbers are those of x86-64.
"""

import json
import platform
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.redteam.live import PRELUDE, live

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.gate("gate.sandbox.escape_denied"),
]

HIGH = 1 << 32


@dataclass(frozen=True)
class Attempt:
    """outside: what root gets without a sandbox; None where that depends on the kernel."""

    name: str
    call: tuple[object, ...]
    inside: str
    outside: str | None = "ok"


# Strings that start with `$` are names of the program below.
ATTEMPTS = (
    # prctl 157
    Attempt("PR_SET_TSC", (157, 26, 1), "EPERM"),
    Attempt("PR_SET_TSC with high bits", (157, 26 | HIGH, 1), "EPERM"),
    Attempt("PR_SET_SECUREBITS", (157, 28, 0), "EPERM"),
    Attempt("PR_SET_KEEPCAPS", (157, 8, 1), "EPERM"),
    Attempt("PR_CAPBSET_DROP", (157, 24, 1), "EPERM"),
    Attempt("PR_SET_MM", (157, 35, 8, 0), "EPERM", None),
    Attempt("PR_SET_SPECULATION_CTRL", (157, 53, 0, 2, 0, 0), "EPERM", None),
    Attempt("PR_SCHED_CORE", (157, 62, 0, 0, 0, 0), "EPERM", None),
    Attempt("PR_SET_PTRACER", (157, 0x59616D61, -1), "EPERM", None),
    Attempt("PR_CAP_AMBIENT_CLEAR_ALL", (157, 47, 4, 0, 0, 0), "ENOSYS"),
    Attempt("PR_SET_SYSCALL_USER_DISPATCH", (157, 59, 0, 0, 0, 0), "ENOSYS", None),
    # mknod 133, mknodat 259
    Attempt("mknod of a character device", (133, "$one", 0o20600, 0x103), "EPERM"),
    Attempt("mknod of a block device", (133, "$two", 0o60600, 0x700), "EPERM"),
    Attempt("mknodat of a character device", (259, -100, "$three", 0o20600, 0x103), "EPERM"),
    # fcntl 72
    Attempt("F_SETLEASE", (72, "$fd", 1024, 1), "EINVAL"),
    Attempt("F_NOTIFY", (72, "$folder", 1026, 1), "EINVAL"),
    # sched_setscheduler 144, sched_setattr 314
    Attempt("SCHED_FIFO", (144, 0, 1, "$priority"), "EPERM", None),
    Attempt("SCHED_RR with reset-on-fork", (144, 0, 2 | 1 << 30, "$priority"), "EPERM", None),
    Attempt("sched_setattr", (314, 0, "$attributes", 0), "EPERM"),
    # clone 56, whose flags are looked at below any high bits
    Attempt(
        "clone NEWUSER with high bits", (56, 0x10000000 | HIGH | 17, 0, 0, 0, 0), "EPERM", None
    ),
    # socket 41, setsockopt 54: numbers that only a kernel's int makes the forbidden ones
    Attempt("AF_ALG with high bits", (41, 38 | HIGH, 5, 0), "EAFNOSUPPORT", None),
    Attempt("AF_NETLINK with high bits", (41, 16 | HIGH, 3, 0), "EAFNOSUPPORT"),
    Attempt("IPPROTO_MPTCP", (41, 2, 1, 262), "EAFNOSUPPORT", None),
    Attempt(
        "TCP_ULP with high bits", (54, "$tcp", 6 | HIGH, 31 | HIGH, "$tls", 4), "ENOPROTOOPT", None
    ),
    Attempt("TCP_REPAIR", (54, "$tcp", 6, 19, "$off", 4), "ENOPROTOOPT"),
    Attempt("UDP_ENCAP", (54, "$tcp", 17, 100, "$off", 4), "ENOPROTOOPT", None),
    Attempt("SO_BINDTODEVICE", (54, "$tcp", 1, 25, "$tls", 0), "ENOPROTOOPT"),
    Attempt("SO_MARK", (54, "$tcp", 1, 36, "$off", 4), "ENOPROTOOPT"),
    # pipe2 293: a notification pipe
    Attempt("O_NOTIFICATION_PIPE", (293, "$pair", 0x80), "ENOSYS", None),
    # Huge pages: mmap 9, memfd_create 319, shmget 29
    Attempt("MAP_HUGETLB", (9, 0, 1 << 21, 3, 0x40022, -1, 0), "ENOMEM", None),
    Attempt("MFD_HUGETLB", (319, "$tls", 4), "EINVAL", None),
    Attempt("SHM_HUGETLB", (29, 0, 1 << 21, 0o5600), "EPERM", None),
    # Another's limits, its core files
    Attempt("adjtimex", (159, "$zeros"), "EPERM"),
    Attempt("FS_IOC_SETFLAGS", (16, "$fd", 0x40086602, "$off"), "EPERM", None),
    Attempt(
        "FS_IOC_FSSETXATTR with high bits", (16, "$fd", 0x401C5820 | HIGH, "$zeros"), "EPERM", None
    ),
)
# The same calls, asked for what ordinary programs ask.
ORDINARY = (
    (157, 15, "$tls"),  # PR_SET_NAME
    (157, 4, 1),  # PR_SET_DUMPABLE
    (133, "$four", 0o10600, 0),
    (133, "$five", 0o100600, 0),
    (259, -100, "$six", 0o140600, 0),
    (72, "$fd", 3, 0),
    (72, "$fd", 1030, 0),
    (144, 0, 3, "$zeros"),
    (41, 2, 1, 6),
    (54, "$tcp", 6, 1, "$off", 4),
    (293, "$pair", 0x80000),
    (9, 0, 1 << 21, 3, 0x22, -1, 0),
    (319, "$tls", 1),
    (29, 0, 1 << 21, 0o1600),
    (162,),  # sync, which says that it did it
)

PROGRAM = (
    PRELUDE
    + """
import tempfile
place = tempfile.mkdtemp().encode()
here = {name: place + b"/" + name.encode() for name in "one two three four five six".split()}
here["fd"] = os.open(place + b"/file", os.O_RDWR | os.O_CREAT, 0o600)
here["folder"] = os.open(place, os.O_RDONLY)
here["tcp"] = socket.socket().detach()
here["tls"], here["off"] = ctypes.create_string_buffer(b"tls"), ctypes.create_string_buffer(4)
here["zeros"], here["pair"] = ctypes.create_string_buffer(256), (ctypes.c_int * 2)()
here["priority"] = ctypes.byref(ctypes.c_int(1))
here["attributes"] = ctypes.create_string_buffer((48).to_bytes(4, "little") + bytes(44), 48)
calls = json.loads(CALLS)
found = []
for call in calls:
    found.append(syscall(*(here[w[1:]] if isinstance(w, str) else w for w in call)))
answer(found)
"""
)


def program(*calls: tuple[object, ...]) -> str:
    return f"CALLS = {json.dumps(calls)!r}\n" + PROGRAM


def run_outside(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """A Python program in the lane itself, as root."""
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, capture_output=True, timeout=60, cwd="/")


def outside(source: str) -> list[str]:
    done = run_outside(source)
    assert done.returncode == 0, done
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.case("ESC-15", "KRN-08", "KRN-09", "RES-16")
async def test_each_refusal_by_argument_is_the_filters() -> None:
    assert platform.machine() == "x86_64"
    async with live() as environment:
        found = await environment.look(program(*(each.call for each in ATTEMPTS)))
    assert dict(zip([a.name for a in ATTEMPTS], found, strict=True)) == {
        each.name: each.inside for each in ATTEMPTS
    }
    shown = [each for each in ATTEMPTS if each.outside is not None]
    control = outside(program(*(each.call for each in shown)))
    assert dict(zip([a.name for a in shown], control, strict=True)) == {
        each.name: each.outside for each in shown
    }


async def test_the_same_calls_do_what_programs_need() -> None:
    async with live() as environment:
        found = await environment.look(program(*ORDINARY))
    assert dict(zip(ORDINARY, found, strict=True)) == dict.fromkeys(ORDINARY, "ok")


# Numbers of mount, socket(AF_ALG) and unshare in both foreign call tables, and what loads them.
FOREIGN = {
    "x32 mount": (0x40000000 + 165, bytes.fromhex("0f05")),
    "x32 socket": (0x40000000 + 41, bytes.fromhex("0f05")),
    "x32 unshare": (0x40000000 + 272, bytes.fromhex("0f05")),
    "i386 mount": (21, bytes.fromhex("cd80")),
    "i386 socket": (359, bytes.fromhex("cd80")),
    "i386 unshare": (310, bytes.fromhex("cd80")),
}
RUN_CODE = """
import ctypes, mmap, sys
page = mmap.mmap(-1, 4096, prot=7)
def run(code):
    page.seek(0)
    page.write(bytes.fromhex(code))
    return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
if run("b8270000000f05c3") > 0:  # native getpid
    print("native works", flush=True)
print(run(sys.argv[1]), flush=True)
"""
SIGSEGV, SIGSYS = 11, 31


@pytest.mark.case("KRN-06")
@pytest.mark.needs("lane-container")  # user-mode Linux reads the numbers as native ones
@pytest.mark.parametrize("name", FOREIGN)
async def test_a_foreign_call_ends_the_process_that_makes_it(name: str) -> None:
    number, instruction = FOREIGN[name]
    code = (b"\xb8" + number.to_bytes(4, "little") + instruction + b"\xc3").hex()
    async with live() as environment:
        result = await environment.run("python3", "-c", RUN_CODE, code)
    control = run_outside(RUN_CODE, code)
    assert result.stdout == b"native works\n", result
    # A kernel without the i386 table answers the trap itself, filter or not.
    without_table = control.returncode == -SIGSEGV
    assert result.signal == (SIGSEGV if without_table else SIGSYS)
    assert without_table or control.stdout.count(b"\n") == 2, "the control: it ran outside"
