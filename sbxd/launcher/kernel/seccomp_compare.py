"""Whether a profile allows nothing that another refuses.

Two judgements that share nothing but the profile's text must both find nothing: one over the
rules, which is exact (each call that the candidate allows is met with each that the base does
not), and one over the compiled programs, run in the BPF machine for every number and around the
calls at which a rule of either profile begins to hold.

Any refusal is as strong as any other: an errno, success without running, the end of the process.
"""

import re
from collections.abc import Iterator

import pyseccomp

from sbxd.launcher.kernel.seccomp import (
    AT_LEAST,
    WORD,
    CompiledProfile,
    Condition,
    ProfileError,
    ProfileName,
    Rule,
    Test,
    compile_profile,
    rules_of,
    syscall_name,
    syscall_number,
)
from sbxd.launcher.kernel.seccomp_machine import ALLOW, X32_BIT, Program

NUMBERS = range(1024)
OPENINGS_SHOWN = 12
# Without these no command starts or ends.
NEEDED = ("execve", "exit_group", "write")

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_ANYTHING: Condition = {}


def admit(name: str, text: bytes, base: bytes) -> CompiledProfile:
    """The compiled profile of an operator. Raises ProfileError, which says what it would open."""
    if _NAME.fullmatch(name) is None or name in list(ProfileName):
        raise ProfileError(
            "the name is not small letters, digits and dashes, or it is a shipped one"
        )
    compiled = compile_profile(text)
    found = openings(text, base)
    if found:
        more = f" and {len(found) - OPENINGS_SHOWN} more" if len(found) > OPENINGS_SHOWN else ""
        raise ProfileError(f"it would open {', '.join(found[:OPENINGS_SHOWN])}{more}")
    program = Program(compiled.bpf)
    for needed in NEEDED:
        if program.run(syscall_number(needed)) != ALLOW:
            raise ProfileError(f"no command could run: {needed} is refused")
    return compiled


def openings(candidate: bytes, base: bytes) -> list[str]:
    """The calls that `candidate` allows and `base` refuses. Raises ProfileError."""
    ours, theirs = rules_of(candidate), rules_of(base)
    found = dict.fromkeys(_by_rules(ours, theirs))
    programs = [Program(compile_profile(text).bpf) for text in (candidate, base)]
    for call in _by_running(programs[0], programs[1], ours, theirs):
        if call.partition("(")[0] not in {each.partition("(")[0] for each in found}:
            found[call] = None
    return list(found)


def _by_rules(ours: dict[str, list[Rule]], theirs: dict[str, list[Rule]]) -> Iterator[str]:
    for name, rules in ours.items():
        refused = [
            condition
            for action, condition in theirs.get(name, [(0, _ANYTHING)])
            if action != pyseccomp.ALLOW
        ]
        for action, condition in rules:
            if action == pyseccomp.ALLOW and any(_meet(condition, hole) for hole in refused):
                yield show(name, condition)


def _by_running(
    ours: Program,
    theirs: Program,
    our_rules: dict[str, list[Rule]],
    their_rules: dict[str, list[Rule]],
) -> Iterator[str]:
    calls: list[tuple[int, tuple[int, ...]]] = [
        (number | high, ()) for number in NUMBERS for high in (0, X32_BIT)
    ]
    for name in our_rules:
        number = syscall_number(name)
        if number >= 0:
            for _, condition in (*our_rules[name], *their_rules.get(name, ())):
                calls += [(number, arguments) for arguments in around(condition)]
    for number, arguments in calls:
        if ours.run(number, arguments) == ALLOW and theirs.run(number, arguments) != ALLOW:
            words = ", ".join(f"{word:#x}" for word in arguments)
            yield f"{syscall_name(number)}({words})" if words else syscall_name(number)


def around(condition: Condition) -> Iterator[tuple[int, ...]]:
    """A call that meets the condition, and its neighbours in each argument that it tests."""
    call = list(example(condition))
    yield tuple(call)
    for index in condition:
        for other in (call[index] + 1, call[index] - 1, call[index] ^ 1 << 32):
            yield (*call[:index], other & WORD, *call[index + 1 :])


def example(condition: Condition) -> tuple[int, ...]:
    """The smallest arguments that meet a condition."""
    return tuple(condition[i][1] if i in condition else 0 for i in range(6))


def show(name: str, condition: Condition) -> str:
    """A rule as text: `ioctl(arg1 & 0xffffffff == 0x5412)`, arguments counted from 0."""
    parts = []
    for index, (mask, value) in sorted(condition.items()):
        if mask == AT_LEAST:
            parts.append(f"arg{index} >= {value:#x}")
        elif mask == WORD:
            parts.append(f"arg{index} == {value:#x}")
        else:
            parts.append(f"arg{index} & {mask:#x} == {value:#x}")
    return f"{name}({', '.join(parts)})" if parts else name


def _meet(first: Condition, second: Condition) -> bool:
    """Whether some call satisfies both."""
    return all(_meet_in_one(first[i], second[i]) for i in first.keys() & second.keys())


def _meet_in_one(first: Test, second: Test) -> bool:
    (mask_a, value_a), (mask_b, value_b) = first, second
    if mask_a == AT_LEAST and mask_b == AT_LEAST:
        return True
    if mask_a == AT_LEAST:
        return _meet_in_one(second, first)
    if mask_b == AT_LEAST:  # the largest that meets the first test
        return value_a | (WORD & ~mask_a) >= value_b
    return not (value_a ^ value_b) & mask_a & mask_b
