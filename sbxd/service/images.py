"""The image store: a content-addressed OCI layout that the daemon alone writes.

An image is named by its manifest digest and by nothing else; a label is a note for people. Every
blob is hashed while it is written, and the launcher hashes it again while it unpacks it. The
same tar always gives the same digest: nothing in the manifest or the configuration depends on
when or where the import ran.

Invariants: `index.json` is replaced atomically and lists only images whose blobs are complete;
an import that fails or is cancelled leaves no blob that no image needs.
"""

import hashlib
import os
import platform
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

import msgspec
import trio

from sbxd.lifecycle.finalize import within_shield
from sbxd.mechanism.protocol import MechanismError
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    UnavailableCode,
)
from sbxd.wire.descriptions import ImageInfo

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LABEL = "sbxd.label"
_IMPORTED_AT = "sbxd.imported-at"
CLEANUP_SECONDS = 10.0
RETIRE_SECONDS = 60.0
_DOCUMENT_BYTES_MAX = 4 * 1024 * 1024


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An OCI content descriptor."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An OCI image manifest, as far as the store needs it."""

    schema_version: int
    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


class Index(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    schema_version: int
    media_type: str
    manifests: tuple[Descriptor, ...]


class Unpacker(Protocol):
    """The part of a mechanism that makes an image usable (`sbxd.mechanism.protocol`)."""

    async def unpack_image(self, image_digest: str) -> None: ...

    async def drop_image(self, image_digest: str) -> None: ...


class Users(Protocol):
    """Whatever stands on images (`sbxd.lifecycle.registry`)."""

    def in_use(self, digest: str) -> int:
        """How many environments stand on this image."""
        ...

    def changed(self) -> None:
        """What `known` answers has changed. Never blocks."""
        ...

    async def wait_free(self, digest: str) -> None:
        """Until nothing stands on a digest that is no longer known."""
        ...


class ImageStore:
    """Imports, lists and removes images below one directory.

    directory: owned by the daemon. aliases: name to digest, from the configuration. users: who
    stands on the images. limiter: admits the store's blocking file work.
    """

    def __init__(
        self,
        directory: Path,
        unpacker: Unpacker,
        *,
        aliases: dict[str, str],
        users: Users,
        limiter: trio.CapacityLimiter,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._directory = directory
        self._blobs = directory / "blobs" / "sha256"
        self._unpacker = unpacker
        self._aliases = aliases
        self._users = users
        self._limiter = limiter
        self._now = now
        self._change = trio.Lock()
        self._unusable: set[str] = set()  # listed, but the mechanism could not unpack it
        self._leaving: set[str] = set()  # being removed
        self._index = Index(schema_version=2, media_type=_INDEX_TYPE, manifests=())

    async def open(self) -> tuple[str, ...]:
        """Read the index, verify each manifest, and make every alias' image usable.

        Returns the problems found (an alias without its image, a damaged manifest), for the log
        and for `doctor`; they make those images unknown, not the service unusable. What a killed
        import left is removed, unless there is damage that those blobs might mend.
        """
        await self._run(self._make_layout)
        problems = [*await self._run(self._read_index)]
        if not problems:
            await self._run(self._collect)
        for digest in sorted(self.known()):
            try:
                await self._unpacker.unpack_image(digest)
            except MechanismError as problem:
                problems.append(f"image {digest} is ignored: it does not unpack ({problem})")
                self._unusable.add(digest)
        listed = {entry.digest for entry in self._index.manifests}
        for name, digest in sorted(self._aliases.items()):
            if digest not in listed:
                problems.append(
                    f"image alias {name!r} names {digest}, which is not in the store: "
                    "import it with `sbxctl image import`"
                )
        return tuple(problems)

    def known(self) -> frozenset[str]:
        """The digests that a specification may name."""
        listed = frozenset(entry.digest for entry in self._index.manifests)
        return listed - self._unusable - self._leaving

    async def import_tar(
        self,
        size_bytes: int,
        chunks: AsyncIterator[bytes],
        expected_digest: str | None,
        label: str,
    ) -> ImageInfo:
        """Store one root file system (an uncompressed tar of exactly size_bytes) and unpack it.

        Raises ExecutionRejected (PROTOCOL for a short or long upload, UNKNOWN_IMAGE for another
        digest than expected) and ExecutionUnavailable (SETUP_FAILED) when it does not unpack.
        Cancellation: the partial blob is removed; the index is unchanged.
        """
        partial = self._directory / "ingress" / f"{os.urandom(8).hex()}.partial"
        try:
            layer = await self._receive(partial, size_bytes, chunks)
            async with self._change:
                return await self._admit(partial, layer, expected_digest, label)
        finally:
            await within_shield(CLEANUP_SECONDS, lambda: self._run(_unlink_quietly, partial))

    async def list(self) -> tuple[ImageInfo, ...]:
        return tuple([await self._run(self._info, entry) for entry in self._index.manifests])

    async def remove(self, digest: str) -> None:
        """Forget an image. Raises ExecutionRejected while an environment or an alias uses it."""
        async with self._change:
            entry = next((e for e in self._index.manifests if e.digest == digest), None)
            if entry is None:
                raise ExecutionRejected(
                    RejectedCode.UNKNOWN_IMAGE, f"{digest} is not in the store", field="digest"
                )
            users = self._users.in_use(digest)
            if users:
                raise _busy(f"{digest} is used by {users} live environments")
            names = self._names(digest)
            if names:
                raise _busy(
                    f"the configuration's alias {names[0]!r} names {digest}: remove it there first"
                )
            await self._retire(digest)
            await self._run(
                self._replace_index, [e for e in self._index.manifests if e.digest != digest]
            )
            self._leaving.discard(digest)
            await self._run(self._collect)

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
        finally:
            if not gone:
                self._leaving.discard(digest)
                self._users.changed()
        if not gone:
            raise _busy(f"what stood on {digest} is not gone yet: try again")

    # --- receiving ----------------------------------------------------------------------------

    async def _receive(
        self, partial: Path, size_bytes: int, chunks: AsyncIterator[bytes]
    ) -> Descriptor:
        digest = hashlib.sha256()
        received = 0
        file = await self._run(_create_exclusive, partial)
        try:
            async for chunk in chunks:
                received += len(chunk)
                if received > size_bytes:
                    break
                await self._run(_append, file, chunk, digest)
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
            media_type=_LAYER_TYPE, digest=f"sha256:{digest.hexdigest()}", size=size_bytes
        )

    async def _admit(
        self, partial: Path, layer: Descriptor, expected_digest: str | None, label: str
    ) -> ImageInfo:
        config_bytes = _canonical(
            {
                "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [layer.digest]},
            }
        )
        config = Descriptor(
            media_type=_CONFIG_TYPE, digest=_digest(config_bytes), size=len(config_bytes)
        )
        manifest_bytes = _canonical(
            Manifest(schema_version=2, media_type=_MANIFEST_TYPE, config=config, layers=(layer,))
        )
        digest = _digest(manifest_bytes)
        if expected_digest is not None and expected_digest != digest:
            raise ExecutionRejected(
                RejectedCode.UNKNOWN_IMAGE,
                f"the image's digest is {digest}, not {expected_digest}",
                field="expected_digest",
            )
        existing = next((e for e in self._index.manifests if e.digest == digest), None)
        if existing is None:
            await self._run(self._commit, partial, layer, config_bytes, manifest_bytes)
        entry = Descriptor(
            media_type=_MANIFEST_TYPE,
            digest=digest,
            size=len(manifest_bytes),
            annotations={_LABEL: label, _IMPORTED_AT: self._now().isoformat()},
        )
        try:
            await self._unpacker.unpack_image(digest)
        except (MechanismError, trio.Cancelled) as problem:
            if existing is None:
                await within_shield(CLEANUP_SECONDS, lambda: self._run(self._collect))
            if isinstance(problem, MechanismError):
                raise ExecutionUnavailable(
                    UnavailableCode.SETUP_FAILED, f"the image does not unpack: {problem}"
                ) from problem
            raise
        self._unusable.discard(digest)
        others = [e for e in self._index.manifests if e.digest != digest]
        await self._run(self._replace_index, [*others, entry])
        self._unusable.discard(digest)
        self._users.changed()
        return await self._run(self._info, entry)

    # --- blocking parts, each run in a thread -------------------------------------------------

    async def _run(self, call: Callable[[Unpack[_Args]], _T], *args: *_Args) -> _T:
        return await trio.to_thread.run_sync(call, *args, limiter=self._limiter)

    def _make_layout(self) -> None:
        self._blobs.mkdir(parents=True, exist_ok=True)
        (self._directory / "ingress").mkdir(exist_ok=True)
        for leftover in (
            *(self._directory / "ingress").iterdir(),
            *self._directory.glob(".index.json.*"),
        ):
            leftover.unlink()
        layout = self._directory / "oci-layout"
        if not layout.exists():
            _write_atomically(layout, b'{"imageLayoutVersion":"1.0.0"}')

    def _read_index(self) -> Sequence[str]:
        path = self._directory / "index.json"
        if not path.exists():
            return []
        try:
            index = msgspec.json.decode(path.read_bytes(), type=Index)
        except (msgspec.DecodeError, UnicodeDecodeError) as damage:
            return [
                f"the store's index is damaged, so no image is known ({damage}): "
                "restore it, or import the images again"
            ]
        problems, good = [], []
        for entry in index.manifests:
            problem = self._damage(entry)
            if problem is None:
                good.append(entry)
            else:
                problems.append(f"image {entry.digest} is ignored: {problem}")
        self._index = Index(schema_version=2, media_type=_INDEX_TYPE, manifests=tuple(good))
        return problems

    def _damage(self, entry: Descriptor) -> str | None:
        try:
            manifest = self._manifest(entry)
        except (OSError, ValueError) as problem:
            return f"its manifest cannot be read ({type(problem).__name__})"
        for blob in (manifest.config, *manifest.layers):
            path = self._blob(blob.digest)
            if not path.is_file() or path.stat().st_size != blob.size:
                return f"its blob {blob.digest} is missing or has another size"
        return None

    def _manifest(self, entry: Descriptor) -> Manifest:
        path = self._blob(entry.digest)
        if path.stat().st_size > _DOCUMENT_BYTES_MAX:
            raise ValueError("the manifest is too large")
        raw = path.read_bytes()
        if _digest(raw) != entry.digest:
            raise ValueError("the manifest's digest is another")
        return msgspec.json.decode(raw, type=Manifest)

    def _commit(
        self, partial: Path, layer: Descriptor, config_bytes: bytes, manifest_bytes: bytes
    ) -> None:
        os.rename(partial, self._blob(layer.digest))
        _write_atomically(self._blob(_digest(config_bytes)), config_bytes)
        _write_atomically(self._blob(_digest(manifest_bytes)), manifest_bytes)
        _fsync_directory(self._blobs)

    def _replace_index(self, entries: Sequence[Descriptor]) -> None:
        index = Index(schema_version=2, media_type=_INDEX_TYPE, manifests=tuple(entries))
        _write_atomically(self._directory / "index.json", _canonical(index))
        _fsync_directory(self._directory)
        self._index = index

    def _collect(self) -> None:
        """Remove every blob that no listed image needs."""
        needed = set()
        for entry in self._index.manifests:
            manifest = self._manifest(entry)
            needed |= {entry.digest, manifest.config.digest}
            needed |= {layer.digest for layer in manifest.layers}
        for blob in self._blobs.iterdir():
            if f"sha256:{blob.name}" not in needed:
                blob.unlink()

    def _info(self, entry: Descriptor) -> ImageInfo:
        manifest = self._manifest(entry)
        return ImageInfo(
            digest=entry.digest,
            label=entry.annotations.get(_LABEL, ""),
            aliases=self._names(entry.digest),
            size_bytes=sum(layer.size for layer in manifest.layers),
            imported_at=datetime.fromisoformat(entry.annotations[_IMPORTED_AT]),
            in_use=self._users.in_use(entry.digest),
        )

    def _names(self, digest: str) -> tuple[str, ...]:
        return tuple(sorted(name for name, target in self._aliases.items() if target == digest))

    def _blob(self, digest: str) -> Path:
        algorithm, _, value = digest.partition(":")
        if algorithm != "sha256" or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            raise ValueError("not a sha256 digest")
        return self._blobs / value


def _busy(detail: str) -> ExecutionRejected:
    return ExecutionRejected(RejectedCode.ENVIRONMENT_BUSY, detail, field="digest")


def _digest(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def _canonical(document: object) -> bytes:
    return msgspec.json.encode(document, order="sorted")


def _create_exclusive(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _append(file: int, chunk: bytes, digest: _Hash) -> None:
    digest.update(chunk)
    view = memoryview(chunk)
    while view:
        view = view[os.write(file, view) :]


def _write_atomically(path: Path, raw: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    file = _create_exclusive(partial)
    try:
        _append(file, raw, hashlib.sha256())
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(partial, path)


def _fsync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _unlink_quietly(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
