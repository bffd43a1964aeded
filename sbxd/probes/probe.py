"""What a probe is: a program that tries things inside an environment, and what is to come of it.

A probe is data. Who drives it (the tests, an operator's check of a host) runs `program(probe)` as
an ordinary command in an environment, decodes the JSON that it prints and asks `judge`. Where
`outside` is set, `program_outside`, run as root without a sandbox, must answer that, or the
refusals say nothing about the layer that they are credited to.

Invariants: a program prints one JSON object, of attempt to outcome ("ok", the name of an errno, or
for a look what is seen); it needs Python and nothing else; it leaves the environment usable.
Deliberately absent: running anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Layer(StrEnum):
    """What is to stop the attempts."""

    APPARMOR = "apparmor"
    DESCRIPTORS = "descriptors"
    IDENTITY = "identity"
    LANDLOCK = "landlock"
    MOUNTS = "mounts"
    NETWORK_NAMESPACE = "network_namespace"
    PID_NAMESPACE = "pid_namespace"
    PROXY = "proxy"
    RESOURCE_LIMITS = "resource_limits"
    SECCOMP = "seccomp"


@dataclass(frozen=True)
class Probe:
    """id: of small letters and dashes. cases: ids of the catalogue (docs/cases.md), which
    has none for what every environment is to be like.

    source: Python that follows PRELUDE and calls `answer` once. inside: each attempt's admissible
    outcomes. controls: attempts that must succeed, or have exactly this outcome, in the same run.
    outside: what root gets without a sandbox; attempts that depend on the kernel are left out.
    """

    id: str
    cases: tuple[str, ...]
    layer: Layer
    source: str
    inside: Mapping[str, frozenset[str]]
    controls: Mapping[str, str]
    outside: Mapping[str, str] = field(default_factory=dict)


PRELUDE = """
import ctypes, errno, json, os, socket, stat, sys

libc = ctypes.CDLL(None, use_errno=True)
ONLY = None


def syscall(number, *arguments):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    ctypes.set_errno(0)
    returned = libc.syscall(ctypes.c_long(number), *words)
    return "ok" if returned != -1 else errno.errorcode[ctypes.get_errno()]


def attempt(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except OSError as error:
        return errno.errorcode.get(error.errno, repr(error))
    return "ok"


def connect(family, address):
    with socket.socket(family) as one:
        one.settimeout(3)
        one.connect(address)


def listed(words):
    return " ".join(sorted(map(str, words))) or "none"


def answer(value):
    json.dump(value, sys.stdout)
    sys.stdout.flush()

"""


class Verdict(StrEnum):
    """INCONCLUSIVE: a control failed, so what else was found says nothing. NOT_RUN: what it needs
    is not there."""

    OK = "ok"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not_run"


@dataclass(frozen=True)
class Attempt:
    """One attempt of a probe: expected is what is admissible, found None where it is missing."""

    name: str
    expected: tuple[str, ...]
    found: str | None
    is_right: bool
    is_control: bool


def program(probe: Probe) -> str:
    """What to give to `python3 -c` in an environment."""
    return PRELUDE + probe.source


def program_outside(probe: Probe) -> str:
    """The same for outside a sandbox. A source with `outside` looks at ONLY, and tries nothing
    else: some of what is refused inside must not be done to a host."""
    return f"{PRELUDE}ONLY = {sorted(probe.outside)!r}\n{probe.source}"


def judge(probe: Probe, answer: object) -> tuple[str, ...]:
    """What is wrong with an answer from inside, attempt by attempt; empty when nothing is."""
    return tuple(_wrong(probe, answer))


def attempts(probe: Probe, answer: object) -> tuple[Attempt, ...]:
    """Attempt by attempt what `judge` judges, the controls last; an attempt that the probe does
    not know is wrong."""
    found = answer if isinstance(answer, dict) else {}
    expectations = [
        *((name, tuple(sorted(each)), False) for name, each in probe.inside.items()),
        *((name, (each,), True) for name, each in probe.controls.items()),
    ]
    judged = [
        Attempt(
            name=name,
            expected=expected,
            found=None if name not in found else str(found[name]),
            is_right=found.get(name) in expected,
            is_control=is_control,
        )
        for name, expected, is_control in expectations
    ]
    known = {each.name for each in judged}
    judged += [
        Attempt(str(name), (), str(found[name]), is_right=False, is_control=False)
        for name in found
        if name not in known
    ]
    return tuple(judged)


def verdict(judged: Sequence[Attempt]) -> Verdict:
    """What the attempts of one probe come to."""
    wrong = [each for each in judged if not each.is_right]
    if any(each.is_control for each in wrong):
        return Verdict.INCONCLUSIVE
    return Verdict.FAILED if wrong or not judged else Verdict.OK


def judge_outside(probe: Probe, answer: object) -> tuple[str, ...]:
    """What is wrong with an answer from outside: then the answers from inside prove nothing."""
    found = answer if isinstance(answer, dict) else {}
    return tuple(
        f"{name}: {found.get(name)!a} outside, not {expected}"
        for name, expected in probe.outside.items()
        if found.get(name) != expected
    )


def _wrong(probe: Probe, answer: object) -> Iterator[str]:
    if not isinstance(answer, dict):
        yield "the answer is no object"
        return
    for name, admissible in probe.inside.items():
        found = answer.get(name)
        if not isinstance(found, str) or found not in admissible:
            yield f"{name}: {answer.get(name)!a}, not {' or '.join(sorted(admissible))}"
    for name, expected in probe.controls.items():
        if answer.get(name) != expected:
            yield f"control {name}: {answer.get(name)!a}, not {expected}"
    for name in sorted(answer.keys() - probe.inside.keys() - probe.controls.keys(), key=str):
        yield f"{name}: an attempt that the probe does not know"
