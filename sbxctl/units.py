"""Sizes, durations and CPU shares as people write them on a command line."""

import click

_FACTORS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


class Size(click.ParamType[int]):
    """`64M`, `1.5GiB`, `1048576`: bytes, binary multiples."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower().removesuffix("b").removesuffix("i")
        number, factor = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
        try:
            size = float(number) * _FACTORS[factor]
        except (KeyError, ValueError):
            self.fail(f"{value!r} is no size: write it like 64M or 2G", param, ctx)
        if not 0 < size < 2**53:
            self.fail(f"{value!r} is out of range", param, ctx)
        return round(size)


class Cpus(click.ParamType[int]):
    """`1.5`: cores, converted to millicores."""

    name = "cpus"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        try:
            millicores = round(float(str(value)) * 1000)
        except ValueError:
            self.fail(f"{value!r} is no number of cores: write it like 0.5 or 2", param, ctx)
        if millicores < 10:
            self.fail("the smallest share is 0.01 cores", param, ctx)
        return millicores


def human_bytes(size: int) -> str:
    """`1.5 MiB`."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
