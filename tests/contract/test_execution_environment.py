"""The life of an environment and its handle, the same for every mechanism (S1).

Nothing here is about isolation: that is the gates' and the red team's.
"""

from datetime import timedelta

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.port.command import ExecutionCommand, KillReason
from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy
from sbxd.port.errors import (
    EscapeCode,
    ExecutionRejected,
    RejectedCode,
    SandboxEscapeSuspected,
    StaleLease,
)
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import ResourceLimits
from tests.contract.subjects import OTHER_DIGEST, Subject, created, with_handle

Clock = MockClock | None


# --- provision --------------------------------------------------------------------------------


async def test_a_handle_carries_the_identity_that_was_asked_for(
    subject: Subject, clock: Clock
) -> None:
    specification = subject.specification(epoch=7)
    handle = await subject.environment.provision(specification)
    assert handle.tenant_id == specification.tenant_id
    assert handle.run_id == specification.run_id
    assert handle.lease_epoch == 7
    assert handle.expires_at - handle.created_at > timedelta(0)
    assert handle.created_at.utcoffset() == timedelta(0)
    await subject.environment.destroy(handle)


async def test_two_environments_are_two(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as one, subject.provisioned() as other:
        assert one.environment_id != other.environment_id
        await subject.run(one, subject.commands.write_file("mine", "1"))
        result = await subject.run(other, subject.commands.write_file("mine", "2"))
        assert result.files_changed == (created("mine", "2"),)


async def test_an_unknown_image_is_rejected_by_field(subject: Subject, clock: Clock) -> None:
    with pytest.raises(ExecutionRejected) as caught:
        await subject.environment.provision(subject.specification(image_digest=OTHER_DIGEST))
    assert caught.value.code is RejectedCode.UNKNOWN_IMAGE
    assert caught.value.field == "image_digest"


@pytest.mark.parametrize("name", ResourceLimits.__struct_fields__)
async def test_a_limit_above_its_ceiling_is_rejected_by_field(
    subject: Subject, clock: Clock, name: str
) -> None:
    specification = subject.specification()
    limits = msgspec.structs.replace(
        specification.limits, **{name: getattr(subject.ceilings, name) + 1}
    )
    with pytest.raises(ExecutionRejected) as caught:
        await subject.environment.provision(msgspec.structs.replace(specification, limits=limits))
    assert caught.value.code is RejectedCode.LIMIT_ABOVE_CEILING
    assert caught.value.field == f"limits.{name}"


async def test_a_destination_that_is_not_configured_is_rejected(
    subject: Subject, clock: Clock
) -> None:
    egress = EgressPolicy(
        mode=EgressMode.ALLOWLIST,
        destinations=(EgressDestination(host="not-configured.example.net", ports=(443,)),),
    )
    specification = msgspec.structs.replace(subject.specification(), egress=egress)
    with pytest.raises(ExecutionRejected) as caught:
        await subject.environment.provision(specification)
    assert caught.value.code is RejectedCode.DESTINATION_NOT_CONFIGURED


async def test_a_specification_that_no_service_could_mean_is_rejected_and_the_next_one_served(
    subject: Subject, clock: Clock
) -> None:
    with pytest.raises(ExecutionRejected) as caught:
        await subject.environment.provision(subject.specification(tenant="not an identifier\n"))
    assert caught.value.code is RejectedCode.PROTOCOL
    async with subject.provisioned() as handle:
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_a_higher_lease_epoch_ends_the_environment_of_the_lower(
    subject: Subject, clock: Clock
) -> None:
    old = await subject.environment.provision(subject.specification(run="leased", epoch=3))
    new = await subject.environment.provision(subject.specification(run="leased", epoch=4))
    with pytest.raises(ExecutionRejected):
        await subject.run(old, subject.commands.write())
    assert (await subject.run(new, subject.commands.write())).exit_code == 0
    await subject.environment.destroy(new)


async def test_a_lower_lease_epoch_than_one_seen_is_stale(subject: Subject, clock: Clock) -> None:
    handle = await subject.environment.provision(subject.specification(run="again", epoch=3))
    with pytest.raises(StaleLease):
        await subject.environment.provision(subject.specification(run="again", epoch=2))
    assert (await subject.run(handle, subject.commands.write())).exit_code == 0
    await subject.environment.destroy(handle)


# --- one at a time, and cancellation ----------------------------------------------------------


async def test_a_second_command_is_refused_while_one_runs(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        results = []

        async def first() -> None:
            argv = subject.commands.write_then_sleep("running", 3000)
            results.append(await subject.run(handle, argv, timeout_seconds=5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await subject.told.something.wait()
            with pytest.raises(ExecutionRejected) as caught:
                await subject.run(handle, subject.commands.write())
        assert caught.value.code is RejectedCode.ENVIRONMENT_BUSY
        assert results[0].killed_by is KillReason.TIMEOUT
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_a_cancelled_command_is_killed_its_result_told_and_the_environment_lives(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        scope = trio.CancelScope()

        async def cancelled() -> None:
            with scope:
                argv = subject.commands.write_then_sleep("partial", 3000)
                await subject.run(handle, argv)
                raise AssertionError("execute returned although it was cancelled")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
            await subject.told.something.wait()
            scope.cancel()
        assert scope.cancelled_caught
        (result,) = subject.told.cancelled
        assert result.killed_by is KillReason.CANCELLED
        assert result.exit_code is None
        assert result.stdout == b"partial"
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_a_destroyed_environments_command_ends_as_cancelled(
    subject: Subject, clock: Clock
) -> None:
    handle = await subject.environment.provision(subject.specification())
    results = []

    async def run() -> None:
        argv = subject.commands.write_then_sleep("running", 3000)
        results.append(await subject.run(handle, argv))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await subject.told.something.wait()
        await subject.environment.destroy(handle)
    assert results[0].killed_by is KillReason.CANCELLED
    assert results[0].stdout == b"running"


# --- destroy, and handles that are not right --------------------------------------------------


async def test_destroy_is_idempotent(subject: Subject, clock: Clock) -> None:
    handle = await subject.environment.provision(subject.specification())
    for _ in range(3):
        await subject.environment.destroy(handle)


async def test_destroy_of_an_environment_that_never_was_returns(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        await subject.environment.destroy(with_handle(handle, environment_id="0" * 32))
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_execute_on_a_destroyed_handle_is_rejected(subject: Subject, clock: Clock) -> None:
    handle = await subject.environment.provision(subject.specification())
    await subject.environment.destroy(handle)
    with pytest.raises(ExecutionRejected) as caught:
        await subject.run(handle, subject.commands.write())
    assert caught.value.code is RejectedCode.ENVIRONMENT_GONE


async def test_another_tenants_handle_raises_and_ends_the_environment(
    subject: Subject, clock: Clock
) -> None:
    handle = await subject.environment.provision(subject.specification())
    with pytest.raises(SandboxEscapeSuspected) as caught:
        await subject.run(
            with_handle(handle, tenant_id=TenantId("tenant-b")), subject.commands.write()
        )
    assert caught.value.code is EscapeCode.TENANT_MISMATCH
    with pytest.raises(ExecutionRejected) as gone:
        await subject.run(handle, subject.commands.write())
    assert gone.value.code is RejectedCode.ENVIRONMENT_GONE


@pytest.mark.parametrize(
    "fields", [{"lease_epoch": 0}, {"lease_epoch": 2}, {"run_id": RunId("another")}], ids=str
)
async def test_another_lease_or_run_is_stale_and_the_environment_lives(
    subject: Subject, clock: Clock, fields: dict[str, object]
) -> None:
    async with subject.provisioned() as handle:
        with pytest.raises(StaleLease):
            await subject.run(with_handle(handle, **fields), subject.commands.write())
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_a_command_whose_numbers_are_out_of_range_is_rejected_by_field(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        for field, value in (("timeout_seconds", 0), ("maximum_output_bytes", 0)):
            command = ExecutionCommand(
                argv=subject.commands.write(),
                working_directory=".",
                timeout_seconds=5,
                stdin=None,
                maximum_output_bytes=100,
            )
            with pytest.raises(ExecutionRejected) as caught:
                await subject.environment.execute(
                    handle, msgspec.structs.replace(command, **{field: value})
                )
            assert caught.value.code is RejectedCode.INVALID_COMMAND
            assert caught.value.field == field
