"""Specifications, commands and the script that the service's tests share."""

import msgspec

from sbxd.fake.script import Invocation, Outcome, Script
from sbxd.port.egress import DENY_ALL
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import MIB, ResourceLimits
from sbxd.wire import messages as m
from tests.service.raw import RawEnd

DIGEST = "sha256:" + "a" * 64
SPECIFICATION = EnvironmentSpec(
    tenant_id=TenantId("tenant"),
    run_id=RunId("run"),
    lease_epoch=1,
    image_digest=DIGEST,
    limits=ResourceLimits(
        cpu_millicores=1000,
        memory_bytes=256 * MIB,
        pids_max=64,
        workspace_bytes=64 * MIB,
        inodes_max=1000,
        wall_clock_seconds=600,
    ),
    egress=DENY_ALL,
    environment={},
    bridge=None,
)


def _bytes(call: Invocation) -> Outcome:
    return Outcome(stdout=b"x" * int(call.argv[1]))


SCRIPT = Script(
    by_argv={
        ("true",): Outcome(),
        ("hello",): Outcome(stdout=b"hello"),
        ("forever",): Outcome(stdout=b"partial", sleep_seconds=float("inf")),
        ("both",): Outcome(stdout=b"o" * 3 * MIB, stderr=b"e" * 3 * MIB),
        ("count",): Outcome(),
    },
    by_program={"bytes": _bytes, "stdin": lambda call: Outcome(stdout=call.stdin)},
)


def specification(run: str) -> EnvironmentSpec:
    return msgspec.structs.replace(SPECIFICATION, run_id=RunId(run))


def command(
    *argv: str, maximum_output_bytes: int = 8 * MIB, timeout_seconds: int = 60
) -> m.WireCommand:
    return m.WireCommand(
        argv=tuple(word.encode() for word in argv),
        working_directory=b".",
        timeout_seconds=timeout_seconds,
        maximum_output_bytes=maximum_output_bytes,
    )


async def provisioned(raw: RawEnd, request_id: int = 1, *, run: str = "run") -> EnvironmentHandle:
    """Provision over a raw connection."""
    await raw.send(m.Provision(request_id=request_id, specification=specification(run)))
    reply = await raw.receive()
    assert isinstance(reply, m.Provisioned), reply
    return reply.handle
