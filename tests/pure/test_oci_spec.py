"""The specification that runsc is given, and its flags: the golden file."""

import json
from pathlib import Path

from sbxd.launcher.kernel import runsc
from sbxd.launcher.kernel.oci_spec import SentrySpec, build

GOLDEN = Path(__file__).parents[1] / "golden" / "oci-spec.json"
SPEC = SentrySpec(hostname="sandbox", tmp_bytes=33_554_432, shm_bytes=16_777_216)


def test_the_specification_and_the_flags_are_the_golden_ones() -> None:
    """After a deliberate change: write `text()` to the golden file."""
    assert text() == GOLDEN.read_text()


def test_sizes_are_all_that_differs_between_environments() -> None:
    other = SentrySpec(hostname="sandbox", tmp_bytes=4096, shm_bytes=16_777_216)
    lines = text().splitlines()
    changed = [
        (one, two) for one, two in zip(lines, text(other).splitlines(), strict=True) if one != two
    ]
    assert [one.strip() for one, _ in changed] == ['"size=33554432"']


def test_no_host_path_and_no_annotation_is_in_it() -> None:
    document = build(SPEC)
    assert "annotations" not in document
    assert "hooks" not in document
    assert '"/var' not in json.dumps(document)
    assert '"/usr' not in json.dumps(document)


def test_no_flag_opens_what_a_sandbox_is_to_be_without() -> None:
    flags = dict(flag.removeprefix("--").split("=") for flag in runsc.FLAGS)
    assert flags["network"] == "none"
    assert flags["platform"] == "systrap"
    assert flags["host-uds"] == flags["host-fifo"] == flags["overlay2"] == "none"
    for off in ("directfs", "rootless", "net-raw", "allow-flag-override", "nvproxy", "debug"):
        assert flags[off] == "false", off
    assert flags["file-access-mounts"] == "shared"  # the steward writes to the same volume


def text(spec: SentrySpec = SPEC) -> str:
    whole = {"specification": build(spec), "flags": runsc.FLAGS, "run": runsc.RUN}
    return json.dumps(whole, indent=2) + "\n"
