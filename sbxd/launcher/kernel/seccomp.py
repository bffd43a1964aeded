"""Compile the syscall profiles of `seccomp/` to BPF programs, once, at the launcher's start.

A profile is OCI-format JSON: an allowlist with default ERRNO(ENOSYS). One reading is added to
that format: an entry without `args`, beside entries with `args` for the same syscall, means
"otherwise": it answers what meets none of them.

Invariants: the native architecture only; a call of any other architecture, x32 included, kills
the process; a name unknown to the installed libseccomp, which knows the numbers, is reported and
falls under the default.
Deliberately absent: loading a filter (a child does that, from these bytes).
"""

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Annotated

import msgspec
import pyseccomp

from sbxd.launcher.kernel import hostpaths
from sbxd.launcher.kernel.seccomp_program import Call, assemble

WORD = 0xFFFF_FFFF_FFFF_FFFF
_UNKNOWN = -1  # to libseccomp: of no architecture


class ProfileError(ValueError):
    """The profile cannot be compiled to exactly what it says."""


class ProfileName(StrEnum):
    """The profiles that are shipped."""

    WORKLOAD = "workload"
    INIT = "init"
    STEWARD = "steward"
    UNPACKER = "unpacker"


@dataclass(frozen=True)
class CompiledProfile:
    """bpf: struct sock_filter[], native byte order. unknown: names that this libseccomp does not
    know; they get the default action."""

    bpf: bytes
    unknown: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the program, for the log."""
        return sha256(self.bpf).hexdigest()


class _Action(StrEnum):
    ALLOW = "SCMP_ACT_ALLOW"
    ERRNO = "SCMP_ACT_ERRNO"
    KILL_PROCESS = "SCMP_ACT_KILL_PROCESS"


class _Operator(StrEnum):
    EQ = "SCMP_CMP_EQ"
    MASKED_EQ = "SCMP_CMP_MASKED_EQ"


_Errno = Annotated[int, msgspec.Meta(ge=0, le=4095)]
_Datum = Annotated[int, msgspec.Meta(ge=0)]


class _Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With MASKED_EQ, `value` is the mask and `valueTwo` the datum, as in the OCI format."""

    index: Annotated[int, msgspec.Meta(ge=0, le=5)]
    value: _Datum
    op: _Operator
    valueTwo: _Datum = 0

    def test(self) -> tuple[int, int]:
        """(mask, value) such that the argument matches when argument & mask == value."""
        mask, value = WORD, self.value
        if self.op is _Operator.MASKED_EQ:
            mask, value = self.value, self.valueTwo
        if max(mask, value) > WORD or value & ~mask or not mask:
            raise ProfileError(f"argument {self.index} can never match")
        return mask, value


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    comment: Annotated[str, msgspec.Meta(min_length=3)]
    names: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    action: _Action
    errnoRet: _Errno | None = None
    args: tuple[_Argument, ...] = ()

    def code(self) -> int:
        if (self.action is _Action.ERRNO) != (self.errnoRet is not None):
            raise ProfileError("errnoRet goes with SCMP_ACT_ERRNO and with nothing else")
        match self.action:
            case _Action.ALLOW:
                return int(pyseccomp.ALLOW)
            case _Action.KILL_PROCESS:
                return int(pyseccomp.KILL_PROCESS)
            case _Action.ERRNO:
                return int(pyseccomp.ERRNO(self.errnoRet or 0))


class _Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    defaultAction: _Action
    defaultErrnoRet: _Errno
    syscalls: Annotated[tuple[_Entry, ...], msgspec.Meta(min_length=1)]


Test = tuple[int, int]  # mask, value
Condition = Mapping[int, Test]  # argument index -> test; all of them hold
Rule = tuple[int, Condition]  # the kernel's action, and when
AT_LEAST = -1  # in place of a mask: the argument is at least `value`


def profile_text(name: ProfileName) -> bytes:
    """The JSON of a shipped profile. Raises FileNotFoundError."""
    with open(hostpaths.seccomp_profile(name.value), "rb") as file:
        return file.read()


def compile_profile(text: bytes) -> CompiledProfile:
    """The program of a profile.

    Raises ProfileError: the text is not a profile, says two things about one call, or says more
    than the kernel takes.
    """
    profile = _decode(text)
    default = _refusal(profile)
    calls, unknown = {}, []
    for name, entries in _entries_by_name(profile).items():
        number = syscall_number(name)
        if number == _UNKNOWN:
            unknown.append(name)
        elif number >= 0:  # the others are calls of other architectures alone
            cases, otherwise = _answers(name, entries, default)
            calls[number] = Call([(tests, action) for action, tests in cases], otherwise)
    try:
        bpf = assemble(platform.machine(), calls, default)
    except ValueError as problem:
        raise ProfileError(str(problem)) from None
    return CompiledProfile(bpf, tuple(unknown))


