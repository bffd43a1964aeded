"""The configuration as one frozen tree. Decoding and checking it is `sbxd.config`.

Every field carries its unit in its name and its bounds in its type. Paths appear in no other
module of the daemon's side but here and in `sbxd.launcher.kernel.hostpaths`.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from sbxd.port.egress import EgressPolicy
from sbxd.port.limits import GIB, MIB, EnvironmentBudgets, IoCeilings, ResourceLimits


class SandboxMechanism(StrEnum):
    MICROVM = "microvm"
    GVISOR = "gvisor"
    NAMESPACES = "namespaces"
    FAKE = "fake"


class DeploymentMode(StrEnum):
    DEVELOPMENT = "development"
    PRODUCTION = "production"


class AuthMode(StrEnum):
    DEV = "dev"
    TOKEN = "token"  # noqa: S105  (the name of a mode, not a secret)


class HostLayer(StrEnum):
    """A layer of the host's that production needs unless its operator accepts to be without."""

    APPARMOR = "apparmor"


# Where the package puts the configuration.
CONFIGURATION_FILE = "/etc/sbxd/config.toml"
# Where the units of this project listen for workers.
WORKER_SOCKET = "/run/sbxd/worker.sock"

DEFAULT_LIMITS = ResourceLimits(
    cpu_millicores=2000,
    memory_bytes=2 * GIB,
    pids_max=512,
    workspace_bytes=4 * GIB,
    inodes_max=100_000,
    wall_clock_seconds=300,
)
DEFAULT_CEILINGS = ResourceLimits(
    cpu_millicores=8000,
    memory_bytes=16 * GIB,
    pids_max=4096,
    workspace_bytes=16 * GIB,
    inodes_max=1_000_000,
    wall_clock_seconds=1800,
)


DEFAULT_BUDGETS = EnvironmentBudgets(
    operations_max=100_000,
    returned_bytes_max=16 * GIB,
    wall_seconds_max=604_800,
)


class LimitSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`defaults` are what a client that names no limit is offered (sbxctl run); `ceilings` are
    what admission holds every specification against. `budgets` are both: what a specification
    without budgets gets, and the most that one may ask for."""

    defaults: ResourceLimits = DEFAULT_LIMITS
    ceilings: ResourceLimits = DEFAULT_CEILINGS
    budgets: EnvironmentBudgets = DEFAULT_BUDGETS
    command_hard_cap_seconds: Annotated[int, Meta(ge=1, le=1800)] = 1800
    environment_lifetime_seconds: Annotated[int, Meta(ge=1, le=604_800)] = 14_400
    start_budget_seconds: Annotated[int, Meta(ge=1, le=60)] = 30
    files_changed_max: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    # An environment whose destruction has failed so often is quarantined, which is an alert.
    destroy_failures_max: Annotated[int, Meta(ge=1, le=10)] = 3
    environments_max: Annotated[int, Meta(ge=1, le=10_000)] = 256
    # Of one worker uid. When absent: all of them where one uid alone may connect, else half.
    environments_per_peer_max: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    # Of all environments together; three quarters of the host's memory when absent.
    memory_committed_max_bytes: Annotated[int, Meta(ge=8 * MIB, le=2**50)] | None = None
    # A command is killed with PIDS at this many refused forks within the window.
    pids_refusals_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    pids_refusals_window_seconds: Annotated[int, Meta(ge=1, le=60)] = 10
    io: IoCeilings = IoCeilings()
    # Development hosts only: limits that may go unenforced, of memory, pids, cpu, io, volume.
    allow_unenforced_limits: tuple[str, ...] = ()


class ImageSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """aliases: name -> `sha256:…` manifest digest. default: the alias that sbxctl run uses."""

    aliases: dict[str, str] = {}
    default: str | None = None


class SeccompSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """profile: what binds commands. `workload` is the shipped one; another name is a file of the
    launcher's directory that allows nothing which that one refuses."""

    profile: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}\Z")] = "workload"


class GvisorSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """runsc_version, runsc_sha256: the only runsc that may be used, as the launcher's log and
    `sbxctl doctor` show it; any when absent. Its path is the launcher's own (--runsc)."""

    runsc_version: Annotated[str, Meta(pattern=r"^[0-9A-Za-z.+~_-]{1,64}\Z")] | None = None
    runsc_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None


class ReserveSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The warm pool. slots: kept prepared in any case, for the default image and volume; 0 for no
    pool at all. slots_max: the most that demand may have prepared, of all kinds together."""

    slots: Annotated[int, Meta(ge=0, le=256)] = 4
    slots_max: Annotated[int, Meta(ge=0, le=256)] | None = None
    age_max_seconds: Annotated[int, Meta(ge=10, le=86_400)] = 3600

    @property
    def most(self) -> int:
        """slots_max, or four times `slots` (256 at most) when it is absent."""
        return min(4 * self.slots, 256) if self.slots_max is None else self.slots_max


class ServiceSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """worker_uids, worker_gids: who may connect to the worker socket (SO_PEERCRED), besides
    root. orphan_grace_seconds: how long an environment outlives its last connection.
    shutdown_grace_seconds: how long a command that runs may go on when the service is stopped."""

    worker_uids: tuple[Annotated[int, Meta(ge=0, le=2**32 - 2)], ...] = ()
    worker_gids: tuple[Annotated[int, Meta(ge=0, le=2**32 - 2)], ...] = ()
    connections_max: Annotated[int, Meta(ge=1, le=10_000)] = 256
    connections_per_peer_max: Annotated[int, Meta(ge=1, le=10_000)] = 64
    hello_seconds: Annotated[int, Meta(ge=1, le=60)] = 5
    heartbeat_seconds: Annotated[int, Meta(ge=1, le=3600)] = 30
    orphan_grace_seconds: Annotated[int, Meta(ge=0, le=3600)] = 60
    shutdown_grace_seconds: Annotated[int, Meta(ge=0, le=60)] = 5


class LeaseAuthoritySettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker tier's lease authority. socket: where it listens. owner_uids: the worker uids for
    whose environments it speaks; it runs under one of them, or as root."""

    socket: Annotated[str, Meta(pattern=r"^/[^\x00]{1,106}\Z")]
    owner_uids: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=2**32 - 2)], ...], Meta(min_length=1, max_length=1024)
    ]


class LeaseSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """interval_seconds: how often the reaper's timer fires; an environment that the authority does
    not know is ended at the second pass. authorities: by a name for the audit."""

    interval_seconds: Annotated[int, Meta(ge=1, le=3600)] = 60
    authorities: dict[
        Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")], LeaseAuthoritySettings
    ] = {}


class ProcessEnvironmentSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """operator_names: tier 1, variables that a specification may carry. Tier 0 names are refused
    here and on the wire."""

    operator_names: tuple[
        Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z")], ...
    ] = ()


class EgressSettings(EgressPolicy, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The operator's policy, and what bounds the proxy of each environment with a network.

    require_matching_sni: a tunnel has to begin with a TLS ClientHello for the requested host.
    tunnels_max, connections_waiting_max: with and without a tunnel. head_seconds: from accept to
    the end of the request. dial_seconds: all addresses together. idle_seconds: no byte either
    way. denials_per_second: answered at once and recorded one by one; the others are counted.
    """

    require_matching_sni: bool = False
    tunnels_max: Annotated[int, Meta(ge=1, le=4096)] = 128
    connections_waiting_max: Annotated[int, Meta(ge=1, le=1024)] = 64
    head_seconds: Annotated[int, Meta(ge=1, le=60)] = 5
    resolve_seconds: Annotated[int, Meta(ge=1, le=60)] = 10
    dial_seconds: Annotated[int, Meta(ge=1, le=60)] = 10
    idle_seconds: Annotated[int, Meta(ge=10, le=86_400)] = 300
    denials_per_second: Annotated[int, Meta(ge=1, le=1000)] = 10


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole configuration. The defaults are the package's: production, token, gvisor."""

    deployment_mode: DeploymentMode = DeploymentMode.PRODUCTION
    auth_mode: AuthMode = AuthMode.TOKEN
    sandbox: SandboxMechanism = SandboxMechanism.GVISOR
    limits: LimitSettings = LimitSettings()
    seccomp: SeccompSettings = SeccompSettings()
    gvisor: GvisorSettings = GvisorSettings()
    images: ImageSettings = ImageSettings()
    reserve: ReserveSettings = ReserveSettings()
    service: ServiceSettings = ServiceSettings()
    leases: LeaseSettings = LeaseSettings()
    process_environment: ProcessEnvironmentSettings = ProcessEnvironmentSettings()
    egress: EgressSettings = EgressSettings()
    allow_software_emulation: bool = False
    # What the operator accepts to run without in production; each is told at every start.
    accept_missing_layers: tuple[HostLayer, ...] = ()
    state_directory: Annotated[str, Meta(pattern=r"^/[^\x00]+\Z")] = "/var/lib/sbxd"
    runtime_directory: Annotated[str, Meta(pattern=r"^/[^\x00]+\Z")] = "/run/sbxd"
    launcher_socket: Annotated[str, Meta(pattern=r"^/[^\x00]+\Z")] = (
        "/run/sbxd-launcher/launcher.sock"
    )
    journal_socket: Annotated[str, Meta(pattern=r"^/[^\x00]{1,106}\Z")] = (
        "/run/systemd/journal/socket"
    )


# The kernel's name of this boot, for the audit's sequence.
BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
SMALLEST_WORKSPACE_BYTES = 16 * MIB
