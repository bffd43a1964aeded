"""The book of a lease authority: who holds what, and what the daemon is told of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sbxd.policy.leases import LeaseBook, LeaseRefusal, run_key
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.leases import LeaseNonce, LeaseRefusalCode, LeaseStanding, RunKey

GRACE = 10.0
RUN = RunKey("a" * 64)
ENVIRONMENT = EnvironmentId("e" * 32)
NONCE = LeaseNonce("1" * 32)
OTHER = LeaseNonce("2" * 32)


def book() -> LeaseBook:
    return LeaseBook(grace_seconds=GRACE)


def bound() -> LeaseBook:
    made = book()
    made.register(1, NONCE, RUN, 5, 0.0)
    made.bind(NONCE, ENVIRONMENT)
    return made


def test_what_was_never_told_is_unknown_and_what_is_held_is_current() -> None:
    made = book()
    made.register(1, NONCE, RUN, 5, 0.0)
    assert made.standing(ENVIRONMENT, 0.0) is LeaseStanding.UNKNOWN
    made.bind(NONCE, ENVIRONMENT)
    assert made.standing(ENVIRONMENT, 0.0) is LeaseStanding.CURRENT


def test_a_higher_epoch_of_another_worker_makes_the_lower_stale_at_once() -> None:
    made = bound()
    made.register(2, OTHER, RUN, 6, 0.0)
    assert made.standing(ENVIRONMENT, 0.0) is LeaseStanding.STALE


def test_the_same_epoch_may_have_several_environments() -> None:
    made = bound()
    made.register(1, OTHER, RUN, 5, 0.0)
    assert made.standing(ENVIRONMENT, 0.0) is LeaseStanding.CURRENT


def test_a_fence_needs_no_lease_of_its_own_and_keeps_the_fenced_out() -> None:
    made = bound()
    made.fence(RUN, 6)
    assert made.standing(ENVIRONMENT, 0.0) is LeaseStanding.STALE
    with pytest.raises(LeaseRefusal) as refused:
        made.register(1, NONCE, RUN, 5, 0.0)
    assert refused.value.code is LeaseRefusalCode.STALE_EPOCH
    with pytest.raises(LeaseRefusal):
        made.fence(RUN, 5)


def test_a_lease_that_is_fenced_before_it_is_bound_is_told_stale_and_not_unknown() -> None:
    made = book()
    made.register(1, NONCE, RUN, 5, 0.0)
    made.fence(RUN, 6)
    with pytest.raises(LeaseRefusal) as refused:
        made.bind(NONCE, ENVIRONMENT)
    assert refused.value.code is LeaseRefusalCode.STALE_EPOCH
    assert made.standing(ENVIRONMENT, 0.0) is LeaseStanding.STALE


def test_a_lost_holder_has_the_grace_and_one_that_comes_back_keeps_its_leases() -> None:
    made = bound()
    made.lose(1, 100.0)
    assert made.standing(ENVIRONMENT, 100.0 + GRACE - 0.1) is LeaseStanding.CURRENT
    assert made.standing(ENVIRONMENT, 100.0 + GRACE) is LeaseStanding.STALE
    made.register(2, NONCE, RUN, 5, 105.0)
    assert made.standing(ENVIRONMENT, 100.0 + GRACE) is LeaseStanding.CURRENT
    # The end of the connection that it left behind says nothing any more.
    made.lose(1, 106.0)
    assert made.standing(ENVIRONMENT, 200.0) is LeaseStanding.CURRENT


def test_a_released_lease_is_stale_and_holds_no_place() -> None:
    made = bound()
    made.release(NONCE)
    assert made.held == 0
    assert made.standing(ENVIRONMENT, 0.0) is LeaseStanding.STALE


@pytest.mark.parametrize("environment", [EnvironmentId("f" * 32), ENVIRONMENT])
def test_neither_a_lease_nor_an_environment_is_bound_twice(environment: EnvironmentId) -> None:
    made = bound()
    made.register(2, OTHER, RUN, 5, 0.0)
    nonce = OTHER if environment == ENVIRONMENT else NONCE
    with pytest.raises(LeaseRefusal) as refused:
        made.bind(nonce, environment)
    assert refused.value.code is LeaseRefusalCode.TAKEN
    made.bind(NONCE, ENVIRONMENT)  # word for word again is no second time


def test_a_nonce_that_means_another_run_is_refused() -> None:
    made = bound()
    with pytest.raises(LeaseRefusal) as refused:
        made.register(2, NONCE, RunKey("b" * 64), 5, 0.0)
    assert refused.value.code is LeaseRefusalCode.TAKEN


def test_a_full_book_refuses_and_makes_room_of_those_who_are_gone() -> None:
    made = LeaseBook(grace_seconds=GRACE, leases_max=1)
    made.register(1, NONCE, RUN, 5, 0.0)
    with pytest.raises(LeaseRefusal) as refused:
        made.register(2, OTHER, RUN, 5, 0.0)
    assert refused.value.code is LeaseRefusalCode.CAPACITY
    made.lose(1, 0.0)
    made.register(2, OTHER, RUN, 5, GRACE)
    assert made.held == 1


def test_the_epoch_of_a_run_that_is_held_is_never_forgotten() -> None:
    made = LeaseBook(grace_seconds=GRACE, runs_max=16)
    made.register(1, NONCE, RUN, 5, 0.0)
    for number in range(200):
        made.fence(RunKey(f"{number:064x}"), 1)
    with pytest.raises(LeaseRefusal):
        made.register(2, OTHER, RUN, 4, 0.0)


def test_runs_of_two_tenants_with_one_name_are_two_runs() -> None:
    one = run_key(TenantId("a"), RunId("r"))
    assert one != run_key(TenantId("b"), RunId("r"))
    assert one == run_key(TenantId("a"), RunId("r"))


class BookMachine(RuleBasedStateMachine):
    """The book against a model that keeps everything for ever."""

    @initialize()
    def begin(self) -> None:
        self.book = book()
        self.now = 0.0
        self.highest: dict[RunKey, int] = {}
        self.leases: dict[LeaseNonce, tuple[RunKey, int, int, float | None]] = {}
        self.bound: dict[EnvironmentId, LeaseNonce] = {}
        self.over: set[LeaseNonce] = set()

    runs = st.integers(0, 1).map(lambda n: RunKey(f"{n:064x}"))
    nonces = st.integers(0, 3).map(lambda n: LeaseNonce(f"{n:032x}"))
    environments = st.integers(0, 3).map(lambda n: EnvironmentId(f"{n:032x}"))
    epochs = st.integers(0, 3)
    holders = st.integers(0, 2)

    @rule(holder=holders, nonce=nonces, run=runs, epoch=epochs)
    def register(self, holder: int, nonce: LeaseNonce, run: RunKey, epoch: int) -> None:
        known = self.leases.get(nonce)
        legal = self.highest.get(run, 0) <= epoch and (known is None or known[:2] == (run, epoch))
        try:
            self.book.register(holder, nonce, run, epoch, self.now)
        except LeaseRefusal:
            assert not legal
        else:
            assert legal
            self.leases[nonce] = (run, epoch, holder, None)
            self.highest[run] = max(epoch, self.highest.get(run, 0))

    @rule(nonce=nonces, environment=environments)
    def bind(self, nonce: LeaseNonce, environment: EnvironmentId) -> None:
        try:
            self.book.bind(nonce, environment)
        except LeaseRefusal as refusal:
            if refusal.code is not LeaseRefusalCode.STALE_EPOCH:
                return
        self.bound[environment] = nonce

    @rule(nonce=nonces)
    def release(self, nonce: LeaseNonce) -> None:
        if nonce not in self.leases:
            with pytest.raises(LeaseRefusal):
                self.book.release(nonce)
            return
        self.book.release(nonce)
        del self.leases[nonce]

    @rule(run=runs, epoch=epochs)
    def fence(self, run: RunKey, epoch: int) -> None:
        try:
            self.book.fence(run, epoch)
        except LeaseRefusal:
            assert self.highest[run] > epoch
        else:
            self.highest[run] = max(epoch, self.highest.get(run, 0))

    @rule(holder=holders)
    def lose(self, holder: int) -> None:
        self.book.lose(holder, self.now)
        for nonce, (run, epoch, by, lost) in self.leases.items():
            if by == holder and lost is None:
                self.leases[nonce] = (run, epoch, by, self.now)

    @rule(seconds=st.sampled_from([1.0, GRACE]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_current_but_what_is_held_under_the_highest_epoch(self) -> None:
        for environment, nonce in self.bound.items():
            lease = self.leases.get(nonce)
            held = (
                lease is not None
                and lease[1] == self.highest[lease[0]]
                and (lease[3] is None or self.now - lease[3] < GRACE)
            )
            said = self.book.standing(environment, self.now)
            assert (said is LeaseStanding.CURRENT) <= held
            if held and self.book.standing(environment, self.now) is not LeaseStanding.CURRENT:
                # Only a lease that was released and registered anew under the same nonce.
                assert said is LeaseStanding.STALE


BookMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBook = BookMachine.TestCase
