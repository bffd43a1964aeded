"""Artifacts that survive: bytes in the tree, what is known of them in the metadata.

A put is: a row that names the object (PENDING), the bytes into `incoming`, the digest compared,
the rename, the row acknowledged (STORED). Only then is the reference given out. A process that
dies at any step leaves a row that a sweep finds, and nothing below `objects` that is not whole.

Invariants: memory is flat, whatever the size; nothing is stored whose digest is not the sender's,
or that is larger than may be; what `open` yields was stored under that reference, to the last
byte, or ArtifactIntegrityError is raised before the last piece. Not an authorization boundary:
`sbxd.artifacts.service` is, and nothing else calls `open` (a gate holds it).
"""

import hashlib
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TypeVar, final

import anyio
import anyio.to_thread
from msgspec import Struct

from sbxd.artifacts.identifiers import ArtifactIds
from sbxd.artifacts.records import Caps, Intent, MetadataStore, Usage
from sbxd.artifacts.retention import Retention, SharedClock, expiry
from sbxd.artifacts.tree import ArtifactTree, ObjectMissing
from sbxd.policy.archives import ArchiveScanner, refused_archives
from sbxd.policy.attachment import is_media_type
from sbxd.policy.content_flags import REFUSED_AS_TEXT, ContentScanner, is_scanned
from sbxd.policy.storage_key import storage_key
from sbxd.port.artifact import (
    FILENAME_CHARACTERS_MAX,
    ArtifactId,
    ArtifactIntegrityError,
    ArtifactMetadata,
    ArtifactNotFound,
    ArtifactOrigin,
    ArtifactRef,
    ArtifactRejected,
    ArtifactRejectedCode,
    ArtifactUnavailable,
    ArtifactUnavailableCode,
    ContentDigest,
    ContentFlag,
    ContentRule,
    TrustLevel,
)
from sbxd.port.ids import IDENTIFIER_PATTERN, RunId, TenantId

ResultT = TypeVar("ResultT")

# What is gathered before it is handed to a thread, and what is read at once.
PIECE_BYTES = 1024 * 1024
FILES_AT_ONCE = 8
UNDO_SECONDS = 10

# What the sender says of its bytes; asked when the stream has ended.
Expected = Callable[[], ContentDigest]

# Out of a sandbox or out of a model, and on its way to a person: the operator says what may be an
# archive. What a person uploaded, or a command printed, is stored as it is and says what it is.
_JUDGED_AS_ARCHIVE = frozenset({ArtifactOrigin.SANDBOX_EXPORT, ArtifactOrigin.MODEL_OUTPUT})
_WITHOUT_RUN = frozenset({ArtifactOrigin.UPLOAD, ArtifactOrigin.KNOWLEDGE_SOURCE})


class Draft(Struct, frozen=True, kw_only=True):
    """An artifact before its bytes. The first three are the pipeline's, the rest the caller's."""

    tenant_id: TenantId
    run_id: RunId | None
    origin: ArtifactOrigin
    filename: str
    media_type: str
    trust: TrustLevel


