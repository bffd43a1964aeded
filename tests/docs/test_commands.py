"""Every command that the documents show and mark as run, run in a lane of its own."""

import re
from collections.abc import Iterator

import pytest

from tests.docs import capture
from tests.docs.blocks import Block, blocks_of, documents
from tests.package.hosts import Host

pytestmark = pytest.mark.needs("lab")

# What a document calls by a name that stands for the reader's own.
NAMES = {r"\bID\b": "$id", r"\bTENANT\b": "operator", r"\bRUN\b": "run"}
# Each block runs in an empty folder beside a live environment, whose id is in $id.
PRELUDE = """
set -eu
cd /src
scratch=$(mktemp -d)
[ "$NEEDS_REPOSITORY" = yes ] || cd "$scratch"
printf 'one,two\\n1,2\\n' >data.csv 2>/dev/null || true
"""
HOLDER = """
import sys
sys.path.insert(0, "/src")
import trio
from sbxctl.specification import LimitOptions, specification
from sbxd.client.admin import connect_admin

async def main():
    async with connect_admin("/run/sbxd/admin.sock") as admin:
        described = await admin.describe()
        wanted = specification(
            described, image=None, limits=LimitOptions.nothing().over(described.default_limits),
            environment={}, network=False,
        )
        handle = await admin.environments.provision(wanted)
        print(handle.environment_id, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""
BLOCKS = [block for file in documents() for block in blocks_of(file)]


@pytest.fixture(scope="module")
def lane() -> Iterator[Host]:
    with capture.lane() as host:
        host.write("/run/holder.py", HOLDER)
        yield host


@pytest.fixture
def environment_id(lane: Host) -> Iterator[str]:
    """A live environment that nobody uses; an earlier block may have restarted the daemon."""
    lane.shell(
        "rm -f /run/holder; systemd-run --collect --unit=holder "
        "--property=StandardOutput=file:/run/holder python /run/holder.py"
    ).ok()
    lane.shell("until [ -s /run/holder ]; do sleep 0.2; done").ok()
    yield lane.run("cat", "/run/holder").ok().strip()
    lane.run("systemctl", "stop", "holder").ok()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.place == "lane"], ids=str)
def test_what_is_shown_runs_in_a_lane(lane: Host, environment_id: str, block: Block) -> None:
    script = block.script
    for name, value in NAMES.items():
        script = re.sub(name, value, script)
    repository = "yes" if "examples/" in script or "tests/" in script else "no"
    done = lane.shell(f"NEEDS_REPOSITORY={repository}; id={environment_id}\n{PRELUDE}\n{script}")
    assert done.status == 0, f"{script}\n{done.out}{done.err}"


def test_control_a_command_that_is_wrong_fails(lane: Host) -> None:
    assert lane.shell(f"NEEDS_REPOSITORY=no\n{PRELUDE}\nsbxctl nonsense").status != 0


def test_what_is_shown_of_doctor_is_what_it_says(lane: Host) -> None:
    """`python -m tests.docs.capture` writes it; numbers differ from machine to machine."""

    def names(text: str) -> list[tuple[str, ...]]:
        return re.findall(r"^ +(ok|degraded|missing|not checked) +(\S+)", text, re.M)

    (file,) = capture.marked()
    shown = capture.captured(file.read_text())["doctor"]
    assert len(names(shown)) > 10
    assert names(shown) == names(capture.said_by(lane)["doctor"])
