"""Every decision of the daemon, as one frozen struct in the past tense.

Invariants: an event holds identifiers, enums, numbers and digests; never output of a command,
never stdin, never a value of a process environment, never an argument beyond the program's name.
MESSAGE_ID is a constant of the type and never reused. What a decision looks like in the journal
is `sbxd.audit.encode`; who delivers it is `sbxd.audit.sink`. Whoever decided emits the event.

A field becomes `SBX_` and its upper-case name; a nested struct is flattened with the field's name
as prefix; a tuple becomes one journal field per element; None is left out.
"""

from datetime import datetime
from enum import IntEnum, StrEnum
from typing import ClassVar

from msgspec import Struct

from sbxd.policy.budgets import Budget
from sbxd.policy.timeouts import TimeoutBound
from sbxd.policy.violations import ViolationCode
from sbxd.port.command import Evidence, KillReason, Usage
from sbxd.port.egress import EgressMode
from sbxd.port.errors import EscapeCode, RejectedCode, UnavailableCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.limits import ResourceLimits


class Priority(IntEnum):
    """syslog's priorities, those that are used."""

    ALERT = 1
    ERROR = 3
    WARNING = 4
    NOTICE = 5
    INFO = 6


class Door(StrEnum):
    """The socket that a peer came through."""

    WORKER = "worker"
    ADMIN = "admin"


class PeerRefusal(StrEnum):
    UID_NOT_CONFIGURED = "UID_NOT_CONFIGURED"
    CREDENTIAL_MISSING = "CREDENTIAL_MISSING"
    CREDENTIAL_WRONG = "CREDENTIAL_WRONG"
    VERSION_UNSUPPORTED = "VERSION_UNSUPPORTED"
    HELLO_TOO_LATE = "HELLO_TOO_LATE"
    TOO_MANY_CONNECTIONS = "TOO_MANY_CONNECTIONS"
    CONNECTING_TOO_FAST = "CONNECTING_TOO_FAST"
    PROTOCOL_VIOLATED = "PROTOCOL_VIOLATED"


class SlotOrigin(StrEnum):
    """Where the environment's slot came from."""

    RESERVE = "RESERVE"
    COLD = "COLD"


class DestroyReason(StrEnum):
    REQUESTED = "REQUESTED"
    EXPIRED = "EXPIRED"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    SUPERSEDED = "SUPERSEDED"
    STALE_LEASE = "STALE_LEASE"
    PEER_GONE = "PEER_GONE"
    PROVISION_CANCELLED = "PROVISION_CANCELLED"
    PROVISION_FAILED = "PROVISION_FAILED"
    ENVIRONMENT_LOST = "ENVIRONMENT_LOST"
    ESCAPE_SUSPECTED = "ESCAPE_SUSPECTED"
    ORPHANED = "ORPHANED"
    SERVICE_SHUTDOWN = "SERVICE_SHUTDOWN"


class StopReason(StrEnum):
    SIGNALLED = "SIGNALLED"
    LAUNCHER_LOST = "LAUNCHER_LOST"
    FAILED = "FAILED"


