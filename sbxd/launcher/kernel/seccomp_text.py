"""A compiled profile as text, for reviews: the same for every version of libseccomp.

The rules are the profile's, the answers are the program's own: each rule's line says what the
BPF machine answers to a call that meets it.
"""

from sbxd.launcher.kernel import hostpaths
from sbxd.launcher.kernel.seccomp import (
    CompiledProfile,
    ProfileError,
    ProfileName,
    compile_profile,
    profile_text,
    rules_of,
    syscall_name,
    syscall_number,
)
from sbxd.launcher.kernel.seccomp_compare import NUMBERS, admit, example, show
from sbxd.launcher.kernel.seccomp_machine import X32_BIT, Program, describe

_UNKNOWN = 1023  # a number that no kernel has


def read(name: str) -> tuple[bytes, CompiledProfile]:
    """The text and the program of a shipped profile or of an operator's.

    Raises ProfileError (also when the launcher would refuse it), OSError.
    """
    if name in list(ProfileName):
        text = profile_text(ProfileName(name))
        return text, compile_profile(text)
    own = hostpaths.operator_profiles()
    if name not in own:
        raise ProfileError(f"there is no profile {name!a}")
    return own[name], admit(name, own[name], profile_text(ProfileName.WORKLOAD))


def table(name: str, text: bytes, compiled: CompiledProfile) -> str:
    """Every number with another answer than the default, then every rule with its arguments."""
    program = Program(compiled.bpf)
    default = describe(program.run(_UNKNOWN))
    lines = [
        f"# profile {name}, x86_64, {len(compiled.bpf) // 8} instructions",
        f"# sha256 of the program: {compiled.digest}",
        f"# another architecture: {describe(program.run(0, arch=0))}",
        f"# bit 30 of the number (x32): {describe(program.run(X32_BIT))}",
        f"# what is not listed: {default}",
    ]
    lines += [f"# unknown to this libseccomp: {each}" for each in compiled.unknown]
    by_arguments = {}
    for syscall, rules in rules_of(text).items():
        if any(condition for _, condition in rules):
            by_arguments[syscall] = [condition for _, condition in rules]
    for number in NUMBERS:
        answer = describe(program.run(number))
        syscall = syscall_name(number)
        if syscall not in by_arguments and answer != default:
            lines.append(f"{syscall} {answer}")
    for syscall, conditions in by_arguments.items():
        number = syscall_number(syscall)
        for condition in conditions:
            answer = describe(program.run(number, example(condition)))
            lines.append(f"{show(syscall, condition)} {answer}")
    return "\n".join(lines) + "\n"
