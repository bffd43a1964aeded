"""An operator's profile is kept when it allows nothing that the shipped one refuses, and only then.

The judgement over the rules is held against the compiled programs in the BPF machine, which share
no code with it.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbxd.launcher.kernel import seccomp_text
from sbxd.launcher.kernel.seccomp import (
    ProfileError,
    ProfileName,
    compile_profile,
    profile_text,
)
from sbxd.launcher.kernel.seccomp_compare import admit, openings
from sbxd.launcher.kernel.seccomp_machine import ALLOW, Program
from tests.pure.test_seccomp_compile import entry, equal, masked, refuse, text

WORKLOAD = profile_text(ProfileName.WORKLOAD)
WRITE = 1
WIDE = 2**64 - 1


def changed(*more: dict[str, Any], without: tuple[str, ...] = ()) -> bytes:
    """The shipped profile with entries added, and with names taken out of every entry."""
    profile = json.loads(WORKLOAD)
    kept = []
    for each in profile["syscalls"]:
        names = [name for name in each["names"] if name not in without]
        if names:
            kept.append({**each, "names": names})
    return json.dumps({**profile, "syscalls": [*kept, *more]}).encode()


def test_the_shipped_profile_is_as_strong_as_itself() -> None:
    assert openings(WORKLOAD, WORKLOAD) == []
    assert admit("same", WORKLOAD, WORKLOAD).bpf == compile_profile(WORKLOAD).bpf


def test_a_profile_that_takes_something_away_is_kept() -> None:
    stricter = changed(refuse(97, names=["socket"]), without=("socket", "memfd_create"))
    program = Program(admit("no-network", stricter, WORKLOAD).bpf)
    assert program.run(41, (2, 1, 0)) != ALLOW
    assert Program(compile_profile(WORKLOAD).bpf).run(41, (2, 1, 0)) == ALLOW
    assert program.run(59) == ALLOW


@pytest.mark.parametrize(
    ("weaker", "named"),
    [
        (changed(entry(names=["ptrace"]), without=("ptrace",)), "ptrace"),
        (changed(entry(names=["io_uring_setup", "bpf"]), without=("bpf",)), "io_uring_setup"),
        (changed(entry(names=["clone3"]), without=("clone3",)), "clone3"),
        (
            changed(entry(names=["socket"], args=[equal(0, 38)]), without=("socket",)),
            "socket(arg0 == 0x26)",
        ),
        (
            changed(
                entry(names=["ioctl"], args=[masked(1, 0xFFFF_FFFF, 0x5412)]), without=("ioctl",)
            ),
            "ioctl(arg1 & 0xffffffff == 0x5412)",
        ),
        (changed(entry(names=["ioctl"]), without=("ioctl",)), "ioctl"),
        (
            # All but the one that is named: the otherwise of an allowing entry.
            changed(
                entry(names=["personality"]),
                refuse(1, names=["personality"], args=[equal(0, 0x40000)]),
                without=("personality",),
            ),
            "personality(",
        ),
        (
            # One namespace bit less in the mask.
            changed(entry(names=["clone"], args=[masked(0, 0x7C020000, 0)]), without=("clone",)),
            "clone(arg0 & 0x7c020000 == 0x0)",
        ),
    ],
)
def test_a_profile_that_opens_something_is_refused_with_its_name(weaker: bytes, named: str) -> None:
    with pytest.raises(ProfileError, match="it would open") as refused:
        admit("weaker", weaker, WORKLOAD)
    assert named in str(refused.value)


@pytest.mark.parametrize("profile", [ProfileName.INIT, ProfileName.STEWARD])
def test_the_other_shipped_profiles_are_none_for_commands(profile: ProfileName) -> None:
    assert openings(profile_text(profile), WORKLOAD)


@pytest.mark.parametrize("name", ["", "A", "a b", "../x", "x" * 33, "workload", "init", "-x"])
def test_a_name_outside_the_grammar_or_a_shipped_one_is_refused(name: str) -> None:
    with pytest.raises(ProfileError, match="name"):
        admit(name, WORKLOAD, WORKLOAD)


@pytest.mark.parametrize("needed", ["execve", "exit_group", "write"])
def test_a_profile_under_which_no_command_runs_is_refused(needed: str) -> None:
    with pytest.raises(ProfileError, match=f"no command could run: {needed}"):
        admit("useless", changed(without=(needed,)), WORKLOAD)


def test_a_refusal_names_no_more_than_fits() -> None:
    many = [entry(names=[name]) for name in ("bpf", "mount", "ptrace", "setns", "unshare")]
    many += [entry(names=[f"io_uring_{name}"]) for name in ("setup", "enter", "register")]
    many += [entry(names=[f"fs{name}"]) for name in ("open", "config", "mount", "pick")]
    many += [entry(names=["userfaultfd"]), entry(names=["clone3"])]
    names = tuple(name for each in many for name in each["names"])
    with pytest.raises(ProfileError, match=r"and 2 more$") as refused:
        admit("many", changed(*many, without=names), WORKLOAD)
    assert len(str(refused.value)) < 500


masks = st.sampled_from([0x1, 0x6, 0x7, 0xFFFF_FFFF])
# With these as arguments every combination of tests that a drawn profile may have is met.
VALUES = (*range(16), 2**31, *range(2**32, 2**32 + 8), WIDE)


@st.composite
def profiles(draw: st.DrawFn) -> bytes:
    """A profile of `write` with up to three disjoint entries and perhaps an otherwise."""
    mask, index = draw(masks), draw(st.integers(0, 1))
    values = draw(st.sets(st.integers(0, 7).map(lambda value: value & mask), max_size=3))
    tests = [masked(index, mask, value) for value in sorted(values)]
    if draw(st.booleans()):
        tests = [equal(index, value) for value in sorted(values)]
    made = [entry(args=[test]) if draw(st.booleans()) else refuse(1, args=[test]) for test in tests]
    otherwise = draw(st.sampled_from(["allow", "refuse", "none"]))
    if otherwise == "allow":
        made.append(entry())
    elif otherwise == "refuse" or not made:
        made.append(refuse(2))
    return text(*made, entry(names=["close"]))


@settings(deadline=None, max_examples=80)
@given(candidate=profiles(), base=profiles())
def test_the_judgement_is_that_of_every_call(candidate: bytes, base: bytes) -> None:
    ours, theirs = (Program(compile_profile(each).bpf) for each in (candidate, base))
    calls = [(a, b) for a in VALUES for b in VALUES]
    opened = any(ours.run(WRITE, c) == ALLOW != theirs.run(WRITE, c) for c in calls)
    assert bool(openings(candidate, base)) == opened


@pytest.mark.parametrize("profile", list(ProfileName))
def test_a_dump_is_the_same_each_time_and_every_answer_is_the_programs(
    profile: ProfileName,
) -> None:
    source, compiled = seccomp_text.read(profile)
    shown = seccomp_text.table(profile, source, compiled)
    assert shown == seccomp_text.table(profile, source, compiled)
    assert compiled.digest in shown
    lines = shown.splitlines()
    assert len(lines) == len(set(lines))
    if profile is ProfileName.WORKLOAD:
        assert {
            "ptrace EPERM",
            "read ALLOW",
            "ioctl(arg1 & 0xffffffff == 0x5412) EPERM",
            "socket(arg0 == 0x1) ALLOW",
            "personality(arg0 & 0xffffffff == 0x8) ALLOW",
            "sync SUCCESS_WITHOUT_RUNNING",
        } <= set(lines)
        assert not any(line.startswith(("clone3 ", "io_uring")) for line in lines)


def sbxctl(*words: str) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "sbxctl", "seccomp", "dump", *words]
    return subprocess.run(command, capture_output=True, timeout=60)


def test_sbxctl_dumps_what_the_launcher_compiles() -> None:
    source, compiled = seccomp_text.read("init")
    assert sbxctl("--profile", "init", "--bpf").stdout == compiled.bpf
    shown = sbxctl("--profile", "init")
    assert shown.stdout.decode() == seccomp_text.table("init", source, compiled)
    assert shown.returncode == 0
    unknown = sbxctl("--profile", "nobody")
    assert (unknown.returncode, unknown.stdout) == (240, b"")
    assert b"there is no profile 'nobody'" in unknown.stderr
