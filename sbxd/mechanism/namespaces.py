"""The `namespaces` mechanism: slots that the launcher builds, commands that init starts.

Invariants: this side holds no privilege and opens no path of a sandbox; when the launcher's
channel ends, every sandbox is lost.
"""

import errno
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakSet

import trio

from sbxd.launcher.requests import (
    CANARY_STEPS,
    RUNSC_ITEM,
    SHIPPED_PROFILE,
    VERIFY,
    WEIGHTS_MAX,
    ErasingIs,
    ImageDrop,
    ImageUnpack,
    InventoryIs,
    LauncherReply,
    Prepare,
    Prepared,
    Probed,
    Share,
    Weight,
)
from sbxd.launcher.requests import Erasing as ErasingRequest
from sbxd.launcher.requests import Inventory as InventoryRequest
from sbxd.launcher.requests import Probe as ProbeRequest
from sbxd.mechanism import launcher_client
from sbxd.mechanism.bridge import BridgeDoors
from sbxd.mechanism.launcher_client import LauncherClient
from sbxd.mechanism.namespaces_sandbox import (
    NamespacesSandbox,
    cgroup_limits,
    destroy_environment,
    volume_size,
)
from sbxd.mechanism.protocol import (
    ConfinementMismatch,
    Erasing,
    Inventory,
    MechanismError,
    Orphan,
    SlotProfile,
)
from sbxd.port.ids import EnvironmentId
from sbxd.port.limits import IoCeilings
from sbxd.wire.descriptions import PostureItem

# How long a cancelled or failed preparation may take to remove what it had begun.
UNDO_SECONDS = 40.0


class NamespacesMechanism:
    """Implements sbxd.mechanism.protocol.Mechanism. Made by `open_namespaces`."""

    name = "namespaces"
    # What the launcher knows of this host that is of no concern to this mechanism.
    _ignored_items: frozenset[str] = frozenset({RUNSC_ITEM})

    def __init__(
        self, client: LauncherClient, nursery: trio.Nursery, profile: str, io: IoCeilings
    ) -> None:
        self._client = client
        self._seccomp_profile = profile
        self._io = io
        self._nursery = nursery
        self._doors = BridgeDoors()
        self._sandboxes: WeakSet[NamespacesSandbox] = WeakSet()

    async def prepare(
        self, environment_id: EnvironmentId, profile: SlotProfile, *, back_stop_seconds: int
    ) -> NamespacesSandbox:
        """Build one slot, with its first child parked. Raises MechanismError, as
        ConfinementMismatch when a layer did not take."""
        sandbox: NamespacesSandbox | None = None
        try:
            with await self._client.request(
                lambda ticket: self._preparation(
                    Prepare(
                        ticket=ticket,
                        environment_id=environment_id,
                        image_digest=profile.image_digest,
                        volume=volume_size(profile.limits),
                        limits=cgroup_limits(profile.limits),
                        back_stop_seconds=back_stop_seconds,
                        seccomp_profile=self._seccomp_profile,
                        network=profile.network,
                        io=self._io,
                        ceilings=None
                        if profile.ceilings is None
                        else cgroup_limits(profile.ceilings),
                    )
                )
            ) as answer:
                reply = expect(answer.reply, Prepared)
                sandbox = self._sandbox(profile, reply, answer.take())
            self._sandboxes.add(sandbox)
            self._client.watch(environment_id, sandbox)
            await sandbox.begin()
        except launcher_client.LauncherRefused as problem:
            # The launcher has removed what it had begun.
            if _is_mismatch(problem):
                raise ConfinementMismatch(problem.step, problem.errno, problem.detail) from None
            raise
        except BaseException:
            await self._undo(environment_id, sandbox)
            raise
        return sandbox

    def _preparation(self, request: Prepare) -> Prepare:
        """The request with what is this mechanism's own."""
        return request

    def _sandbox(
        self, profile: SlotProfile, reply: Prepared, descriptors: list[int]
    ) -> NamespacesSandbox:
        return NamespacesSandbox(
            self._client, self._nursery, profile, reply, descriptors, self._doors
        )

    async def _undo(self, environment_id: EnvironmentId, sandbox: NamespacesSandbox | None) -> None:
        """Remove what a failed or cancelled preparation has begun, within UNDO_SECONDS."""
        with trio.move_on_after(UNDO_SECONDS, shield=True):
            try:
                if sandbox is not None:
                    await sandbox.destroy()
                else:
                    await destroy_environment(self._client, environment_id)
            except MechanismError:
                return  # it is in the inventory, and the caller's failure is the one to tell

    async def share(self, weights: Mapping[EnvironmentId, int]) -> None:
        """Weigh these environments against each other. Raises MechanismError."""
        wanted = [
            Weight(environment_id=environment_id, cpu_weight=weight)
            for environment_id, weight in weights.items()
        ]
        for start in range(0, len(wanted), WEIGHTS_MAX):
            part = tuple(wanted[start : start + WEIGHTS_MAX])
            with await self._client.request(
                lambda ticket, part=part: Share(ticket=ticket, weights=part)  # type: ignore[misc]
            ):
                pass

    async def destroy_orphan(self, environment_id: EnvironmentId) -> None:
        """Remove whatever the kernel still holds under this id. Raises MechanismError."""
        await destroy_environment(self._client, environment_id)

    async def inventory(self) -> Inventory:
        """What the kernel holds. Raises MechanismError."""
        with await self._client.request(lambda ticket: InventoryRequest(ticket=ticket)) as answer:
            reply = expect(answer.reply, InventoryIs)
        items = tuple(Orphan(item.environment_id, item.kinds) for item in reply.items)
        return Inventory(boot_id=reply.boot_id, items=items)

    async def erasing(self) -> Erasing:
        """What is still to be erased. Raises MechanismError."""
        with await self._client.request(lambda ticket: ErasingRequest(ticket=ticket)) as answer:
            reply = expect(answer.reply, ErasingIs)
        return Erasing(reply.volumes, reply.bytes_used)

    async def posture(self) -> tuple[PostureItem, ...]:
        """What this host can enforce. Raises MechanismError."""
        with await self._client.request(lambda ticket: ProbeRequest(ticket=ticket)) as answer:
            reply = expect(answer.reply, Probed)
        return tuple(
            PostureItem(name=item.name, state=item.state, detail=item.detail, fix=item.fix)
            for item in reply.items
            if item.name not in self._ignored_items
        )

    async def unpack_image(self, image_digest: str) -> None:
        """Make an image of the store usable. Raises MechanismError."""
        with await self._client.request(
            lambda ticket: ImageUnpack(ticket=ticket, image_digest=image_digest)
        ):
            pass

    async def drop_image(self, image_digest: str) -> None:
        """Remove the unpacked form of an image. Raises MechanismError."""
        with await self._client.request(
            lambda ticket: ImageDrop(ticket=ticket, image_digest=image_digest)
        ):
            pass

    def release(self) -> None:
        """Kill and let go of every environment that was not destroyed."""
        for sandbox in list(self._sandboxes):
            sandbox.on_launcher_lost()
            sandbox.release()

    async def wait_lost(self) -> None:
        """Until the launcher's channel has ended."""
        await self._client.wait_lost()


