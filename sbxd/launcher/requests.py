"""What the daemon may ask of the launcher, and what is answered.

One SOCK_SEQPACKET message is the msgpack of one struct; descriptors travel beside it in the order
that the reply's `descriptors` names. The legality table (which verb in which state of the
environment) is `LEGAL` in this module's neighbour `sbxd.launcher.legality`. The launcher trusts
no field: it validates each again and derives every path, unit name and uid itself.

Requests may be outstanding concurrently; replies carry the `ticket` of their request and arrive
in any order. End of file on the channel ends all environments (SERVICE_SHUTDOWN).
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from sbxd.port.environment import ImageDigestField
from sbxd.port.ids import EnvironmentIdField
from sbxd.port.limits import IoCeilings
from sbxd.port.network import NetworkShape

MESSAGE_BYTES_MAX = 64 * 1024
DESCRIPTORS_MAX = 32
# The kernel's largest weight, and what every scope begins with.
CPU_WEIGHT_MAX = 10_000
WEIGHTS_MAX = 512

# The workload's shipped profile; any other name is that of an operator's own.
SHIPPED_PROFILE = "workload"
ProfileField = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}\Z")]
Sha256Field = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
TicketField = Annotated[int, Meta(ge=1, le=2**53)]


class Kernel(StrEnum):
    """Whose kernel the commands of an environment run on."""

    HOST = "host"  # the mechanism namespaces
    SENTRY = "sentry"  # gVisor's


class LauncherMessage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    ticket: TicketField


class VolumeSize(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    workspace_bytes: Annotated[int, Meta(ge=1024 * 1024, le=2**50)]
    inodes_max: Annotated[int, Meta(ge=16, le=2**32)]


class CgroupLimits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    cpu_millicores: Annotated[int, Meta(ge=10, le=1_024_000)]
    memory_bytes: Annotated[int, Meta(ge=8 * 1024 * 1024, le=2**50)]
    pids_max: Annotated[int, Meta(ge=1, le=4_194_304)]


class Prepare(LauncherMessage, frozen=True, tag="prepare", kw_only=True):
    """Build one slot: scope, box, volume, namespaces, init and steward. No tenant in it.

    kernel: SENTRY boots a gVisor sandbox in leaf 1, and init is process 1 within it (init_pidfd is
    that of the Sentry). runsc_sha256: refuse another runsc than this one.

    back_stop_seconds becomes RuntimeMaxSec of the scope. limits are the box's and the first
    leaf's until Assign says otherwise, within ceilings, which are the scope's for good (limits,
    when absent); io is the box's for good. seccomp_profile names what binds
    the commands; each that the launcher has is at least as strong as the shipped one. Answered by
    Prepared with descriptors `PREPARED_DESCRIPTORS`, followed by those of leaf 1
    (`LEAF_DESCRIPTORS`), followed, when network is PROXY_PORT, by `PROXY_DESCRIPTORS`, and when
    kernel is SENTRY, by `SENTRY_DESCRIPTORS`.
    """

    environment_id: EnvironmentIdField
    image_digest: ImageDigestField
    volume: VolumeSize
    limits: CgroupLimits
    back_stop_seconds: Annotated[int, Meta(ge=1, le=31_536_000)]
    seccomp_profile: ProfileField = SHIPPED_PROFILE
    kernel: Kernel = Kernel.HOST
    runsc_sha256: Sha256Field | None = None
    network: NetworkShape = NetworkShape.NONE
    io: IoCeilings = IoCeilings()
    ceilings: CgroupLimits | None = None

    @property
    def most(self) -> CgroupLimits:
        """What the environment can be handed out with at most."""
        return self.ceilings or self.limits


VOLUME_QUOTA = "quota"  # Prepared.volume_kind of a volume whose size can still be lowered

PREPARED_DESCRIPTORS = (
    "init_channel",  # SOCK_SEQPACKET, sbxd.jail.frames
    "steward_channel",  # SOCK_STREAM, sbxd.steward.frames
    "init_pidfd",
    "steward_pidfd",
    "box_kill",  # write "1": everything in the environment dies
    "box_events",  # cgroup.events: populated
    "box_memory_current",  # empty file (/dev/null) where the controller is missing
    "volume",  # O_PATH, for fstat and fstatvfs; nothing of the workspace is reached through it
    "bridge",  # SOCK_STREAM, bound in the environment's /dev; nobody listens yet
)
LEAF_DESCRIPTORS = (
    "leaf_directory",  # O_DIRECTORY of exec-<n>, for CLONE_INTO_CGROUP by init
    "leaf_kill",
    "leaf_events",
    "leaf_memory_events",  # /dev/null where the controller is missing
    "leaf_memory_peak",
    "leaf_pids_events",
    "leaf_pids_peak",
    "leaf_cpu_stat",
    "leaf_io_stat",
)
PROXY_DESCRIPTORS = (
    "proxy_listener",  # TCP, bound to the proxy's port of the sandbox's loopback, not listening
)
SENTRY_DESCRIPTORS = (
    "forks",  # SOCK_SEQPACKET: what the Sentry tells of forks that are over
)


class Step(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long one step of a preparation took."""

    name: str
    duration_us: int


class Prepared(LauncherMessage, frozen=True, tag="prepared", kw_only=True):
    environment_id: EnvironmentIdField
    scope: str
    volume_kind: str
    workspace: tuple[int, int]  # the device and the inode of the workspace's root
    unenforced: tuple[str, ...]  # what this host cannot enforce: "memory", "pids", "cpu", "io"
    steps: tuple[Step, ...]


