"""A daemon that was taken over says what it likes to the launcher: every field of every request.

The set of requests is closed, and so is the set of their fields: the tests walk both. A new field
fails here until its type bounds it and until it is said which values of the right type are hostile.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
import pytest
from msgspec import Meta, inspect

from sbxd.launcher import channel, fast
from sbxd.launcher.channel import ChannelViolation, decode_request
from sbxd.launcher.filters import Filters
from sbxd.launcher.kernel import hostpaths
from sbxd.launcher.legality import State, Trigger
from sbxd.launcher.requests import (
    Assign,
    Boot,
    CgroupLimits,
    Destroy,
    DropLeaf,
    Erasing,
    Failed,
    ImageDrop,
    ImageUnpack,
    Inventory,
    Kernel,
    LauncherMessage,
    LauncherReply,
    LauncherRequest,
    Leaf,
    Prepare,
    Probe,
    Share,
    VolumeSize,
    Weight,
)
from sbxd.launcher.verbs import Verbs
from sbxd.port.ids import EnvironmentId
from sbxd.port.limits import IoCeilings
from tests.kernel.test_launcher_verbs import StillPool

READY, ASSIGNED, SENTRY, UNKNOWN = (EnvironmentId("0" * 31 + digit) for digit in "1234")
USED, FREE, LEAVING = (f"sha256:{digit * 64}" for digit in "abc")
LIMITS = CgroupLimits(cpu_millicores=1000, memory_bytes=64 << 20, pids_max=32)
VOLUME = VolumeSize(workspace_bytes=16 << 20, inodes_max=1000)
IO = IoCeilings(read_bytes=4096, write_bytes=4096, read_operations=1, write_operations=1)
LAST_LEAF = 5

# One of each that is legal in the state that `World` is in, with every field set.
SAMPLES: tuple[LauncherRequest, ...] = (
    Prepare(
        ticket=1,
        environment_id=UNKNOWN,
        image_digest=USED,
        volume=VOLUME,
        limits=LIMITS,
        back_stop_seconds=60,
        runsc_sha256="a" * 64,
        io=IO,
        ceilings=LIMITS,
    ),
    Leaf(ticket=1, environment_id=ASSIGNED, number=LAST_LEAF + 1, limits=LIMITS),
    Boot(ticket=1, environment_id=SENTRY, number=LAST_LEAF + 1, limits=LIMITS),
    DropLeaf(ticket=1, environment_id=ASSIGNED, number=LAST_LEAF),
    Assign(ticket=1, environment_id=READY, limits=LIMITS, volume=VOLUME),
    Share(ticket=1, weights=(Weight(environment_id=ASSIGNED, cpu_weight=100),)),
    Destroy(ticket=1, environment_id=ASSIGNED, party=7),
    Erasing(ticket=1),
    ImageUnpack(ticket=1, image_digest=FREE),
    ImageDrop(ticket=1, image_digest=FREE),
    Inventory(ticket=1),
    Probe(ticket=1),
)
_ABOVE = {
    "cpu_millicores": [LIMITS.cpu_millicores + 1, 1_024_000],
    "memory_bytes": [LIMITS.memory_bytes + 1, 2**50],
    "pids_max": [LIMITS.pids_max + 1, 4_194_304],
}
_LIMITS = {f"limits.{name}": values for name, values in _ABOVE.items()}
# Values of the right type and range that the state of things makes illegal, for each field.
ILLEGAL: Mapping[str, Mapping[str, list[Any]]] = {
    "Prepare": {"environment_id": [READY, ASSIGNED, SENTRY], "image_digest": [LEAVING]},
    "Leaf": {
        "environment_id": [UNKNOWN, READY, SENTRY],
        "number": [1, LAST_LEAF, LAST_LEAF + 2, 1_000_000],
        **_LIMITS,
    },
    "Boot": {
        "environment_id": [UNKNOWN, READY, ASSIGNED],
        "number": [2, LAST_LEAF, LAST_LEAF + 2, 1_000_000],
        **_LIMITS,
    },
    "DropLeaf": {
        "environment_id": [UNKNOWN, READY],
        "number": [LAST_LEAF + 1, 1_000_000],
    },
    "Assign": {
        "environment_id": [UNKNOWN, ASSIGNED, SENTRY],
        **_LIMITS,
        "volume.workspace_bytes": [VOLUME.workspace_bytes + 1, 2**50],
        "volume.inodes_max": [VOLUME.inodes_max + 1, 2**32],
    },
    "ImageDrop": {"image_digest": [USED, LEAVING]},
    "ImageUnpack": {"image_digest": [LEAVING]},
}
# Of these every value of the type is one that an honest daemon may send; and why it does no harm.
HARMLESS: Mapping[str, Mapping[str, str]] = {
    "Prepare": {
        "back_stop_seconds": "the end of its own environment",
        "kernel": "which of two mechanisms",
        "network": "nothing, or a port of its own loopback",
        "seccomp_profile": "a name of the launcher's own list: "
        "test_a_profile_that_is_not_the_launchers_own_is_refused",
        "runsc_sha256": "compared with what is installed: kernel/test_gvisor_parts.py::"
        "test_another_digest_than_the_configured_one_is_refused",
        **{f"{of}.{name}": "of its own scope" for of in ("limits", "ceilings") for name in _ABOVE},
        "volume.workspace_bytes": "of its own volume; the disk's own size ends it",
        "volume.inodes_max": "of its own volume",
        **{
            f"io.{name}": "a ceiling of its own"
            for name in ("read_bytes", "write_bytes", "read_operations", "write_operations")
        },
    },
    "Share": {
        "weights.environment_id": "test_a_weight_for_what_is_not_handed_out_is_left_out",
        "weights.cpu_weight": "a share among the environments",
    },
    "Destroy": {
        "environment_id": "destruction goes by what the kernel holds of this very id",
        "party": "whose turn it is when volumes of the dead are erased",
    },
}

# What is of no field's type or range.
NAMES = (
    "", ".", "..", "/", "/etc/shadow", "../../root/.ssh/id_rsa", "sbxd", "0" * 31, "0" * 33,
    "0" * 32 + "\n", "0" * 31 + "G", "A" * 32, "0" * 31 + "/", "\0" * 32, "\u0661" * 32,
    "sha256:" + "a" * 63, "sha256:" + "a" * 64 + "\n", "sha256:../" + "a" * 61,
    "sha512:" + "a" * 64, "SHA256:" + "a" * 64, "sha256:" + "A" * 64, "x" * 5000, "-x", "$(id)",
    7, -1, True, None, 1.5, b"0" * 32, ["0" * 32], {"x": 1},
)  # fmt: skip
NUMBERS = (-1, -(2**63), 2**63, 2**64 - 1, 1.5, float("nan"), float("inf"), "1", b"1", None, [1])


class Field(NamedTuple):
    """One field that holds a value, by its path from the request."""

    request: type[LauncherMessage]
    path: tuple[str, ...]
    type: inspect.Type

    @property
    def name(self) -> str:
        return ".".join(self.path)


def within(type_: inspect.Type, request: type[Any], path: tuple[str, ...]) -> Iterator[Field]:
    match type_:
        case inspect.StructType():
            for each in type_.fields:
                yield from within(each.type, request, (*path, each.encode_name))
        case inspect.VarTupleType() if type_.max_length is not None:
            yield from within(type_.item_type, request, path)
        case inspect.UnionType() if len(type_.types) == 2 and type_.includes_none:
            inner = next(each for each in type_.types if not isinstance(each, inspect.NoneType))
            yield from within(inner, request, path)
        case _:
            yield Field(request, path, type_)


def fields_of(request: type[Any]) -> list[Field]:
    return list(within(inspect.type_info(request), request, ()))


FIELDS = [field for request in get_args(LauncherRequest) for field in fields_of(request)]


def is_bounded(field: Field) -> bool:
    match field.type:
        case inspect.IntType(ge=least, le=most):
            return least is not None and most is not None
        case inspect.StrType(pattern=pattern):
            return pattern is not None and pattern.startswith("^") and pattern.endswith(r"\Z")
        case inspect.EnumType():
            return True
    return False


def hostile_to(field: Field) -> Iterator[Any]:
    """Values that the field's type refuses."""
    match field.type:
        case inspect.IntType(ge=least, le=most):
            assert least is not None
            assert most is not None
            yield from (least - 1, most + 1, *(each for each in NUMBERS))
        case inspect.StrType():
            accepts = msgspec.msgpack.Decoder(Annotated[str, Meta(pattern=field.type.pattern)])
            for each in NAMES:
                try:
                    accepts.decode(msgspec.msgpack.encode(each))
                except msgspec.ValidationError:
                    yield each
        case inspect.EnumType():
            yield from NAMES


