"""The launcher's order of things: what may happen in which state, and nothing else."""

from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.launcher.books import Books
from sbxd.launcher.legality import (
    IMAGE_LEGAL,
    LEGAL,
    Illegal,
    ImageState,
    ImageTrigger,
    State,
    Trigger,
    image_transition,
    require_known_leaf,
    require_next_leaf,
    transition,
)
from sbxd.launcher.pool import Job, Lane
from sbxd.launcher.requests import (
    Assign,
    Boot,
    CgroupLimits,
    DropLeaf,
    ImageDrop,
    Kernel,
    Leaf,
    Prepare,
    VolumeSize,
)
from sbxd.port.ids import EnvironmentId

VERBS = frozenset(
    {
        Trigger.PREPARE,
        Trigger.LEAF,
        Trigger.BOOT,
        Trigger.DROP_LEAF,
        Trigger.ASSIGN,
        Trigger.DESTROY,
    }
)
LIMITS = CgroupLimits(cpu_millicores=1000, memory_bytes=64 << 20, pids_max=32)
VOLUME = VolumeSize(workspace_bytes=16 << 20, inodes_max=1000)
ENVIRONMENT = EnvironmentId("0" * 31 + "1")
DIGEST = "sha256:" + "a" * 64


def prepare_request(
    environment_id: EnvironmentId = ENVIRONMENT, kernel: Kernel = Kernel.HOST
) -> Prepare:
    return Prepare(
        ticket=1,
        environment_id=environment_id,
        image_digest=DIGEST,
        volume=VOLUME,
        limits=LIMITS,
        back_stop_seconds=60,
        kernel=kernel,
    )


def assign_request(limits: CgroupLimits = LIMITS, volume: VolumeSize = VOLUME) -> Assign:
    return Assign(ticket=1, environment_id=ENVIRONMENT, limits=limits, volume=volume)


def ready_books() -> Books:
    books = Books()
    books.begin_prepare(prepare_request()).move(Trigger.PREPARED)
    return books


def assigned_books() -> Books:
    books = ready_books()
    books.environments[ENVIRONMENT].move(Trigger.ASSIGN)
    return books


def test_the_table_names_every_state_and_leads_to_states_that_it_names() -> None:
    assert set(LEGAL) == set(State)
    assert {after for row in LEGAL.values() for after in row.values()} <= set(State)
    assert set(IMAGE_LEGAL) == set(ImageState)


@given(st.sampled_from(State), st.sampled_from(Trigger))
def test_a_pair_that_the_table_lacks_is_illegal_and_every_other_is_not(
    state: State, trigger: Trigger
) -> None:
    if trigger in LEGAL[state]:
        assert transition(state, trigger) is LEGAL[state][trigger]
    else:
        with pytest.raises(Illegal):
            transition(state, trigger)


@given(st.sampled_from(ImageState), st.sampled_from(ImageTrigger))
def test_an_image_moves_only_by_its_table(state: ImageState, trigger: ImageTrigger) -> None:
    if trigger in IMAGE_LEGAL[state]:
        assert image_transition(state, trigger) is IMAGE_LEGAL[state][trigger]
    else:
        with pytest.raises(Illegal):
            image_transition(state, trigger)


def test_destroy_is_legal_in_every_state() -> None:
    assert all(Trigger.DESTROY in row for row in LEGAL.values())


def test_only_an_assigned_slot_gets_leaves_and_only_a_ready_one_is_assigned() -> None:
    assert [state for state in State if Trigger.LEAF in LEGAL[state]] == [State.ASSIGNED]
    assert [state for state in State if Trigger.ASSIGN in LEGAL[state]] == [State.READY]


@given(st.lists(st.sampled_from(Trigger), max_size=30))
def test_no_order_of_triggers_assigns_a_slot_twice(triggers: list[Trigger]) -> None:
    state, assigned = State.ABSENT, 0
    for trigger in triggers:
        try:
            state = transition(state, trigger)
        except Illegal:
            continue
        assigned += trigger is Trigger.ASSIGN
        if state is State.ABSENT:
            assigned = 0
        assert assigned <= 1


@given(st.lists(st.sampled_from(Trigger), max_size=30))
def test_nothing_but_a_destruction_empties_the_books(triggers: list[Trigger]) -> None:
    state = State.ABSENT
    for trigger in triggers:
        before = state
        try:
            state = transition(state, trigger)
        except Illegal:
            continue
        if state is State.ABSENT:
            assert (before, trigger) == (State.DESTROYING, Trigger.DESTROYED)


@pytest.mark.parametrize("verb", sorted(VERBS - {Trigger.PREPARE, Trigger.DESTROY}))
def test_a_verb_about_an_environment_that_was_never_made_is_refused(verb: Trigger) -> None:
    with pytest.raises(Illegal):
        transition(State.ABSENT, verb)


