"""The compiled seccomp programs as bytes.

They are compiled in a child, so that the launcher itself stays small: libseccomp, its binding and
the profiles' text are in no process that forks a sandbox.

Invariant: what an operator's profile is called by is a name of the launcher's own directory, and
a profile that allows anything which the shipped one refuses is not kept: whatever name is asked
for, the answer binds at least as much.
"""

import errno
import os
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.msgpack import Decoder, encode

from sbxd.launcher.kernel.process import ERROR, INFO, say
from sbxd.launcher.requests import SHIPPED_PROFILE


class Filters(NamedTuple):
    """One BPF program (struct sock_filter[]) for each kind of process, and those of the
    operator's profiles. refused: why a profile of this name is not among them."""

    workload: bytes
    init: bytes
    steward: bytes
    unpacker: bytes = b""
    named: Mapping[str, bytes] = {}
    refused: Mapping[str, str] = {}

    def of_profile(self, name: str) -> bytes:
        """What binds commands under this profile. Raises OSError (EPERM, ENOENT)."""
        if name == SHIPPED_PROFILE:
            return self.workload
        if name in self.refused:
            raise OSError(errno.EPERM, f"profile {name}: {self.refused[name]}")
        if name not in self.named:
            raise OSError(errno.ENOENT, f"there was no profile {name} when the launcher started")
        return self.named[name]


class FiltersUnavailable(Exception):
    """The profiles do not compile on this host. The launcher refuses to start."""


def load() -> Filters:
    """Compile the shipped profiles and the operator's. Raises FiltersUnavailable."""
    here, there = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _child(there)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        raw = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise FiltersUnavailable("the seccomp profiles do not compile: see the lines above")
    return Decoder(Filters).decode(raw)


def _child(pipe: int) -> None:
    try:
        from sbxd.launcher.kernel import hostpaths, seccomp, seccomp_compare

        shipped = {}
        for profile in seccomp.ProfileName:
            compiled = seccomp.compile_profile(seccomp.profile_text(profile))
            shipped[profile.value] = compiled.bpf
            say(INFO, f"seccomp: profile {profile}: sha256 {compiled.digest}")
        base = seccomp.profile_text(seccomp.ProfileName.WORKLOAD)
        named, refused = {}, {}
        for name, text in hostpaths.operator_profiles().items():
            try:
                compiled = seccomp_compare.admit(name, text, base)
            except seccomp.ProfileError as problem:
                refused[name] = str(problem)
                say(ERROR, f"seccomp: profile {name} is refused: {problem}")
            else:
                named[name] = compiled.bpf
                say(INFO, f"seccomp: profile {name} of the operator: sha256 {compiled.digest}")
        with os.fdopen(pipe, "wb") as file:
            file.write(encode(Filters(**shipped, named=named, refused=refused)))
        os._exit(0)
    except BaseException as problem:
        say(ERROR, f"seccomp: {type(problem).__name__}: {problem}")
        os._exit(1)
