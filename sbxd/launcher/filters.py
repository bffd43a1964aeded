"""The compiled seccomp programs as bytes.

They are compiled in a child, so that the launcher itself stays small: libseccomp, its binding and
the profiles' text are in no process that forks a sandbox.
"""

import os
from typing import NamedTuple

from msgspec.msgpack import Decoder, encode


class Filters(NamedTuple):
    """One BPF program (struct sock_filter[]) for each kind of process."""

    workload: bytes
    init: bytes
    steward: bytes


class FiltersUnavailable(Exception):
    """The profiles do not compile on this host. The launcher refuses to start."""


def load() -> Filters:
    """Compile the three shipped profiles. Raises FiltersUnavailable."""
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
    return Filters(*Decoder(tuple[bytes, bytes, bytes]).decode(raw))


def _child(pipe: int) -> None:
    try:
        from sbxd.launcher.kernel.seccomp import ProfileName, compile_profile, profile_text

        programs = tuple(
            compile_profile(profile_text(name)).bpf
            for name in (ProfileName.WORKLOAD, ProfileName.INIT, ProfileName.STEWARD)
        )
        with os.fdopen(pipe, "wb") as file:
            file.write(encode(programs))
        os._exit(0)
    except BaseException as problem:
        os.write(2, f"seccomp: {type(problem).__name__}: {problem}\n".encode())
        os._exit(1)
