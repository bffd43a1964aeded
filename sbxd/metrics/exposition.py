"""Families as text: OpenMetrics 1.0, the older format of Prometheus, and JSON. Pure.

The older one is for node_exporter's textfile collector, which reads nothing else: there a
counter's type names it with its suffix, and a unit and the end have no line. Invariant: no value
can end its line or its label, whatever it holds. Decision 0130 says why no library writes this.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from sbxd.metrics.families import Distribution, Family, Kind, Label, Sample
from sbxd.wire.observing import MetricsForm

_ESCAPES = {"\\": r"\\", "\n": r"\n", '"': r"\""}
_ESCAPED_IN_HELP = {"\\": r"\\", "\n": r"\n"}
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def render(families: Sequence[Family], form: MetricsForm) -> str:
    """The whole text, ended by a newline. Raises ValueError for two families of one name."""
    names = [each.name for each in families]
    if len(set(names)) != len(names):
        raise ValueError(f"one name twice: {sorted(n for n in names if names.count(n) > 1)}")
    if form is MetricsForm.JSON:
        return msgspec.json.encode(families).decode() + "\n"
    lines = [line for family in families for line in _lines(family, form)]
    if form is MetricsForm.OPENMETRICS:
        lines.append("# EOF")
    return "\n".join([*lines, ""])


def _lines(family: Family, form: MetricsForm) -> Iterator[str]:
    name = family.name
    is_counter = family.kind is Kind.COUNTER
    sampled = f"{name}_total" if is_counter else name
    named = name if form is MetricsForm.OPENMETRICS else sampled
    yield f"# TYPE {named} {family.kind}"
    if family.unit and form is MetricsForm.OPENMETRICS:
        yield f"# UNIT {named} {family.unit}"
    yield f"# HELP {named} {_replaced(family.help, _help_escapes(form))}"
    for sample in family.samples:
        yield _sample(sampled, sample)
    for each in family.distributions:
        yield from _distribution(name, each, form)


def _help_escapes(form: MetricsForm) -> dict[str, str]:
    return _ESCAPES if form is MetricsForm.OPENMETRICS else _ESCAPED_IN_HELP


def _sample(name: str, sample: Sample) -> str:
    return f"{name}{_label_set(sample.labels)} {number(sample.value)}"


def _distribution(name: str, each: Distribution, form: MetricsForm) -> Iterator[str]:
    # OpenMetrics wants a bound with its fraction, 1.0; the older format has always had 1.
    bound = repr if form is MetricsForm.OPENMETRICS else number
    for bucket in each.buckets:
        labels = (*each.labels, Label("le", bound(float(bucket.upper))))
        yield f"{name}_bucket{_label_set(labels)} {bucket.count}"
    yield f"{name}_bucket{_label_set((*each.labels, Label('le', '+Inf')))} {each.count}"
    yield f"{name}_count{_label_set(each.labels)} {each.count}"
    yield f"{name}_sum{_label_set(each.labels)} {number(each.sum)}"


def _label_set(labels: Iterable[Label]) -> str:
    inner = ",".join(f'{each.name}="{_replaced(each.value, _ESCAPES)}"' for each in labels)
    return f"{{{inner}}}" if inner else ""


def _replaced(text: str, escapes: dict[str, str]) -> str:
    clean = _UNPRINTABLE.sub("?", text).encode("utf-8", "replace").decode()
    return "".join(escapes.get(character, character) for character in clean)


def number(value: float) -> str:
    """A value as all formats write it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)