class AuditEvent(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Base of all events.

    MESSAGE_ID: 32 hex digits, the type's own for ever. PRIORITY: of every event of the type.
    SUMMARY: the text of MESSAGE; `{field}` is replaced by the escaped value, "-" for None.
    """

    MESSAGE_ID: ClassVar[str] = ""
    PRIORITY: ClassVar[Priority] = Priority.INFO
    SUMMARY: ClassVar[str] = ""


class RequestEvent(AuditEvent, frozen=True, kw_only=True):
    """Base of how a request was answered. The ids are the peer's words."""

    verb: str
    peer_uid: int
    environment_id: EnvironmentId | None = None
    tenant_id: TenantId | None = None
    run_id: RunId | None = None


class EnvironmentEvent(AuditEvent, frozen=True, kw_only=True):
    """Base of what happened to one environment that a tenant has."""

    environment_id: EnvironmentId
    tenant_id: TenantId
    run_id: RunId
    lease_epoch: int


# --- the service ------------------------------------------------------------------------------


class ServiceStarted(AuditEvent, frozen=True, kw_only=True):
    """The daemon is ready. posture: one "name=state" per thing that this host can or cannot
    enforce."""

    MESSAGE_ID: ClassVar[str] = "8c60e168da244821896fe386b8e25f44"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = (
        "Service started: mechanism {mechanism}, deployment_mode {deployment_mode}, "
        "auth_mode {auth_mode}, version {version}"
    )

    version: str
    mechanism: str
    deployment_mode: str
    auth_mode: str
    boot_id: str
    posture: tuple[str, ...] = ()


class ServiceStopped(AuditEvent, frozen=True, kw_only=True):
    """The daemon ended every environment and stops."""

    MESSAGE_ID: ClassVar[str] = "4297f9a5ea6c40cdbbc553db819fc343"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Service stopped ({reason}): {environments_ended} environments ended"

    reason: StopReason
    environments_ended: int


class StartupRefused(AuditEvent, frozen=True, kw_only=True):
    """The daemon does not start with this configuration. settings: "key=value" of each refusal."""

    MESSAGE_ID: ClassVar[str] = "ab37f5de9a2547b19a9d192a4d5def0c"
    PRIORITY: ClassVar[Priority] = Priority.ERROR
    SUMMARY: ClassVar[str] = "Startup refused: {settings}"

    settings: tuple[str, ...]


class LimitUnenforced(AuditEvent, frozen=True, kw_only=True):
    """A limit goes unenforced on this host, because its operator allows that."""

    MESSAGE_ID: ClassVar[str] = "e6bad57236d64afb9dc090d5be3483e7"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = "Limit {limit} is not enforced on this host"

    limit: str


# --- peers and requests -----------------------------------------------------------------------


class PeerRefused(AuditEvent, frozen=True, kw_only=True):
    """A connection was closed before, or because of, what it sent."""

    MESSAGE_ID: ClassVar[str] = "53b96a066f21478d946e0dfec9a599b2"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = "Peer refused on the {door} socket: {reason} (uid {peer_uid})"

    door: Door
    reason: PeerRefusal
    peer_uid: int
    peer_gid: int
    peer_pid: int


class RequestRejected(RequestEvent, frozen=True, kw_only=True):
    """A request was wrong and was refused. detail: what the peer was told."""

    MESSAGE_ID: ClassVar[str] = "a1ed9b83d2fa4ea39fbf3a64fc549e5c"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Request {verb} rejected with {code}, field {field}"

    code: RejectedCode
    violation: ViolationCode
    detail: str
    field: str | None = None


class PathDenied(RequestEvent, frozen=True, kw_only=True):
    """A path led out of the workspace, or broke the rules for one. The path is not kept."""

    MESSAGE_ID: ClassVar[str] = "704cba6a2f3f40e9a6309bdbd5c0b064"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Request {verb} denied: {violation}"

    violation: ViolationCode = ViolationCode.PATH_TRAVERSAL


class RequestUnserved(RequestEvent, frozen=True, kw_only=True):
    """A request was right and could not be served now."""

    MESSAGE_ID: ClassVar[str] = "ca1775f37f0f4ed38fe1efdd9936944b"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = "Request {verb} could not be served: {code}"

    code: UnavailableCode
    detail: str


# --- environments -----------------------------------------------------------------------------


class EnvironmentProvisioned(EnvironmentEvent, frozen=True, kw_only=True):
    """An environment was handed to a run. duration_ms: from the request to the hand-out."""

    MESSAGE_ID: ClassVar[str] = "cc176e4745564cdda4cdb4e0422b1655"
    SUMMARY: ClassVar[str] = (
        "Environment {environment_id} provisioned for run {run_id} of tenant {tenant_id} "
        "({mechanism}, {origin})"
    )

    mechanism: str
    image_digest: str
    limits: ResourceLimits
    egress_mode: EgressMode
    egress_destinations: tuple[str, ...]
    origin: SlotOrigin
    duration_ms: int
    expires_at: datetime
    owner_uid: int
    unenforced_limits: tuple[str, ...] = ()


class EnvironmentDestroyed(EnvironmentEvent, frozen=True, kw_only=True):
    """Every process is proven gone, and nobody reaches the workspace any more, which is erased
    now or later.

    lifetime_ms: since the hand-out. executing_ms: the part of it spent in commands. destroying_ms:
    from its end to that proof. operations and bytes: charged to its budgets, and metered."""

    MESSAGE_ID: ClassVar[str] = "59fbab65a7df4627a9f7e347ef5d60c3"
    SUMMARY: ClassVar[str] = "Environment {environment_id} destroyed: {reason}"

    reason: DestroyReason
    commands_run: int
    lifetime_ms: int
    executing_ms: int
    destroying_ms: int = 0
    operations: int = 0
    returned_bytes: int = 0
    written_bytes: int = 0


class EnvironmentExpired(EnvironmentEvent, frozen=True, kw_only=True):
    """An environment reached its expires_at and is being ended."""

    MESSAGE_ID: ClassVar[str] = "dc9618a7b906474b9ec526be10607514"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Environment {environment_id} reached its expiry {expires_at}"

    expires_at: datetime


class BudgetWasExhausted(EnvironmentEvent, frozen=True, kw_only=True):
    """An environment overran one of its budgets and is being ended."""

    MESSAGE_ID: ClassVar[str] = "1558227b3437473e815f2c7bc257cefa"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Environment {environment_id} exhausted {budget}"

    budget: Budget


class EnvironmentDestroyFailed(AuditEvent, frozen=True, kw_only=True):
    """An attempt to destroy failed and will be repeated. step names the site, never a path."""

    MESSAGE_ID: ClassVar[str] = "7d8c4955154d4f6bb1f211d22cd72abe"
    PRIORITY: ClassVar[Priority] = Priority.ERROR
    SUMMARY: ClassVar[str] = (
        "Destroying environment {environment_id} failed at {step} (errno {errno}), "
        "attempt {attempt}"
    )

    environment_id: EnvironmentId
    step: str
    errno: int
    attempt: int


class EnvironmentQuarantined(AuditEvent, frozen=True, kw_only=True):
    """What is left of an environment could not be proven stopped and is kept for an operator."""

    MESSAGE_ID: ClassVar[str] = "84421395e47e42b4a565d90b0f26b864"
    PRIORITY: ClassVar[Priority] = Priority.ALERT
    SUMMARY: ClassVar[str] = (
        "Environment {environment_id} quarantined at {step} (errno {errno}): {kinds} remain"
    )

    environment_id: EnvironmentId
    step: str
    errno: int
    kinds: tuple[str, ...] = ()


class OrphanDestroyed(AuditEvent, frozen=True, kw_only=True):
    """The kernel held something of ours that no environment of this daemon owns; it is gone."""

    MESSAGE_ID: ClassVar[str] = "5a015b18e54a4fc99dce144a076403de"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = "Orphan {environment_id} destroyed: {kinds}"

    environment_id: EnvironmentId
    kinds: tuple[str, ...]


class SlotPreparationFailed(AuditEvent, frozen=True, kw_only=True):
    """A slot could not be built; nothing of it is left."""

    MESSAGE_ID: ClassVar[str] = "40c65051578c4ce1b16ac5a73a2efdd5"
    PRIORITY: ClassVar[Priority] = Priority.ERROR
    SUMMARY: ClassVar[str] = "Preparing slot {environment_id} failed at {step} (errno {errno})"

    environment_id: EnvironmentId
    step: str
    errno: int


class SandboxEscapeWasSuspected(EnvironmentEvent, frozen=True, kw_only=True):
    """An invariant of the isolation was violated; the environment is destroyed."""

    MESSAGE_ID: ClassVar[str] = "19b7b96f7f33415ca6fa486baefa3172"
    PRIORITY: ClassVar[Priority] = Priority.ALERT
    SUMMARY: ClassVar[str] = "Sandbox escape suspected in environment {environment_id}: {code}"

    code: EscapeCode
    detail: str


# --- commands ---------------------------------------------------------------------------------


class CommandStarted(EnvironmentEvent, frozen=True, kw_only=True):
    """A command's program was started. See `sbxd.audit.argv` for program and argv."""

    MESSAGE_ID: ClassVar[str] = "0d519a12c7b04974982f4e33d86ae6aa"
    SUMMARY: ClassVar[str] = (
        "Command {command_number} of environment {environment_id} started: {program}"
    )

    command_number: int
    program: str
    program_bytes: int
    argv_count: int
    argv_sha256: str
    stdin_bytes: int
    network_enabled: bool
    effective_timeout_ms: int
    timeout_bound: TimeoutBound


class CommandFinished(EnvironmentEvent, frozen=True, kw_only=True):
    """A command's whole process tree is gone. Output is counted and digested, never kept.

    exit_code is None exactly when killed_by is set. stdout_sha256 and stderr_sha256 are of the
    captured bytes.
    """

    MESSAGE_ID: ClassVar[str] = "390600c00ff94365a8c5d750c797688e"
    SUMMARY: ClassVar[str] = (
        "Command {command_number} of environment {environment_id} finished: "
        "exit_code {exit_code}, killed_by {killed_by}, {duration_ms} ms"
    )

    command_number: int
    exit_code: int | None
    signal: int | None
    killed_by: KillReason | None
    duration_ms: int
    stdout_bytes: int
    stdout_sha256: str
    stdout_truncated: bool
    stderr_bytes: int
    stderr_sha256: str
    stderr_truncated: bool
    files_changed: int
    files_changed_truncated: bool
    evidence: Evidence = Evidence()
    usage: Usage = Usage()
    unenforced_limits: tuple[str, ...] = ()


class CommandUnfinished(EnvironmentEvent, frozen=True, kw_only=True):
    """A command was started and its end could not be observed (the environment was lost)."""

    MESSAGE_ID: ClassVar[str] = "ee7cc865be4e49eb95c2a0d829051550"
    PRIORITY: ClassVar[Priority] = Priority.ERROR
    SUMMARY: ClassVar[str] = (
        "Command {command_number} of environment {environment_id} has no known end: {code}"
    )

    command_number: int
    code: UnavailableCode


# --- images -----------------------------------------------------------------------------------


class ImageImported(AuditEvent, frozen=True, kw_only=True):
    """An image is in the store, every blob verified."""

    MESSAGE_ID: ClassVar[str] = "02ab23d9b0ff498ba149a8d8d78da142"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Image {image_digest} imported ({size_bytes} bytes)"

    image_digest: str
    size_bytes: int
    label: str
    peer_uid: int


class ImageRemoved(AuditEvent, frozen=True, kw_only=True):
    MESSAGE_ID: ClassVar[str] = "2eb04a41222e4b3c8e87992a39c1f8fd"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Image {image_digest} removed"

    image_digest: str
    peer_uid: int


class ImageAliasResolved(AuditEvent, frozen=True, kw_only=True):
    """At start: the digest that an alias of the configuration stands for was verified."""

    MESSAGE_ID: ClassVar[str] = "04b0f7d3ec4947abbb027f20b95c38e3"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Image alias {alias} is {image_digest}"

    alias: str
    image_digest: str


class ImageAliasUnresolved(AuditEvent, frozen=True, kw_only=True):
    """At start: the store holds no verified image of the digest that an alias stands for."""

    MESSAGE_ID: ClassVar[str] = "6a7a29a4714c4bb68f182d61280d9804"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = "Image alias {alias} names {image_digest}, which is not in the store"

    alias: str
    image_digest: str


EVENT_TYPES: tuple[type[AuditEvent], ...] = (
    ServiceStarted,
    ServiceStopped,
    StartupRefused,
    LimitUnenforced,
    PeerRefused,
    RequestRejected,
    PathDenied,
    RequestUnserved,
    EnvironmentProvisioned,
    EnvironmentDestroyed,
    EnvironmentExpired,
    BudgetWasExhausted,
    EnvironmentDestroyFailed,
    EnvironmentQuarantined,
    OrphanDestroyed,
    SlotPreparationFailed,
    SandboxEscapeWasSuspected,
    CommandStarted,
    CommandFinished,
    CommandUnfinished,
    ImageImported,
    ImageRemoved,
    ImageAliasResolved,
    ImageAliasUnresolved,
)
