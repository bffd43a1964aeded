"""Have one image unpacked by a process that is confined like a steward (runs in a helper).

It is built by the steward's own steps (`sbxd.jail.steward_process`): a root that holds nothing but
the image's directory, namespaces of its own, an empty network, the user namespace of the image
block, four capabilities there, a seccomp allowlist, no stream of the launcher, and a scope of PID
1 with a limit on memory and on processes. It is looked at from outside before it is given a byte.

Invariants: the helper, the host's root, reads nothing that an image says. It opens the blobs that
it is asked for by digest, and hashes what it passes on; what is not what its name says fails the
image, whatever the process makes of it. What the process answers is matched whole against three
short forms. It dies with the helper.
"""

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from sbxd.jail.plan import IdBlock
from sbxd.jail.steward_alone import Intermediate
from sbxd.launcher.kernel import cgroup, hostpaths, image_layers, images, mounts, systemd, uids
from sbxd.launcher.kernel.image_stream import load_zstd
from sbxd.launcher.kernel.image_tar import room_of
from sbxd.launcher.requests import CgroupLimits
from sbxd.launcher.verify import Process, verify_process

HOSTNAME = "image"
MEMORY_BYTES_MAX = 1024**3  # what a layer says of itself may ask for more
PIDS_MAX = 4
SECONDS_MAX = 900
_LIMITS = CgroupLimits(cpu_millicores=1_024_000, memory_bytes=MEMORY_BYTES_MAX, pids_max=PIDS_MAX)
_SCOPE_SECONDS = 15.0
_CPU_WEIGHT = 100
_FREE_SHARE = 0.9  # of the file system's free space that one image may take
_CHUNK_BYTES = 256 * 1024
_DOCUMENTS = ("manifest", "configuration")

Serve = Callable[[int, int], int]


class Refused(ValueError):
    """What the process says against the image. The text is for people."""


class DigestMismatch(OSError):
    """The content of a blob is not what its name or the manifest says."""

    def __init__(self, what: str) -> None:
        super().__init__(74, f"the digest of the {what} is another")  # EBADMSG


def unpack(image_digest: str, seccomp: bytes) -> None:
    """Verify, extract and publish the image. Idempotent. seccomp: the filter of the process.

    Raises JailError, OSError (of which DigestMismatch), ValueError with the reason of a refusal.
    """
    images.publish(image_digest, partial(_fill, image_digest, seccomp))


def _fill(image_digest: str, seccomp: bytes, root: int) -> None:
    load_zstd()
    serve = partial(image_layers.serve, image_digest, room_of(root, _FREE_SHARE))
    blobs = hostpaths.open_blobs()
    try:
        with confined(root, seccomp, serve) as (channel, _):
            said = _feed(channel, blobs, image_digest)
    finally:
        os.close(blobs)
    _judge(said)


@contextmanager
def confined(root: int, seccomp: bytes, serve: Serve) -> Iterator[tuple[socket.socket, int]]:
    """Run `serve` in a confined process that has the directory `root`: its channel and its pid.

    It is killed and reaped when the block ends. Raises JailError, OSError.
    """
    ids = IdBlock(uids.IMAGE_BASE, (0,))
    lines = mounts.map_text([(0, uids.IMAGE_BASE, uids.IMAGE_BLOCK_SIZE)])
    name = hostpaths.image_scope_name(os.urandom(8).hex())
    with ExitStack() as held:
        intermediate = Intermediate(HOSTNAME, seccomp, serve, MEMORY_BYTES_MAX)
        held.callback(intermediate.end)
        anchor = mounts.start_holder(lines)
        held.callback(os.close, anchor.user_namespace)
        with ExitStack() as anchored:
            anchored.callback(anchor.end)
            leaf = _scope(name, anchor.pid)
            held.callback(os.close, leaf)
            mount = mounts.clone_tree(root)
            held.callback(os.close, mount)
            os.close(intermediate.copy(mount))
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            held.enter_context(ours)
            with theirs:
                intermediate.begin_steward(anchor.user_namespace, leaf, theirs.fileno())
            held.callback(intermediate.end_steward)
        intermediate.finish_steward()
        path = f"/{hostpaths.SLICE}/{name}"
        verify_process(intermediate.pid, ids, path, Process.STEWARD, lines)
        yield ours, intermediate.pid


def _scope(name: str, anchor: int) -> int:
    properties = systemd.scope_properties("image", anchor, _LIMITS, SECONDS_MAX)
    with systemd.connect() as manager:
        job = manager.start_scope(name, properties)
        manager.wait_job(job, time.monotonic() + _SCOPE_SECONDS)
        manager.set_cpu_weight(name, _CPU_WEIGHT)  # commands come first
    return cgroup.open_directory(f"{hostpaths.slice_directory()}/{name}")


def _feed(channel: socket.socket, blobs: int, image_digest: str) -> bytes:
    """Give it the blobs that it asks for; what it says in the end, b"" when it died."""
    for number in range(image_layers.BLOBS_MAX + 1):
        try:
            said = channel.recv(image_layers.REPORT_BYTES_MAX)
        except ConnectionResetError:
            return b""
        asked = image_layers.ASKED.fullmatch(said)
        if asked is None:
            return said
        digest = asked[1].decode("ascii")
        if number == 0 and digest != image_digest:
            break
        what = _DOCUMENTS[number] if number < len(_DOCUMENTS) else "layer"
        if _pass_on(channel, blobs, digest) != digest:
            raise DigestMismatch(what)
    raise Refused("it asked for more blobs than an image has")


def _pass_on(channel: socket.socket, blobs: int, digest: str) -> str:
    """Send one blob; the digest of what was in it."""
    blob = hostpaths.open_blob(blobs, digest)
    try:
        left = os.fstat(blob).st_size
        found = hashlib.sha256()
        reads = _send(channel, left.to_bytes(image_layers.SIZE_BYTES, "big"))
        while left > 0 and (chunk := os.read(blob, min(left, _CHUNK_BYTES))):
            found.update(chunk)
            left -= len(chunk)
            reads = reads and _send(channel, chunk)
    finally:
        os.close(blob)
    return f"sha256:{found.hexdigest()}" if not left else ""


def _send(channel: socket.socket, raw: bytes) -> bool:
    """Whether it still reads; when it gave up, its last word says why."""
    try:
        channel.sendall(raw)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _judge(said: bytes) -> None:
    """What the process says is a hint for people, and trusted no further. Raises OSError,
    Refused."""
    if said == image_layers.DONE:
        return
    failed = image_layers.FAILED.fullmatch(said)
    if failed is not None:
        number = int(failed[1])
        raise DigestMismatch("layer") if number == 74 else OSError(number, os.strerror(number))
    text = said.removeprefix(image_layers.REFUSED).decode("ascii", "replace")
    shown = "".join(c if " " <= c <= "~" else "?" for c in text)
    raise Refused(shown or "it could not be unpacked: it is damaged or needs too much memory")
