"""The image store: a content-addressed OCI layout that the daemon alone writes.

An image is named by its manifest digest and by nothing else; a label is a note for people. Every
blob is hashed while it is written, and the launcher hashes it again while it unpacks it. What is
imported is a root file system, whose manifest is made here from nothing but its bytes (the same
tar always gives the same digest), or an archive of images, whose manifest is kept as it is.

Invariants: an import that fails or is cancelled leaves no blob that no image needs, and nothing
unpacked that nobody will remove; nobody is given an image that is being removed.

Concurrency: whoever imports or removes an image has its turn (`_turn`), so that two never work on
one digest, while other images come and go beside it. Blobs and the index are changed under one lock
that is held for file work alone, never while an image is unpacked or waited for; what was committed
and is not listed yet is `_pending`, which no collection removes.
"""

import errno
import hashlib
import os
import platform
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

import trio

from sbxd.lifecycle.finalize import BudgetSpent, within_shield
from sbxd.mechanism.protocol import MechanismError
from sbxd.oci import media
from sbxd.oci.documents import Descriptor, InvalidImage, Manifest
from sbxd.policy.images import default_image
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    UnavailableCode,
)
from sbxd.service.image_archive import Archive, Taken
from sbxd.service.image_blobs import (
    BlobStore,
    canonical,
    create_exclusive,
    digest_of,
    write_all,
)
from sbxd.settings import ImageSettings
from sbxd.wire.descriptions import ImageHold, ImageInfo
from sbxd.wire.messages import ImageFormat, ImageImport

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_LABEL = "sbxd.label"
_IMPORTED_AT = "sbxd.imported-at"
_UPLOAD = "upload"
_DETAIL_MAX = 500
_UNPACK_STEP = "image_unpack"
_WRONG_BYTES = 74  # EBADMSG: a blob's digest is another
CLEANUP_SECONDS = 10.0
RETIRE_SECONDS = 60.0
UNPACKINGS_MAX = 2  # imports that are unpacked at a time: each may take a GiB of memory for it


class Unpacker(Protocol):
    """The part of a mechanism that makes an image usable (`sbxd.mechanism.protocol`)."""

    async def unpack_image(self, image_digest: str) -> None: ...

    async def drop_image(self, image_digest: str) -> None: ...


class Users(Protocol):
    """Whatever stands on images (`sbxd.lifecycle.registry`)."""

    def in_use(self, digest: str) -> int:
        """How many environments stand on this image."""
        ...

    def reserved(self, digest: str) -> int:
        """How many slots of the reserve stand on this image."""
        ...

    def changed(self) -> None:
        """What `known` answers has changed. Never blocks."""
        ...

    async def wait_free(self, digest: str) -> None:
        """Until nothing stands on a digest that is no longer known."""
        ...


