"""Layered images against the installed daemon: imported, run, shared, held and removed."""

import io
import json
import platform
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sbxctl.exits import Exit
from sbxd.oci import media
from tests.service.image_archives import LayoutDraft, digest
from tests.service.test_sbxctl_lane import sbxctl

pytestmark = [pytest.mark.needs("daemon", "root", "image")]

BASE = Path("/var/cache/sbxd-lab/image.tar")
UNPACKED = Path("/var/lib/sbxd/unpacked")
DEADLINE_SECONDS = 60


def upper() -> bytes:
    """A layer with one file more and one less than the base."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in (("etc/hello", b"from the upper layer\n"), ("etc/.wh.issue", b"")):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o4644
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The digest of the lane's image with a layer on top, from an OCI layout."""
    draft = LayoutDraft()
    manifest = draft.image(
        BASE.read_bytes(), upper(), architecture=media.ARCHITECTURES[platform.machine()]
    )
    draft.offer(manifest)
    folder = draft.write(tmp_path_factory.mktemp("layout"))
    ran = sbxctl("image", "import", "--digest", digest(manifest), str(folder))
    assert ran.code == 0, ran.stderr
    yield ran.stdout.decode().strip()
    sbxctl("image", "rm", digest(manifest))


def listed() -> list[dict[str, Any]]:
    images: list[dict[str, Any]] = json.loads(sbxctl("image", "ls", "--json").stdout)
    return images


def test_a_sandbox_sees_the_layers_one_over_the_other(layered: str) -> None:
    script = "cat /etc/hello; test ! -e /etc/issue && test -e /etc/debian_version && echo both"
    ran = sbxctl("run", "--image", layered, "--", "sh", "-c", script)
    assert ran.stdout == b"from the upper layer\nboth\n", ran.stderr
    base = next(i["digest"] for i in listed() if i["digest"] != layered and i["layers"] == 1)
    script = "test -e /etc/issue && test ! -e /etc/hello"
    ran = sbxctl("run", "--image", base, "--", "sh", "-c", script)
    assert ran.code == 0, "the control: the base alone differs"


def test_the_base_is_kept_once_in_the_store(layered: str) -> None:
    found = next(i for i in listed() if i["digest"] == layered)
    assert found["layers"] == 2
    # The lane's own image is the same tar.
    assert found["unshared_bytes"] == found["size_bytes"] - BASE.stat().st_size


def test_an_image_that_runs_is_not_removed_and_afterwards_it_is(layered: str) -> None:
    argv = ["sbxctl", "run", "--image", layered, "--", "sh", "-c", "echo up; sleep 100"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"up\n"
        refused = sbxctl("image", "rm", layered)
        assert refused.code == Exit.REJECTED
        assert "used by 1 live" in refused.stderr
        assert "sbxctl image ls" in refused.stderr
        kept = json.loads(sbxctl("image", "prune", "--dry-run", "--json").stdout)
        assert "ENVIRONMENT" in kept["kept"][layered]
        running.terminate()
    limit = time.monotonic() + DEADLINE_SECONDS
    while (ran := sbxctl("image", "rm", layered)).code != 0:
        assert "live environments" in ran.stderr, ran.stderr
        assert time.monotonic() < limit
    assert not (UNPACKED / layered.removeprefix("sha256:")).exists()
    assert sbxctl("run", "--image", layered, "--", "true").code == Exit.REJECTED
