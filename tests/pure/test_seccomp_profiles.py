"""What the shipped profiles answer, call by call (native x86-64 programs run in a BPF machine)."""

from functools import cache
from itertools import product
from pathlib import Path

import pyseccomp
import pytest

from sbxd.launcher.kernel.seccomp import (
    CompiledProfile,
    ProfileName,
    compile_profile,
    profile_text,
)
from sbxd.launcher.kernel.seccomp_machine import (
    ALLOW,
    I386,
    KILL_PROCESS,
    X32_BIT,
    Program,
    describe,
)

GOLDEN = Path(__file__).parents[1] / "golden"
LAST = 1023

TIOCSTI, TIOCSETD, TIOCLINUX, TCGETS = 0x5412, 0x5423, 0x541C, 0x5401
NAMESPACE_BITS = (0x20000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 2**30)
CLONE_THREAD_FLAGS = 0x3D0F00
STREAM, DGRAM, RAW, CLOEXEC, NONBLOCK = 1, 2, 3, 0x80000, 0x800

# (syscall, arguments): calls whose answer hangs on their arguments.
PROBES: dict[str, list[tuple[int, ...]]] = {
    "clone": [(0,), (17,), (CLONE_THREAD_FLAGS,), *((bit | 17,) for bit in NAMESPACE_BITS)],
    "socket": [
        *(
            (family, kind, protocol)
            for family in (*range(46), 2**32 + 38, 2**31)
            for kind, protocol in ((STREAM, 0), (STREAM | CLOEXEC | NONBLOCK, 6), (DGRAM, 0))
        ),
        *((2, STREAM, 262), (2, STREAM, 132), (2, RAW, 1), (10, DGRAM, 17), (2, 5, 0), (2, 6, 33)),
    ],
    "socketpair": [(family, STREAM, 0) for family in (0, 1, 2, 10, 16, 38, 40)],
    "setsockopt": [
        (3, level, option)
        for level, option in (
            *((1, 2), (1, 7), (1, 9), (6, 1), (6, 4), (0, 1), (41, 26)),
            *((1, 26), (1, 50), (1, 51), (1, 25), (6, 31), (6, 19), (6, 13), (17, 100)),
            *((0, 3), (0, 35), (41, 20), (263, 1), (270, 1), (1, 2**20)),
        )
    ],
    "ioctl": [
        (0, request + high)
        for request, high in product(
            (TCGETS, TIOCSTI, TIOCSETD, TIOCLINUX, 0x540E, 0x541B, 0x5421, 0xAE00, 0x401C5820),
            (0, 0xDEAD << 32, 0xFFFF_FFFF << 32),
        )
    ],
    "personality": [(value,) for value in (0, 8, 0xFFFF_FFFF, 0x40000, 0x400000, 0x80000, 9)],
    "prctl": [
        *(
            (value, 1)
            for value in (1, 2, 4, 15, 16, 22, 23, 24, 26, 28, 35, 38, 47, 53, 62, 0x53564D41)
        ),
        *((47, 2), (47, 3), (47, 4)),
        *((47, 2, capability) for capability in (0, 5, 6, 7, 8, 21, 2**32 + 6)),
    ],
    "mknod": [(0, mode | 0o644) for mode in (0, 0x1000, 0x2000, 0x6000, 0x8000, 0xC000)],
    "mknodat": [(0, 0, mode | 0o644) for mode in (0, 0x1000, 0x2000, 0x6000, 0x8000, 0xC000)],
    "fcntl": [
        (0, value)
        for value in (0, 1, 2, 3, 4, 6, 38, 1024, 1025, 1026, 1030, 1031, 1032, 1033, 2**33)
    ],
    "setrlimit": [(resource, 0x1000) for resource in (3, 4, 7, 15, 2**32 + 4)],
    "prlimit64": [
        *((0, resource, 0x1000, 0) for resource in (3, 4, 7, 15, 2**32 + 4)),
        *((0, resource, 0, 0x1000) for resource in (4, 7)),
        (0, 4, 0x1000, 0x1000),
    ],
    "sched_setscheduler": [(0, policy) for policy in (0, 1, 2, 3, 5, 6, 2**30)],
    "seccomp": [(0, 0), (1, 0), (1, 1), (1, 8), (1, 9), (2, 0)],
    "pipe2": [(0, 0), (0, CLOEXEC), (0, 0x80)],
    "mmap": [(0, 4096, 3), (0, 4096, 7), (0, 4096, 3, 0x22), (0, 4096, 3, 0x40022)],
    "memfd_create": [(0, 0), (0, 1), (0, 4), (0, 5)],
    "shmget": [(0, 4096, 0o1600), (0, 4096, 0o4000 | 0o1600)],
    "mprotect": [(0, 4096, 1), (0, 4096, 5)],
    "keyctl": [(0,), (1,), (11,)],
}