def with_value(sample: LauncherRequest, path: tuple[str, ...], value: object) -> bytes:
    """The message of a sample in which one field is another."""
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
    at = raw
    for name in path[:-1]:
        at = at[name]
        at = at[0] if isinstance(at, list) else at
    at = at[0] if isinstance(at, list) else at
    assert path[-1] in at or value is not None
    at[path[-1]] = value
    return msgspec.msgpack.encode(raw)


def sample_of(request: type[Any]) -> LauncherRequest:
    return next(each for each in SAMPLES if type(each) is request)


class World:
    """A launcher with one environment of each state, over a pool that runs nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replies: list[LauncherReply] = []
        self.done: list[str] = []
        self.pool = StillPool()
        self.verbs = Verbs(self.pool, Filters(b"", b"", b""), lambda reply, _: self._say(reply))
        self.books = self.verbs._books
        for environment_id, kernel in (
            (READY, Kernel.HOST),
            (ASSIGNED, Kernel.HOST),
            (SENTRY, Kernel.SENTRY),
        ):
            one = self.books.begin_prepare(
                Prepare(
                    ticket=1,
                    environment_id=environment_id,
                    image_digest=USED,
                    volume=VOLUME,
                    limits=LIMITS,
                    back_stop_seconds=60,
                    kernel=kernel,
                )
            )
            one.move(Trigger.PREPARED)
            if environment_id != READY:
                one.move(Trigger.ASSIGN)
                one.last_leaf = LAST_LEAF
        self.books.begin_image_drop(ImageDrop(ticket=1, image_digest=LEAVING))
        monkeypatch.setattr(fast, "make_leaf", self._make_leaf)
        monkeypatch.setattr(fast, "drop_leaf", lambda *_: self.done.append("drop_leaf"))
        monkeypatch.setattr(fast, "assign", lambda *_: self.done.append("assign"))

    def _make_leaf(self, *_: object) -> tuple[int, ...]:
        self.done.append("leaf")
        return ()

    def _say(self, reply: LauncherReply) -> None:
        self.replies.append(reply)

    def state(self) -> object:
        """All that a verb could change."""
        return (
            list(self.done),
            len(self.pool.jobs),
            len(self.pool.cancelled),
            {name: (one.state, one.last_leaf) for name, one in self.books.environments.items()},
            {name: image.state for name, image in self.books.images.items()},
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_every_request_has_a_sample_and_every_sample_all_of_its_fields() -> None:
    assert [type(sample) for sample in SAMPLES] == list(get_args(LauncherRequest))
    for field in FIELDS:
        raw = msgspec.msgpack.decode(msgspec.msgpack.encode(sample_of(field.request)))
        for name in field.path:
            raw = raw[0] if isinstance(raw, list) else raw
            raw = raw[name]
        assert raw is not None, field.name


@pytest.mark.case("DMN-21")
@pytest.mark.parametrize("field", FIELDS, ids=lambda each: f"{each.request.__name__}.{each.name}")
def test_every_field_is_bounded_by_its_type_and_refuses_what_is_not_of_it(field: Field) -> None:
    assert is_bounded(field), "a number needs both ends, a text a pattern that is anchored"
    sample = sample_of(field.request)
    assert decode_request(msgspec.msgpack.encode(sample)) == sample, "the control"
    hostile = list(hostile_to(field))
    assert len(hostile) > 5
    optional = isinstance(getattr(sample, field.path[0]), IoCeilings) or field.name in (
        "runsc_sha256",
    )
    for value in hostile:
        if value is None and optional:
            continue
        with pytest.raises(ChannelViolation):
            decode_request(with_value(sample, field.path, value))


@pytest.mark.case("DMN-21")
@pytest.mark.parametrize("request_type", get_args(LauncherRequest))
def test_a_request_takes_no_field_that_it_does_not_have(
    request_type: type[LauncherMessage],
) -> None:
    for name in ("path", "fd", "uid", "pid", "scope", "unit", "command"):
        with pytest.raises(ChannelViolation):
            decode_request(with_value(sample_of(request_type), (name,), "x"))


def test_each_field_has_its_illegal_values_or_a_reason_why_it_has_none() -> None:
    """Fails for a new field, and for one that is gone."""
    for request in get_args(LauncherRequest):
        name = request.__name__
        listed = [*ILLEGAL.get(name, {}), *HARMLESS.get(name, {}), "ticket"]
        assert sorted(listed) == sorted(field.name for field in fields_of(request)), name


@pytest.mark.case("DMN-21")
@pytest.mark.parametrize(
    ("request_name", "field", "value"),
    [
        pytest.param(request, field, value, id=f"{request}.{field}={str(value)[-12:]}")
        for request, fields in ILLEGAL.items()
        for field, values in fields.items()
        for value in values
    ],
)
def test_a_value_that_the_state_of_things_makes_illegal_touches_nothing(
    world: World, request_name: str, field: str, value: object
) -> None:
    sample = next(each for each in SAMPLES if type(each).__name__ == request_name)
    before = world.state()
    world.verbs.dispatch(decode_request(with_value(sample, tuple(field.split(".")), value)))
    (reply,) = world.replies
    assert isinstance(reply, Failed)
    assert reply.step == "legality"
    assert world.state() == before


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda each: type(each).__name__)
def test_the_same_requests_with_legal_values_are_carried_out(
    world: World, sample: LauncherRequest
) -> None:
    """The positive control: it is the one field that has the others refused."""
    before = world.state()
    world.verbs.dispatch(sample)
    assert not any(isinstance(reply, Failed) for reply in world.replies)
    assert world.state() != before


@pytest.mark.case("DMN-21")
def test_a_weight_for_what_is_not_handed_out_is_left_out(world: World) -> None:
    weights = tuple(
        Weight(environment_id=each, cpu_weight=10_000) for each in (READY, UNKNOWN, ASSIGNED)
    )
    kept = world.books.only_assigned(Share(ticket=1, weights=weights)).weights
    assert [each.environment_id for each in kept] == [ASSIGNED]


@pytest.mark.case("DMN-21")
@pytest.mark.parametrize("name", ["init", "steward", "unpacker", "none", "workload-2", "x"])
def test_a_profile_that_is_not_the_launchers_own_is_refused(name: str) -> None:
    filters = Filters(b"w", b"i", b"s", named={"mine": b"m"}, refused={"x": "it allows too much"})
    assert filters.of_profile("workload") == b"w"
    assert filters.of_profile("mine") == b"m"
    with pytest.raises(OSError, match="profile"):
        filters.of_profile(name)


@pytest.mark.case("DMN-21")
@pytest.mark.parametrize("request_type", get_args(LauncherRequest))
def test_a_request_with_a_descriptor_is_a_violation_and_the_descriptor_is_not_kept(
    request_type: type[LauncherMessage],
) -> None:
    raw = channel.encode(sample_of(request_type))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull, "rb") as file:
        channel.send(theirs, raw)
        assert channel.receive_request(ours) == sample_of(request_type), "the control"
        before = os.listdir("/proc/self/fd")
        channel.send(theirs, raw, [file.fileno()])
        with pytest.raises(ChannelViolation):
            channel.receive_request(ours)
        assert os.listdir("/proc/self/fd") == before


@pytest.mark.case("DMN-21")
@pytest.mark.parametrize("name", [each for each in NAMES if isinstance(each, str)])
def test_no_name_becomes_a_path_that_is_not_of_its_grammar(name: str) -> None:
    """The launcher's own second look, whoever has let it through."""
    for make in (
        hostpaths.scope_name,
        hostpaths.scope_directory,
        hostpaths.volume_name,
        hostpaths.digest_hex,
    ):
        with pytest.raises(ValueError, match="not an"):
            make(name)
    assert hostpaths.volume_name(READY) == READY
    assert hostpaths.digest_hex(USED) == "a" * 64


def test_the_states_are_what_the_names_say(world: World) -> None:
    states = {name: one.state for name, one in world.books.environments.items()}
    assert states == {READY: State.READY, ASSIGNED: State.ASSIGNED, SENTRY: State.ASSIGNED}