@final
class DurableArtifactStore:
    """Implements `sbxd.port.artifact.ArtifactStore`.

    now: the clock that says when an artifact begins and ends. archives: the media types, bare and
    in lower case, as which an export may be an archive.
    """

    def __init__(
        self,
        tree: ArtifactTree,
        metadata: MetadataStore,
        *,
        retention: Retention,
        ids: ArtifactIds,
        now: SharedClock,
        archives: frozenset[str] = frozenset(),
    ) -> None:
        self._archives = archives
        self._tree = tree
        self._metadata = metadata
        self._retention = retention
        self._ids = ids
        self._now = now
        self._files = anyio.CapacityLimiter(FILES_AT_ONCE)
        self._caps = Caps(
            bytes_max=retention.tenant_bytes_max, count_max=retention.tenant_artifacts_max
        )

    async def put(self, stream: AsyncIterator[bytes], metadata: ArtifactMetadata) -> ArtifactRef:
        """Store what the sender has measured: size_bytes and sha256 are compared, expires_at is
        taken as it is. Raises and leaves behind what `receive` does."""
        said = ContentDigest(sha256=metadata.sha256, size_bytes=metadata.size_bytes)
        draft = Draft(
            tenant_id=metadata.tenant_id,
            run_id=metadata.run_id,
            origin=metadata.origin,
            filename=metadata.filename,
            media_type=metadata.media_type,
            trust=metadata.trust,
        )
        begun_at = await self._now()
        intent = self._intent(draft, begun_at, metadata.created_at, metadata.expires_at)
        return await self._receive(stream, intent, lambda: said, ContentRule.ANY)

    async def receive(
        self,
        stream: AsyncIterator[bytes],
        draft: Draft,
        *,
        expected: Expected | None = None,
        rule: ContentRule = ContentRule.ANY,
    ) -> ArtifactRef:
        """Store a stream whose digest is known at its end (expected), or to nobody but us (None).

        Returns: the reference, once bytes and metadata are on disk.

        Raises:
            ArtifactRejected: nothing is stored. TOO_LARGE, TENANT_CAP, NOT_TEXT (by `rule`),
                ARCHIVE (an export whose type is not listed for what it is), INVALID_NAME,
                INVALID_MEDIA_TYPE, INVALID_IDENTIFIER.
            ArtifactIntegrityError: the bytes are not what `expected` says; nothing is stored.
            ArtifactUnavailable: nothing is stored that anybody was told of.
            Whatever the stream raises; nothing is stored.

        Cancellation: nothing is stored, unless the acknowledgment had come through already; what
        cannot be removed at once (10 s) is left to the sweep.
        """
        now = await self._now()
        intent = self._intent(draft, now, now, expiry(self._retention, draft.origin, now))
        return await self._receive(stream, intent, expected, rule)

    async def open(self, ref: ArtifactRef) -> "ObjectStream":
        """The bytes of an artifact, in pieces. The caller has authorised the tenant, and closes.

        Raises: ArtifactNotFound; ArtifactIntegrityError here or while iterating;
        ArtifactUnavailable here or while iterating.
        """
        for attempt in (1, 2):
            found = await self._metadata.find(ref.artifact_id, now=await self._now())
            if found is None:
                raise ArtifactNotFound
            known = found.metadata
            if (ref.sha256, ref.size_bytes) != (known.sha256, known.size_bytes):
                raise ArtifactIntegrityError("the reference is not of these bytes")
            key = storage_key(known.tenant_id, ref.artifact_id)
            try:
                object_fd, size = await self._in_thread(partial(self._tree.open_object, key))
            except ObjectMissing:
                if attempt == 1:
                    continue  # it may have ended and been swept since
                raise ArtifactIntegrityError("the bytes are gone") from None
            if size != known.size_bytes:
                os.close(object_fd)
                raise ArtifactIntegrityError("the bytes are fewer or more than were stored")
            return ObjectStream(self._tree, object_fd, ref, self._files)
        raise AssertionError

    def _intent(
        self,
        draft: Draft,
        begun_at: datetime,
        created_at: datetime,
        expires_at: datetime | None,
    ) -> Intent:
        _check(draft)
        return Intent(
            artifact_id=self._ids.new(),
            tenant_id=draft.tenant_id,
            run_id=draft.run_id,
            origin=draft.origin,
            filename=draft.filename,
            media_type=draft.media_type,
            trust=draft.trust,
            begun_at=begun_at,
            created_at=created_at,
            expires_at=expires_at,
        )

    async def _receive(
        self,
        stream: AsyncIterator[bytes],
        intent: Intent,
        expected: Expected | None,
        rule: ContentRule,
    ) -> ArtifactRef:
        key = storage_key(intent.tenant_id, intent.artifact_id)
        ref: ArtifactRef | None = None
        try:
            # Half of what a sweep waits: no put is alive when its row is taken for abandoned.
            with anyio.move_on_after(self._retention.abandoned_put_seconds / 2):
                usage = await self._metadata.intend(intent)
                ref = await self._stored(stream, intent, key, usage, expected, rule)
            if ref is None:
                raise ArtifactUnavailable(
                    ArtifactUnavailableCode.ABANDONED, "the stream did not end in time"
                )
        except BaseException as problem:
            await self._undo(intent.artifact_id, key, certain=_is_certain(problem))
            raise
        return ref

    async def _stored(
        self,
        stream: AsyncIterator[bytes],
        intent: Intent,
        key: str,
        usage: Usage,
        expected: Expected | None,
        rule: ContentRule,
    ) -> ArtifactRef:
        intake = _Intake(
            self._tree,
            rule,
            scanned=rule is ContentRule.TEXT or is_scanned(intent.media_type),
        )
        artifact_bytes_max = self._retention.artifact_bytes_max
        tenant_bytes_left = max(self._caps.bytes_max - usage.stored_bytes, 0)
        if usage.stored_count >= self._caps.count_max:
            raise _too_much_for_tenant()
        partial_fd = await self._in_thread(lambda: self._tree.begin(intent.artifact_id))
        try:
            gathered = bytearray()
            size = 0
            async for piece in stream:
                size += len(piece)
                if size > artifact_bytes_max:
                    raise ArtifactRejected(
                        ArtifactRejectedCode.TOO_LARGE,
                        f"an artifact holds {artifact_bytes_max} bytes at most",
                    )
                if size > tenant_bytes_left:
                    raise _too_much_for_tenant()
                gathered += piece
                if len(gathered) >= PIECE_BYTES:
                    whole, gathered = gathered, bytearray()
                    await self._in_thread(partial(intake.take, partial_fd, whole))
            await self._in_thread(partial(intake.take, partial_fd, gathered))
            digest, flags = intake.finish()
            self._judge_archive(intent, flags)
            if expected is not None and expected() != digest:
                raise ArtifactIntegrityError("the bytes that came are not the bytes that were sent")
            await self._in_thread(lambda: self._tree.commit(partial_fd, intent.artifact_id, key))
            await self._metadata.acknowledge(
                intent.artifact_id,
                size_bytes=digest.size_bytes,
                sha256=digest.sha256,
                flags=flags,
                caps=self._caps,
            )
        finally:
            # Not before: as long as it is open, no sweep takes the put for abandoned.
            os.close(partial_fd)
        return ArtifactRef(
            artifact_id=intent.artifact_id,
            sha256=digest.sha256,
            size_bytes=digest.size_bytes,
            media_type=intent.media_type,
        )

    def _judge_archive(self, intent: Intent, flags: frozenset[ContentFlag]) -> None:
        if intent.origin not in _JUDGED_AS_ARCHIVE:
            return
        refused = refused_archives(flags, intent.media_type, self._archives)
        if refused:
            kinds = ", ".join(sorted(flag.removeprefix("ARCHIVE_") for flag in refused))
            raise ArtifactRejected(
                ArtifactRejectedCode.ARCHIVE,
                f"this is an archive ({kinds}), and this deployment does not take one as "
                f"{intent.media_type}: export the files one by one, or have the operator list the "
                "type in artifacts.archives",
            )

    async def _undo(self, artifact_id: ArtifactId, key: str, *, certain: bool) -> None:
        """Remove what a put that failed has begun. What fails here is the sweep's.

        certain: it cannot have been acknowledged, so its object goes before the metadata is
        asked: a database on the same full disk needs the room to take a record.
        """
        with anyio.move_on_after(UNDO_SECONDS, shield=True):
            with suppress(ArtifactUnavailable):
                # Of what was committed there is no partial any more.
                await self._in_thread(lambda: self._tree.discard(artifact_id))
                if certain:
                    await self._in_thread(lambda: self._tree.remove(key))
            with suppress(ArtifactUnavailable):
                if await self._metadata.abandon(artifact_id):
                    await self._in_thread(lambda: self._tree.remove(key))
                    await self._metadata.forget(artifact_id)

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await anyio.to_thread.run_sync(work, limiter=self._files)


