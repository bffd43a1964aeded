"""The lifecycle against its model: on the fake, over a mechanism in memory, and on namespaces."""

import secrets
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from sbxd.client.admin import connect_admin
from sbxd.client.remote import RemoteExecutionEnvironment, connect
from sbxd.fake.environment import FakeExecutionEnvironment
from sbxd.fake.script import Outcome, Script
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec, ExecutionEnvironment
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from tests.lifecycle.model import Leases, Subject
from tests.lifecycle.world import WITH_RESERVE, WORKER, World, open_world, spec
from tests.redteam.live import ADMIN_SOCKET, LIMITS, WORKER_SOCKET, default_image, specification


@dataclass
class FakeSubject:
    environments: ExecutionEnvironment

    def specification(self, tenant: str, run: str, epoch: int) -> EnvironmentSpec:
        return spec(tenant=tenant, run=run, epoch=epoch)

    async def listed(self) -> Collection[EnvironmentId] | None:
        await trio.lowlevel.checkpoint()
        return None


class OnFake(Leases):
    """The in-memory port."""

    def open(self) -> AbstractAsyncContextManager[Subject]:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Subject]:
        yield FakeSubject(FakeExecutionEnvironment(Script(otherwise=Outcome())))


@dataclass
class PortOfWorld:
    """The daemon's lifecycle as one worker's port."""

    world: World

    async def provision(self, specification: EnvironmentSpec) -> EnvironmentHandle:
        return await self.world.environments.provision(WORKER, specification)

    async def execute(
        self, environment: EnvironmentHandle, command: ExecutionCommand
    ) -> ExecutionResult:
        return await self.world.run(environment, ask=command)

    async def destroy(self, environment: EnvironmentHandle) -> None:
        await self.world.environments.destroy(WORKER, environment)


@dataclass
class WorldSubject:
    world: World
    environments: ExecutionEnvironment

    def specification(self, tenant: str, run: str, epoch: int) -> EnvironmentSpec:
        return spec(tenant=tenant, run=run, epoch=epoch)

    async def listed(self) -> Collection[EnvironmentId] | None:
        listed = await self.world.environments.list()
        return [each.handle.environment_id for each in listed if each.state != "DESTROYING"]


class OnDouble(Leases):
    """The daemon's lifecycle with its reserve, over a mechanism in memory."""

    def open(self) -> AbstractAsyncContextManager[Subject]:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Subject]:
        with tempfile.TemporaryDirectory() as directory:
            async with open_world(Path(directory), settings=WITH_RESERVE) as world:
                yield WorldSubject(world, PortOfWorld(world))


@dataclass
class LaneSubject:
    environments: RemoteExecutionEnvironment
    image: str
    prefix: str = field(default_factory=lambda: secrets.token_hex(8))

    def specification(self, tenant: str, run: str, epoch: int) -> EnvironmentSpec:
        made = specification(self.image, LIMITS)
        return msgspec.structs.replace(
            made,
            tenant_id=TenantId(f"{self.prefix}-{tenant}"),
            run_id=RunId(f"{self.prefix}-{run}"),
            lease_epoch=epoch,
        )

    async def listed(self) -> Collection[EnvironmentId] | None:
        async with connect_admin(ADMIN_SOCKET) as admin:
            return [
                each.handle.environment_id
                for each in await admin.list()
                if each.handle.tenant_id.startswith(self.prefix) and each.state != "DESTROYING"
            ]


class OnNamespaces(Leases):
    """The installed daemon."""

    def open(self) -> AbstractAsyncContextManager[Subject]:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Subject]:
        image = await default_image()
        async with connect(WORKER_SOCKET, client_name="model") as remote:
            yield LaneSubject(remote, image)


def run(machine: type[Leases], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_fake_does_what_the_model_says() -> None:
    run(OnFake, examples=25, steps=20)


def test_the_lifecycle_does_what_the_model_says() -> None:
    run(OnDouble, examples=25, steps=20)


@pytest.mark.needs("daemon")
@pytest.mark.also("uml")
@pytest.mark.case("API-09", "API-13")
def test_namespaces_does_what_the_model_says() -> None:
    run(OnNamespaces, examples=6, steps=15)


class Wrong(OnDouble):
    """The control: an implementation that ends nothing when it is told to."""

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Subject]:
        async with super()._open() as subject:
            assert isinstance(subject, WorldSubject)

            class Deaf(PortOfWorld):
                async def destroy(self, environment: EnvironmentHandle) -> None:
                    await trio.lowlevel.checkpoint()

            yield WorldSubject(subject.world, Deaf(subject.world))


@pytest.mark.parametrize("machine", [OnDouble, Wrong])
def test_the_model_notices_an_implementation_that_ends_nothing(machine: type[Leases]) -> None:
    """By what it serves and by what it lists; step by step, since a search may miss it."""
    steps = machine()
    notices = pytest.raises(AssertionError) if machine is Wrong else nullcontext()
    try:
        steps.provision("a", "x", 1)
        steps.execute(0)
        steps.compare()
        steps.destroy(0)
        with notices:
            steps.execute(0)
        with notices:
            steps.compare()
    finally:
        steps.teardown()
