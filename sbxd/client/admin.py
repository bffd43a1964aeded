"""The operator's verbs over the admin socket, for `sbxctl`.

    async with connect_admin("/run/sbxd/admin.sock") as admin:
        print((await admin.describe()).mechanism)

Every method raises ExecutionUnavailable or ExecutionRejected. `admin.environments` is the
ExecutionEnvironment port over the same connection.
"""

from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from sbxd.client.channel import Channel
from sbxd.client.remote import CONNECT_SECONDS, Hooks, RemoteExecutionEnvironment, open_channel
from sbxd.client.replies import error_of
from sbxd.client.workspace import RemoteWorkspace
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.port.ids import EnvironmentId
from sbxd.wire import messages as m
from sbxd.wire.descriptions import EnvironmentInfo, ImageInfo
from sbxd.wire.egress import EgressCheck, EgressChecked, EgressShow, EgressShown
from sbxd.wire.legality import Role
from sbxd.wire.observing import (
    MetersAre,
    MetersQuery,
    MetricsAre,
    MetricsForm,
    MetricsQuery,
    StatusIs,
    StatusQuery,
)

Reply = TypeVar("Reply", bound=m.Message)


class AdminClient:
    """What an operator may ask. Made by `connect_admin`."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    @property
    def environments(self) -> RemoteExecutionEnvironment:
        """The port over this connection; an operator may act on every environment."""
        return RemoteExecutionEnvironment(self.channel)

    def environments_with(self, hooks: Hooks) -> RemoteExecutionEnvironment:
        """The same, with hooks (live output)."""
        return RemoteExecutionEnvironment(self.channel, hooks=hooks)

    def workspace(self, handle: EnvironmentHandle) -> RemoteWorkspace:
        """The files of one environment."""
        return RemoteWorkspace(self.channel, handle)

    async def describe(self) -> m.Described:
        """What the daemon is: settings, images, reserve and what its host can enforce."""
        return await self._ask(lambda i: m.AdminDescribe(request_id=i), m.Described)

    async def list(self) -> tuple[EnvironmentInfo, ...]:
        """All live environments, oldest first."""
        found: tuple[EnvironmentInfo, ...] = ()
        while True:
            page = await self._page(skip=len(found))
            found += page.environments
            if not page.more or not page.environments:
                return found

    async def inspect(self, environment_id: EnvironmentId) -> EnvironmentInfo:
        """One environment. Raises ExecutionRejected(ENVIRONMENT_GONE)."""
        reply = await self._ask(
            lambda i: m.AdminInspect(request_id=i, environment_id=environment_id),
            m.Environments,
        )
        return reply.environments[0]

    async def image_import(
        self,
        stream: AsyncIterable[bytes],
        size_bytes: int,
        *,
        format: m.ImageFormat = m.ImageFormat.ROOTFS,
        reference: str | None = None,
        expected_digest: str | None = None,
        label: str = "",
    ) -> ImageInfo:
        """Import an uncompressed tar of exactly size_bytes: a root file system, or an archive.

        reference: which image of an archive. Raises: ExecutionRejected when the digest is not the
        expected one or the tar is refused;
        ValueError when `stream` holds more or fewer bytes.
        """
        reply = await self._ask(
            lambda i: m.ImageImport(
                request_id=i,
                size_bytes=size_bytes,
                format=format,
                reference=reference,
                expected_digest=expected_digest,
                label=label,
            ),
            m.ImageImported,
            upload=stream,
        )
        return reply.image

    async def image_list(self) -> tuple[ImageInfo, ...]:
        """All images of the store."""
        return (await self._ask(lambda i: m.ImageList(request_id=i), m.Images)).images

    async def image_remove(self, digest: str) -> None:
        """Remove an image that nothing stands on. Raises ExecutionRejected."""
        await self._ask(lambda i: m.ImageRemove(request_id=i, digest=digest), m.Done)

    async def reconcile(self) -> m.Reconciled:
        """Destroy what nobody owns; report it and what could not be proven stopped."""
        return await self._ask(lambda i: m.Reconcile(request_id=i), m.Reconciled)

    async def egress_check(self, host: str, port: int) -> EgressChecked:
        """How the operator's policy judges one destination now; nothing is dialled."""
        return await self._ask(
            lambda i: EgressCheck(request_id=i, host=host, port=port), EgressChecked
        )

    async def egress_show(self) -> EgressShown:
        """The configured destinations and caps, the host's own network, what was decided."""
        return await self._ask(lambda i: EgressShow(request_id=i), EgressShown)

    async def metrics(self, form: MetricsForm = MetricsForm.OPENMETRICS) -> str:
        """Every metric now, as one text."""
        return (await self._ask(lambda i: MetricsQuery(request_id=i, form=form), MetricsAre)).text

    async def status(self) -> StatusIs:
        """The daemon on one page."""
        return await self._ask(lambda i: StatusQuery(request_id=i), StatusIs)

    async def meters(self) -> MetersAre:
        """What each live environment uses now, oldest first, and the pool."""
        reply = last = await self._meters_page(skip=0)
        found = reply.environments
        while last.more and last.environments:
            last = await self._meters_page(skip=len(found))
            found += last.environments
        return msgspec.structs.replace(reply, environments=found, more=False)

    async def reap(self) -> m.Reaped:
        """One pass over the leases: what it asked about, and what it ended."""
        return await self._ask(lambda i: m.Reap(request_id=i), m.Reaped)

    async def quarantine(self) -> tuple[m.QuarantinedItem, ...]:
        """What was not proven stopped, and what the kernel holds of it now."""
        return (await self._ask(lambda i: m.QuarantineList(request_id=i), m.QuarantineIs)).items

    async def clear_quarantine(self, name: str, word: m.ClearingWord) -> str:
        """Release one; returns what that rests on. Raises ExecutionRejected for what is not
        quarantined, ExecutionUnavailable when a proof was asked for and is not to be had."""
        reply = await self._ask(
            lambda i: m.QuarantineClear(request_id=i, name=name, word=word),
            m.QuarantineWasCleared,
        )
        return reply.proof

    async def _meters_page(self, *, skip: int) -> MetersAre:
        return await self._ask(lambda i: MetersQuery(request_id=i, skip=skip), MetersAre)

    async def _page(self, *, skip: int) -> m.Environments:
        return await self._ask(lambda i: m.AdminList(request_id=i, skip=skip), m.Environments)

    async def _ask(
        self,
        make: Callable[[int], m.Request],
        expected: type[Reply],
        *,
        upload: AsyncIterable[bytes] | None = None,
    ) -> Reply:
        call = await self.channel.start(make)
        try:
            if upload is not None:
                await call.upload(upload)
            reply = await call.receive()
        finally:
            call.cancel()
            self.channel.abandon(call, then=_ignore)
        error = error_of(reply)
        if error is not None:
            raise error
        if not isinstance(reply, expected):
            raise ExecutionUnavailable(
                UnavailableCode.UNREACHABLE, f"unexpected reply {type(reply).__name__}"
            )
        return reply


@asynccontextmanager
async def connect_admin(
    path: str,
    *,
    client_name: str = "sbxctl",
    credential: bytes | None = None,
    connect_seconds: float = CONNECT_SECONDS,
) -> AsyncIterator[AdminClient]:
    """Connect to a daemon's admin socket. connect_seconds: as `sbxd.client.remote.connect`.

    Raises: ExecutionUnavailable(UNREACHABLE, CAPACITY), ServiceShuttingDown;
    ExecutionRejected(NOT_AUTHORIZED).
    """
    async with open_channel(
        path,
        role=Role.ADMIN,
        client_name=client_name,
        credential=credential,
        connect_seconds=connect_seconds,
    ) as channel:
        yield AdminClient(channel)


def _ignore(reply: m.Message) -> None:
    """The terminal reply of a call that its caller has left."""
