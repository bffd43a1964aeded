"""What the worker's side exports of artifacts, as OpenMetrics text. Pure.

Invariant: the number of series is bounded; beyond it tenants are summed as `_others` (no tenant
id begins so).
"""

from collections.abc import Sequence

from sbxd.artifacts.records import Usage
from sbxd.port.ids import TenantId

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TENANTS_MAX = 1000
OTHERS = TenantId("_others")


def render(listed: Sequence[Usage], rest: Usage) -> str:
    """The exposition of `MetadataStore.usages`.

    Of a tenant of which nothing was removed yet there is no share by retention.
    """
    usages = [*listed]
    if rest.stored_bytes or rest.removed_by_request_bytes or rest.removed_by_retention_bytes:
        usages.append(rest)
    lines = [
        "# TYPE sbxd_artifact_stored_bytes gauge",
        "# UNIT sbxd_artifact_stored_bytes bytes",
        "# HELP sbxd_artifact_stored_bytes Bytes that a tenant's artifacts take until swept.",
    ]
    lines += [_sample("stored_bytes", u, u.stored_bytes) for u in usages]
    lines += [
        "# TYPE sbxd_artifact_stored gauge",
        "# HELP sbxd_artifact_stored Artifacts of a tenant until swept.",
    ]
    lines += [_sample("stored", u, u.stored_count) for u in usages]
    lines += [
        "# TYPE sbxd_artifact_removed_bytes counter",
        "# UNIT sbxd_artifact_removed_bytes bytes",
        "# HELP sbxd_artifact_removed_bytes Bytes removed, by retention or by request.",
    ]
    for u in usages:
        retention, request = u.removed_by_retention_bytes, u.removed_by_request_bytes
        lines.append(_sample("removed_bytes_total", u, retention, ',by="retention"'))
        lines.append(_sample("removed_bytes_total", u, request, ',by="request"'))
    lines += [
        "# TYPE sbxd_artifact_removed_by_retention_ratio gauge",
        "# UNIT sbxd_artifact_removed_by_retention_ratio ratio",
        "# HELP sbxd_artifact_removed_by_retention_ratio Share of the removed bytes that"
        " retention removed.",
    ]
    for u in usages:
        removed = u.removed_by_retention_bytes + u.removed_by_request_bytes
        if removed:
            share = u.removed_by_retention_bytes / removed
            lines.append(_sample("removed_by_retention_ratio", u, round(share, 6)))
    return "\n".join([*lines, "# EOF", ""])


def _sample(name: str, usage: Usage, value: float, labels: str = "") -> str:
    # A tenant id has no character that a label must escape (its grammar says so).
    tenant = OTHERS if usage.tenant_id == "*" else usage.tenant_id
    return f'sbxd_artifact_{name}{{tenant="{tenant}"{labels}}} {value}'
