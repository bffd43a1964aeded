"""Archives of images for tests: what honest tools write, and what nobody should."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sbxd.oci import media

Document = dict[str, object]


def digest(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def encode(document: object) -> bytes:
    return json.dumps(document).encode()


def descriptor(media_type: str, raw: bytes, **more: object) -> Document:
    return {"mediaType": media_type, "digest": digest(raw), "size": len(raw), **more}


def layer_of(text: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("etc/motd")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


def config_of(*layers: bytes, architecture: str) -> bytes:
    return encode(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {"Labels": {"kept": "yes"}, "Env": ["A=B"]},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]},
        }
    )


def tar_of(files: Mapping[str, bytes | tuple[bytes, str]]) -> bytes:
    """A tar; a pair of type and target is a link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, tuple):
                member.type, member.linkname = content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


@dataclass
class LayoutDraft:
    """An OCI layout that grows; what is added under a name may be anything."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    offered: list[Document] = field(default_factory=list)

    def blob(self, raw: bytes) -> bytes:
        self.blobs[f"blobs/sha256/{digest(raw).removeprefix('sha256:')}"] = raw
        return raw

    def image(
        self,
        *layers: bytes,
        architecture: str,
        layer_type: str = media.LAYER,
        unpacked: Sequence[bytes] = (),
        **more: object,
    ) -> bytes:
        """One image; its manifest, which nothing offers yet."""
        config = self.blob(config_of(*(unpacked or layers), architecture=architecture))
        manifest: Document = {
            "schemaVersion": 2,
            "mediaType": media.MANIFEST,
            "config": descriptor(media.CONFIG, config),
            "layers": [descriptor(layer_type, self.blob(layer)) for layer in layers],
            "annotations": {"org.opencontainers.image.source": "somewhere"},
            **more,
        }
        return self.blob(encode(manifest))

    def offer(self, raw: bytes, media_type: str = media.MANIFEST, **more: object) -> None:
        self.offered.append(descriptor(media_type, raw, **more))

    def files(self, **changed: object) -> dict[str, bytes]:
        index = {"schemaVersion": 2, "mediaType": media.INDEX, "manifests": self.offered}
        return {
            "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
            "index.json": encode({**index, **changed}),
            **self.blobs,
        }

    def tar(self) -> bytes:
        return tar_of(self.files())

    def write(self, folder: Path) -> Path:
        for name, raw in self.files().items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        return folder


def saved(*layers: bytes, architecture: str, tags: Sequence[str] = ("x:1",)) -> dict[str, bytes]:
    """What `docker save` writes, file by file."""
    config = config_of(*layers, architecture=architecture)
    name = f"{digest(config).removeprefix('sha256:')}.json"
    paths = [f"{number}/layer.tar" for number, _ in enumerate(layers)]
    manifest = [{"Config": name, "RepoTags": list(tags), "Layers": paths}]
    return {
        name: config,
        **dict(zip(paths, layers, strict=True)),
        "manifest.json": encode(manifest),
    }
