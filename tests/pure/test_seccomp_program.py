"""The assembled program gives libseccomp's answers and the text's, call by call, in a quarter of
the instructions."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from struct import iter_unpack, pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbxd.launcher.kernel.seccomp import (
    WORD,
    Condition,
    ProfileError,
    ProfileName,
    compile_profile,
    profile_text,
    rules_of,
    syscall_number,
)
from sbxd.launcher.kernel.seccomp_machine import (
    ALLOW,
    ERRNO,
    I386,
    KILL_PROCESS,
    X32_BIT,
    Program,
)
from sbxd.launcher.kernel.seccomp_program import ARCHITECTURES, INSTRUCTIONS_MAX, Call, assemble
from tests.pure.seccomp_oracle import by_libseccomp, by_reading, disagreements, telling
from tests.pure.test_seccomp_compile import entry, equal, masked, refuse, text

X86_64, AARCH64 = ARCHITECTURES["x86_64"], ARCHITECTURES["aarch64"]
ENOSYS, EPERM = ERRNO | 38, ERRNO | 1
NUMBERS = [*range(1100), 2**30 - 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
SAMPLES = 400  # of the calls of one name, where there are more that tell
RETURN, EQUAL, AT_LEAST = 0x06, 0x15, 0x35


def calls_of(profile: bytes) -> Iterator[tuple[int, Sequence[int]]]:
    """Every number, x32's too, and for each name what tells its rules apart."""
    chance = random.Random(175)
    for number in NUMBERS:
        yield number, ()
        yield number | X32_BIT, ()
    for name, rules in rules_of(profile).items():
        conditions = [condition for _, condition in rules]
        yield from ((syscall_number(name), call) for call in _met(conditions))
        mixed = list(telling(conditions)) if len(conditions) < 6 else list(_pairs(conditions))
        for call in chance.sample(mixed, min(SAMPLES, len(mixed))):
            yield syscall_number(name), call


def _met(conditions: Sequence[Condition]) -> Iterator[list[int]]:
    for condition in conditions:
        yield from telling([condition])


def _pairs(conditions: Sequence[Condition]) -> Iterator[list[int]]:
    for first, second in pairwise(conditions):
        yield from telling([first, second])


@pytest.mark.parametrize("name", list(ProfileName))
def test_a_shipped_profile_has_the_answers_of_libseccomp_and_of_its_text(name: ProfileName) -> None:
    profile = profile_text(name)
    ours, theirs = Program(compile_profile(profile).bpf), Program(by_libseccomp(profile))
    assert disagreements(ours, theirs, calls_of(profile)) == []
    for syscall, rules in rules_of(profile).items():
        for call in _met([condition for _, condition in rules]):
            expected = by_reading(profile, syscall, call)
            assert ours.run(syscall_number(syscall), call) == expected, (syscall, call)


@pytest.mark.parametrize("name", list(ProfileName))
def test_each_changed_comparison_or_answer_is_a_disagreement(name: ProfileName) -> None:
    """The control: whichever is changed, the calls above tell, or one of another architecture."""
    profile = profile_text(name)
    code = list(iter_unpack("=HBBI", compile_profile(profile).bpf))
    theirs = Program(by_libseccomp(profile))
    answers = [(call, theirs.run(*call)) for call in calls_of(profile)]
    missed, changes = [], 0
    for position, (operation, if_true, if_false, operand) in enumerate(code):
        if operation in (EQUAL, AT_LEAST):
            changed = (operation, if_false, if_true, operand)
        elif operation == RETURN:
            changed = (operation, if_true, if_false, operand ^ 1)
        else:
            continue
        changes += 1
        worse = [*code[:position], changed, *code[position + 1 :]]
        broken = Program(b"".join(pack("=HBBI", *each) for each in worse))
        tells = broken.run(0, arch=I386) != KILL_PROCESS
        if not tells and all(broken.run(*call) == answer for call, answer in answers):
            missed.append((position, code[position]))
    assert missed == []
    assert changes > 60


@pytest.mark.parametrize("name", list(ProfileName))
def test_a_program_is_one_that_the_kernel_takes(name: ProfileName) -> None:
    """Forward jumps within the program alone, nothing that falls off its end, aligned loads of
    struct seccomp_data: what bpf_check_classic and seccomp_check_filter ask for."""
    code = list(iter_unpack("=HBBI", compile_profile(profile_text(name)).bpf))
    assert 0 < len(code) <= INSTRUCTIONS_MAX
    for position, (operation, if_true, if_false, operand) in enumerate(code):
        left = len(code) - position - 1
        match operation:
            case 0x15 | 0x35:
                assert max(if_true, if_false) < left
            case 0x05:
                assert operand < left
            case 0x20:
                assert left
                assert (operand % 4, operand < 64) == (0, True)
            case 0x54:
                assert left
            case _:
                assert (operation, if_true, if_false) == (RETURN, 0, 0)
                assert operand in (ALLOW, KILL_PROCESS) or operand & 0xFFFF_0000 == ERRNO


@pytest.mark.parametrize("name", [ProfileName.WORKLOAD, ProfileName.INIT])
def test_it_has_a_third_of_libseccomps_instructions_at_most(name: ProfileName) -> None:
    profile = profile_text(name)
    assert 3 * len(compile_profile(profile).bpf) < len(by_libseccomp(profile))


