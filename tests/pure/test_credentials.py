"""A SecretValue shows nothing of itself by accident; a sandbox's resolver has nothing."""

import copy
import json
import logging
import pickle
import traceback
from io import BytesIO

import anyio
import msgspec
import pytest

from sbxd.port.credentials import (
    CredentialRef,
    CredentialResolver,
    CredentialUnavailable,
    NoCredentials,
    SecretValue,
)

TEXT = "sk-live-0123456789"
SECRET = SecretValue(TEXT)


def test_reveal_is_the_way_to_it() -> None:
    assert SECRET.reveal() == TEXT


@pytest.mark.parametrize(
    "shown",
    [
        str(SECRET),
        repr(SECRET),
        f"{SECRET}",
        f"{SECRET!r}",
        f"{SECRET:>40}",
        f"{SECRET:.3}",
        "%s %r" % (SECRET, SECRET),  # noqa: UP031
        repr([SECRET, {"a": SECRET}]),
        format(SECRET, "s"),
        repr(CredentialUnavailable(CredentialRef(name="x"))),
        ascii(SECRET),
    ],
)
def test_no_text_form_shows_it(shown: str) -> None:
    assert TEXT[:4] not in shown


def test_a_log_line_and_a_traceback_do_not_show_it(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("x").error("with %s", SECRET)
    assert TEXT not in caplog.text
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        raise ValueError(SECRET)
    shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert TEXT not in "".join(shown.format())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_is_refused(protocol: int) -> None:
    for value in (SECRET, [SECRET], {"a": SECRET}):
        file = BytesIO()
        with pytest.raises(TypeError, match="serialization"):
            pickle.Pickler(file, protocol).dump(value)
        assert TEXT.encode() not in file.getvalue()


class Holder(msgspec.Struct):
    secret: SecretValue


def test_encoders_refuse_it() -> None:
    for encode in (json.dumps, msgspec.json.encode, msgspec.msgpack.encode, msgspec.to_builtins):
        for value in (SECRET, [SECRET], {"a": SECRET}):
            with pytest.raises(TypeError):
                encode(value)
    with pytest.raises(TypeError):
        msgspec.json.encode(Holder(SECRET))
    assert TEXT not in json.dumps([SECRET], default=str)
    assert TEXT not in repr(Holder(SECRET))


def test_a_copy_is_the_object_itself() -> None:
    assert copy.copy(SECRET) is SECRET
    assert copy.deepcopy([SECRET])[0] is SECRET


def test_it_has_no_attribute_to_stumble_over_and_cannot_be_changed() -> None:
    assert not hasattr(SECRET, "__dict__")
    assert [name for name in dir(SECRET) if "value" in name] == ["_SecretValue__value"]
    with pytest.raises(TypeError):
        vars(SECRET)
    with pytest.raises(AttributeError):
        SECRET.other = 1
    with pytest.raises(AttributeError):
        del SECRET._SecretValue__value  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        object.__setattr__(SECRET, "other", 1)


def test_equality_is_of_the_value_and_the_hash_tells_nothing() -> None:
    assert SecretValue(TEXT) == SECRET
    assert SecretValue("other") != SECRET
    assert SECRET != TEXT
    assert SecretValue("\udcff") != SECRET
    assert hash(SecretValue("other")) == hash(SECRET)
    assert len({SECRET, SecretValue(TEXT), SecretValue("other")}) == 2
    assert not {TEXT} & {SECRET}


def test_an_empty_secret_does_not_tell_that_it_is() -> None:
    assert SecretValue("")
    assert str(SecretValue("")) == str(SECRET)
    with pytest.raises(TypeError):
        len(SECRET)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        sorted([SECRET, SecretValue("a")])  # type: ignore[type-var]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("name", ["", "database", "x" * 1000])
def test_a_sandboxs_resolver_always_raises(backend: str, name: str) -> None:
    resolver: CredentialResolver = NoCredentials()

    async def main() -> None:
        with pytest.raises(CredentialUnavailable) as caught:
            await resolver.resolve(CredentialRef(name=name))
        assert caught.value.reference == CredentialRef(name=name)

    anyio.run(main, backend=backend)
