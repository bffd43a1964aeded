"""Signals of a command start at their defaults, also those that the C library hides."""

import subprocess
import sys

IGNORE_ALL = """
import ctypes, signal
from sbxd.jail import identity, syscalls
ignored = (1).to_bytes(8, "little") + bytes(24)  # struct sigaction with SIG_IGN
for number in (signal.SIGPIPE, signal.SIGUSR1, 32, 33, 64):
    syscalls._call("rt_sigaction", ctypes.c_long(number), ignored, None, ctypes.c_size_t(8))
def mask():
    with open("/proc/self/status") as status:
        words = dict(line.split(":", 1) for line in status)
    return [int(words[name], 16) for name in ("SigIgn", "SigBlk", "SigCgt")]
before = mask()[0]
identity.reset_signals()
print(hex(before), mask())
"""


def test_what_a_caller_left_ignored_is_reset() -> None:
    said = subprocess.run(
        [sys.executable, "-c", IGNORE_ALL], capture_output=True, text=True, check=True
    ).stdout.split(" ", 1)
    before = int(said[0], 16)
    for number in (10, 13, 32, 33, 64):
        assert before >> (number - 1) & 1, f"signal {number} was not ignored before"
    assert said[1].strip() == "[0, 0, 0]"
