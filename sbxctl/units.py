"""Sizes, CPU shares, names and destinations as people write them on a command line."""

import re

import click

from sbxctl.naming import ID_DIGITS, NAME_PATTERN, PREFIX_DIGITS_MIN
from sbxd.wire.egress import HOST_CHARACTERS_MAX

_SIZE = re.compile(
    r"([0-9]{1,16}(?:\.[0-9]{1,6})?)(?:([kmgt])(?:i?b)?|b)?", re.ASCII | re.IGNORECASE
)
_PORT = re.compile(r"[0-9]{1,6}", re.ASCII)
_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", re.ASCII)
_CORES = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,3})?", re.ASCII)
LINES_MAX = 10**9  # that a verb is asked for
_FACTORS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


class Size(click.ParamType[int]):
    """`64M`, `1.5GiB`, `1048576`: bytes, binary multiples."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip(" "))
        if match is None:
            self.fail(f"{value!r} is no size: write it like 64M or 2G", param, ctx)
        size = round(float(match[1]) * _FACTORS[(match[2] or "").lower()])
        if not 0 < size < 2**53:
            self.fail(f"{value!r} is out of range", param, ctx)
        return size


class Cpus(click.ParamType[int]):
    """`1.5`: cores, converted to millicores."""

    name = "cpus"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip(" ")
        if _CORES.fullmatch(text) is None:
            self.fail(f"{value!r} is no number of cores: write it like 0.5 or 2", param, ctx)
        millicores = round(float(text) * 1000)
        if millicores < 10:
            self.fail("the smallest share is 0.01 cores", param, ctx)
        return millicores


class Whole(click.ParamType[int]):
    """A whole number in ASCII digits alone, within bounds that are both allowed."""

    name = "number"

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        if _DIGITS.fullmatch(str(value)) is None:
            self.fail(f"{str(value)[:40]!a} is no whole number of decimal digits", param, ctx)
        number = int(str(value))
        if not self._least <= number <= self._most:
            self.fail(f"{number} is not from {self._least} to {self._most}", param, ctx)
        return number


class Seconds(click.ParamType[float]):
    """A length of time in seconds, in ASCII digits with at most one point, within bounds that are
    both allowed."""

    name = "seconds"

    def __init__(self, least: float, most: float) -> None:
        self._least = least
        self._most = most

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        if _DECIMAL.fullmatch(str(value)) is None:
            found = f"{str(value)[:40]!a} is not a number of seconds"
            self.fail(f"{found}: write it like 2 or 0.5", param, ctx)
        seconds = float(str(value))
        if not self._least <= seconds <= self._most:
            self.fail(f"{seconds:g} is not from {self._least:g} to {self._most:g}", param, ctx)
        return seconds


class EnvironmentName(click.ParamType[str]):
    """An environment's id, or how it begins (`sbxctl.naming.find`)."""

    name = "environment"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        if re.fullmatch(NAME_PATTERN, str(value)) is None:
            self.fail(
                f"{str(value)[:40]!a} is not an id: write its {ID_DIGITS} hex digits, or the first "
                f"{PREFIX_DIGITS_MIN} or more, as `sbxctl ls` shows",
                param,
                ctx,
            )
        return str(value)


class ImageDigest(click.ParamType[str]):
    """An image's digest, whole."""

    name = "digest"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        if re.fullmatch(r"sha256:[0-9a-f]{64}", str(value)) is None:
            found = f"{str(value)[:80]!a} is no digest"
            self.fail(f"{found}: sha256: and 64 hex digits, as `sbxctl image ls` shows", param, ctx)
        return str(value)


def human_bytes(size: int) -> str:
    """`1.5 MiB`."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def human_duration(milliseconds: int) -> str:
    """`250 ms`, `12.3 s`, `4 m 05 s`, `3 h 20 m`, `2 d 4 h`."""
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.1f} s"
    minutes, seconds = divmod(milliseconds // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02} m" if hours else f"{minutes} m {seconds:02} s"


def parse_destination(value: str) -> tuple[str, int]:
    """HOST:PORT, as far as it has that form; what is a host is judged elsewhere. The port is 0,
    which is none, where it is not written as the proxy takes it (0443).

    Raises click.UsageError.
    """
    host, colon, port = value.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or len(host) > HOST_CHARACTERS_MAX:
        raise click.UsageError(f"{value!a}: write HOST:PORT, as files.example.org:443")
    return host, 0 if port.startswith("0") else int(port)