def test_the_same_environment_is_never_prepared_twice() -> None:
    books = ready_books()
    with pytest.raises(Illegal):
        books.begin_prepare(prepare_request())


@pytest.mark.parametrize(
    "limits",
    [
        CgroupLimits(cpu_millicores=1001, memory_bytes=64 << 20, pids_max=32),
        CgroupLimits(cpu_millicores=1000, memory_bytes=(64 << 20) + 1, pids_max=32),
        CgroupLimits(cpu_millicores=1000, memory_bytes=64 << 20, pids_max=33),
    ],
)
def test_a_slot_is_not_handed_out_larger_than_it_was_built(limits: CgroupLimits) -> None:
    books = ready_books()
    assert books.admit_assign(assign_request()) is books.environments[ENVIRONMENT]
    with pytest.raises(Illegal):
        books.admit_assign(assign_request(limits=limits))
    with pytest.raises(Illegal):
        assigned_books().admit_leaf(
            Leaf(ticket=1, environment_id=ENVIRONMENT, number=2, limits=limits)
        )


@pytest.mark.parametrize(
    "volume",
    [
        VolumeSize(workspace_bytes=(16 << 20) + 1, inodes_max=1000),
        VolumeSize(workspace_bytes=16 << 20, inodes_max=1001),
    ],
)
def test_a_volume_is_not_handed_out_larger_than_it_was_built(volume: VolumeSize) -> None:
    with pytest.raises(Illegal):
        ready_books().admit_assign(assign_request(volume=volume))


def test_leaves_are_made_once_and_in_order() -> None:
    require_next_leaf(1, 2)
    for wanted in (1, 3, 1_000_000):
        with pytest.raises(Illegal):
            require_next_leaf(1, wanted)


def test_a_leaf_that_was_never_made_cannot_be_dropped() -> None:
    require_known_leaf(2, 2)
    books = assigned_books()
    books.admit_drop_leaf(DropLeaf(ticket=1, environment_id=ENVIRONMENT, number=1))
    with pytest.raises(Illegal):
        books.admit_drop_leaf(DropLeaf(ticket=1, environment_id=ENVIRONMENT, number=2))


def test_an_image_is_not_dropped_under_an_environment() -> None:
    books = ready_books()
    drop = ImageDrop(ticket=1, image_digest=DIGEST)
    with pytest.raises(Illegal):
        books.begin_image_drop(drop)
    books.begin_destroy(ENVIRONMENT)
    books.forget(ENVIRONMENT)
    assert books.begin_image_drop(drop).state is ImageState.DROPPING


def test_no_environment_is_prepared_while_its_image_is_dropped_or_unpacked() -> None:
    for trigger in (ImageTrigger.DROP, ImageTrigger.UNPACK):
        books = Books()
        books.image(DIGEST).move(trigger)
        with pytest.raises(Illegal):
            books.begin_prepare(prepare_request())
        assert not books.environments


def boot_request(number: int = 2, memory_bytes: int = 64 << 20) -> Boot:
    limits = msgspec.structs.replace(LIMITS, memory_bytes=memory_bytes)
    return Boot(ticket=1, environment_id=ENVIRONMENT, number=number, limits=limits)


def test_a_sentry_is_booted_only_where_one_was_prepared_and_in_order() -> None:
    with pytest.raises(Illegal):
        assigned_books().admit_boot(boot_request())
    books = Books()
    environment = books.begin_prepare(prepare_request(kernel=Kernel.SENTRY))
    environment.move(Trigger.PREPARED)
    with pytest.raises(Illegal):  # a slot has the one that it was made with
        books.admit_boot(boot_request())
    environment.move(Trigger.ASSIGN)
    assert books.admit_boot(boot_request()) is environment
    for wrong in (boot_request(number=3), boot_request(memory_bytes=65 << 20)):
        with pytest.raises(Illegal):
            books.admit_boot(wrong)
    with pytest.raises(Illegal):  # a leaf without a Sentry runs nothing there
        books.admit_leaf(Leaf(ticket=1, environment_id=ENVIRONMENT, number=2, limits=LIMITS))


def test_one_sentry_is_booted_at_a_time() -> None:
    books = Books()
    environment = books.begin_prepare(prepare_request(kernel=Kernel.SENTRY))
    environment.move(Trigger.PREPARED)
    environment.move(Trigger.ASSIGN)
    environment.boot = Job(Lane.BUILD, 1, 1.0, Mock(), Mock())
    with pytest.raises(Illegal):
        books.admit_boot(boot_request())


def test_a_refused_verb_changes_nothing() -> None:
    books = ready_books()
    before = books.environments[ENVIRONMENT].state
    with pytest.raises(Illegal):
        books.admit_leaf(Leaf(ticket=1, environment_id=ENVIRONMENT, number=2, limits=LIMITS))
    assert books.environments[ENVIRONMENT].state is before
    assert books.environments[ENVIRONMENT].last_leaf == 1
