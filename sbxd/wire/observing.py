"""What an operator sees of a daemon that runs: metrics, its state on one page, and each
environment's use of the host. Admin socket only; nothing here changes anything.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.wire.base import Message, Request, RequestIdField
from sbxd.wire.descriptions import PostureItem

PROGRAM_BYTES_MAX = 256


class MetricsForm(StrEnum):
    """OPENMETRICS: version 1.0. PROMETHEUS: text format 0.0.4, for a textfile of node_exporter.
    JSON: an array of families."""

    OPENMETRICS = "openmetrics"
    PROMETHEUS = "prometheus"
    JSON = "json"


class MetricsQuery(Request, frozen=True, tag="metrics", kw_only=True):
    """Every metric of the daemon, now."""

    form: MetricsForm = MetricsForm.OPENMETRICS


class MetricsAre(Message, frozen=True, tag="metrics_are", kw_only=True):
    """text: the whole exposition; the number of its series is bounded."""

    request_id: RequestIdField
    form: MetricsForm
    text: str


class StatusQuery(Request, frozen=True, tag="status", kw_only=True):
    """The daemon on one page."""


class MetersQuery(Request, frozen=True, tag="meters", kw_only=True):
    """What each live environment uses, oldest first. skip: how many of them an earlier page has
    shown."""

    skip: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class EnvironmentMeter(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One environment now. cpu_ms: of all its commands, the running one included. memory_bytes:
    of all its processes. Both are None where the host does not count them. denials: of requests,
    connections and bridges. program: of the command that runs, at most PROGRAM_BYTES_MAX of it."""

    environment_id: EnvironmentId
    tenant_id: TenantId
    run_id: RunId
    state: str
    age_ms: int
    commands_run: int
    cpu_ms: int | None
    cpu_millicores: int
    memory_bytes: int | None
    memory_max_bytes: int
    denials: int
    program: bytes | None


class PoolInfo(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The slots that are prepared ahead. target: how many there are to be. ages_ms: of those that
    are ready, oldest first. memory_bytes: what those hold now, null when it is not counted. hits,
    misses: hand-outs of a prepared slot and others, since the daemon started; recent_: within the
    last minutes."""

    ready: int
    building: int
    target: int
    ages_ms: tuple[int, ...]
    memory_bytes: int | None
    hits: int
    misses: int
    recent_hits: int
    recent_misses: int


class MetersAre(Message, frozen=True, tag="meters_are", kw_only=True):
    """clock_ms: of the daemon's steady clock, so that two replies give a rate. more: the page is
    full and MetersQuery with a larger `skip` shows the rest."""

    request_id: RequestIdField
    environments: tuple[EnvironmentMeter, ...]
    pool: PoolInfo
    clock_ms: int
    more: bool = False


class Severity(StrEnum):
    """PAGE: somebody should look now. WARNING: today."""

    PAGE = "page"
    WARNING = "warning"


class AlertInfo(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is wrong now. name: of the alert rule that speaks of the same. fix: what to do."""

    name: str
    severity: Severity
    detail: str
    fix: str


class DenialInfo(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many denials of one kind one tenant had within the last minutes."""

    tenant: str
    violation: str
    count: int


class AuthorityInfo(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A lease authority of the configuration. missed: passes without its answer since the start;
    recently_missed: within the last minutes."""

    name: str
    missed: int
    recently_missed: int


class StatusIs(Message, frozen=True, tag="status_is", kw_only=True):
    """states: how many environments are in each. waiting: requests that wait for a place.
    provision_p50_ms, provision_p99_ms: upper bounds since the start, None before the first.
    erasing_volumes, erasing_bytes: workspaces of environments proven dead that are not erased yet,
    and the disk that they use.
    lag_worst_ms: of the event loop within the last minute. recorded, unrecorded: events of the
    audit since the start; waiting_records: those that the journal has not taken yet.
    journal_refusals: records that the creation journal did not take, since the start.
    store_free_bytes, store_size_bytes: of the file system of images and workspaces; None where it
    cannot be read. recent_seconds: what "the last minutes" are. deviations: what this host cannot
    enforce. alerts: most severe first. quarantined_truncated, denials_truncated: there are more."""

    request_id: RequestIdField
    version: str
    mechanism: str
    deployment_mode: str
    auth_mode: str
    uptime_ms: int
    states: dict[str, int]
    environments_max: int
    waiting: int
    pool: PoolInfo
    provision_p50_ms: int | None
    provision_p99_ms: int | None
    quarantined: tuple[str, ...]
    erasing_volumes: int
    erasing_bytes: int
    authorities: tuple[AuthorityInfo, ...]
    denials: tuple[DenialInfo, ...]
    recent_seconds: int
    tunnels: int
    lag_worst_ms: int
    recorded: int
    unrecorded: int
    waiting_records: int
    journal_refusals: int
    store_free_bytes: int | None
    store_size_bytes: int | None
    deviations: tuple[PostureItem, ...]
    alerts: tuple[AlertInfo, ...]
    quarantined_truncated: bool = False
    denials_truncated: bool = False


ObservingRequest = MetricsQuery | StatusQuery | MetersQuery
ObservingReply = MetricsAre | StatusIs | MetersAre