class Leaf(LauncherMessage, frozen=True, tag="leaf", kw_only=True):
    """Make the leaf of command `number` with these limits. Answered by LeafMade."""

    environment_id: EnvironmentIdField
    number: Annotated[int, Meta(ge=1, le=1_000_000)]
    limits: CgroupLimits


class LeafMade(LauncherMessage, frozen=True, tag="leaf_made", kw_only=True):
    environment_id: EnvironmentIdField
    number: int


class Boot(LauncherMessage, frozen=True, tag="boot", kw_only=True):
    """Make leaf `number` and boot a fresh Sentry in it, on the same volume. Of an environment that
    was prepared with one. Answered by Booted with `BOOTED_DESCRIPTORS`, those of the leaf and
    `SENTRY_DESCRIPTORS`."""

    environment_id: EnvironmentIdField
    number: Annotated[int, Meta(ge=2, le=1_000_000)]
    limits: CgroupLimits


BOOTED_DESCRIPTORS = ("init_channel", "init_pidfd")


class Booted(LauncherMessage, frozen=True, tag="booted", kw_only=True):
    environment_id: EnvironmentIdField
    number: int


class DropLeaf(LauncherMessage, frozen=True, tag="drop_leaf", kw_only=True):
    """Remove an empty leaf. Answered by Acknowledged; a gone leaf is no error."""

    environment_id: EnvironmentIdField
    number: Annotated[int, Meta(ge=1, le=1_000_000)]


class Assign(LauncherMessage, frozen=True, tag="assign", kw_only=True):
    """Set the box's and leaf 1's limits, and the volume's where it is a quota. Once per slot."""

    environment_id: EnvironmentIdField
    limits: CgroupLimits
    volume: VolumeSize


class Weight(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The share of a busy host that one environment has, against the others."""

    environment_id: EnvironmentIdField
    cpu_weight: Annotated[int, Meta(ge=1, le=CPU_WEIGHT_MAX)]


class Share(LauncherMessage, frozen=True, tag="share", kw_only=True):
    """Have PID 1 set these weights. Answered by Acknowledged; environments that are not assigned
    (any more) are left out."""

    weights: Annotated[tuple[Weight, ...], Meta(max_length=WEIGHTS_MAX)]


# The steps of a Failed that answers Prepare when a layer did not take: what was seen from outside,
# with EPERM; and the steps of the process that was confined like a command.
VERIFY = "verify"
CANARY_STEPS = "canary."


# The step of a Failed that answers Destroy, with ETIMEDOUT, when processes outlived the kill.
STOP_PROOF = "stop_proof"


class Destroy(LauncherMessage, frozen=True, tag="destroy", kw_only=True):
    """Kill, prove empty, detach the volume, release the uid block. Idempotent. What the volume
    holds is erased later, unless it is little.

    party: whom it is erased for. Parties take turns, whatever each has left to erase.
    """

    environment_id: EnvironmentIdField
    party: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0


class Erasing(LauncherMessage, frozen=True, tag="erasing", kw_only=True):
    """What is detached and not erased yet. Erasing begins again where it has stopped."""


class ErasingIs(LauncherMessage, frozen=True, tag="erasing_is", kw_only=True):
    volumes: int
    bytes_used: int


class ImageUnpack(LauncherMessage, frozen=True, tag="image_unpack", kw_only=True):
    """Unpack the layer blobs of an image of the store and mount it read-only. Idempotent.

    The launcher verifies the digest of every blob that it reads.
    """

    image_digest: ImageDigestField


class ImageDrop(LauncherMessage, frozen=True, tag="image_drop", kw_only=True):
    """Unmount and remove an unpacked image that no environment uses."""

    image_digest: ImageDigestField


class Inventory(LauncherMessage, frozen=True, tag="inventory", kw_only=True):
    """What the kernel and systemd hold that is ours, by environment id."""


class InventoryItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    environment_id: str
    kinds: tuple[str, ...]  # of: scope, cgroup, volume, mount, uid_block, process


class InventoryIs(LauncherMessage, frozen=True, tag="inventory_is", kw_only=True):
    boot_id: str
    items: tuple[InventoryItem, ...]


class Probe(LauncherMessage, frozen=True, tag="probe", kw_only=True):
    """What this host can enforce."""


RUNSC_ITEM = "runsc"  # the item about gVisor's program; it concerns one mechanism alone


class ProbeItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    state: Annotated[str, Meta(pattern=r"^(ok|degraded|missing|not_checked)\Z")]
    detail: str
    fix: str = ""


class Probed(LauncherMessage, frozen=True, tag="probed", kw_only=True):
    items: tuple[ProbeItem, ...]


class Acknowledged(LauncherMessage, frozen=True, tag="acknowledged", kw_only=True):
    pass


class Failed(LauncherMessage, frozen=True, tag="failed", kw_only=True):
    """The verb failed at `step` with `errno` (0 when it was no system call). Never a path.

    After a failed Prepare nothing is left. After a failed Destroy the environment is to be
    quarantined unless `retriable`.
    """

    step: str
    errno: int
    detail: str
    retriable: bool = False


class Died(LauncherMessage, frozen=True, tag="died", kw_only=True):
    """Unasked (ticket is that of the Prepare): init or the steward of an environment ended."""

    environment_id: EnvironmentIdField
    process: str  # "init" or "steward"
    wait_status: int


LauncherRequest = (
    Prepare
    | Leaf
    | Boot
    | DropLeaf
    | Assign
    | Share
    | Destroy
    | Erasing
    | ImageUnpack
    | ImageDrop
    | Inventory
    | Probe
)
LauncherReply = (
    Prepared | LeafMade | Booted | Acknowledged | Failed | ErasingIs | InventoryIs | Probed | Died
)