@final
class ObjectStream:
    """The pieces of one object, in order; an async iterator with `aclose`.

    The digest is compared before the last piece is given out. Cancellation: the stream may be
    iterated further, or closed.
    """

    def __init__(
        self, tree: ArtifactTree, object_fd: int, ref: ArtifactRef, limiter: anyio.CapacityLimiter
    ) -> None:
        self._tree = tree
        self._file = os.fdopen(object_fd, "rb", buffering=0)
        self._ref = ref
        self._limiter = limiter
        self._hash = hashlib.sha256()
        self._offset = 0
        self._ended = False

    def __aiter__(self) -> "ObjectStream":
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        piece = await anyio.to_thread.run_sync(self._next, limiter=self._limiter)
        if self._offset == self._ref.size_bytes:
            await self.aclose()
            if not piece:
                raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Give the descriptor back. Idempotent."""
        self._ended = True
        self._file.close()

    def _next(self) -> bytes:
        left = self._ref.size_bytes - self._offset
        piece = self._tree.read(self._file.fileno(), self._offset, min(PIECE_BYTES, left))
        self._hash.update(piece)
        self._offset += len(piece)
        whole = self._offset == self._ref.size_bytes
        if (left and not piece) or (whole and self._hash.hexdigest() != self._ref.sha256):
            self._ended = True
            raise ArtifactIntegrityError("the bytes are not the bytes that were stored")
        return piece


@final
class _Intake:
    """Measures and writes, in a thread."""

    def __init__(self, tree: ArtifactTree, rule: ContentRule, *, scanned: bool) -> None:
        self._tree = tree
        self._rule = rule
        self._hash = hashlib.sha256()
        self._size = 0
        self._scanner = ContentScanner() if scanned else None
        self._archive = ArchiveScanner()

    def take(self, partial_fd: int, data: bytearray) -> None:
        self._size += len(data)
        self._hash.update(data)
        if self._scanner is not None:
            self._scanner.feed(bytes(data))
        self._archive.feed(data)
        self._tree.append(partial_fd, data)

    def finish(self) -> tuple[ContentDigest, frozenset[ContentFlag]]:
        flags = self._scanner.finish() if self._scanner is not None else frozenset()
        if self._rule is ContentRule.TEXT and flags & REFUSED_AS_TEXT:
            raise ArtifactRejected(
                ArtifactRejectedCode.NOT_TEXT,
                f"this is no text: {', '.join(sorted(flags & REFUSED_AS_TEXT))}",
            )
        digest = ContentDigest(sha256=self._hash.hexdigest(), size_bytes=self._size)
        return digest, flags | self._archive.finish()


def _is_certain(problem: BaseException) -> bool:
    """Whether a put that failed so was not acknowledged. A database that did not answer, and a
    cancellation, leave that open."""
    if isinstance(problem, ArtifactUnavailable):
        return problem.code is ArtifactUnavailableCode.NO_SPACE
    return isinstance(problem, ArtifactRejected | ArtifactIntegrityError)


def _check(draft: Draft) -> None:
    for name, value in (("tenant_id", draft.tenant_id), ("run_id", draft.run_id)):
        if value is not None and not re.match(IDENTIFIER_PATTERN, value):
            raise ArtifactRejected(ArtifactRejectedCode.INVALID_IDENTIFIER, f"not a {name}")
    if draft.run_id is None and draft.origin not in _WITHOUT_RUN:
        raise ArtifactRejected(
            ArtifactRejectedCode.INVALID_IDENTIFIER, f"{draft.origin} belongs to a run"
        )
    if len(draft.filename) > FILENAME_CHARACTERS_MAX:
        raise ArtifactRejected(
            ArtifactRejectedCode.INVALID_NAME,
            f"a filename has {FILENAME_CHARACTERS_MAX} characters at most",
        )
    if not is_media_type(draft.media_type):
        raise ArtifactRejected(ArtifactRejectedCode.INVALID_MEDIA_TYPE, "not a media type")


def _too_much_for_tenant() -> ArtifactRejected:
    return ArtifactRejected(ArtifactRejectedCode.TENANT_CAP, "the tenant holds as much as it may")
