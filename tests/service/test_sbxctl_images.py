"""`sbxctl image` as a program: what it tells apart, fetches, keeps and removes.

skopeo is a stand-in here: a program that writes down how it was called and answers as it is told.
"""

import gzip
import hashlib
import json
import os
import platform
import pty
import sys
from pathlib import Path

import msgspec
import pytest
import trio

from sbxctl.archive import prepared
from sbxctl.exits import Exit
from sbxctl.pull import _repository
from sbxd.fake.script import Script
from sbxd.oci import media
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.wire.descriptions import ImageHold
from sbxd.wire.messages import ImageFormat
from tests.service.fake_socket import CLIENT_SECONDS, Ran, socket_daemon
from tests.service.image_archives import LayoutDraft, layer_of, saved, tar_of

HERE = media.ARCHITECTURES[platform.machine()]
NOTHING = Script()
INDEX = json.dumps({"schemaVersion": 2, "mediaType": media.INDEX, "manifests": []}).encode()
DOCKER = json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.docker.x"}).encode()


def a_layout() -> LayoutDraft:
    draft = LayoutDraft()
    draft.offer(draft.image(layer_of("x"), architecture=HERE))
    return draft


# --- telling what a path holds ------------------------------------------------------------------


def test_what_a_path_holds_is_told_by_the_names_in_it(tmp_path: Path) -> None:
    folder = a_layout().write(tmp_path / "layout")
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "manifest.json").write_text("{}")
    files = {
        "layout.tar": a_layout().tar(),
        "saved.tar": tar_of(saved(layer_of("x"), architecture=HERE)),
        "root.tar": layer_of("x"),
        "packed.tar.gz": gzip.compress(a_layout().tar()),
    }
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    told = {}
    for path in (folder, root, *(tmp_path / name for name in files)):
        with prepared(path, None) as found:
            assert sum(map(len, found.pieces())) == found.size
            told[path.name] = found.format
    assert told == {
        "layout": ImageFormat.ARCHIVE,
        "root": ImageFormat.ROOTFS,
        "layout.tar": ImageFormat.ARCHIVE,
        "saved.tar": ImageFormat.ARCHIVE,
        "root.tar": ImageFormat.ROOTFS,
        "packed.tar.gz": ImageFormat.ARCHIVE,
    }
    with prepared(tmp_path / "layout.tar", ImageFormat.ROOTFS) as found:
        assert found.format is ImageFormat.ROOTFS, "what the operator says counts"


def test_a_layouts_links_are_left_behind(tmp_path: Path) -> None:
    folder = a_layout().write(tmp_path / "layout")
    (folder / "blobs" / "sha256" / ("e" * 64)).symlink_to("/etc/passwd")
    with prepared(folder, None) as found:
        raw = b"".join(found.pieces())
    assert b"root:" not in raw
    assert b"e" * 64 not in raw


def test_what_is_no_tar_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(os.urandom(4096))
    with pytest.raises(ExecutionRejected) as caught, prepared(tmp_path / "x", None):
        raise AssertionError
    assert caught.value.code is RejectedCode.INVALID_IMAGE


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("debian", "debian"),
        ("debian:13", "debian"),
        ("host:5000/a/b:1", "host:5000/a/b"),
        ("host:5000/a", "host:5000/a"),
        ("a/b:1@sha256:" + "0" * 64, "a/b"),
    ],
)
def test_a_name_loses_its_tag_and_its_digest(name: str, repository: str) -> None:
    assert _repository(name) == repository


# --- pull ---------------------------------------------------------------------------------------

STAND_IN = """#!{python}
import json, os, shutil, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if os.path.exists({fail!r}):
    sys.exit("stand-in: denied")
if sys.argv[1] == "inspect":
    sys.stdout.buffer.write(open({raw!r}, "rb").read())
else:
    shutil.copyfile({archive!r}, sys.argv[-1].removeprefix("oci-archive:"))
"""


class Skopeo:
    """The stand-in, first on PATH."""

    def __init__(self, folder: Path, raw: bytes) -> None:
        self.log, self.fail = folder / "calls", folder / "fail"
        (folder / "raw").write_bytes(raw)
        (folder / "archive").write_bytes(a_layout().tar())
        (folder / "bin").mkdir()
        program = folder / "bin" / "skopeo"
        program.write_text(
            STAND_IN.format(
                python=sys.executable,
                log=str(self.log),
                fail=str(self.fail),
                raw=str(folder / "raw"),
                archive=str(folder / "archive"),
            )
        )
        program.chmod(0o755)
        self.path = str(folder / "bin")

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


async def pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, *arguments: str
) -> tuple[Ran, Skopeo, str]:
    """How a pull went, and the label that the store has then."""
    skopeo = Skopeo(tmp_path, raw)
    monkeypatch.setenv("PATH", f"{skopeo.path}:{os.environ['PATH']}")
    async with socket_daemon(NOTHING, tmp_path) as daemon:
        ran = await daemon.sbxctl("image", "pull", *arguments)
        (image, *_) = (*daemon.daemon.images.images.values(), None)
    return ran, skopeo, image.label if image else ""