@cache
def compiled(name: ProfileName) -> CompiledProfile:
    return compile_profile(profile_text(name))


@cache
def program(name: ProfileName) -> Program:
    return Program(compiled(name).bpf)


def number(name: str) -> int:
    return int(pyseccomp.resolve_syscall(pyseccomp.Arch.X86_64, name))


def answer(profile: ProfileName, name: str, *arguments: int) -> str:
    return describe(program(profile).run(number(name), arguments))


def name_of(syscall: int) -> str:
    return str(pyseccomp.resolve_syscall(pyseccomp.Arch.X86_64, syscall).decode())


def truth_table(profile: ProfileName) -> str:
    """Every call 0..1023 with all arguments zero, and the probes; default answers left out."""
    by_answer: dict[str, list[str]] = {}
    for syscall in range(LAST + 1):
        action = describe(program(profile).run(syscall))
        if action != "ENOSYS":
            by_answer.setdefault(action, []).append(name_of(syscall))
    lines = ["# with all arguments zero; every other number of 0..1023 gets ENOSYS"]
    for action in sorted(by_answer):
        lines += [f"{action}:", *(f"  {name}" for name in sorted(by_answer[action]))]
    lines.append("# by arguments")
    for name, probes in PROBES.items():
        for arguments in probes:
            text = ", ".join(f"{value:#x}" for value in arguments)
            lines.append(f"{name}({text}) {answer(profile, name, *arguments)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("profile", list(ProfileName))
def test_the_truth_table_is_the_reviewed_one(profile: ProfileName) -> None:
    golden = GOLDEN / f"seccomp-{profile}.txt"
    assert truth_table(profile) == golden.read_text(), (
        f"{golden.name} is not what the profile says: review, then "
        "python -m tests.pure.test_seccomp_profiles"
    )


@pytest.mark.parametrize("profile", list(ProfileName))
def test_every_name_of_a_profile_is_known_to_the_library(profile: ProfileName) -> None:
    assert compiled(profile).unknown == ()


@pytest.mark.parametrize("profile", list(ProfileName))
def test_another_architecture_kills_the_process(profile: ProfileName) -> None:
    for syscall in (0, 1, 11, 120, 359, 400):
        assert program(profile).run(syscall, arch=I386) == KILL_PROCESS


@pytest.mark.parametrize("profile", list(ProfileName))
def test_no_x32_call_is_ever_allowed(profile: ProfileName) -> None:
    allowed = [n for n in range(LAST + 1) if program(profile).run(n) == ALLOW]
    assert allowed  # the positive control: the same numbers without the bit
    for syscall in range(LAST + 1):
        assert program(profile).run(syscall | X32_BIT) == KILL_PROCESS


def test_what_a_workload_may_do_init_may_do() -> None:
    """Filters stack: a command inherits init's, so a gap in it would be one in the workload's."""
    calls: list[tuple[int, tuple[int, ...]]] = [(n, ()) for n in range(LAST + 1)]
    calls += [(number(name), arguments) for name, probes in PROBES.items() for arguments in probes]
    workload = [c for c in calls if program(ProfileName.WORKLOAD).run(*c) == ALLOW]
    assert len(workload) > 250
    assert [c for c in workload if program(ProfileName.INIT).run(*c) != ALLOW] == []


@pytest.mark.parametrize("bit", NAMESPACE_BITS)
def test_a_workload_makes_no_namespace_by_clone(bit: int) -> None:
    assert answer(ProfileName.WORKLOAD, "clone", bit | 17) == "EPERM"
    assert answer(ProfileName.WORKLOAD, "clone", CLONE_THREAD_FLAGS) == "ALLOW"


def test_clone3_says_that_it_does_not_exist() -> None:
    assert answer(ProfileName.WORKLOAD, "clone3") == "ENOSYS"
    assert answer(ProfileName.INIT, "clone3") == "ALLOW"


@pytest.mark.parametrize("high", [0, 1, 0xFFFF_FFFF])
@pytest.mark.parametrize("request_number", [TIOCSTI, TIOCSETD, TIOCLINUX])
def test_terminal_injection_is_refused_whatever_the_high_bits(
    request_number: int, high: int
) -> None:
    assert answer(ProfileName.WORKLOAD, "ioctl", 0, request_number + (high << 32)) == "EPERM"
    assert answer(ProfileName.WORKLOAD, "ioctl", 0, TCGETS + (high << 32)) == "ALLOW"


def test_only_unix_and_tcp_sockets_exist_for_a_workload() -> None:
    for family in range(64):
        for kind in (STREAM, STREAM | CLOEXEC, STREAM | NONBLOCK | CLOEXEC):
            expected = "ALLOW" if family in (1, 2, 10) else "EAFNOSUPPORT"
            assert answer(ProfileName.WORKLOAD, "socket", family, kind, 0) == expected
    for family, kind, protocol in product((2, 10), range(16), (0, 1, 6, 17, 132, 136, 262)):
        allowed = answer(ProfileName.WORKLOAD, "socket", family, kind, protocol) == "ALLOW"
        assert allowed == (kind == STREAM and protocol in (0, 6))


def test_the_steward_has_no_way_out_of_its_volume() -> None:
    for name in (
        *("open", "openat", "creat", "execve", "execveat", "fork", "vfork", "clone", "clone3"),
        *("socket", "connect", "bind", "accept4", "mount", "fsopen", "open_tree", "unshare"),
        *("setns", "ptrace", "process_vm_readv", "bpf", "io_uring_setup", "chroot", "symlinkat"),
        *("mknodat", "linkat", "setuid", "capset", "kill", "ioctl", "memfd_create", "keyctl"),
    ):
        assert answer(ProfileName.STEWARD, name) in ("EPERM", "ENOSYS"), name
    assert answer(ProfileName.STEWARD, "openat2") == "ALLOW"
    assert answer(ProfileName.STEWARD, "mmap", 0, 4096, 7) == "ENOSYS"


def test_the_unpacker_makes_files_and_nothing_else() -> None:
    for name in (
        *("open", "creat", "execve", "execveat", "fork", "vfork", "clone", "clone3"),
        *("socket", "connect", "bind", "accept4", "mount", "fsopen", "open_tree", "unshare"),
        *("setns", "ptrace", "process_vm_readv", "bpf", "io_uring_setup", "chroot", "mknodat"),
        *("mknod", "setuid", "setresuid", "capset", "kill", "memfd_create", "keyctl"),
        *("recvmsg", "sendmsg", "prctl", "setrlimit", "prlimit64", "setxattr", "fsetxattr"),
    ):
        assert answer(ProfileName.UNPACKER, name) in ("EPERM", "ENOSYS"), name
    for name in ("openat2", "mkdirat", "symlinkat", "linkat", "fchownat", "fchmod", "utimensat"):
        assert answer(ProfileName.UNPACKER, name) == "ALLOW", name
    assert answer(ProfileName.UNPACKER, "mmap", 0, 4096, 7) == "ENOSYS"


if __name__ == "__main__":
    for each in ProfileName:
        (GOLDEN / f"seccomp-{each}.txt").write_text(truth_table(each))
