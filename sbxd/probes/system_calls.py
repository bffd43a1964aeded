"""Probes of the system-call filter: calls that are refused whole, and what is asked of the others.

Numbers are those of x86-64. Each refusal names the errno that the filter gives, since another one
would be another layer's.
"""

import json
from dataclasses import dataclass

from sbxd.probes.probe import Layer, Probe

# Number and arguments; 0 where the refusal comes before any argument is looked at.
_REFUSED: dict[str, dict[str, tuple[object, ...]]] = {
    "EPERM": {
        "mount": (165, 0, 0, 0, 0, 0),
        "umount2": (166, 0, 0),
        "pivot_root": (155, 0, 0),
        "chroot": (161, 0),
        "setns": (308, 0, 0),
        "ptrace": (101, 0, 0, 0, 0),
        "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
        "process_vm_writev": (311, 1, 0, 0, 0, 0, 0),
        "pidfd_getfd": (438, 0, 0, 0),
        "kcmp": (312, 1, 1, 0, 0, 0),
        "add_key": (248, 0, 0, 0, 0, 0),
        "request_key": (249, 0, 0, 0, 0),
        "keyctl": (250, 0, 0, 0, 0, 0),
        "keyctl for the session's keyring": (250, 0, -3, 1),
        "keyctl to read the user's keyring": (250, 11, -4, 0, 0),
        "request_key by name": (249, "$tls", "$off", 0, -3),
        "bpf": (321, 0, 0, 0),
        "perf_event_open": (298, 0, 0, 0, 0, 0),
        "open_by_handle_at": (304, 0, 0, 0),
        "kexec_load": (246, 0, 0, 0, 0),
        "init_module": (175, 0, 0, 0),
        "delete_module": (176, 0, 0),
        "reboot": (169, 0, 0, 0, 0),
        "swapon": (167, 0, 0),
        "quotactl": (179, 0, 0, 0, 0),
        "acct": (163, 0),
        "iopl": (172, 3),
        "syslog": (103, 3, 0, 0),
        "sethostname": (170, 0, 0),
        "settimeofday": (164, 0, 0),
        "clock_settime": (227, 0, 0),
        "setuid": (105, 0),
        "setresgid": (119, 0, 0, 0),
        "vhangup": (153,),
    },
    "ENOSYS": {
        "clone3": (435, 0, 0),
        "io_uring_setup": (425, 1, 0),
        "io_uring_enter": (426, 0, 0, 0, 0, 0),
        "userfaultfd": (323, 0),
        "open_tree": (428, 0, 0, 0),
        "move_mount": (429, 0, 0, 0, 0, 0),
        "fsopen": (430, 0, 0),
        "fsmount": (432, 0, 0, 0),
        "mount_setattr": (442, 0, 0, 0, 0, 0),
        "open_tree_attr": (467, 0, 0, 0, 0, 0),
        "splice": (275, 0, 0, 0, 0, 0, 0),
        "vmsplice": (278, 0, 0, 0, 0),
        "tee": (276, 0, 0, 0, 0),
        "fanotify_init": (300, 0, 0),
        "name_to_handle_at": (303, 0, 0, 0, 0, 0),
        "modify_ldt": (154, 0, 0, 0),
        "unknown 600": (600,),
        "unknown 999": (999,),
    },
}

_WHOLE = {name: words for each in _REFUSED.values() for name, words in each.items()}
_WHOLE_CONTROLS: dict[str, tuple[object, ...]] = {
    "getpid": (39,),
    "getuid": (102,),
    "close of none": (3, 999),
    "access of none": (21, "$none", 0),
}
# Arguments that start with `$` are names of the program.
_RUN = """
CALLS = json.loads(%s)
import tempfile
place = tempfile.mkdtemp().encode()
here = {name: place + b"/" + name.encode() for name in "none one two three four five six".split()}
here["fd"] = os.open(place + b"/file", os.O_RDWR | os.O_CREAT, 0o600)
here["folder"] = os.open(place, os.O_RDONLY)
here["tcp"] = socket.socket().detach()
here["tls"], here["off"] = ctypes.create_string_buffer(b"tls"), ctypes.create_string_buffer(4)
here["zeros"], here["pair"] = ctypes.create_string_buffer(256), (ctypes.c_int * 2)()
here["priority"] = ctypes.byref(ctypes.c_int(1))
here["attributes"] = ctypes.create_string_buffer((48).to_bytes(4, "little") + bytes(44), 48)
answer({name: syscall(*(here[word[1:]] if isinstance(word, str) else word for word in call))
        for name, call in CALLS.items() if ONLY is None or name in ONLY})
"""


def _source(calls: dict[str, tuple[object, ...]]) -> str:
    return _RUN % repr(json.dumps(calls))


