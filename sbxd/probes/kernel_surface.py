"""Probes of the system-call filter that take more than one call: namespaces, sockets, terminals,
another architecture, and the filter itself.

Numbers are those of x86-64.
"""

from sbxd.probes.probe import Layer, Probe

_EPERM = frozenset({"EPERM"})
_NONE = frozenset({"none"})

_NAMESPACES = {
    "NEWTIME": 0x80,
    "NEWNS": 0x20000,
    "NEWCGROUP": 0x2000000,
    "NEWUTS": 0x4000000,
    "NEWIPC": 0x8000000,
    "NEWUSER": 0x10000000,
    "NEWPID": 0x20000000,
    "NEWNET": 0x40000000,
}
# To clone, the bit of NEWTIME is one of the exit signal's.
_CLONED = [name for name in _NAMESPACES if name != "NEWTIME"]

NAMESPACES = Probe(
    id="namespaces",
    cases=("ESC-07",),
    layer=Layer.SECCOMP,
    source=f"FLAGS, CLONED = {_NAMESPACES!r}, {_CLONED!r}"
    + """
def clone(flags):
    pid = libc.syscall(56, ctypes.c_ulong(flags | 17), 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid == -1:
        return errno.errorcode[ctypes.get_errno()]
    os.waitpid(pid, 0)
    return "ok"

found = {} if ONLY else {"clone " + name: clone(FLAGS[name]) for name in CLONED}
found["clone"] = clone(0)
found |= {"unshare " + name: syscall(272, flag) for name, flag in FLAGS.items()
          if ONLY is None or "unshare " + name in ONLY}
answer(found)
""",
    inside={
        **{f"unshare {name}": _EPERM for name in _NAMESPACES},
        **{f"clone {name}": _EPERM for name in _CLONED},
    },
    controls={"clone": "ok"},
    outside={f"unshare {name}": "ok" for name in ("NEWNS", "NEWUTS", "NEWIPC", "NEWNET")},
)

_FAMILIES = {
    "AF_ALG": (38, 5),
    "AF_PACKET": (17, 3),
    "AF_VSOCK": (40, 1),
    "AF_KEY": (15, 3),
    "AF_RXRPC": (33, 2),
    "AF_XDP": (44, 3),
    "AF_CAN": (29, 3),
}

# Of netlink, NETLINK_ROUTE (0) alone may be asked, for the interfaces.
_NETLINK = {
    "NETLINK_SOCK_DIAG": 4,
    "NETLINK_XFRM": 6,
    "NETLINK_AUDIT": 9,
    "NETLINK_NETFILTER": 12,
    "NETLINK_KOBJECT_UEVENT": 15,
    "NETLINK_GENERIC": 16,
    "NETLINK_CRYPTO": 21,
}

SOCKETS = Probe(
    id="sockets",
    cases=("ESC-16", "KRN-07", "KRN-08"),
    layer=Layer.SECCOMP,
    source=f"NAMED = {_FAMILIES!r}\nNETLINK = {_NETLINK!r}"
    + """
types = {"stream": 1, "dgram": 2, "raw": 3, "seqpacket": 5, "dccp": 6, "packet": 10}
made, codes = set(), set()
for family in range(0, 51) if ONLY is None else ():
    for name, kind in types.items():
        for protocol in (0, 1, 6, 17, 58, 132, 255, 262):
            how = syscall(41, family, kind, protocol)
            if how == "ok" and family != 1:
                made.add(f"{family}/{name}/{protocol}")
            elif how != "ok":
                codes.add(how)
two = (ctypes.c_int * 2)()
answer({
    "made": listed(made),
    "pairs": listed(f for f in range(0, 51) if syscall(53, f, 1, 0, two) == "ok"),
    "other refusals": listed(
        codes - {"EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EPROTOTYPE"}),
    **{name: syscall(41, *words, 0) for name, words in NAMED.items()},
    **{name: syscall(41, 16, 3, protocol) for name, protocol in NETLINK.items()},
    "a stream to a file": syscall(41, 1, 1, 0),
    "datagrams to a file": syscall(41, 1, 2, 0),
})
""",
    inside={
        "made": frozenset({"10/stream/0 10/stream/6 16/dgram/0 16/raw/0 2/stream/0 2/stream/6"}),
        "pairs": frozenset({"1"}),
        "other refusals": _NONE,
        **dict.fromkeys({**_FAMILIES, **_NETLINK}, frozenset({"EAFNOSUPPORT"})),
    },
    controls={"a stream to a file": "ok", "datagrams to a file": "ok"},
    outside={"NETLINK_GENERIC": "ok"},
)

