"""The plan of one environment's construction, as data.

Invariant: everything that the forked child needs is a number, a descriptor or bytes; it opens no
host path. `describe()` is what golden tests read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

WORKLOAD_ID = 10001
EXPORTER_ID = 20002
INNER_IDS = (0, WORKLOAD_ID, EXPORTER_ID)
# runsc gives the Sentry, which needs no file, the uid of nobody.
SENTRY_ID = 65534
SENTRY_INNER_IDS = (0, WORKLOAD_ID, SENTRY_ID)


@dataclass(frozen=True)
class IdBlock:
    """Host uids (and equal gids) of one environment: `base + index` for each of `inner`."""

    base: int
    inner: tuple[int, ...] = INNER_IDS

    def outer(self, inner: int) -> int:
        return self.base + self.inner.index(inner)

    def map_lines(self) -> str:
        """The text of uid_map and gid_map: inner, outer, 1."""
        return "".join(f"{inner} {self.outer(inner)} 1\n" for inner in self.inner)


@dataclass(frozen=True)
class JailPlan:
    """What init and the steward of one environment are built from.

    Descriptors are borrowed from the caller, who closes its own copies afterwards.

    image_fd: a detached mount of the image's root, id-mapped for the block, read-only.
    workspace_fd: a detached mount of the volume, id-mapped. box_fd, init_leaf_fd, steward_leaf_fd:
    directories of the cgroups. init_channel_fd, steward_channel_fd: the environment's ends.
    seccomp_workload, seccomp_init, seccomp_steward: BPF programs (struct sock_filter[]). A command
    inherits init's, which must therefore allow all that the workload's allows.
    command_program_fd: guest/init.c, compiled, in a file that commands may execute and not read.
    rlimits: by the names of setrlimit, with or without RLIMIT_; never above the caller's own.
    apparmor_label: the profile of every command, which must be loaded and enforced; None where the
    kernel has no AppArmor. landlock_version: of the kernel's interface; 0 for none.
    proxy_port: the port of the loopback that the proxy's socket is bound to; None for no socket.
    A launch uses both mounts up: they cannot be attached again.
    """

    environment_id: str
    hostname: str
    ids: IdBlock
    image_fd: int
    workspace_fd: int
    box_fd: int
    init_leaf_fd: int
    steward_leaf_fd: int
    init_channel_fd: int
    steward_channel_fd: int
    command_program_fd: int
    seccomp_workload: bytes
    seccomp_init: bytes
    seccomp_steward: bytes
    tmp_bytes: int
    shm_bytes: int
    rlimits: Mapping[str, tuple[int, int]]
    apparmor_label: str | None
    landlock_version: int
    proxy_port: int | None = None


@dataclass(frozen=True)
class StewardPlan:
    """What a steward is built from whose environment has a kernel of its own.

    Descriptors are borrowed. workspace_fd: a detached mount of the volume, id-mapped, used up.
    user_namespace_fd: one that maps the environment's block. memory_bytes: of a process that is
    built like a steward to work for the helper alone; it has no more, and dies with the helper.
    """

    hostname: str
    workspace_fd: int
    user_namespace_fd: int
    steward_leaf_fd: int
    steward_channel_fd: int
    seccomp_steward: bytes
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Launched:
    """The two processes, as seen from the initial pid namespace, the bridge's bound socket, and the
    proxy's where the plan has a port for it; the caller owns the descriptors."""

    init_pid: int
    init_pidfd: int
    steward_pid: int
    steward_pidfd: int
    bridge_fd: int
    proxy_listener: int | None = None
