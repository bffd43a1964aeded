"""Two other readings of a syscall profile, to hold the compiled program against: libseccomp's, a
program of its own, and that of whoever reads the text entry by entry."""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pyseccomp

from sbxd.launcher.kernel.seccomp import AT_LEAST, WORD, Condition, rules_of
from sbxd.launcher.kernel.seccomp_machine import ALLOW, ERRNO, KILL_PROCESS, Program

ACTIONS = {"SCMP_ACT_ALLOW": ALLOW, "SCMP_ACT_KILL_PROCESS": KILL_PROCESS}


def by_libseccomp(text: bytes) -> bytes:
    """What libseccomp makes of the rules, which it is given with their exact complements."""
    default = pyseccomp.ERRNO(json.loads(text)["defaultErrnoRet"])
    program = pyseccomp.SyscallFilter(default)
    program.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    program.set_attr(pyseccomp.Attr.CTL_NNP, 0)
    program.set_attr(pyseccomp.Attr.API_SYSRAWRC, 1)
    program.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)
    for name, rules in rules_of(text).items():
        number = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name)
        for action, condition in rules:
            if number >= 0 and action != default:  # it refuses to be told what is so anyway
                program.add_rule(action, number, *_arguments(condition))
    with os.fdopen(os.memfd_create("seccomp"), "w+b") as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()


def _arguments(condition: Condition) -> Iterator[pyseccomp.Arg]:
    for index, (mask, value) in sorted(condition.items()):
        if mask == AT_LEAST:
            yield pyseccomp.Arg(index, pyseccomp.GE, value)
        else:
            yield pyseccomp.Arg(index, pyseccomp.MASKED_EQ, mask, value)


def by_reading(text: bytes, name: str, arguments: Sequence[int]) -> int:
    """The action that the entries say, in the order of the text and with "otherwise" last."""
    profile = json.loads(text)
    entries = [each for each in profile["syscalls"] if name in each["names"]]
    for entry in sorted(entries, key=lambda each: not each.get("args")):
        if all(_holds(test, arguments[test["index"]]) for test in entry.get("args", [])):
            if entry["action"] in ACTIONS:
                return ACTIONS[entry["action"]]
            return int(ERRNO | entry["errnoRet"])
    return int(ERRNO | profile["defaultErrnoRet"])


def _holds(test: dict[str, Any], argument: int) -> bool:
    if test["op"] == "SCMP_CMP_MASKED_EQ":
        return bool(argument & test["value"] == test["valueTwo"])
    return bool(argument == test["value"])


def telling(conditions: Sequence[Condition], extra: Sequence[int] = ()) -> Iterator[list[int]]:
    """Calls that meet each of these conditions, miss it by little, or mix two of them."""
    values: list[set[int]] = [{0} for _ in range(6)]
    for condition in conditions:
        for index, (mask, value) in condition.items():
            values[index] |= {value, value ^ 1, value + 1 & WORD, value - 1 & WORD}
            values[index] |= {value ^ 1 << 32, value | 1 << 63, value | WORD & ~max(mask, 0)}
            values[index] |= set(extra)
    for call in product(*values):
        yield list(call)


def disagreements(
    ours: Program, theirs: Program, calls: Iterator[tuple[int, Sequence[int]]]
) -> list[tuple[int, Sequence[int], int, int]]:
    """(number, arguments, our answer, theirs) where they differ."""
    return [
        (number, arguments, one, other)
        for number, arguments in calls
        if (one := ours.run(number, arguments)) != (other := theirs.run(number, arguments))
    ]