def rules_of(text: bytes) -> dict[str, list[Rule]]:
    """What a profile says of each name that it lists: disjoint rules, one of which meets each
    call. Raises ProfileError."""
    profile = _decode(text)
    default = _refusal(profile)
    return {
        name: list(_rules(name, entries, default))
        for name, entries in _entries_by_name(profile).items()
    }


def syscall_name(number: int) -> str:
    """The native name of a number, or the number as text."""
    try:
        return str(pyseccomp.resolve_syscall(pyseccomp.system_arch(), number).decode())
    except ValueError:
        return str(number)


def syscall_number(name: str) -> int:
    """The native number; negative where there is none."""
    return int(pyseccomp.resolve_syscall(pyseccomp.system_arch(), name))


def _decode(text: bytes) -> _Profile:
    try:
        profile = msgspec.json.decode(text, type=_Profile)
    except msgspec.DecodeError as problem:
        raise ProfileError(str(problem)) from None
    if profile.defaultAction is not _Action.ERRNO:
        raise ProfileError("the default must refuse with an errno")
    return profile


def _refusal(profile: _Profile) -> int:
    return int(pyseccomp.ERRNO(profile.defaultErrnoRet))


def _entries_by_name(profile: _Profile) -> dict[str, list[_Entry]]:
    entries: dict[str, list[_Entry]] = {}
    for entry in profile.syscalls:
        for name in entry.names:
            entries.setdefault(name, []).append(entry)
    return dict(sorted(entries.items()))


def _answers(name: str, entries: list[_Entry], default: int) -> tuple[list[Rule], int]:
    """The rules with conditions, which are disjoint, and the action for what meets none."""
    plain = [entry for entry in entries if not entry.args]
    conditional: list[Rule] = []
    for entry in entries:
        condition = {argument.index: argument.test() for argument in entry.args}
        if len(condition) != len(entry.args):
            raise ProfileError(f"{name}: an entry tests one argument twice")
        if condition:
            conditional.append((entry.code(), condition))
    for position, (_, first) in enumerate(conditional):
        if any(_overlap(first, second) for _, second in conditional[position + 1 :]):
            raise ProfileError(f"{name}: two entries match the same call")
    if len(plain) > 1:
        raise ProfileError(f"{name}: two entries without arguments")
    return conditional, plain[0].code() if plain else default


def _rules(name: str, entries: list[_Entry], default: int) -> Iterable[Rule]:
    conditional, otherwise = _answers(name, entries, default)
    yield from conditional
    for condition in complement([condition for _, condition in conditional]):
        yield otherwise, condition


def _overlap(first: Condition, second: Condition) -> bool:
    """Whether some call satisfies both."""
    for index in first.keys() & second.keys():
        (mask_a, value_a), (mask_b, value_b) = first[index], second[index]
        if (value_a ^ value_b) & mask_a & mask_b:
            return False
    return True


def complement(conditions: list[Condition]) -> Iterable[dict[int, Test]]:
    """Disjoint conditions that hold exactly where none of `conditions` does."""
    if not conditions:
        yield {}
        return
    if any(not condition for condition in conditions):
        return
    index = min(min(condition) for condition in conditions)
    free = [condition for condition in conditions if index not in condition]
    values: dict[Test, list[Condition]] = {}
    for condition in conditions:
        if index in condition:
            rest = {key: test for key, test in condition.items() if key != index}
            values.setdefault(condition[index], []).append(rest)
    for test, rests in values.items():
        for condition in complement(rests + free):
            yield {index: test, **condition}
    for test in _outside(list(values)):
        for condition in complement(free):
            yield {index: test, **condition}


def _outside(tests: list[Test]) -> Iterable[Test]:
    """Disjoint tests of one argument that hold exactly where none of `tests` does."""
    masks = {mask for mask, _ in tests}
    if masks == {WORD}:
        bits = max(value for _, value in tests).bit_length()
        yield AT_LEAST, 1 << bits
        high = WORD & ~((1 << bits) - 1)
        yield from _prefixes(tests, high, 0, [1 << bit for bit in reversed(range(bits))])
    else:
        union = 0
        for mask in masks:
            union |= mask
        order = [1 << bit for bit in reversed(range(64)) if union >> bit & 1]
        yield from _prefixes(tests, 0, 0, order)


def _prefixes(tests: list[Test], mask: int, value: int, bits: list[int]) -> Iterable[Test]:
    """The parts of the space (mask, value), split bit by bit, that meet no test."""
    near = [
        (test_mask, test_value)
        for test_mask, test_value in tests
        if not (test_value ^ value) & test_mask & mask
    ]
    if not near:
        yield mask, value
    elif all(test_mask & ~mask for test_mask, _ in near):
        yield from _prefixes(near, mask | bits[0], value, bits[1:])
        yield from _prefixes(near, mask | bits[0], value | bits[0], bits[1:])
