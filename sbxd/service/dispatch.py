"""From a request to the lifecycle's or the image store's method, and from its result to a reply.

Invariants: every handler returns exactly one terminal reply or raises; the port's errors become
replies here and nowhere else, and a refusal is audited before it is sent. Paths and commands are
judged by `sbxd.policy` before the lifecycle is asked. Deliberately absent: connections, frames,
catching what is no error of the port (the session's).
"""

import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol, assert_never

import msgspec

from sbxd.audit.counted_events import WorkspaceUsed
from sbxd.audit.events import (
    AuditEvent,
    ImageImported,
    ImageRemoved,
    PathDenied,
    RequestRejected,
    RequestUnserved,
)
from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.lifecycle.environments import Environments, Peer, PeerRole
from sbxd.lifecycle.errors import audit_unavailable
from sbxd.policy.command import validate_command
from sbxd.policy.containment import relative_bytes
from sbxd.policy.images import default_image
from sbxd.policy.network import network_grant
from sbxd.policy.violations import violation_of
from sbxd.port.command import ExecutionCommand
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
    SandboxEscapeSuspected,
    UnavailableCode,
    WorkspaceCode,
    WorkspaceError,
    WorkspaceEscape,
)
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.service.egress import OperatorEgress, answer
from sbxd.service.exchange import Exchange
from sbxd.service.listing import page_of, shortened
from sbxd.service.observing import Observer, observe
from sbxd.service.posture import own_items
from sbxd.service.repair import repair
from sbxd.settings import Settings
from sbxd.wire import messages as m
from sbxd.wire.descriptions import ImageInfo
from sbxd.wire.egress import EgressCheck, EgressShow
from sbxd.wire.observing import MetersQuery, MetricsQuery, StatusQuery

_WorkspaceRequest = (
    m.WorkspaceRead | m.WorkspaceWrite | m.WorkspaceList | m.WorkspaceProvenanceQuery
)


class Images(Protocol):
    """What is asked of the image store (`sbxd.service.images`)."""

    async def import_image(
        self, request: m.ImageImport, chunks: AsyncIterator[bytes]
    ) -> ImageInfo: ...

    async def list(self) -> tuple[ImageInfo, ...]: ...

    async def remove(self, digest: str) -> None: ...

    def known_in_order(self) -> tuple[str, ...]: ...