@pytest.mark.parametrize("raw", [INDEX, DOCKER], ids=["oci", "docker"])
async def test_a_tag_is_resolved_and_what_is_copied_is_asked_for_by_digest(
    raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "registry.example:5000/team/tool:1.2"
    ran, skopeo, label = await pulled(tmp_path, monkeypatch, raw, name)
    assert ran.code == 0, ran.stderr
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    inspect, copy = skopeo.calls()
    assert inspect == ["inspect", "--raw", "--", f"docker://{name}"]
    assert copy[:3] == ["copy", "--override-os", "linux"]
    assert ("--preserve-digests" in copy) is (raw is INDEX)
    assert copy[-3:-1] == ["--", f"docker://registry.example:5000/team/tool@{digest}"]
    assert copy[-1].startswith("oci-archive:")
    assert not await trio.Path(copy[-1].removeprefix("oci-archive:")).exists(), "it is removed"
    assert f"{name} is {digest}" in ran.stderr
    assert label == f"{name}@{digest}"
    assert ran.stdout.startswith(b"sha256:")


async def test_another_digest_than_the_reference_names_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, skopeo, _ = await pulled(tmp_path, monkeypatch, INDEX, "tool@sha256:" + "0" * 64)
    assert ran.code == Exit.UNAVAILABLE
    assert len(skopeo.calls()) == 1


async def test_a_local_source_is_copied_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, skopeo, label = await pulled(
        tmp_path, monkeypatch, INDEX, "--label", "mine", "oci:/srv/layout:x"
    )
    assert ran.code == 0, ran.stderr
    assert [call[-2] for call in skopeo.calls()] == ["oci:/srv/layout:x"]
    assert label == "mine (oci:/srv/layout:x)"


@pytest.mark.parametrize("name", ["--help", "-v", "a b", "a;b", "", "x\n", "$(x)", "ü"])
async def test_what_is_no_reference_reaches_no_program(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, skopeo, _ = await pulled(tmp_path, monkeypatch, INDEX, "--", name)
    assert ran.code == Exit.USAGE
    assert not skopeo.log.exists()


async def test_a_failure_of_skopeo_is_shown_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fail").touch()
    ran, _, label = await pulled(tmp_path, monkeypatch, INDEX, "tool:1")
    assert ran.code == Exit.UNAVAILABLE
    assert "stand-in: denied" in ran.stderr
    assert "skopeo login" in ran.stderr
    assert (ran.stdout, label) == (b"", "")


async def test_without_skopeo_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with socket_daemon(NOTHING, tmp_path) as daemon:
        ran = await daemon.sbxctl("image", "pull", "debian:13")
    assert ran.code == Exit.UNAVAILABLE
    assert "apt-get install skopeo" in ran.stderr
    assert "sbxctl image import" in ran.stderr


# --- prune and ls -------------------------------------------------------------------------------


async def test_prune_removes_what_nothing_holds_and_says_why_the_rest_stays(
    tmp_path: Path,
) -> None:
    async with socket_daemon(NOTHING, tmp_path) as daemon:
        images = daemon.daemon.images.images
        digests = []
        for content in (b"a", b"b" * 600):
            (tmp_path / "x.tar").write_bytes(layer_of(content.decode() * 4))
            ran = await daemon.sbxctl(
                "image",
                "import",
                "--digest",
                f"sha256:{content[:1].hex() * 32}",
                str(tmp_path / "x.tar"),
            )
            digests.append(ran.stdout.decode().strip())
        free, held = digests
        images[held] = msgspec.structs.replace(images[held], held_by=(ImageHold.RESERVE,))
        would = await daemon.sbxctl("image", "prune", "--dry-run", "--json")
        assert set(images) == {free, held}
        unasked = await daemon.sbxctl("image", "prune")
        assert set(images) == {free, held}, "nobody could be asked"
        did = await daemon.sbxctl("image", "prune", "--yes")
        listed = await daemon.sbxctl("image", "ls")
    assert json.loads(would.stdout) == {
        "removed": [free], "kept": {held: ["RESERVE"]}, "dry_run": True,
    }  # fmt: skip
    assert unasked.code == Exit.USAGE
    assert "--yes" in unasked.stderr
    assert did.stdout.decode().split() == [free]
    assert "1 kept" in did.stderr
    assert set(images) == {held}
    assert "reserve" in listed.stdout.decode()


@pytest.mark.parametrize(("answer", "is_removed"), [(b"n\n", False), (b"y\n", True)])
async def test_prune_asks_on_a_terminal_and_removes_only_after_yes(
    answer: bytes, is_removed: bool, tmp_path: Path
) -> None:
    async with socket_daemon(NOTHING, tmp_path) as daemon:
        (tmp_path / "x.tar").write_bytes(layer_of("content"))
        await daemon.sbxctl("image", "import", str(tmp_path / "x.tar"))
        images = daemon.daemon.images.images
        (digest,) = images
        primary, secondary = pty.openpty()
        try:
            os.write(primary, answer)
            with trio.fail_after(CLIENT_SECONDS):
                done = await trio.run_process(
                    (
                        sys.executable,
                        "-m",
                        "sbxctl",
                        "--socket",
                        str(daemon.path),
                        "image",
                        "prune",
                    ),
                    stdin=secondary,
                    capture_stdout=True,
                    capture_stderr=True,
                )
        finally:
            os.close(primary)
            os.close(secondary)
        assert (digest not in images) == is_removed
    assert digest.encode() in done.stdout, "what would go is shown before the question"
    assert b"Remove this image?" in done.stderr
