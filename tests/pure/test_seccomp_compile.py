"""The compiler of seccomp profiles: "otherwise" is an exact complement, and nothing is guessed."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbxd.launcher.kernel.seccomp import ProfileError, compile_profile
from sbxd.launcher.kernel.seccomp_machine import X86_64, Program, describe

WRITE, CLOSE = 1, 3
WORD = 2**64 - 1


def entry(action: str = "SCMP_ACT_ALLOW", **fields: Any) -> dict[str, Any]:
    return {"comment": "a reason", "names": ["write"], "action": action, **fields}


def refuse(errno: int, **fields: Any) -> dict[str, Any]:
    return entry("SCMP_ACT_ERRNO", errnoRet=errno, **fields)


def equal(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}


def masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def text(*entries: dict[str, Any], **fields: Any) -> bytes:
    profile = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "syscalls": entries}
    return json.dumps({**profile, **fields}).encode()


def answers(*entries: dict[str, Any]) -> Program:
    return Program(compile_profile(text(*entries)).bpf)


def test_what_is_not_listed_does_not_exist() -> None:
    program = answers(entry())
    assert describe(program.run(WRITE)) == "ALLOW"
    assert describe(program.run(CLOSE)) == "ENOSYS"


def test_an_entry_without_arguments_is_the_otherwise_of_the_others() -> None:
    program = answers(entry(args=[equal(0, 1)]), entry(args=[equal(0, 10)]), refuse(97))
    for value in (*range(70), 2**31, 2**32 + 1, 2**32 + 10, WORD):
        expected = "ALLOW" if value in (1, 10) else "EAFNOSUPPORT"
        assert describe(program.run(WRITE, (value,))) == expected


@settings(deadline=None)
@given(
    allowed=st.sets(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6),
    wide=st.tuples(st.integers(0, WORD), st.integers(0, WORD)),
)
def test_otherwise_is_exact_over_two_arguments(
    allowed: set[tuple[int, int]], wide: tuple[int, int]
) -> None:
    entries = [entry(args=[equal(0, a), equal(2, b)]) for a, b in sorted(allowed)]
    program = answers(*entries, refuse(1))
    for first, third in [wide, *((a, b) for a in range(14) for b in range(14))]:
        expected = "ALLOW" if (first, third) in allowed else "EPERM"
        assert describe(program.run(WRITE, (first, 0, third))) == expected


@settings(deadline=None)
@given(
    mask=st.integers(1, 0xFF),
    seeds=st.sets(st.integers(0, 0xFF), min_size=1, max_size=4),
    value=st.integers(0, WORD),
)
def test_otherwise_is_exact_under_a_mask(mask: int, seeds: set[int], value: int) -> None:
    allowed = sorted({seed & mask for seed in seeds})
    program = answers(*(entry(args=[masked(1, mask, v)]) for v in allowed), refuse(1))
    for candidate in (value, *range(256)):
        expected = "ALLOW" if candidate & mask in allowed else "EPERM"
        assert describe(program.run(WRITE, (0, candidate))) == expected


def test_a_masked_comparison_does_not_see_the_other_bits() -> None:
    program = answers(refuse(1, args=[masked(1, 0xFFFF_FFFF, 0x5412)]), entry(names=["close"]))
    for high in (0, 1, 0xFFFF_FFFF):
        assert describe(program.run(WRITE, (0, (high << 32) | 0x5412))) == "EPERM"
    assert describe(program.run(WRITE, (0, 0x5413))) == "ENOSYS"


def test_an_unknown_name_is_reported_and_stays_refused() -> None:
    profile = compile_profile(text(entry(names=["write", "no_such_call"])))
    assert profile.unknown == ("no_such_call",)


def test_the_same_text_gives_the_same_program() -> None:
    raw = text(entry(), refuse(1, names=["close"]))
    assert compile_profile(raw) == compile_profile(raw)
    assert len(compile_profile(raw).digest) == 64


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        text(entry(surprise=1)),
        text(entry(names=[])),
        text({"names": ["write"], "action": "SCMP_ACT_ALLOW"}),
        text(entry("SCMP_ACT_LOG")),
        text(entry(), defaultAction="SCMP_ACT_ALLOW"),
        text(entry(errnoRet=1)),
        text(entry("SCMP_ACT_ERRNO")),
        text(refuse(4096)),
        text(entry(), entry()),
        text(entry(args=[equal(0, 1), equal(0, 2)])),
        text(entry(args=[equal(0, 1)]), refuse(1, args=[masked(0, 1, 1)])),
        text(entry(args=[masked(0, 1, 2)])),
        text(entry(args=[masked(0, 0, 0)])),
        text(entry(args=[equal(6, 1)])),
        text(entry(args=[{"index": 0, "value": 1, "op": "SCMP_CMP_LT"}])),
    ],
)
def test_what_cannot_be_compiled_exactly_is_refused(raw: bytes) -> None:
    assert compile_profile(text(entry()))
    with pytest.raises(ProfileError):
        compile_profile(raw)


def test_the_machine_agrees_that_x86_64_is_the_architecture() -> None:
    assert describe(answers(entry()).run(WRITE, arch=X86_64)) == "ALLOW"
    assert describe(answers(entry()).run(WRITE, arch=X86_64 ^ 1)) == "KILL_PROCESS"
