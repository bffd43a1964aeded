"""Which system calls a command has, beyond what the probes ask (`test_inside_probes`).

Source: CASES ESC-07, ESC-08, ESC-12, ESC-13, ESC-14, KRN-01 to KRN-10, KRN-14. Numbers are those of
x86-64.
"""

import secrets

import pytest
import trio

from sbxd.probes.probe import PRELUDE
from tests.redteam.live import Live, live, wait_process_on_the_host

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.escape_denied"),
]

NAMESPACES = {
    "NEWTIME": 0x80,
    "NEWNS": 0x20000,
    "NEWCGROUP": 0x2000000,
    "NEWUTS": 0x4000000,
    "NEWIPC": 0x8000000,
    "NEWUSER": 0x10000000,
    "NEWPID": 0x20000000,
    "NEWNET": 0x40000000,
}


@pytest.mark.case("ESC-07")
@pytest.mark.parametrize("name", NAMESPACES)
async def test_no_namespace_can_be_made(name: str) -> None:
    flag = NAMESPACES[name]
    source = f"""
def clone(flags):
    pid = libc.syscall(56, ctypes.c_ulong(flags | 17), 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid == -1:
        return errno.errorcode[ctypes.get_errno()]
    os.waitpid(pid, 0)
    return "ok"

by_clone = "shares a bit with the exit signal" if {flag} == 0x80 else clone({flag})
answer([syscall(272, {flag}), by_clone, clone(0)])
"""
    async with live() as environment:
        unshare, by_clone, control = await environment.look(source)
    assert unshare == "EPERM"
    assert by_clone != "ok"
    assert control == "ok"


@pytest.mark.case("ESC-16", "KRN-07", "KRN-08")
async def test_only_unix_and_tcp_sockets_can_be_made() -> None:
    source = """
types = {"stream": 1, "dgram": 2, "raw": 3, "seqpacket": 5, "dccp": 6, "packet": 10}
made, codes = [], set()
for family in range(0, 51):
    for name, kind in types.items():
        for protocol in (0, 1, 6, 17, 58, 132, 255, 262):
            how = syscall(41, family, kind, protocol)
            if how == "ok":
                made.append([family, name, protocol])
            else:
                codes.add(how)
two = (ctypes.c_int * 2)()
pairs = [family for family in range(0, 51) if syscall(53, family, 1, 0, two) == "ok"]
named = {name: syscall(41, family, kind, 0) for name, family, kind in [
    ("AF_ALG", 38, 5), ("AF_NETLINK", 16, 3), ("AF_PACKET", 17, 3), ("AF_VSOCK", 40, 1),
    ("AF_KEY", 15, 3), ("AF_RXRPC", 33, 2), ("AF_XDP", 44, 3), ("AF_CAN", 29, 3)]}
answer([made, sorted(codes), pairs, named])
"""
    async with live() as environment:
        made, codes, pairs, named = await environment.look(source)
    assert {(family, kind) for family, kind, _ in made if family != 1} == {
        (2, "stream"),
        (10, "stream"),
    }
    assert {protocol for family, _, protocol in made if family != 1} == {0, 6}
    assert {kind for family, kind, _ in made if family == 1} >= {"stream", "dgram"}
    assert pairs == [1]
    assert set(codes) <= {"EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EPROTOTYPE"}
    assert set(named.values()) == {"EAFNOSUPPORT"}


@pytest.mark.case("KRN-09")
async def test_dangerous_socket_options_are_refused_and_ordinary_ones_work() -> None:
    source = """
one = socket.socket()
word = ctypes.create_string_buffer(b"tls\\0" + bytes(60))
options = {"TCP_ULP": (6, 31), "TCP_REPAIR": (6, 19), "TCP_MD5SIG": (6, 14), "IP_HDRINCL": (0, 3),
           "SO_ATTACH_FILTER": (1, 26), "SO_ATTACH_BPF": (1, 50), "SO_BINDTODEVICE": (1, 25),
           "SO_MARK": (1, 36), "IP_ADD_MEMBERSHIP": (0, 35), "IPT_SO_SET_REPLACE": (0, 64)}
found = {name: syscall(54, one.fileno(), level, option, word, 64)
         for name, (level, option) in options.items()}
control = [attempt(one.setsockopt, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
           attempt(one.setsockopt, socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
answer([found, control])
"""
    async with live() as environment:
        found, control = await environment.look(source)
    assert set(found.values()) == {"ENOPROTOOPT"}, found
    assert control == ["ok", "ok"]


