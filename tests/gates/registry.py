"""The hard gates of the sandbox area: what each is called, where its proof stands, when it is due.

A gate that is due must have a test that carries its mark, in the file named here; one that is not
due yet may have some. A mark that names no gate of this table fails the run.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    STRUCTURAL = "structural"
    PROPERTY = "property"
    CASE = "case"


class Milestone(StrEnum):
    """In the order in which they are built."""

    FIRST_LIGHT = "first light"
    LIMITS_AND_WORKSPACE = "limits and workspace"
    EGRESS = "egress"
    KERNEL_PER_SANDBOX = "kernel per sandbox"
    ARTIFACTS = "artifacts"
    LEASES = "leases"


REACHED = frozenset(
    {Milestone.FIRST_LIGHT, Milestone.EGRESS, Milestone.ARTIFACTS, Milestone.LEASES}
)


@dataclass(frozen=True)
class Gate:
    """claim: one sentence. file: where its test stands, None while it is not due."""

    id: str
    kind: Kind
    milestone: Milestone
    claim: str
    file: str | None = None


GATES = (
    Gate(
        "gate.sandbox.production_refuses_dev",
        Kind.STRUCTURAL,
        Milestone.FIRST_LIGHT,
        "Startup fails for every mechanism without a kernel of its own in production, and where "
        "real credentials are used; both failures name both settings.",
        "tests/gates/test_production_refuses_dev.py",
    ),
    Gate(
        "gate.sandbox.no_runtime_in_worker",
        Kind.STRUCTURAL,
        Milestone.FIRST_LIGHT,
        "No module of the worker's side imports or starts a container runtime, directly or not.",
        "tests/gates/test_import_boundaries.py",
    ),
    Gate(
        "gate.sandbox.spec_has_no_host_path",
        Kind.STRUCTURAL,
        Milestone.FIRST_LIGHT,
        "No type that crosses the port could hold a path of the host, and no error repeats one.",
        "tests/gates/test_no_host_path.py",
    ),
    Gate(
        "gate.sandbox.workspace_containment",
        Kind.PROPERTY,
        Milestone.FIRST_LIGHT,
        "Every generated path is under the workspace or a WorkspaceEscape, and nothing else.",
        "tests/properties/test_containment_properties.py",
    ),
    Gate(
        "gate.sandbox.limits_enforced",
        Kind.CASE,
        Milestone.LIMITS_AND_WORKSPACE,
        "Each limit kills what exceeds it, with its own reason and the partial output.",
    ),
    Gate(
        "gate.sandbox.workspace_isolated",
        Kind.CASE,
        Milestone.LIMITS_AND_WORKSPACE,
        "No environment reads, writes, lists or stats the workspace of another.",
    ),
    Gate(
        "gate.sandbox.network_denied",
        Kind.CASE,
        Milestone.EGRESS,
        "Without egress configuration nothing is reachable, at the network namespace.",
        "tests/redteam/test_network_denied.py",
    ),
    Gate(
        "gate.sandbox.egress_allowlisted",
        Kind.CASE,
        Milestone.EGRESS,
        "The listed destination is reached and nothing else is; every outcome is logged.",
        "tests/redteam/test_egress_allowlisted.py",
    ),
    Gate(
        "gate.sandbox.no_credential_reaches",
        Kind.CASE,
        Milestone.KERNEL_PER_SANDBOX,
        "A command that dumps all it can see shows no credential and no value of the worker's.",
    ),
    Gate(
        "gate.sandbox.escape_denied",
        Kind.CASE,
        Milestone.KERNEL_PER_SANDBOX,
        "The known ways out of the configured mechanism reach nothing.",
    ),
    Gate(
        "gate.sandbox.no_orphans",
        Kind.CASE,
        Milestone.LEASES,
        "Nothing outlives its lease: two intervals after a worker died nothing of it is left.",
        "tests/redteam/test_no_orphans.py",
    ),
    Gate(
        "gate.sandbox.artifact_checksum",
        Kind.CASE,
        Milestone.ARTIFACTS,
        "An artifact's bytes are the bytes that were exported; a mismatch stores nothing.",
        "tests/artifacts/test_service.py",
    ),
    Gate(
        "gate.sandbox.artifact_key_opaque",
        Kind.STRUCTURAL,
        Milestone.ARTIFACTS,
        "A storage key is made of the tenant's and the artifact's id and of nothing else.",
        "tests/gates/test_artifact_key.py",
    ),
)