class ImageStore:
    """Imports, lists and removes images below one directory.

    directory: owned by the daemon. settings: the names of digests, and which is the default.
    users: who stands on the images. limiter: admits the store's blocking file work.
    """

    def __init__(
        self,
        directory: Path,
        unpacker: Unpacker,
        *,
        settings: ImageSettings,
        users: Users,
        limiter: trio.CapacityLimiter,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._blobs = BlobStore(directory)
        self._unpacker = unpacker
        self._settings = settings
        self._aliases = settings.aliases
        self._users = users
        self._limiter = limiter
        self._now = now
        self._change = trio.Lock()
        self._unpackings = trio.CapacityLimiter(UNPACKINGS_MAX)
        self._turns: dict[str, trio.Lock] = {}  # of every digest that somebody works on
        self._pending: dict[str, frozenset[str]] = {}  # being imported: its blobs, by digest
        self._unusable: set[str] = set()  # listed, but the mechanism could not unpack it
        self._leaving: set[str] = set()  # being removed

    async def open(self) -> tuple[str, ...]:
        """Read the index, verify each manifest, and make every listed image usable.

        Returns the problems found (an alias without its image, a damaged manifest), for the log
        and for `doctor`; they make those images unknown, not the service unusable. What a killed
        import left is removed, unless there is damage that those blobs might mend.
        """
        await self._run(self._blobs.make_layout)
        problems = [*await self._run(self._blobs.read_index)]
        if not problems:
            await self._run(self._blobs.collect, ())
        await self._drop_doubtful()
        for digest in sorted(self.known()):
            try:
                await self._unpacker.unpack_image(digest)
            except MechanismError as problem:
                problems.append(f"image {digest} is ignored: it does not unpack ({problem})")
                self._unusable.add(digest)
        listed = {entry.digest for entry in self._blobs.entries}
        for name, digest in sorted(self._aliases.items()):
            if digest not in listed:
                problems.append(
                    f"image alias {name!r} names {digest}, which is not in the store: "
                    "import it with `sbxctl image import`"
                )
        return tuple(problems)

    def known(self) -> frozenset[str]:
        """The digests that a specification may name."""
        return frozenset(self.known_in_order())

    def known_in_order(self) -> tuple[str, ...]:
        """The same, in the order of import."""
        left_out = self._unusable | self._leaving
        return tuple(e.digest for e in self._blobs.entries if e.digest not in left_out)

    async def import_image(self, request: ImageImport, chunks: AsyncIterator[bytes]) -> ImageInfo:
        """Store one image (an uncompressed tar of exactly request.size_bytes) and unpack it.

        Raises ExecutionRejected (PROTOCOL for a short or long upload, INVALID_IMAGE for what is
        no image or a hostile one, UNKNOWN_IMAGE for another digest than expected) and
        ExecutionUnavailable (CAPACITY when the disk is too full for it, SETUP_FAILED when it does
        not unpack for another reason than what it is).
        Cancellation: what was received is removed; the index is unchanged.
        """
        # What an archive is and what is taken out of it lie side by side for a while.
        times = 1 if request.format is ImageFormat.ROOTFS else 2
        try:
            folder = await self._run(self._blobs.open_ingress, request.size_bytes * times)
            return await self._import(folder, request, chunks)
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ExecutionUnavailable(
                UnavailableCode.CAPACITY,
                "the image store's disk has no room for this image: see `sbxctl image prune`",
            ) from problem

    async def _import(
        self, folder: Path, request: ImageImport, chunks: AsyncIterator[bytes]
    ) -> ImageInfo:
        try:
            layer = await self._receive(folder / _UPLOAD, request.size_bytes, chunks)
            try:
                if request.format is ImageFormat.ROOTFS:
                    taken = await self._run(_wrapped, folder, layer)
                else:
                    taken = await self._run(_taken, folder, request.reference)
            except InvalidImage as problem:
                raise _invalid(str(problem)) from problem
            digest = digest_of(taken.manifest_raw)
            if request.expected_digest not in (None, digest):
                raise ExecutionRejected(
                    RejectedCode.UNKNOWN_IMAGE,
                    f"the image's digest is {digest}, not {request.expected_digest}",
                    field="expected_digest",
                )
            async with self._turn(digest):
                return await self._admit(folder, taken, digest, request.label)
        finally:
            await within_shield(CLEANUP_SECONDS, lambda: self._run(_remove_tree, folder))

    async def list(self) -> tuple[ImageInfo, ...]:
        """Every listed image, in the order of import."""
        await trio.lowlevel.checkpoint()
        return tuple(self._info(entry) for entry in self._blobs.entries)

    async def remove(self, digest: str) -> None:
        """Forget an image and remove what only it needs.

        Raises ExecutionRejected: UNKNOWN_IMAGE; IMAGE_IN_USE while an environment or an alias
        uses it; ExecutionUnavailable when the launcher cannot remove it, which leaves it known.
        A slot of the reserve gives way.
        """
        async with self._turn(digest):
            if not any(entry.digest == digest for entry in self._blobs.entries):
                raise ExecutionRejected(
                    RejectedCode.UNKNOWN_IMAGE, f"{digest} is not in the store", field="digest"
                )
            users = self._users.in_use(digest)
            if users:
                raise _in_use(f"{digest} is used by {users} live environments")
            names = self._names(digest)
            if names:
                raise _in_use(
                    f"the configuration's alias {names[0]!r} names {digest}: remove it there first"
                )
            await self._retire(digest)
            async with self._change:
                others = [each for each in self._blobs.entries if each.digest != digest]
                await self._run(self._blobs.replace_index, others)
                self._leaving.discard(digest)
                await self._collect()

    async def _retire(self, digest: str) -> None:
        """Nobody gets the image any more; then it goes, once nobody has it. Undone on failure."""
        self._leaving.add(digest)
        self._users.changed()
        gone = False
        try:
            with trio.move_on_after(RETIRE_SECONDS):
                await self._users.wait_free(digest)
                await self._unpacker.drop_image(digest)
                gone = True
        except MechanismError as problem:
            raise ExecutionUnavailable(
                UnavailableCode.SETUP_FAILED, f"the image could not be removed: {problem}"
            ) from problem
        finally:
            if not gone:
                self._leaving.discard(digest)
                self._users.changed()
        if not gone:
            raise _in_use(f"what stood on {digest} is not gone yet: try again")

    # --- importing ----------------------------------------------------------------------------

    async def _receive(
        self, upload: Path, size_bytes: int, chunks: AsyncIterator[bytes]
    ) -> Descriptor:
        digest = hashlib.sha256()

        def append(chunk: bytes) -> None:
            digest.update(chunk)
            write_all(file, chunk)

        received = 0
        file = await self._run(create_exclusive, upload)
        try:
            async for chunk in chunks:
                received += len(chunk)
                if received > size_bytes:
                    break
                await self._run(append, chunk)
            if received != size_bytes:
                raise ExecutionRejected(
                    RejectedCode.PROTOCOL,
                    f"the upload has {received} bytes and announced {size_bytes}",
                    field="size_bytes",
                )
            await self._run(os.fsync, file)
        finally:
            os.close(file)
        return Descriptor(
            media_type=media.LAYER, digest=f"sha256:{digest.hexdigest()}", size=size_bytes
        )

    async def _admit(self, folder: Path, taken: Taken, digest: str, label: str) -> ImageInfo:
        entry = Descriptor(
            media_type=taken.manifest.media_type or media.MANIFEST,
            digest=digest,
            size=len(taken.manifest_raw),
            annotations={_LABEL: label, _IMPORTED_AT: self._now().isoformat()},
        )
        is_new = all(each.digest != digest for each in self._blobs.entries)
        admitted = False
        try:
            if is_new or digest in self._unusable:  # then this may mend its blobs
                async with self._change:
                    blobs = {f"sha256:{name}" for name in taken.blobs}
                    self._pending[digest] = frozenset({digest, *blobs})
                    await self._run(self._blobs.commit, folder, taken.blobs, taken.manifest_raw)
                    await self._run(self._blobs.begin_unpacking, digest)
            await self._unpack(digest)
            async with self._change:
                others = [each for each in self._blobs.entries if each.digest != digest]
                await self._run(self._blobs.replace_index, [*others, entry])
                admitted = True
        finally:
            self._pending.pop(digest, None)
            if is_new and not admitted:
                with suppress(BudgetSpent):  # what was begun is written down
                    await within_shield(CLEANUP_SECONDS, lambda: self._undo(digest))
        await self._run(self._blobs.end_unpacking, digest)
        self._unusable.discard(digest)
        self._users.changed()
        return self._info(entry)

    async def _unpack(self, digest: str) -> None:
        try:
            async with self._unpackings:
                await self._unpacker.unpack_image(digest)
        except MechanismError as problem:
            if problem.step == _UNPACK_STEP and problem.errno in (0, _WRONG_BYTES):
                raise _invalid(problem.detail or "it does not unpack") from problem
            raise ExecutionUnavailable(
                UnavailableCode.SETUP_FAILED, f"the image does not unpack: {problem}"
            ) from problem

    async def _undo(self, digest: str) -> None:
        """What an import in its turn has begun."""
        async with self._change:
            await self._collect()
        await self._drop_unlisted(digest)
        await self._drop_doubtful()

    async def _collect(self) -> None:
        """In a change: remove the blobs that no image needs, listed or under way."""
        await self._run(self._blobs.collect, frozenset[str]().union(*self._pending.values()))

    async def _drop_doubtful(self) -> None:
        """Remove what is unpacked and not listed, but what somebody works on."""
        for digest in await self._run(self._blobs.unpacked_in_doubt):
            if digest not in self._turns:
                async with self._turn(digest):
                    await self._drop_unlisted(digest)

    async def _drop_unlisted(self, digest: str) -> None:
        """In its turn. What cannot go yet (its unpacking may still be under way) is tried again at
        the next failure and at the next start."""
        if digest in await self._run(self._blobs.unpacked_in_doubt):
            with suppress(MechanismError):
                await self._unpacker.drop_image(digest)
                await self._run(self._blobs.end_unpacking, digest)

    # --- parts --------------------------------------------------------------------------------

    @asynccontextmanager
    async def _turn(self, digest: str) -> AsyncIterator[None]:
        """Nobody else imports or removes this image meanwhile."""
        turn = self._turns.setdefault(digest, trio.Lock())
        try:
            async with turn:
                yield
        finally:
            if not turn.locked():  # else it is the next one's
                self._turns.pop(digest, None)

    async def _run(self, call: Callable[[Unpack[_Args]], _T], *args: *_Args) -> _T:
        return await trio.to_thread.run_sync(call, *args, limiter=self._limiter)

    def _info(self, entry: Descriptor) -> ImageInfo:
        contents = self._blobs.contents(entry.digest)
        return ImageInfo(
            digest=entry.digest,
            label=entry.annotations.get(_LABEL, ""),
            aliases=self._names(entry.digest),
            size_bytes=contents.size_bytes,
            unshared_bytes=self._blobs.unshared_bytes(entry.digest),
            layers=contents.layers,
            held_by=self._holds(entry.digest),
            imported_at=datetime.fromisoformat(entry.annotations[_IMPORTED_AT]),
            in_use=self._users.in_use(entry.digest),
        )

    def _holds(self, digest: str) -> tuple[ImageHold, ...]:
        """Why a prune keeps the image."""
        found = []
        if self._names(digest):
            found.append(ImageHold.ALIAS)
        if self._users.in_use(digest):
            found.append(ImageHold.ENVIRONMENT)
        if self._users.reserved(digest):
            found.append(ImageHold.RESERVE)
        if digest == default_image(self._settings, self.known_in_order()):
            found.append(ImageHold.DEFAULT)
        return tuple(found)

    def _names(self, digest: str) -> tuple[str, ...]:
        return tuple(sorted(name for name, target in self._aliases.items() if target == digest))


def _in_use(detail: str) -> ExecutionRejected:
    return ExecutionRejected(RejectedCode.IMAGE_IN_USE, detail, field="digest")


def _invalid(detail: str) -> ExecutionRejected:
    """The words may be the image's own: no control character of theirs reaches a terminal."""
    plain = "".join(c if c.isprintable() else "?" for c in detail)[:_DETAIL_MAX]
    return ExecutionRejected(RejectedCode.INVALID_IMAGE, plain)


def _architecture() -> str:
    return media.ARCHITECTURES.get(platform.machine(), platform.machine())


def _taken(folder: Path, reference: str | None) -> Taken:
    with (folder / _UPLOAD).open("rb") as file:
        return Archive(file).take(folder, _architecture(), reference)


def _wrapped(folder: Path, layer: Descriptor) -> Taken:
    """An image whose one layer is the upload."""
    config_raw = canonical(
        {
            "architecture": _architecture(),
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest]},
        }
    )
    config = Descriptor(media_type=media.CONFIG, digest=digest_of(config_raw), size=len(config_raw))
    manifest = Manifest(schema_version=2, media_type=media.MANIFEST, config=config, layers=(layer,))
    config_name, layer_name = (each.digest.removeprefix("sha256:") for each in (config, layer))
    with (folder / config_name).open("xb") as file:
        file.write(config_raw)
        file.flush()
        os.fsync(file.fileno())
    os.rename(folder / _UPLOAD, folder / layer_name)
    return Taken(canonical(manifest), manifest, (config_name, layer_name))


def _remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
