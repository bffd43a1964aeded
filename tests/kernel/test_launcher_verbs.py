"""The launcher's answers, over a pool that runs nothing: who is answered when, and with what."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest

from sbxd.launcher import destroy, helpers, prepare
from sbxd.launcher.filters import Filters
from sbxd.launcher.helpers import Outcome, Report
from sbxd.launcher.pool import Job, Lane, Pool, Result
from sbxd.launcher.requests import (
    Acknowledged,
    Assign,
    Boot,
    Booted,
    CgroupLimits,
    Destroy,
    Died,
    Erasing,
    ErasingIs,
    Failed,
    ImageDrop,
    ImageUnpack,
    Inventory,
    InventoryIs,
    Kernel,
    LauncherReply,
    LauncherRequest,
    Leaf,
    Prepare,
    Prepared,
    Probe,
    Share,
    VolumeSize,
    Weight,
)
from sbxd.launcher.verbs import Verbs
from sbxd.port.ids import EnvironmentId

ENVIRONMENT = EnvironmentId("0" * 31 + "1")
OTHER = EnvironmentId("0" * 31 + "2")
DIGEST = "sha256:" + "a" * 64
LIMITS = CgroupLimits(cpu_millicores=1000, memory_bytes=64 << 20, pids_max=32)
VOLUME = VolumeSize(workspace_bytes=16 << 20, inodes_max=1000)
PREPARE = Prepare(
    ticket=7,
    environment_id=ENVIRONMENT,
    image_digest=DIGEST,
    volume=VOLUME,
    limits=LIMITS,
    back_stop_seconds=60,
)
DESTROY = Destroy(ticket=8, environment_id=ENVIRONMENT)
OK = Acknowledged(ticket=1)


class StillPool(Pool):
    """Keeps every job until the test ends it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.jobs: list[Job] = []
        self.cancelled: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def cancel(self, job: Job) -> None:
        self.cancelled.append(job)

    def end(self, result: Result) -> None:
        """End the oldest job."""
        self.jobs.pop(0).done(result)

    def lanes(self) -> list[Lane]:
        return [job.lane for job in self.jobs]


class Bench:
    def __init__(self) -> None:
        self.replies: list[LauncherReply] = []
        self.descriptors: list[int] = []
        self.pool = StillPool()
        self.verbs = Verbs(self.pool, Filters(b"", b"", b""), self._reply)

    def _reply(self, reply: LauncherReply, descriptors: list[int]) -> None:
        self.replies.append(reply)
        self.descriptors += descriptors

    def prepared(
        self, init_pid: int = 100, steward_pid: int = 101, kernel: Kernel = Kernel.HOST
    ) -> None:
        """Prepare to the end. The descriptors are those of a process that lives: our own."""
        self.verbs.dispatch(msgspec.structs.replace(PREPARE, kernel=kernel))
        descriptors = [os.pidfd_open(os.getpid()) for _ in range(4)]
        reply = Prepared(
            ticket=7,
            environment_id=ENVIRONMENT,
            scope="sbx.scope",
            volume_kind="loop",
            workspace=(1, 2),
            unenforced=(),
            steps=(),
        )
        report = Report(reply=reply, init_pid=init_pid, steward_pid=steward_pid, uid_base=1)
        self.pool.end((report, descriptors))

    def booted(self, init_pid: int, pidfd: int) -> None:
        """A fresh Sentry to the end, in an environment that is handed out."""
        self.prepared(kernel=Kernel.SENTRY)
        self.verbs.dispatch(
            Assign(ticket=4, environment_id=ENVIRONMENT, limits=LIMITS, volume=VOLUME)
        )
        self.take()
        self.verbs.dispatch(Boot(ticket=5, environment_id=ENVIRONMENT, number=2, limits=LIMITS))
        reply = Booted(ticket=5, environment_id=ENVIRONMENT, number=2)
        self.pool.end((Report(reply=reply, init_pid=init_pid), [os.dup(0), os.dup(pidfd)]))

    def take(self) -> list[LauncherReply]:
        taken, self.replies = self.replies, []
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        return taken


@pytest.fixture
def bench() -> Bench:
    return Bench()


def report(reply: Acknowledged | Failed | ErasingIs, *, is_erasing: bool = False) -> Result:
    return Report(reply=reply, is_erasing=is_erasing), []


def failed(ticket: int, step: str = "x") -> Failed:
    return Failed(ticket=ticket, step=step, errno=5, detail="it did not work")


def test_a_prepared_slot_is_answered_with_its_descriptors(bench: Bench) -> None:
    bench.prepared()
    assert len(bench.descriptors) == 4
    assert [type(reply) for reply in bench.take()] == [Prepared]


