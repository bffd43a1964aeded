"""The launcher's verbs about a guest's kernel, each with its n-th effect failing, as
`test_launcher_effects` does it with the others."""

from pathlib import Path

import msgspec
import pytest

from sbxd.launcher.kernel import hostpaths
from sbxd.launcher.requests import (
    Acknowledged,
    Assign,
    Boot,
    Booted,
    DropLeaf,
    Failed,
    Kernel,
    LauncherReply,
    Prepare,
    Prepared,
)
from sbxd.port.ids import EnvironmentId
from tests.kernel import launcher_subject as subject
from tests.kernel.test_launcher_effects import FAULTS, Bench, bench, built_like, every_effect
from tests.kernel.test_launcher_lab import LIMITS, VOLUME, prepare, wait_for, wait_until_gone

pytestmark = pytest.mark.needs("lane-gvisor")


def with_sentry(image: str, environment_id: EnvironmentId) -> Prepare:
    return msgspec.structs.replace(prepare(image, environment_id), kernel=Kernel.SENTRY)


def test_a_preparation_with_a_sentry_that_fails_anywhere_leaves_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        ids = [subject.fresh_id()]
        unharmed = one.ask(with_sentry(one.image, ids[-1]))
        one.destroyed(ids[-1])
        assert isinstance(unharmed, Prepared), unharmed

        def request() -> Prepare:
            ids.append(subject.fresh_id())
            return with_sentry(one.image, ids[-1])

        def afterwards(reply: LauncherReply) -> None:
            if isinstance(reply, Failed):
                wait_until_gone(ids[-1])
            else:
                assert built_like(reply) == built_like(unharmed)
            one.destroyed(ids[-1])

        assert every_effect(one, FAULTS, request, Prepared, afterwards) > 30


def test_a_sentry_that_cannot_be_booted_anew_costs_at_most_the_environment(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        ids: list[EnvironmentId] = []

        def request() -> Boot:
            ids.append(subject.fresh_id())
            _ready_for_boot(one, ids[-1])
            return Boot(ticket=5, environment_id=ids[-1], number=2, limits=LIMITS)

        def afterwards(reply: LauncherReply) -> None:
            one.destroyed(ids[-1])

        assert every_effect(one, FAULTS, request, Booted, afterwards) > 10


def _ready_for_boot(one: Bench, environment_id: EnvironmentId) -> None:
    """Its first Sentry is gone, as after a kill for memory."""
    assert isinstance(one.ask(with_sentry(one.image, environment_id)), Prepared)
    assign = Assign(ticket=4, environment_id=environment_id, limits=LIMITS, volume=VOLUME)
    assert isinstance(one.ask(assign), Acknowledged)
    leaf = Path(hostpaths.scope_directory(environment_id)) / "box" / "exec-1"
    (leaf / "cgroup.kill").write_text("1")
    wait_for(lambda: "populated 0" in (leaf / "cgroup.events").read_text())
    drop = DropLeaf(ticket=6, environment_id=environment_id, number=1)
    assert isinstance(one.ask(drop), Acknowledged)