class Dispatch:
    """Answers requests. One for the daemon; `handle` is awaited concurrently."""

    def __init__(
        self,
        *,
        environments: Environments,
        images: Images,
        settings: Settings,
        egress: OperatorEgress,
        observer: Observer,
        audit: AuditSink,
        log: logging.Logger,
        version: str,
    ) -> None:
        self._environments = environments
        self._images = images
        self._settings = settings
        self._egress = egress
        self._observer = observer
        self._audit = audit
        self._log = log
        self._version = version

    async def handle(
        self, peer: Peer, request: m.AnyRequest, exchange: Exchange
    ) -> m.TerminalReply:
        """The terminal reply to a request.

        Cancellation: as the lifecycle's and the store's methods say; no reply.
        """
        request_id = request.request_id
        try:
            return await self._answer(peer, request, exchange)
        except WorkspaceEscape as error:
            environment_id, tenant_id, run_id = _about(request)
            await self._record(
                PathDenied(
                    verb=_verb(request),
                    peer_uid=peer.uid,
                    environment_id=environment_id,
                    tenant_id=tenant_id,
                    run_id=run_id,
                )
            )
            return m.WorkspaceEscaped(request_id=request_id, detail=error.detail)
        except WorkspaceError as error:
            return m.WorkspaceFailed(request_id=request_id, code=error.code, detail=error.detail)
        except PortError as error:
            return await self._refusal(peer, request, error)

    async def refuse(self, peer: Peer, request: m.AnyRequest, error: PortError) -> m.TerminalReply:
        """The terminal reply to a request that is not handled at all, once it is recorded."""
        return await self._refusal(peer, request, error)

    async def _answer(
        self, peer: Peer, request: m.AnyRequest, exchange: Exchange
    ) -> m.TerminalReply:
        match request:
            case m.Provision():
                self._admit()
                handle = await self._environments.provision(peer, request.specification)
                return m.Provisioned(request_id=request.request_id, handle=handle)
            case m.Execute():
                return await self._execute(peer, request, exchange)
            case m.Destroy():
                await self._environments.destroy(peer, request.handle)
                return m.Done(request_id=request.request_id)
            case (
                m.WorkspaceRead()
                | m.WorkspaceWrite()
                | m.WorkspaceList()
                | m.WorkspaceProvenanceQuery()
            ):
                return await self._workspace(peer, request, exchange)
            case m.NetworkGrantQuery():
                return m.NetworkGrantIs(
                    request_id=request.request_id, policy=network_grant(self._settings.egress)
                )
            case m.ImageImport() | m.ImageList() | m.ImageRemove():
                return await self._image(peer, request, exchange)
            case m.AdminDescribe() | m.AdminList() | m.AdminInspect():
                return await self._administer(peer, request)
            case EgressCheck() | EgressShow():
                _require_operator(peer)
                return await answer(request, self._settings.egress, self._egress)
            case m.Reconcile() | m.Reap() | m.QuarantineList() | m.QuarantineClear():
                _require_operator(peer)
                return await repair(peer, request, self._environments)
            case MetricsQuery() | StatusQuery() | MetersQuery():
                _require_operator(peer)
                return await observe(request, self._observer)
            case _:
                assert_never(request)

    async def _execute(self, peer: Peer, request: m.Execute, exchange: Exchange) -> m.TerminalReply:
        self._environments.attempt(peer, request.handle)
        wire = request.command
        command = ExecutionCommand(
            argv=tuple(word.decode("utf-8", "surrogateescape") for word in wire.argv),
            working_directory=wire.working_directory.decode("utf-8", "surrogateescape"),
            timeout_seconds=wire.timeout_seconds,
            stdin=None,
            maximum_output_bytes=wire.maximum_output_bytes,
            network_enabled=wire.network_enabled,
        )
        validate_command(command)
        self._admit()
        stdin = b"".join([piece async for piece in exchange.upload()])
        result = await self._environments.execute(
            peer,
            request.handle,
            msgspec.structs.replace(command, stdin=stdin),
            cancelled=exchange.end_by_event(),
            on_output=exchange.send_output,
            bridge=exchange.bridge if request.bridge else None,
        )
        await exchange.send_entries(result.files_changed)
        return m.Executed(
            request_id=request.request_id,
            exit_code=result.exit_code,
            signal=result.signal,
            stdout_truncated=result.stdout_truncated,
            stderr_truncated=result.stderr_truncated,
            timed_out=result.timed_out,
            killed_by=result.killed_by,
            files_changed_truncated=result.files_changed_truncated,
            duration_ms=result.duration_ms,
            evidence=result.evidence,
            usage=result.usage,
            unenforced_limits=result.unenforced_limits,
        )

    async def _workspace(
        self, peer: Peer, request: _WorkspaceRequest, exchange: Exchange
    ) -> m.TerminalReply:
        self._environments.attempt(peer, request.handle)
        path = relative_bytes(request.path)
        try:
            reply = await self._use_workspace(peer, request, path, exchange)
        except WorkspaceError as error:
            await self._record(_workspace_used(peer, request, error.code))
            raise
        await self._record(_workspace_used(peer, request, None))
        return reply

    async def _use_workspace(
        self, peer: Peer, request: _WorkspaceRequest, path: bytes, exchange: Exchange
    ) -> m.TerminalReply:
        match request:
            case m.WorkspaceRead():
                measured = _Measured(exchange)
                await self._environments.read(
                    peer,
                    request.handle,
                    path,
                    maximum_bytes=request.maximum_bytes,
                    on_content=measured.send,
                )
                return measured.end()
            case m.WorkspaceWrite():
                await self._environments.write(
                    peer,
                    request.handle,
                    path,
                    size_bytes=request.size_bytes,
                    data=exchange.upload(),
                )
            case m.WorkspaceList():
                truncated = await self._environments.listdir(
                    peer, request.handle, path, on_entries=exchange.send_entries
                )
                return m.Listed(request_id=request.request_id, truncated=truncated)
            case m.WorkspaceProvenanceQuery():
                provenance = await self._environments.provenance(peer, request.handle, path)
                return m.ProvenanceIs(request_id=request.request_id, provenance=provenance)
            case _:
                assert_never(request)
        return m.Done(request_id=request.request_id)

    async def _image(
        self,
        peer: Peer,
        request: m.ImageImport | m.ImageList | m.ImageRemove,
        exchange: Exchange,
    ) -> m.TerminalReply:
        match request:
            case m.ImageImport():
                self._admit()
                image = await self._images.import_image(request, exchange.upload())
                await self._record_done(
                    ImageImported(
                        image_digest=image.digest,
                        size_bytes=image.size_bytes,
                        label=image.label,
                        peer_uid=peer.uid,
                    )
                )
                return m.ImageImported(request_id=request.request_id, image=image)
            case m.ImageList():
                return m.Images(request_id=request.request_id, images=await self._images.list())
            case m.ImageRemove():
                self._admit()
                await self._images.remove(request.digest)
                await self._record_done(
                    ImageRemoved(image_digest=request.digest, peer_uid=peer.uid)
                )
                return m.Done(request_id=request.request_id)
            case _:
                assert_never(request)

    async def _administer(
        self, peer: Peer, request: m.AdminDescribe | m.AdminList | m.AdminInspect
    ) -> m.TerminalReply:
        _require_operator(peer)
        match request:
            case m.AdminDescribe():
                return await self._describe(request.request_id)
            case m.AdminList():
                page, more = page_of(await self._environments.list(), skip=request.skip)
                return m.Environments(request_id=request.request_id, environments=page, more=more)
            case m.AdminInspect():
                info = await self._environments.inspect(request.environment_id)
                return m.Environments(
                    request_id=request.request_id, environments=(shortened(info),)
                )
            case _:
                assert_never(request)

    async def _describe(self, request_id: int) -> m.Described:
        description = await self._environments.describe()
        settings = self._settings
        own = own_items(self._audit, description.quarantined)
        return m.Described(
            request_id=request_id,
            version=self._version,
            mechanism=description.mechanism,
            deployment_mode=settings.deployment_mode,
            default_limits=settings.limits.defaults,
            ceilings=settings.limits.ceilings,
            default_image=default_image(settings.images, self._images.known_in_order()),
            image_aliases=settings.images.aliases,
            destinations=settings.egress.destinations,
            reserve_ready=description.reserve_ready,
            reserve_target=description.reserve_target,
            environments=description.environments,
            posture=(*description.posture, *own),
        )

    async def _refusal(
        self, peer: Peer, request: m.AnyRequest, error: PortError
    ) -> m.TerminalReply:
        request_id = request.request_id
        about = _about(request)
        match error:
            case ExecutionRejected():
                await self._record(
                    RequestRejected(
                        verb=_verb(request),
                        code=error.code,
                        violation=violation_of(error),
                        detail=error.detail,
                        peer_uid=peer.uid,
                        field=error.field,
                        environment_id=about[0],
                        tenant_id=about[1],
                        run_id=about[2],
                    )
                )
                return m.Rejected(
                    request_id=request_id,
                    code=error.code,
                    detail=error.detail,
                    field=error.field,
                )
            case ExecutionUnavailable():
                await self._record(
                    RequestUnserved(
                        verb=_verb(request),
                        code=error.code,
                        detail=error.detail,
                        peer_uid=peer.uid,
                        environment_id=about[0],
                        tenant_id=about[1],
                        run_id=about[2],
                    )
                )
                return m.Unavailable(
                    request_id=request_id,
                    code=error.code,
                    detail=error.detail,
                    retry_after_ms=_milliseconds(error.retry_after_seconds),
                )
            case SandboxEscapeSuspected():
                return m.EscapeSuspected(
                    request_id=request_id, code=error.code, detail=error.detail
                )
            case _:
                raise error

    def _admit(self) -> None:
        """New work, before anything is done. Raises ExecutionUnavailable(AUDIT_UNAVAILABLE)."""
        try:
            self._audit.admit()
        except AuditUnavailable:
            raise audit_unavailable() from None

    async def _record_done(self, event: AuditEvent) -> None:
        try:
            await self._audit.emit(event)
        except AuditUnavailable as error:
            raise ExecutionUnavailable(
                UnavailableCode.AUDIT_UNAVAILABLE, "it was done and could not be recorded"
            ) from error

    async def _record(self, event: AuditEvent) -> None:
        try:
            await self._audit.emit(event)
        except AuditUnavailable:
            # Nothing was done, so nothing goes unrecorded that changed anything.
            self._log.error("ignoring: a refusal could not be recorded: %s", event)


