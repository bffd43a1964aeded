"""Images for the unpacker's tests: layers entry by entry, and blobs that may lie."""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import msgspec
import zstandard

from sbxd.launcher import unpacker
from sbxd.launcher.kernel.seccomp import ProfileName, compile_profile, profile_text
from sbxd.oci import media
from sbxd.oci.media import Compression

PACK: Mapping[Compression, Callable[[bytes], bytes]] = {
    Compression.NONE: bytes,
    Compression.GZIP: lambda raw: gzip.compress(raw, mtime=0),
    Compression.ZSTD: lambda raw: zstandard.ZstdCompressor().compress(raw),
}
_TYPES = {
    Compression.NONE: media.LAYER,
    Compression.GZIP: f"{media.LAYER}+gzip",
    Compression.ZSTD: f"{media.LAYER}+zstd",
}


def sha256(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def put_blob(state: Path, raw: bytes, content: bytes | None = None) -> str:
    """Store a blob under the name of `raw`; `content` is what is really in it."""
    digest = sha256(raw)
    blob = state / "images" / "blobs" / "sha256" / digest.removeprefix("sha256:")
    blob.write_bytes(raw if content is None else content)
    return digest


def config_of(*layers: bytes) -> bytes:
    """The configuration of an image with these unpacked layers."""
    return config_text(*(sha256(layer) for layer in layers))


def config_text(*diff_ids: str, architecture: str = "amd64") -> bytes:
    """The configuration of an image whose unpacked layers have these digests."""
    return msgspec.json.encode(
        {
            "architecture": architecture,
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
    )


def descriptor(media_type: str, raw: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": sha256(raw), "size": len(raw)}


def put_image(
    state: Path, *layers: bytes, compression: Compression = Compression.NONE, config: bytes = b""
) -> str:
    """Store an image of these unpacked layers; its manifest digest."""
    return put_packed(
        state,
        *(PACK[compression](layer) for layer in layers),
        compression=compression,
        config=config or config_of(*layers),
    )


def put_packed(state: Path, *blobs: bytes, compression: Compression, config: bytes) -> str:
    """Store an image whose blobs are given as they are."""
    put_blob(state, config)
    for blob in blobs:
        put_blob(state, blob)
    manifest = {
        "schemaVersion": 2,
        "config": descriptor(media.CONFIG, config),
        "layers": [descriptor(_TYPES[compression], blob) for blob in blobs],
    }
    return put_blob(state, msgspec.json.encode(manifest))


def tar_of(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for member, content in entries:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **fields: int
) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = link
    member.mode = fields.get("mode", 0o644)
    member.uid = fields.get("uid", 0)
    member.gid = fields.get("gid", 0)
    member.mtime = fields.get("mtime", 1_000_000_000)
    return member


def rootfs(state: Path, digest: str) -> Path:
    return state / "unpacked" / digest.removeprefix("sha256:") / "rootfs"


@cache
def seccomp() -> bytes:
    """The filter of the process that unpacks."""
    return compile_profile(profile_text(ProfileName.UNPACKER)).bpf


def unpack(digest: str) -> None:
    """Have the image unpacked as the launcher does."""
    unpacker.unpack(digest, seccomp())