_REQUESTS = {
    "TIOCSTI": 0x5412,
    "TIOCLINUX": 0x541C,
    "TIOCSETD": 0x5423,
    "TIOCSCTTY": 0x540E,
    "TIOCCONS": 0x541D,
}
# What a program puts above the request's 32 bits, at which the kernel does not look.
_ABOVE = {"": 0, " with high bits": 1, " with all high bits": 0x7FFFFFFF}
_TRICKS = {
    name + how: request | high << 32
    for name, request in _REQUESTS.items()
    for how, high in _ABOVE.items()
}

TERMINALS = Probe(
    id="terminals",
    cases=("KRN-05",),
    layer=Layer.SECCOMP,
    source=f"TRICKS = {_TRICKS!r}"
    + """
byte = ctypes.create_string_buffer(b"x" * 64)
read, write = os.pipe()
os.write(write, b"abc")
count = ctypes.c_int()
found = {name: syscall(16, 0, request, byte) for name, request in TRICKS.items()}
found["FIONREAD"] = syscall(16, read, 0x541B, ctypes.byref(count))
found["bytes that wait"] = str(count.value)
answer({**found, "/dev/tty": attempt(open, "/dev/tty"), "openpty": attempt(os.openpty)})
""",
    inside={
        **dict.fromkeys(_TRICKS, _EPERM),
        "/dev/tty": frozenset({"ENOENT"}),
        "openpty": frozenset({"ENOENT"}),
    },
    controls={"FIONREAD": "ok", "bytes that wait": "3"},
)

FILTER = Probe(
    id="filter",
    cases=(),
    layer=Layer.SECCOMP,
    source="""
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

returns_allow = (6).to_bytes(2, "little") + bytes(2) + (0x7FFF0000).to_bytes(4, "little")
allow = ctypes.create_string_buffer(returns_allow)
program = Program(1, ctypes.cast(allow, ctypes.c_void_p))
answer({
    "another filter": syscall(317, 1, 0, ctypes.byref(program)),
    "mount under a filter that allows it": syscall(165, 0, 0, 0, 0, 0),
    "io_uring under a filter that allows it": syscall(425, 1, 0),
    "a listener": syscall(317, 1, 8, ctypes.byref(program)),
})
""",
    inside={
        "mount under a filter that allows it": _EPERM,
        "io_uring under a filter that allows it": frozenset({"ENOSYS"}),
        "a listener": _EPERM,
    },
    controls={"another filter": "ok"},
)

# Numbers in the foreign tables (x32 has the bit 30 set), and the instruction that looks there.
_X32, _I386 = "0f05", "cd80"
FOREIGN = {
    "x32 getpid": (0x40000000 + 39, _X32),
    "x32 mount": (0x40000000 + 165, _X32),
    "x32 socket": (0x40000000 + 41, _X32),
    "x32 unshare": (0x40000000 + 272, _X32),
    "i386 getpid": (20, _I386),
    "i386 mount": (21, _I386),
    "i386 socket": (359, _I386),
    "i386 unshare": (310, _I386),
}
FOREIGN_CALLS = Probe(
    id="foreign-calls",
    cases=("KRN-06",),
    layer=Layer.SECCOMP,
    source=f"FOREIGN = {FOREIGN!r}"
    + """
import mmap, signal
page = mmap.mmap(-1, 4096, prot=7)
run = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))

def in_a_child(number, instruction):
    page.seek(0)
    page.write(b"\\xb8" + number.to_bytes(4, "little") + bytes.fromhex(instruction + "c3"))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if run() >= 0 else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: "ok", 1: "refused"}[code] if code >= 0 else signal.Signals(-code).name

found = {name: in_a_child(*words) for name, words in FOREIGN.items()}
answer({**found, "getpid": in_a_child(39, "0f05")})
""",
    # The filter ends the process; a kernel without the table does so itself or says no.
    inside=dict.fromkeys(FOREIGN, frozenset({"SIGSYS", "SIGSEGV", "refused"})),
    controls={"getpid": "ok"},
)

PROBES = (NAMESPACES, SOCKETS, TERMINALS, FILTER, FOREIGN_CALLS)
