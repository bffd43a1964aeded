"""Room for one more environment, and what a host may promise."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.config import decode
from sbxd.host import memory_refusals, with_host_memory
from sbxd.policy.admission import admit_memory
from sbxd.policy.capacity import Held, Room, environments_per_peer_max, retry_after_seconds
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.port.limits import GIB, MIB
from sbxd.settings import DEFAULT_LIMITS, LimitSettings, Settings

LIMITS = LimitSettings(
    environments_max=3, environments_per_peer_max=2, memory_committed_max_bytes=256 * MIB
)


def room(limits: LimitSettings, held: Collection[Held]) -> Room:
    return Room(Settings(limits=limits), held)


def small(owner: int) -> Held:
    return Held(owner, 64 * MIB)


def test_places_of_all_of_one_peer_and_memory_are_each_a_bound() -> None:
    assert room(LIMITS, []).has(small(1))
    assert not room(LIMITS, [small(1), small(1)]).has(small(1)), "its peer has as many as it may"
    assert room(LIMITS, [small(1), small(1)]).has(small(2)), "the control: another peer"
    assert not room(LIMITS, [small(1), small(2), small(3)]).has(small(4))
    assert not room(LIMITS, [Held(1, 193 * MIB)]).has(small(2)), "more than may be promised"
    assert room(LIMITS, [Held(1, 192 * MIB)]).has(small(2)), "the control: exactly as much"


@pytest.mark.case("PEER-06")
@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("", 256),
        ("[service]\nworker_uids = [1000]\n", 256),
        ("[service]\nworker_uids = [1000, 1000]\n", 256),
        ("[service]\nworker_uids = [1000, 1001]\n", 128),
        ("[service]\nworker_gids = [1000]\n", 128),
        ("[service]\nworker_uids = [1000]\nworker_gids = [1000]\n", 128),
        ("[limits]\nenvironments_max = 1\n[service]\nworker_uids = [1, 2]\n", 1),
        ("[limits]\nenvironments_per_peer_max = 7\n[service]\nworker_uids = [1, 2]\n", 7),
        ("[limits]\nenvironments_per_peer_max = 7\n", 7),
    ],
)
def test_one_worker_uid_leaves_room_where_there_are_others(text: str, most: int) -> None:
    settings = decode(text.encode())
    assert environments_per_peer_max(settings) == most
    held = [Held(1000, MIB)] * most
    assert Room(settings, held[1:]).has(Held(1000, MIB))
    taken = Room(settings, held)
    assert not taken.has(Held(1000, MIB)), "it has as many as it may"
    assert taken.has(Held(1001, MIB)) is (most < settings.limits.environments_max)
    assert f"(at most {most})" in taken.describe(Held(1000, MIB))


def test_without_a_bound_memory_is_not_counted() -> None:
    unbounded = LimitSettings()
    assert room(unbounded, [Held(1, 2**49)] * 3).has(Held(1, 2**49))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(8 * MIB, 512 * MIB)), max_size=40))
def test_whatever_is_asked_for_no_more_is_promised_than_may_be(
    asked: list[tuple[int, int]],
) -> None:
    held: list[Held] = []
    for owner, memory in asked:
        wanted = Held(owner, memory)
        if room(LIMITS, held).has(wanted):
            held.append(wanted)
    assert sum(each.memory_bytes for each in held) <= 256 * MIB
    assert len(held) <= 3


def test_whoever_is_refused_is_told_what_is_taken() -> None:
    text = room(LIMITS, [Held(1, 200 * MIB)]).describe(small(1))
    assert "1 environments are live (at most 3)" in text
    assert f"{200 * MIB} bytes of memory are promised (at most {256 * MIB}" in text
    assert str(64 * MIB) in text


def test_the_time_to_ask_again_is_bounded() -> None:
    assert retry_after_seconds(-5) == 1.0
    assert retry_after_seconds(7.5) == 7.5
    assert retry_after_seconds(9000) == 30.0


def test_one_that_alone_is_more_than_may_be_promised_is_rejected_and_not_put_off() -> None:
    with pytest.raises(ExecutionRejected) as refused:
        admit_memory(DEFAULT_LIMITS, DEFAULT_LIMITS.memory_bytes - 1)
    assert refused.value.code is RejectedCode.LIMIT_ABOVE_CEILING
    assert refused.value.field == "limits.memory_bytes"
    admit_memory(DEFAULT_LIMITS, DEFAULT_LIMITS.memory_bytes)
    admit_memory(DEFAULT_LIMITS, None)


def test_a_host_keeps_a_quarter_of_its_memory_where_the_operator_says_nothing() -> None:
    assert with_host_memory(Settings(), 8 * GIB).limits.memory_committed_max_bytes == 6 * GIB
    said = decode(b"[limits]\nmemory_committed_max_bytes = 1_073_741_824\n")
    assert with_host_memory(said, 8 * GIB).limits.memory_committed_max_bytes == GIB


def test_on_a_small_host_whoever_names_no_limit_is_offered_what_finds_room_twice() -> None:
    small, large = (with_host_memory(Settings(), size * GIB).limits for size in (2, 64))
    assert small.memory_committed_max_bytes is not None
    assert 2 * small.defaults.memory_bytes == small.memory_committed_max_bytes
    assert large.defaults == DEFAULT_LIMITS


def test_production_promises_no_more_than_the_host_has_and_names_both_numbers() -> None:
    said = decode(b"[limits]\nmemory_committed_max_bytes = 4_294_967_296\n")
    (refusal,) = memory_refusals(said, 2 * GIB)
    assert f"memory_committed_max_bytes = {4 * GIB}" in str(refusal)
    assert f"memory of this host = {2 * GIB}" in str(refusal)
    assert memory_refusals(said, 4 * GIB) == ()
    development = decode(
        b'deployment_mode = "development"\nauth_mode = "dev"\nsandbox = "namespaces"\n'
        b"[limits]\nmemory_committed_max_bytes = 4_294_967_296\n"
    )
    assert memory_refusals(development, 2 * GIB) == ()
    assert memory_refusals(with_host_memory(Settings(), 2 * GIB), 2 * GIB) == ()