def test_an_illegal_verb_is_answered_and_starts_nothing(bench: Bench) -> None:
    bench.verbs.dispatch(Leaf(ticket=3, environment_id=ENVIRONMENT, number=2, limits=LIMITS))
    bench.verbs.dispatch(Assign(ticket=4, environment_id=ENVIRONMENT, limits=LIMITS, volume=VOLUME))
    assert [(reply.ticket, getattr(reply, "step", "")) for reply in bench.take()] == [
        (3, "legality"),
        (4, "legality"),
    ]
    assert not bench.pool.jobs


def test_only_environments_that_are_handed_out_are_weighed(bench: Bench) -> None:
    def ask() -> list[str]:
        weights = tuple(
            Weight(environment_id=each, cpu_weight=100) for each in (ENVIRONMENT, OTHER)
        )
        bench.verbs.dispatch(Share(ticket=9, weights=weights))
        assert bench.pool.lanes() == [Lane.SHARE]
        work = bench.pool.jobs[0].work
        assert isinstance(work, partial)
        bench.pool.end(report(Acknowledged(ticket=9)))
        return [each.environment_id for each in work.args[0].weights]

    bench.prepared()
    assert ask() == []
    bench.verbs.dispatch(Assign(ticket=4, environment_id=ENVIRONMENT, limits=LIMITS, volume=VOLUME))
    assert ask() == [ENVIRONMENT]
    bench.take()


def test_a_failed_preparation_is_answered_only_when_nothing_is_left(bench: Bench) -> None:
    bench.verbs.dispatch(PREPARE)
    bench.pool.end(report(failed(7, "volume")))
    assert bench.take() == []
    assert bench.pool.lanes() == [Lane.END]
    bench.pool.end(report(OK))
    assert bench.take() == [failed(7, "volume")]
    assert bench.verbs.is_idle()


def test_a_helper_that_dies_is_a_failed_preparation(bench: Bench) -> None:
    bench.verbs.dispatch(PREPARE)
    bench.pool.end(None)
    bench.pool.end(report(OK))
    (reply,) = bench.take()
    assert isinstance(reply, Failed)
    assert (reply.ticket, reply.step) == (7, "helper")


def test_a_preparation_that_cannot_be_cleaned_up_says_so_and_can_be_destroyed(
    bench: Bench,
) -> None:
    bench.verbs.dispatch(PREPARE)
    bench.pool.end(report(failed(7, "volume")))
    bench.pool.end(report(failed(1, "stop_proof")))
    (reply,) = bench.take()
    assert isinstance(reply, Failed)
    assert "stop_proof" in reply.detail
    bench.verbs.dispatch(PREPARE)
    assert [type(reply) for reply in bench.take()] == [Failed]
    bench.verbs.dispatch(DESTROY)
    bench.pool.end(report(OK))
    assert bench.take() == [Acknowledged(ticket=8)]


def test_destroy_during_a_preparation_ends_it_first_and_answers_both(bench: Bench) -> None:
    bench.verbs.dispatch(PREPARE)
    bench.verbs.dispatch(DESTROY)
    assert bench.pool.cancelled == bench.pool.jobs
    bench.pool.end(None)  # the helper is gone, and only now is taken apart what it built
    assert bench.pool.lanes() == [Lane.END]
    bench.pool.end(report(OK))
    first, second = bench.take()
    assert isinstance(first, Failed)
    assert (first.ticket, first.step) == (7, "cancelled")
    assert second == Acknowledged(ticket=8)


def test_two_destroys_share_one_end(bench: Bench) -> None:
    bench.prepared()
    bench.take()
    bench.verbs.dispatch(DESTROY)
    bench.verbs.dispatch(Destroy(ticket=9, environment_id=ENVIRONMENT))
    assert len(bench.pool.jobs) == 1
    bench.pool.end(report(OK))
    assert bench.take() == [Acknowledged(ticket=8), Acknowledged(ticket=9)]


def test_destroy_of_what_was_never_made_is_carried_out(bench: Bench) -> None:
    bench.verbs.dispatch(DESTROY)
    assert bench.pool.lanes() == [Lane.END]
    bench.pool.end(report(OK))
    assert bench.take() == [Acknowledged(ticket=8)]


def test_a_failed_destruction_is_told_and_may_be_tried_again(bench: Bench) -> None:
    bench.prepared()
    bench.take()
    bench.verbs.dispatch(DESTROY)
    bench.pool.end(report(failed(1, "stop_proof")))
    assert bench.take() == [failed(8, "stop_proof")]
    bench.verbs.dispatch(DESTROY)
    bench.pool.end(report(OK))
    assert bench.take() == [Acknowledged(ticket=8)]


