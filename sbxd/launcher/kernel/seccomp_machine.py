"""A classic BPF machine for seccomp programs, so that every answer of a filter can be seen.

It knows what libseccomp and our compiler emit and refuses everything else. Independent of both,
whose programs it is there to judge.
"""

import errno
from collections.abc import Sequence
from struct import Struct

X86_64 = 0xC000_003E
I386 = 0x4000_0003
X32_BIT = 0x4000_0000

ALLOW = 0x7FFF_0000
KILL_PROCESS = 0x8000_0000
ERRNO = 0x0005_0000

_INSTRUCTION = Struct("=HBBI")
_DATA = Struct("=iIQ6Q")
_WORD = 0xFFFF_FFFF


class Program:
    """One program: struct sock_filter[]."""

    def __init__(self, raw: bytes) -> None:
        self._code = list(_INSTRUCTION.iter_unpack(raw))

    def run(self, number: int, arguments: Sequence[int] = (), arch: int = X86_64) -> int:
        """The action for one call. Raises ValueError for an instruction that it does not know."""
        values = [value & 0xFFFF_FFFF_FFFF_FFFF for value in (*arguments, 0, 0, 0, 0, 0, 0)][:6]
        signed = number - 2**32 if number > 0x7FFF_FFFF else number
        data = _DATA.pack(signed, arch, 0, *values)
        accumulator, position = 0, 0
        while True:
            operation, if_true, if_false, operand = self._code[position]
            position += 1
            match operation:
                case 0x20:  # ld word
                    accumulator = int.from_bytes(data[operand : operand + 4], "little")
                case 0x54:  # and
                    accumulator &= operand
                case 0x05:  # ja
                    position += operand
                case 0x15:
                    position += if_true if accumulator == operand else if_false
                case 0x25:
                    position += if_true if accumulator > operand else if_false
                case 0x35:
                    position += if_true if accumulator >= operand else if_false
                case 0x45:
                    position += if_true if accumulator & operand else if_false
                case 0x06:
                    return int(operand)
                case _:
                    raise ValueError(f"instruction {operation:#x}")


def describe(action: int) -> str:
    """`ALLOW`, `KILL_PROCESS` or the errno's name."""
    if action == ALLOW:
        return "ALLOW"
    if action == KILL_PROCESS:
        return "KILL_PROCESS"
    if action & 0xFFFF_0000 == ERRNO:
        number = action & 0xFFFF
        return errno.errorcode[number] if number else "SUCCESS_WITHOUT_RUNNING"
    return f"{action:#x}"
