"""Credentials on the worker's side: a reference travels, a value is resolved where it is used.

Invariant: no text form, copy, pickle or encoding of a SecretValue holds the secret; `reveal` is
the one way to it. This is no security boundary (whoever holds the object can reveal it): it makes
the accident hard. Deliberately absent: a resolver with credentials in it; a deployment brings its
own. A tool whose target is a sandbox is handed NoCredentials, always.
"""

import hmac
from typing import NoReturn, Protocol, final

from msgspec import Struct

REDACTED = "<redacted>"


class CredentialRef(Struct, frozen=True, kw_only=True):
    """Names a credential without holding it; the model may see it."""

    name: str


@final
class SecretValue:
    """A secret that redacts itself.

    `str`, `repr` and `format` (with any specification) give a marker. Pickling and copying by
    pickle raise TypeError; json, msgspec and other encoders do not know the type and raise it
    too. `copy` and `deepcopy` return the object itself, which is immutable. Equality takes the
    same time wherever two values of one length differ; there is no ordering, no length, and the
    hash is one for all (so that it tells nothing).
    """

    __slots__ = ("__value",)

    __value: str

    def __init__(self, value: str) -> None:
        object.__setattr__(self, "_SecretValue__value", value)

    def reveal(self) -> str:
        """The secret itself: for the call that needs it, never for a variable that stays."""
        return self.__value

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a SecretValue is immutable")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a SecretValue is immutable")

    def __str__(self) -> str:
        return REDACTED

    def __repr__(self) -> str:
        return f"SecretValue({REDACTED})"

    def __format__(self, specification: str) -> str:
        return REDACTED

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecretValue):
            return NotImplemented
        return hmac.compare_digest(_bytes(self.__value), _bytes(other.__value))

    def __hash__(self) -> int:
        return hash(SecretValue)

    def __bool__(self) -> bool:
        return True

    def __copy__(self) -> "SecretValue":
        return self

    def __deepcopy__(self, memo: object) -> "SecretValue":
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a SecretValue does not survive serialization")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecretValue does not survive serialization")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a SecretValue does not survive serialization")


def _bytes(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


class CredentialUnavailable(Exception):
    """No credential is resolved for this holder. Names the reference, nothing else."""

    def __init__(self, reference: CredentialRef) -> None:
        super().__init__(f"no credential for {reference.name!r}")
        self.reference = reference


class CredentialResolver(Protocol):
    """The tool's side of a broker. Raises CredentialUnavailable."""

    async def resolve(self, reference: CredentialRef) -> SecretValue: ...


@final
class NoCredentials:
    """The resolver of a tool whose target is a sandbox: a credential that is resolved there is a
    credential in a sandbox, however it came."""

    async def resolve(self, reference: CredentialRef) -> SecretValue:
        """Raises CredentialUnavailable for every reference."""
        raise CredentialUnavailable(reference)
