"""From the command line's options to an EnvironmentSpec and an ExecutionCommand."""

import secrets
from dataclasses import dataclass

import click
import msgspec

from sbxd.policy.child_environment import OperatorNamesRefused, worker_environment
from sbxd.port.egress import DENY_ALL, EgressMode, EgressPolicy
from sbxd.port.environment import EnvironmentSpec
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import ResourceLimits
from sbxd.wire.messages import Described

OPERATOR_TENANT = TenantId("operator")
TEST_RUNS = "sbxctl-egress-test-"  # how the ids of the runs of `sbxctl egress test` begin


@dataclass(frozen=True)
class LimitOptions:
    """What the operator asked for; None takes the daemon's default."""

    memory_bytes: int | None
    cpu_millicores: int | None
    pids_max: int | None
    workspace_bytes: int | None
    inodes_max: int | None

    @classmethod
    def nothing(cls) -> "LimitOptions":
        """Nothing was asked for."""
        return cls(None, None, None, None, None)

    def over(
        self, defaults: ResourceLimits, *, timeout_seconds: int | None = None
    ) -> ResourceLimits:
        """The defaults with what was asked for in their place. timeout_seconds: of a command there,
        where one was asked for; the environment allows that much."""
        asked = {
            name: value
            for name in self.__dataclass_fields__
            if (value := getattr(self, name)) is not None
        }
        if timeout_seconds is not None and timeout_seconds > defaults.wall_clock_seconds:
            asked["wall_clock_seconds"] = timeout_seconds
        try:
            return msgspec.convert({**msgspec.to_builtins(defaults), **asked}, ResourceLimits)
        except msgspec.ValidationError as error:
            raise click.UsageError(f"the limits are out of range: {error}") from None


def require_mechanism(asked: str | None, described: Described) -> None:
    """A daemon has one mechanism, that of its configuration. Raises ExecutionRejected when another
    one was asked for: nothing is run on a weaker or stronger one than the caller named."""
    if asked is not None and asked != described.mechanism:
        raise ExecutionRejected(
            RejectedCode.UNSUPPORTED,
            f"--mechanism: this daemon runs {described.mechanism}, not {asked}: leave the option "
            f'out, or have the operator set sandbox = "{asked}" and restart sbxd',
            field="mechanism",
        )


def image_digest(asked: str | None, described: Described) -> str:
    """A digest as it is; an alias by the daemon's table; nothing as the daemon's default."""
    if asked is None:
        if described.default_image is None:
            raise ExecutionRejected(
                RejectedCode.UNKNOWN_IMAGE,
                "no --image was given and there is no image: make one with `sbxctl image build`, "
                "or import one",
                field="image_digest",
            )
        return described.default_image
    if asked.startswith("sha256:"):
        return asked
    if asked in described.image_aliases:
        return described.image_aliases[asked]
    names = ", ".join(sorted(described.image_aliases)) or "none"
    raise ExecutionRejected(
        RejectedCode.UNKNOWN_IMAGE,
        f"{asked!r} is no alias of this daemon (it has: {names}) and no sha256 digest",
        field="image_digest",
    )


def specification(
    described: Described,
    *,
    image: str | None,
    limits: ResourceLimits,
    environment: dict[str, str],
    network: bool,
    run_id: RunId | None = None,
) -> EnvironmentSpec:
    """The specification of one `sbxctl run`, under a run id of its own where none is given.

    Raises ExecutionRejected: an unknown image, a variable that is never passed, or a network that
    has no destination.
    """
    egress = DENY_ALL
    if network and not described.destinations:
        raise ExecutionRejected(
            RejectedCode.DESTINATION_NOT_CONFIGURED,
            "--network: no destination is configured: list some in the daemon's "
            'egress.destinations, with egress.mode "allowlist"',
            field="egress.destinations",
        )
    if network:
        egress = EgressPolicy(mode=EgressMode.ALLOWLIST, destinations=described.destinations)
    try:
        built = worker_environment(tuple(environment), environment)
    except OperatorNamesRefused as error:
        raise ExecutionRejected(
            RejectedCode.ENVIRONMENT_NAME_REFUSED, f"--env: {error}", field="environment"
        ) from None
    return EnvironmentSpec(
        tenant_id=OPERATOR_TENANT,
        run_id=run_id or RunId(f"sbxctl-{secrets.token_hex(8)}"),
        lease_epoch=0,
        image_digest=image_digest(image, described),
        limits=limits,
        egress=egress,
        environment=built.environment,
        bridge=None,
    )