REFUSED_CALLS = Probe(
    id="refused-calls",
    cases=(
        "ESC-08",
        "ESC-12",
        "ESC-13",
        "ESC-14",
        "KRN-01",
        "KRN-02",
        "KRN-03",
        "KRN-04",
        "KRN-14",
    ),
    layer=Layer.SECCOMP,
    source=_source({**_WHOLE, **_WHOLE_CONTROLS}),
    inside={name: frozenset({code}) for code, each in _REFUSED.items() for name in each},
    controls={
        "getpid": "ok",
        "getuid": "ok",
        "close of none": "EBADF",
        "access of none": "ENOENT",
    },
)


@dataclass(frozen=True)
class _Attempt:
    """outside: what root gets without a sandbox; None where that depends on the kernel."""

    name: str
    call: tuple[object, ...]
    inside: str
    outside: str | None = "ok"


_HIGH = 1 << 32
_ATTEMPTS = (
    # prctl 157
    _Attempt("PR_SET_TSC", (157, 26, 1), "EPERM", None),
    _Attempt("PR_SET_TSC with high bits", (157, 26 | _HIGH, 1), "EPERM", None),
    _Attempt("PR_SET_SECUREBITS", (157, 28, 0), "EPERM"),
    _Attempt("PR_SET_KEEPCAPS", (157, 8, 1), "EPERM"),
    _Attempt("PR_CAPBSET_DROP", (157, 24, 1), "EPERM"),
    _Attempt("PR_SET_MM", (157, 35, 8, 0), "EPERM", None),
    _Attempt("PR_SET_SPECULATION_CTRL", (157, 53, 0, 2, 0, 0), "EPERM", None),
    _Attempt("PR_SCHED_CORE", (157, 62, 0, 0, 0, 0), "EPERM", None),
    _Attempt("PR_SET_PTRACER", (157, 0x59616D61, -1), "EPERM", None),
    _Attempt("PR_CAP_AMBIENT_CLEAR_ALL", (157, 47, 4, 0, 0, 0), "ENOSYS"),
    _Attempt("PR_SET_SYSCALL_USER_DISPATCH", (157, 59, 0, 0, 0, 0), "ENOSYS", None),
    # mknod 133, mknodat 259
    _Attempt("mknod of a character device", (133, "$one", 0o20600, 0x103), "EPERM"),
    _Attempt("mknod of a block device", (133, "$two", 0o60600, 0x700), "EPERM"),
    _Attempt("mknodat of a character device", (259, -100, "$three", 0o20600, 0x103), "EPERM"),
    # fcntl 72
    _Attempt("F_SETLEASE", (72, "$fd", 1024, 1), "EINVAL"),
    _Attempt("F_NOTIFY", (72, "$folder", 1026, 1), "EINVAL"),
    # sched_setscheduler 144, sched_setattr 314
    _Attempt("SCHED_FIFO", (144, 0, 1, "$priority"), "EPERM", None),
    _Attempt("SCHED_RR with reset-on-fork", (144, 0, 2 | 1 << 30, "$priority"), "EPERM", None),
    _Attempt("sched_setattr", (314, 0, "$attributes", 0), "EPERM"),
    # clone 56, whose flags are looked at below any high bits
    _Attempt(
        "clone NEWUSER with high bits", (56, 0x10000000 | _HIGH | 17, 0, 0, 0, 0), "EPERM", None
    ),
    # socket 41, setsockopt 54: numbers that only a kernel's int makes the forbidden ones
    _Attempt("AF_ALG with high bits", (41, 38 | _HIGH, 5, 0), "EAFNOSUPPORT", None),
    _Attempt("AF_NETLINK with high bits", (41, 16 | _HIGH, 3, 0), "EAFNOSUPPORT"),
    _Attempt("IPPROTO_MPTCP", (41, 2, 1, 262), "EAFNOSUPPORT", None),
    _Attempt(
        "TCP_ULP with high bits",
        (54, "$tcp", 6 | _HIGH, 31 | _HIGH, "$tls", 4),
        "ENOPROTOOPT",
        None,
    ),
    _Attempt("TCP_ULP", (54, "$tcp", 6, 31, "$tls", 4), "ENOPROTOOPT", None),
    _Attempt("TCP_MD5SIG", (54, "$tcp", 6, 14, "$zeros", 64), "ENOPROTOOPT", None),
    _Attempt("IPT_SO_SET_REPLACE", (54, "$tcp", 0, 64, "$zeros", 64), "ENOPROTOOPT", None),
    _Attempt("TCP_REPAIR", (54, "$tcp", 6, 19, "$off", 4), "ENOPROTOOPT"),
    _Attempt("UDP_ENCAP", (54, "$tcp", 17, 100, "$off", 4), "ENOPROTOOPT", None),
    _Attempt("SO_BINDTODEVICE", (54, "$tcp", 1, 25, "$tls", 0), "ENOPROTOOPT"),
    _Attempt("SO_MARK", (54, "$tcp", 1, 36, "$off", 4), "ENOPROTOOPT"),
    # pipe2 293: a notification pipe
    _Attempt("O_NOTIFICATION_PIPE", (293, "$pair", 0x80), "ENOSYS", None),
    # Huge pages: mmap 9, memfd_create 319, shmget 29
    _Attempt("MAP_HUGETLB", (9, 0, 1 << 21, 3, 0x40022, -1, 0), "ENOMEM", None),
    _Attempt("MFD_HUGETLB", (319, "$tls", 4), "EINVAL", None),
    _Attempt("SHM_HUGETLB", (29, 0, 1 << 21, 0o5600), "EPERM", None),
    # Another's limits, its core files
    _Attempt("adjtimex", (159, "$zeros"), "EPERM"),
    _Attempt("FS_IOC_SETFLAGS", (16, "$fd", 0x40086602, "$off"), "EPERM", None),
    _Attempt(
        "FS_IOC_FSSETXATTR with high bits", (16, "$fd", 0x401C5820 | _HIGH, "$zeros"), "EPERM", None
    ),
    # personality 135
    _Attempt("ADDR_NO_RANDOMIZE", (135, 0x40000), "EPERM"),
    _Attempt("READ_IMPLIES_EXEC", (135, 0x400000), "EPERM"),
    _Attempt("ADDR_COMPAT_LAYOUT", (135, 0x200000), "EPERM"),
    _Attempt("ADDR_LIMIT_3GB", (135, 0x8000000), "EPERM"),
    _Attempt("ADDR_NO_RANDOMIZE with high bits", (135, 0x40000 | _HIGH), "EPERM"),
    _Attempt("ADDR_NO_RANDOMIZE with higher bits", (135, 0x40000 | 1 << 40), "EPERM"),
    # setsockopt 54 again
    _Attempt("SO_ATTACH_FILTER", (54, "$tcp", 1, 26, "$zeros", 16), "ENOPROTOOPT", None),
    _Attempt("SO_ATTACH_BPF", (54, "$tcp", 1, 50, "$off", 4), "ENOPROTOOPT", None),
    _Attempt("IP_HDRINCL", (54, "$tcp", 0, 3, "$off", 4), "ENOPROTOOPT", None),
    _Attempt("IP_ADD_MEMBERSHIP", (54, "$tcp", 0, 35, "$zeros", 8), "ENOPROTOOPT", None),
)
# The same calls, asked for what ordinary programs ask.
_ORDINARY: dict[str, tuple[object, ...]] = {
    "PR_SET_NAME": (157, 15, "$tls"),
    "PR_SET_DUMPABLE": (157, 4, 1),
    "mknod of a FIFO": (133, "$four", 0o10600, 0),
    "mknod of a file": (133, "$five", 0o100600, 0),
    "mknodat of a socket": (259, -100, "$six", 0o140600, 0),
    "F_GETFL": (72, "$fd", 3, 0),
    "F_DUPFD_CLOEXEC": (72, "$fd", 1030, 0),
    "SCHED_BATCH": (144, 0, 3, "$zeros"),
    "a TCP socket": (41, 2, 1, 6),
    "TCP_NODELAY": (54, "$tcp", 6, 1, "$off", 4),
    "SO_REUSEADDR": (54, "$tcp", 1, 2, "$priority", 4),
    "the personality": (135, 0xFFFFFFFF),
    "the usual personality": (135, 0),
    "pipe2": (293, "$pair", 0x80000),
    "mmap": (9, 0, 1 << 21, 3, 0x22, -1, 0),
    "memfd_create": (319, "$tls", 1),
    "shmget": (29, 0, 1 << 21, 0o1600),
    "sync": (162,),  # which says that it did it
}

REFUSED_ARGUMENTS = Probe(
    id="refused-arguments",
    cases=("ESC-15", "KRN-08", "KRN-09", "KRN-10", "RES-16"),
    layer=Layer.SECCOMP,
    source=_source({**{each.name: each.call for each in _ATTEMPTS}, **_ORDINARY}),
    inside={each.name: frozenset({each.inside}) for each in _ATTEMPTS},
    controls=dict.fromkeys(_ORDINARY, "ok"),
    outside={each.name: each.outside for each in _ATTEMPTS if each.outside is not None},
)

PROBES = (REFUSED_CALLS, REFUSED_ARGUMENTS)