_VALUES = st.one_of(
    st.sampled_from([0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, WORD]),
    st.integers(0, WORD),
)
_TESTS = st.dictionaries(
    st.integers(0, 2),
    st.tuples(st.one_of(st.just(WORD), st.sampled_from([1, 6, 2**32 - 1, 3 << 31])), _VALUES),
    min_size=1,
    max_size=3,
)


NAMES = ("read", "write", "open", "close", "mmap", "accept")
Conditions = list[tuple[str, dict[int, tuple[int, int]]]]


@st.composite
def profiles(draw: st.DrawFn) -> tuple[bytes, Conditions]:
    """A profile of some neighbouring calls, where no call meets two entries, and its conditions."""
    entries, taken = [], Conditions()
    for name in NAMES:
        if draw(st.booleans()):
            entries.append(draw(st.sampled_from([entry(names=[name]), refuse(1, names=[name])])))
        for tests in draw(st.lists(_TESTS, max_size=4)):
            exact = {i: (mask, value & mask) for i, (mask, value) in tests.items()}
            if any(n == name and _may_meet(exact, other) for n, other in taken):
                continue
            taken.append((name, exact))
            arguments = [
                equal(i, value) if mask == WORD else masked(i, mask, value)
                for i, (mask, value) in exact.items()
            ]
            wrong = draw(st.integers(1, 90))
            entries.append(
                draw(
                    st.sampled_from(
                        [
                            entry(names=[name], args=arguments),
                            refuse(wrong, names=[name], args=arguments),
                        ]
                    )
                )
            )
    return text(*(entries or [entry()])), taken


def _may_meet(first: dict[int, tuple[int, int]], second: dict[int, tuple[int, int]]) -> bool:
    return not any(
        (first[i][1] ^ second[i][1]) & first[i][0] & second[i][0] for i in first.keys() & second
    )


@settings(deadline=None, max_examples=150)
@given(made=profiles(), wide=st.lists(st.tuples(_VALUES, _VALUES, _VALUES), max_size=8))
def test_any_profile_means_what_its_text_says(
    made: tuple[bytes, Conditions], wide: list[tuple[int, int, int]]
) -> None:
    profile, conditions = made
    program = Program(compile_profile(profile).bpf)
    for name in NAMES:
        near = list(_met([condition for n, condition in conditions if n == name]))[:SAMPLES]
        for call in [*near, *([*three, 0, 0, 0] for three in wide)]:
            assert program.run(syscall_number(name), call) == by_reading(profile, name, call)
    listed = {syscall_number(name) for name in NAMES}
    for number in (*range(45), 1023, 2**32 - 1):
        assert number in listed or program.run(number) == ENOSYS


def test_a_rule_of_thousands_of_values_is_a_program_or_a_refusal_and_no_crash() -> None:
    """An operator's own profile may be long; the launcher is to start beside any."""
    for count, fits in ((1500, True), (4200, False)):
        values = [refuse(1, args=[masked(1, 2**32 - 1, 7 * number)]) for number in range(count)]
        long = text(*values, entry(names=["close"]))
        if not fits:
            with pytest.raises(ProfileError, match="more than the kernel takes"):
                compile_profile(long)
            continue
        program = Program(compile_profile(long).bpf)
        assert [program.run(1, (0, each)) for each in (0, 7, 8, 7 * 1499, 7 * 1500)] == [
            *(EPERM, EPERM, ENOSYS, EPERM, ENOSYS)
        ]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 1200))
def test_what_is_far_away_is_still_reached(seed: int, size: int) -> None:
    """Programs of thousands of instructions, whose jumps are longer than one can be."""
    chance = random.Random(seed)
    calls = {
        number: Call(
            [({1: (WORD, chance.randrange(9))}, ERRNO | chance.randrange(1, 99))]
            if chance.random() < 0.3
            else [],
            chance.choice((ALLOW, EPERM, KILL_PROCESS, ERRNO | 22)),
        )
        for number in range(0, size, chance.choice((1, 2)))
    }
    program = Program(assemble("x86_64", calls, ENOSYS))
    for number in range(size + 1):
        for value in (0, chance.randrange(9), 2**32):
            call = calls.get(number, Call([], ENOSYS))
            met = [action for tests, action in call.cases if tests[1][1] == value]
            assert program.run(number, (0, value)) == (met or [call.otherwise])[0]


def test_the_other_machines_numbers_and_architecture_are_its_own() -> None:
    code = assemble("aarch64", {64: Call([], ALLOW)}, ENOSYS)
    program = Program(code)
    assert [program.run(number, arch=AARCH64) for number in (63, 64, 65)] == [ENOSYS, ALLOW, ENOSYS]
    assert program.run(64 | X32_BIT, arch=AARCH64) == ENOSYS  # no bit of a number means x32 there
    for arch in (X86_64, I386, AARCH64 ^ 1):
        assert program.run(64, arch=arch) == KILL_PROCESS


def test_a_machine_that_is_not_known_and_a_program_that_is_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="sparc64"):
        assemble("sparc64", {}, ENOSYS)
    many = {
        number: Call([({0: (WORD, number)}, ERRNO | number % 4000 + 1)], ALLOW)
        for number in range(1200)
    }
    with pytest.raises(ValueError, match="more than the kernel takes"):
        assemble("x86_64", many, ENOSYS)
