"""Fetches an image by reference with skopeo, for `sbxctl image pull`.

It runs as the operator's own process with the operator's own credentials; the service has no
route to a registry and never learns of them. What comes back is an OCI archive, which is imported
and judged like any other.

Invariant: a tag is resolved to a digest first, and what is copied is asked for by that digest, so
what is printed and recorded is what was fetched.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from sbxctl.report import tell
from sbxd.oci.documents import DOCUMENT_BYTES_MAX

_REFERENCE = re.compile(r"[A-Za-z0-9/._][A-Za-z0-9/._:@+-]{0,480}", re.ASCII)
_REGISTRY = "docker://"
# Where skopeo can read from besides a registry: nothing there can be asked for by digest.
_LOCAL = tuple(
    f"{transport}:"
    for transport in (
        "containers-storage", "dir", "docker-archive", "docker-daemon", "oci", "oci-archive",
    )
)  # fmt: skip
_OCI = "application/vnd.oci."


class Pulled(NamedTuple):
    """An OCI archive, and where it is from: the reference, with the digest where there is one."""

    path: Path
    origin: str


class _Kind(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str = ""


def pull(reference: str, folder: Path) -> Pulled:
    """Fetch the image into `folder`. Raises click.ClickException, click.UsageError."""
    if _REFERENCE.fullmatch(reference.removeprefix(_REGISTRY)) is None:
        raise click.UsageError(f"{reference!r} is no reference of an image")
    tool = shutil.which("skopeo")
    if tool is None:
        raise click.ClickException(
            "skopeo is not installed: run `apt-get install skopeo`, or fetch the image elsewhere "
            "and import it with `sbxctl image import ARCHIVE`"
        )
    target = folder / "image.tar"
    if reference.startswith(_LOCAL):
        _copy(tool, [], reference, target)
        return Pulled(target, reference)
    name = reference.removeprefix(_REGISTRY)
    raw = _inspect(tool, _REGISTRY + name)
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    _, at, wanted = name.partition("@")
    if at and wanted != digest:
        raise click.ClickException(f"the registry answered {digest} for {name}")
    tell(f"{name} is {digest}", err=True)
    options = ["--preserve-digests"] if _is_oci(raw) else []
    _copy(tool, options, f"{_REGISTRY}{_repository(name)}@{digest}", target)
    return Pulled(target, name if at else f"{name}@{digest}")


def _repository(name: str) -> str:
    """The name without its tag and digest."""
    bare = name.partition("@")[0]
    parent, slash, last = bare.rpartition("/")
    return parent + slash + last.partition(":")[0]


def _is_oci(raw: bytes) -> bool:
    """Else the manifest is docker's own, which an OCI archive cannot hold: skopeo translates it,
    and the image's digest is that of the translation."""
    try:
        return msgspec.json.decode(raw, type=_Kind).media_type.startswith(_OCI)
    except (msgspec.DecodeError, RecursionError):
        return False


def _inspect(tool: str, source: str) -> bytes:
    done = subprocess.run(
        [tool, "inspect", "--raw", "--", source], stdout=subprocess.PIPE, check=False
    )
    if done.returncode != 0 or len(done.stdout) > DOCUMENT_BYTES_MAX:
        raise _failed()
    return done.stdout


def _copy(tool: str, options: list[str], source: str, target: Path) -> None:
    argv = [tool, "copy", "--override-os", "linux", *options, "--", source, f"oci-archive:{target}"]
    if subprocess.run(argv, stdout=sys.stderr, check=False).returncode != 0:
        raise _failed()


def _failed() -> click.ClickException:
    return click.ClickException(
        "skopeo failed; its own message is above. Log in with `skopeo login`; if a policy.json is "
        "missing, run `apt-get install golang-github-containers-common`"
    )