def test_the_death_of_init_is_told_once_with_the_ticket_of_its_preparation(bench: Bench) -> None:
    bench.prepared(init_pid=4711)
    bench.take()
    bench.verbs.reaped(4712, 0)
    assert bench.take() == []
    bench.verbs.reaped(4711, 9)
    bench.verbs.reaped(4711, 9)
    assert bench.take() == [
        Died(ticket=7, environment_id=ENVIRONMENT, process="init", wait_status=9)
    ]


@contextmanager
def dead() -> Iterator[int]:
    """The pidfd of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    os.waitpid(pid, 0)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def test_a_sentry_that_was_reaped_before_it_had_a_role_is_told_of(bench: Bench) -> None:
    """With the ticket of the boot, after its answer; and once."""
    bench.verbs.reaped(4711, 9)
    with dead() as pidfd:
        bench.booted(4711, pidfd)
    assert bench.take() == [
        Booted(ticket=5, environment_id=ENVIRONMENT, number=2),
        Died(ticket=5, environment_id=ENVIRONMENT, process="init", wait_status=9),
    ]
    bench.verbs.reaped(4711, 9)
    assert bench.take() == []


def test_a_sentry_that_lives_is_not_taken_for_one_that_had_its_number(bench: Bench) -> None:
    bench.verbs.reaped(4711, 9)
    living = os.pidfd_open(os.getpid())
    bench.booted(4711, living)
    os.close(living)
    assert bench.take() == [Booted(ticket=5, environment_id=ENVIRONMENT, number=2)]
    bench.verbs.reaped(4711, 6)
    assert bench.take() == [
        Died(ticket=5, environment_id=ENVIRONMENT, process="init", wait_status=6)
    ]


def test_the_deaths_that_a_destruction_brings_are_not_told(bench: Bench) -> None:
    bench.prepared(init_pid=4711)
    bench.take()
    bench.verbs.dispatch(DESTROY)
    bench.verbs.reaped(4711, 9)
    assert bench.take() == []


def test_the_end_of_the_client_kills_at_once_and_destroys_everything(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(destroy, "kill_now", killed.append)
    bench.prepared()
    bench.take()
    other = EnvironmentId("0" * 31 + "2")
    bench.verbs.dispatch(
        Prepare(
            ticket=9,
            environment_id=other,
            image_digest=DIGEST,
            volume=VOLUME,
            limits=LIMITS,
            back_stop_seconds=60,
        )
    )
    bench.verbs.end_all()
    assert killed == [ENVIRONMENT]
    assert not bench.verbs.is_idle()
    assert bench.pool.lanes() == [Lane.BUILD, Lane.END]
    bench.pool.end(None)
    bench.pool.end(report(OK))
    bench.pool.end(report(OK))
    assert bench.verbs.is_idle()


def test_what_is_left_of_the_dead_is_erased_by_one_helper_at_a_time(bench: Bench) -> None:
    for ticket, environment in ((8, ENVIRONMENT), (9, OTHER)):
        bench.verbs.dispatch(Destroy(ticket=ticket, environment_id=environment))
    bench.pool.end(report(OK, is_erasing=True))
    bench.pool.end(report(OK, is_erasing=True))
    assert bench.pool.lanes() == [Lane.ERASE]
    assert bench.take() == [Acknowledged(ticket=8), Acknowledged(ticket=9)], "nobody waits for it"
    assert bench.verbs.is_idle()
    bench.pool.end(report(OK, is_erasing=True))
    assert bench.pool.lanes() == [Lane.ERASE], "a round that left something is followed by another"
    bench.pool.end(report(OK))
    assert bench.pool.jobs == []
    assert bench.take() == []


@pytest.mark.case("PEER-32")
def test_a_start_goes_on_with_what_was_not_erased(bench: Bench) -> None:
    """The daemon takes its inventory before it serves."""
    bench.verbs.dispatch(Inventory(ticket=3))
    reply = InventoryIs(ticket=3, boot_id="boot", items=())
    bench.pool.end((Report(reply=reply, is_erasing=True), []))
    assert bench.pool.lanes() == [Lane.ERASE]
    bench.pool.end(report(OK))
    bench.verbs.dispatch(Inventory(ticket=4))
    bench.pool.end((Report(reply=reply), []))
    assert bench.pool.jobs == [], "the control: nothing is left"
    bench.take()


@pytest.mark.parametrize("result", [None, report(failed(1, "erase"))])
def test_a_round_that_gets_nowhere_is_not_repeated_until_somebody_asks(
    bench: Bench, result: Result
) -> None:
    bench.verbs.dispatch(DESTROY)
    bench.pool.end(report(OK, is_erasing=True))
    bench.pool.end(result)
    assert bench.pool.jobs == []
    bench.verbs.dispatch(Erasing(ticket=3))
    bench.pool.end(report(ErasingIs(ticket=3, volumes=1, bytes_used=5), is_erasing=True))
    assert bench.pool.lanes() == [Lane.ERASE]
    assert bench.take()[1:] == [ErasingIs(ticket=3, volumes=1, bytes_used=5)]


def test_a_new_client_does_not_wait_for_what_is_being_erased() -> None:
    def wait() -> Outcome:
        signal.pause()
        raise AssertionError

    pool = Pool(1)
    jobs = [Job(lane, 1, 60.0, wait, lambda _: None) for lane in (Lane.ERASE, Lane.END)]
    try:
        pool.submit(jobs[0])
        assert pool.channels()
        assert not pool.is_busy()
        pool.submit(jobs[1])
        assert pool.is_busy(), "the control: whose verb runs is waited for"
    finally:
        for job in jobs:
            assert job.helper is not None
            job.helper.kill()
            os.waitpid(job.helper.pid, 0)
            job.helper.close()


def test_a_destruction_says_for_whom_it_is_erased(bench: Bench) -> None:
    bench.verbs.dispatch(Destroy(ticket=8, environment_id=ENVIRONMENT, party=77))
    asked: list[Destroy] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(destroy, "destroy", asked.append)
        bench.pool.jobs[0].work()
    assert [each.party for each in asked] == [77]


def test_two_askers_for_one_image_share_the_unpacking(bench: Bench) -> None:
    bench.verbs.dispatch(ImageUnpack(ticket=3, image_digest=DIGEST))
    bench.verbs.dispatch(ImageUnpack(ticket=4, image_digest=DIGEST))
    assert len(bench.pool.jobs) == 1
    bench.verbs.dispatch(ImageDrop(ticket=5, image_digest=DIGEST))
    (refused,) = bench.take()
    assert (refused.ticket, getattr(refused, "step", "")) == (5, "legality")
    bench.pool.end(report(OK))
    assert bench.take() == [Acknowledged(ticket=3), Acknowledged(ticket=4)]


def test_a_tmpfs_is_a_part_of_the_memory_limit() -> None:
    assert prepare.tmpfs_bytes(LIMITS) == prepare.TMP_BYTES_MIN
    large = CgroupLimits(cpu_millicores=1000, memory_bytes=4 << 30, pids_max=32)
    assert prepare.tmpfs_bytes(large) == 1 << 30


def test_a_report_of_the_wrong_kind_is_a_failure(bench: Bench) -> None:
    bench.verbs.dispatch(PREPARE)
    bench.pool.end(report(OK))
    bench.pool.end(report(OK))
    (reply,) = bench.take()
    assert isinstance(reply, Failed)
    assert reply.step == "helper"


def started_with(monkeypatch: pytest.MonkeyPatch) -> tuple[Verbs, list[int]]:
    """A launcher whose helpers never end, and the tickets of those that were started."""
    started: list[int] = []

    class Endless:
        def __init__(self, number: int) -> None:
            self.deadline = float("inf")
            self.channel = self
            self._number = number

        def fileno(self) -> int:
            return self._number

    def fork(_: object, *, ticket: int, deadline: float) -> Endless:
        del deadline
        started.append(ticket)
        return Endless(len(started))

    monkeypatch.setattr(helpers, "fork", fork)
    return Verbs(Pool(4), Filters(b"", b"", b""), lambda *_: None), started


def test_slow_images_keep_no_other_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs, started = started_with(monkeypatch)
    for number in range(50):
        digest = "sha256:" + f"{number:064x}"
        verbs.dispatch(ImageUnpack(ticket=100 + number, image_digest=digest))
    assert started == [100, 101], "two are unpacked at a time"
    others: list[LauncherRequest] = [
        Inventory(ticket=1),
        Probe(ticket=2),
        PREPARE,
        Destroy(ticket=8, environment_id=OTHER),
        Share(ticket=9, weights=()),
        ImageDrop(ticket=10, image_digest="sha256:" + "e" * 64),
    ]
    for request in others:
        verbs.dispatch(request)
    assert started[2:] == [1, 2, 7, 1, 9, 10]  # an end has a ticket of its own: 1


def test_slow_removals_of_images_keep_no_question_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs, started = started_with(monkeypatch)
    for number in range(5):
        digest = "sha256:" + f"{number:064x}"
        verbs.dispatch(ImageDrop(ticket=100 + number, image_digest=digest))
    verbs.dispatch(Inventory(ticket=1))
    verbs.dispatch(Probe(ticket=2))
    verbs.dispatch(ImageUnpack(ticket=3, image_digest="sha256:" + "e" * 64))
    assert started == [100, 1, 2, 3]