class _Measured:
    """Passes content on, and says at its end what it was (S1: both sides compute)."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    async def send(self, data: bytes) -> None:
        self._digest.update(data)
        self._size_bytes += len(data)
        await self._exchange.send_content(data)

    def end(self) -> m.ContentEnd:
        return m.ContentEnd(
            request_id=self._exchange.request_id,
            size_bytes=self._size_bytes,
            sha256=self._digest.hexdigest(),
        )


def _about(
    request: m.AnyRequest,
) -> tuple[EnvironmentId | None, TenantId | None, RunId | None]:
    """Which environment, tenant and run a request speaks of, in the peer's words."""
    if isinstance(request, m.Provision):
        return None, request.specification.tenant_id, request.specification.run_id
    if isinstance(request, m.AdminInspect):
        return request.environment_id, None, None
    handle: EnvironmentHandle | None = getattr(request, "handle", None)
    if handle is None:
        return None, None, None
    return handle.environment_id, handle.tenant_id, handle.run_id


def _workspace_used(
    peer: Peer, request: _WorkspaceRequest, code: WorkspaceCode | None
) -> WorkspaceUsed:
    """What is recorded of an operation on a handle that was found to be the peer's."""
    handle = request.handle
    return WorkspaceUsed(
        environment_id=handle.environment_id,
        tenant_id=handle.tenant_id,
        run_id=handle.run_id,
        lease_epoch=handle.lease_epoch,
        verb=_verb(request),
        peer_uid=peer.uid,
        code=code,
    )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _require_operator(peer: Peer) -> None:
    if peer.role is not PeerRole.ADMIN:
        raise ExecutionRejected(RejectedCode.NOT_AUTHORIZED, "an operator's request")


def _verb(request: m.AnyRequest) -> str:
    return str(request.__struct_config__.tag)