@pytest.mark.case("KRN-05")
async def test_terminal_tricks_are_refused_also_with_high_bits() -> None:
    source = """
requests = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCSETD": 0x5423, "TIOCSCTTY": 0x540E,
            "TIOCCONS": 0x541D}
byte = ctypes.create_string_buffer(b"x" * 64)
found = {name + hex(high): syscall(16, 0, request | high << 32, byte)
         for name, request in requests.items() for high in (0, 1, 0x7FFFFFFF)}
read, write = os.pipe()
os.write(write, b"abc")
count = ctypes.c_int()
control = [syscall(16, read, 0x541B, ctypes.byref(count)), count.value]
answer([found, control, attempt(open, "/dev/tty"), attempt(os.openpty)])
"""
    async with live() as environment:
        found, control, tty, pty = await environment.look(source)
    assert set(found.values()) == {"EPERM"}, found
    assert control == ["ok", 3]
    assert (tty, pty) == ("ENOENT", "ENOENT")


@pytest.mark.case("KRN-10")
async def test_personality_cannot_weaken_and_can_be_asked() -> None:
    source = """
weak = (0x0040000, 0x0400000, 0x0200000, 0x8000000, 1 << 40 | 0x40000)
found = {hex(p): syscall(135, p) for p in weak}
answer([found, syscall(135, 0xFFFFFFFF), syscall(135, 0)])
"""
    async with live() as environment:
        found, query, reset = await environment.look(source)
    assert set(found.values()) == {"EPERM"}, found
    assert (query, reset) == ("ok", "ok")


@pytest.mark.case("KRN-06")
@pytest.mark.parametrize(
    ("name", "code"),
    [
        # x32: the bit 30 of the number. mov eax, 0x40000000 + 39; syscall
        ("x32", bytes.fromhex("b8270000400f05c3")),
        # i386: mov eax, 20 (getpid); int 0x80
        ("i386", bytes.fromhex("b814000000cd80c3")),
    ],
)
async def test_a_call_of_another_architecture_is_never_run(name: str, code: bytes) -> None:
    source = """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
def run(code):
    page.seek(0)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_long)(address)()
assert run(bytes.fromhex("b8270000000f05c3")) == os.getpid()  # the control: native getpid
print("native works", flush=True)
"""
    async with live() as environment:
        result = await environment.python(PRELUDE + source + f"print(run({code!r}), flush=True)")
    lines = result.stdout.decode().splitlines()
    assert lines[0] == "native works", result
    if result.signal is None:  # user-mode Linux reads the number as a native one
        assert int(lines[1]) < 0, f"{name}: the kernel ran it"
    else:
        assert result.signal in (11, 31)
        assert len(lines) == 1


@pytest.mark.case("KRN-04")
async def test_a_key_left_behind_is_not_found_by_the_next() -> None:
    """There are no keys at all; the control is that the answer is a refusal, not emptiness."""
    source = """
answer([syscall(250, 0, -3, 1), syscall(250, 11, -4, 0, 0), syscall(249, b"user", b"x", 0, -3)])
"""
    async with live() as environment:
        assert await environment.look(source) == ["EPERM"] * 3


async def test_a_filter_cannot_be_loosened_and_can_be_narrowed() -> None:
    source = """
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

returns_allow = (6).to_bytes(2, "little") + bytes(2) + (0x7FFF0000).to_bytes(4, "little")
allow = ctypes.create_string_buffer(returns_allow)
program = Program(1, ctypes.cast(allow, ctypes.c_void_p))
added = syscall(317, 1, 0, ctypes.byref(program))
after = [syscall(165, 0, 0, 0, 0, 0), syscall(425, 1, 0)]
answer([added, after, syscall(317, 1, 8, ctypes.byref(program))])
"""
    async with live() as environment:
        added, after, listener = await environment.look(source)
    assert added == "ok"
    assert after == ["EPERM", "ENOSYS"]
    assert listener == "EPERM"


async def test_the_workload_on_the_host_is_a_stranger_with_no_power() -> None:
    """What the host's kernel says of the process itself, not what it says inside."""
    marker = f"marker-{secrets.token_hex(8)}"
    async with live() as environment, trio.open_nursery() as nursery:
        nursery.start_soon(_sleep, environment, marker)
        process = await wait_process_on_the_host(marker)
        lines = (process / "status").read_text().splitlines()
        fields = {
            line.split(":\t")[0]: line.split(":\t")[1].split() for line in lines if "\t" in line
        }
        init = (process / "cgroup").read_text()
        nursery.cancel_scope.cancel()
    assert 1879048192 <= int(fields["Uid"][0]) <= 2147483647
    assert len(set(fields["Uid"] + fields["Gid"])) == 1
    assert fields["CapEff"] == fields["CapBnd"] == ["0" * 16]
    assert fields["NoNewPrivs"] == ["1"]
    assert fields["Seccomp"] == ["2"]
    assert f"sbx-{environment.handle.environment_id}.scope/box/exec-" in init


async def _sleep(environment: Live, marker: str) -> None:
    await environment.run("python3", "-c", "import time; time.sleep(600)", marker)