@asynccontextmanager
async def open_namespaces(
    launcher_socket: str,
    *,
    seccomp_profile: str = SHIPPED_PROFILE,
    io: IoCeilings | None = None,
) -> AsyncIterator[NamespacesMechanism]:
    """The mechanism for the length of the block. Raises OSError when nothing listens.

    seccomp_profile: what binds the commands, by the name that the launcher knows it by; a
    preparation with a name that it does not know, or has refused, fails. io: what each environment
    may ask of the disk.

    Leaving the block closes the launcher's channel, which ends every environment.
    """
    async with launcher_client.connect(launcher_socket) as client, trio.open_nursery() as nursery:
        mechanism = NamespacesMechanism(client, nursery, seccomp_profile, io or IoCeilings())
        try:
            yield mechanism
        finally:
            mechanism.release()
            nursery.cancel_scope.cancel()


# Init's own words for a child that was killed before it did a step, or between two.
_KILLED = (f"{CANARY_STEPS}park", f"{CANARY_STEPS}release")


def _is_mismatch(problem: launcher_client.LauncherRefused) -> bool:
    if problem.step in _KILLED:
        return False
    if problem.step.startswith(CANARY_STEPS):
        return not problem.retriable  # short of memory is no fault of the confinement
    return problem.step == VERIFY and problem.errno == errno.EPERM


_Reply = TypeVar("_Reply", bound=LauncherReply)


def expect(reply: LauncherReply, kind: type[_Reply]) -> _Reply:
    """The reply, which is of this kind. Raises MechanismError."""
    if not isinstance(reply, kind):
        raise MechanismError("launcher", 0, "the launcher answered with another message")
    return reply
