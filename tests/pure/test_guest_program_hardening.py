"""How guest/build.sh compiles the program that starts commands: where it lies is not known ahead,
what it does not change is read-only, and a frame that is overwritten ends it.
"""

import errno
import os
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

GUEST = Path(__file__).parents[2] / "guest"
ET_DYN = 3
PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
PT_GNU_STACK, PT_GNU_RELRO = 0x6474_E551, 0x6474_E552
EXECUTE, WRITE = 1, 2
DT_NEEDED, DT_TEXTREL, DT_FLAGS_1, DF_1_NOW, DF_1_PIE = 1, 22, 0x6FFF_FFFB, 1, 0x0800_0000
STACK_SMASHED = 51
SMASHING = """
__attribute__((noinline)) static void smash(volatile unsigned char *at, size_t size)
{
    while (size--)
        *at++ = 'x';
}

__attribute__((noinline)) static void be_smashed(size_t size)
{
    unsigned char room[32];
    smash(room, size);
}
"""


class Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    address: int
    file_size: int
    memory_size: int


class Program:
    """What the headers of an ELF file say."""

    def __init__(self, path: Path) -> None:
        self.raw = path.read_bytes()
        self.kind: int = struct.unpack_from("<H", self.raw, 16)[0]
        at, size, count = (
            struct.unpack_from(form, self.raw, place)[0]
            for form, place in (("<Q", 32), ("<H", 54), ("<H", 56))
        )
        self.segments = [self._segment(at + number * size) for number in range(count)]

    def _segment(self, at: int) -> Segment:
        kind, flags, offset, address, _, file_size, memory_size, _ = struct.unpack_from(
            "<IIQQQQQQ", self.raw, at
        )
        return Segment(kind, flags, offset, address, file_size, memory_size)

    def of(self, kind: int) -> list[Segment]:
        return [segment for segment in self.segments if segment.kind == kind]

    def dynamic(self) -> Iterator[tuple[int, int]]:
        for segment in self.of(PT_DYNAMIC):
            for at in range(segment.offset, segment.offset + segment.file_size, 16):
                yield struct.unpack_from("<QQ", self.raw, at)

    def flaws(self) -> set[str]:
        """What is to be there and is not."""
        entries = list(self.dynamic())
        stacks = self.of(PT_GNU_STACK)
        modes = [segment.flags & (EXECUTE | WRITE) for segment in self.of(PT_LOAD)]
        flags = next((value for name, value in entries if name == DT_FLAGS_1), 0)
        seen = {
            "position independent": self.kind == ET_DYN and bool(flags & DF_1_PIE),
            "no loader": not self.of(PT_INTERP) and DT_NEEDED not in dict(entries),
            "read-only after its start": len(self.of(PT_GNU_RELRO)) == 1,
            "nothing is bound later": bool(flags & DF_1_NOW),
            "code is not written to": EXECUTE | WRITE not in modes
            and DT_TEXTREL not in dict(entries),
            "no code on the stack": len(stacks) == 1 and not stacks[0].flags & EXECUTE,
        }
        return {name for name, is_there in seen.items() if not is_there}


def compiled(folder: Path, source: Path = GUEST) -> Path:
    program = folder / "program"
    subprocess.run(["sh", str(source / "build.sh"), str(program)], check=True)
    return program


def changed(folder: Path, name: str, *pairs: tuple[str, str]) -> Path:
    """The source with one file of it changed."""
    source = folder / "guest"
    shutil.copytree(GUEST, source)
    text = (source / name).read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (source / name).write_text(text)
    return source


def started(program: Path, *words: str) -> tuple[bytes, int]:
    """What it tells on the descriptor that a command's failure goes to, and its exit status."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            os.dup2(theirs.fileno(), 3)
            os.execv(program, ["sbx-command", *words])
        theirs.close()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return ours.recv(256), status


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("guest"))


def test_it_is_position_independent_with_read_only_data_and_no_code_on_the_stack(
    program: Path,
) -> None:
    assert Program(program).flaws() == set()


@pytest.mark.parametrize(
    ("option", "instead", "flaw"),
    [
        ("-fPIE -static-pie", "-fno-pie -no-pie -static", "position independent"),
        ("-z,relro", "-z,norelro", "read-only after its start"),
        ("-z,now", "-z,lazy", "nothing is bound later"),
        ("-z,noexecstack", "-z,execstack", "no code on the stack"),
    ],
)
def test_each_option_that_is_left_out_is_seen(
    tmp_path: Path, option: str, instead: str, flaw: str
) -> None:
    source = changed(tmp_path, "build.sh", (option, instead))
    assert flaw in Program(compiled(tmp_path, source)).flaws()


def test_its_own_addresses_are_right_wherever_the_kernel_puts_it(program: Path) -> None:
    """The name of the step is reached through a table of addresses."""
    for _ in range(3):
        said, status = started(program, "", "")
        assert said.startswith(b"die_with_init\0"), said
        assert status == 127


def test_a_frame_that_is_overwritten_ends_it(tmp_path: Path) -> None:
    work = "__attribute__((noreturn, noinline)) static void work(long *start)\n{\n"
    call = "    be_smashed(start[0] > 1 ? 64 : 8);\n"
    source = changed(tmp_path, "init.c", (work, SMASHING + work + call))
    program = compiled(tmp_path, source)
    assert started(program) == (b"command\x00" + b"%d" % errno.EPROTO, 30), "the control"
    assert started(program, "too long") == (b"", STACK_SMASHED)
    text = (source / "build.sh").read_text()
    (source / "build.sh").write_text(text.replace("-fstack-protector-strong", ""))
    assert started(compiled(tmp_path, source), "too long")[1] != STACK_SMASHED


def test_what_is_read_only_after_its_start_cannot_be_written_to(tmp_path: Path) -> None:
    work = "    if (start[0] > 0 && is_same"
    write = "    if (start[0] > 1)\n        *(void *volatile *)&STEPS[0].take = NULL;\n"
    program = compiled(tmp_path, changed(tmp_path, "init.c", (work, write + work)))
    assert started(program)[1] == 30, "the control"
    assert started(program, "write") == (b"", -signal.SIGSEGV)
