"""Whether an environment may be built: the specification against the operator's configuration.

Invariants: pure and complete before anything is touched; a refusal carries the field, the value
and the ceiling; nothing is lowered, dropped or substituted to make a specification fit.
"""

from collections.abc import Container

from sbxd.policy.bridge import admit_bridge
from sbxd.policy.budgets import admit_budgets
from sbxd.policy.child_environment import check_specification
from sbxd.policy.destinations import (
    DestinationInvalid,
    canonical_destination,
    configured_destinations,
    uncovered_ports,
)
from sbxd.port.egress import EgressPolicy
from sbxd.port.environment import EnvironmentSpec
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.port.limits import ResourceLimits
from sbxd.settings import SMALLEST_WORKSPACE_BYTES, Settings

# Every field of ResourceLimits is held against its ceiling; a new field is from its first day.
LIMIT_FIELDS = ResourceLimits.__struct_fields__


def admit(
    specification: EnvironmentSpec, settings: Settings, known_digests: Container[str]
) -> None:
    """Accept a specification or say why not.

    Args:
        settings: the configuration, which has passed the startup checks.
        known_digests: the manifest digests of the image store.

    Raises:
        ExecutionRejected: UNKNOWN_IMAGE, LIMIT_ABOVE_CEILING, LIMIT_NOT_ENFORCEABLE (a volume
            below the smallest that can be made), DESTINATION_NOT_CONFIGURED,
            BRIDGE_REFUSED or ENVIRONMENT_NAME_REFUSED, with `field`.
    """
    if specification.image_digest not in known_digests:
        raise ExecutionRejected(
            RejectedCode.UNKNOWN_IMAGE,
            f"image_digest: {specification.image_digest} is not in the image store: import it "
            "with `sbxctl image import`, or see `sbxctl image ls`",
            field="image_digest",
        )
    admit_limits(specification.limits, settings.limits.ceilings)
    admit_memory(specification.limits, settings.limits.memory_committed_max_bytes)
    admit_budgets(specification.budgets, settings.limits.budgets)
    admit_egress(specification.egress, settings.egress)
    admit_bridge(specification.bridge)
    check_specification(specification.environment, settings.process_environment.operator_names)


def admit_limits(limits: ResourceLimits, ceilings: ResourceLimits) -> None:
    """Hold each limit against its ceiling.

    Raises:
        ExecutionRejected: LIMIT_ABOVE_CEILING or LIMIT_NOT_ENFORCEABLE, `field` "limits.<name>".
    """
    for name in LIMIT_FIELDS:
        value, ceiling = getattr(limits, name), getattr(ceilings, name)
        if value > ceiling:
            raise ExecutionRejected(
                RejectedCode.LIMIT_ABOVE_CEILING,
                f"limits.{name}: {value} is above the ceiling of {ceiling}: ask for less, or "
                f"have the operator raise limits.ceilings.{name}",
                field=f"limits.{name}",
            )
    if limits.workspace_bytes < SMALLEST_WORKSPACE_BYTES:
        raise ExecutionRejected(
            RejectedCode.LIMIT_NOT_ENFORCEABLE,
            f"limits.workspace_bytes: {limits.workspace_bytes} is below the smallest volume, "
            f"{SMALLEST_WORKSPACE_BYTES} bytes",
            field="limits.workspace_bytes",
        )


def admit_memory(limits: ResourceLimits, committed_max_bytes: int | None) -> None:
    """One that asks for more than all may have together would wait for ever.

    Raises:
        ExecutionRejected: LIMIT_ABOVE_CEILING, `field` "limits.memory_bytes".
    """
    if committed_max_bytes is not None and limits.memory_bytes > committed_max_bytes:
        raise ExecutionRejected(
            RejectedCode.LIMIT_ABOVE_CEILING,
            f"limits.memory_bytes: {limits.memory_bytes} is above the {committed_max_bytes} that "
            "this host may promise to all environments together "
            "(limits.memory_committed_max_bytes): ask for less",
            field="limits.memory_bytes",
        )


def admit_egress(requested: EgressPolicy, operator: EgressPolicy) -> None:
    """Hold each destination against the operator's list: exact, or under one of its wildcards,
    and with every port.

    Raises:
        ExecutionRejected: DESTINATION_NOT_CONFIGURED, `field` "egress.destinations[n].host" or
            "….ports".
    """
    configured = configured_destinations(operator)
    for position, destination in enumerate(requested.destinations):
        field = f"egress.destinations[{position}]"
        try:
            canonical = canonical_destination(destination)
        except DestinationInvalid as invalid:
            raise _not_configured(f"{field}.{invalid.part}", invalid.detail) from None
        missing = uncovered_ports(canonical, configured)
        if missing == canonical.ports:
            raise _not_configured(
                f"{field}.host",
                f"{canonical.host} (ports {_ports(missing)}) is not among the destinations that "
                f"the operator configured ({operator.mode}, {len(configured)} listed)",
            )
        if missing:
            raise _not_configured(
                f"{field}.ports",
                f"ports {_ports(missing)} of {canonical.host} are not among those that the "
                "operator configured",
            )


def _ports(ports: tuple[int, ...]) -> str:
    return ", ".join(str(port) for port in ports)


def _not_configured(field: str, detail: str) -> ExecutionRejected:
    return ExecutionRejected(
        RejectedCode.DESTINATION_NOT_CONFIGURED, f"{field}: {detail}", field=field
    )
