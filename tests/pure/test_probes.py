"""The shipped probes are well-formed data, and a wrong answer is told from a right one."""

import ast
import importlib
import pkgutil
import re

import pytest

import sbxd.probes
from sbxd.probes.catalogue import PROBES
from sbxd.probes.egress import EGRESS_PROBES
from sbxd.probes.egress_probe import EgressProbe, Target, program_of
from sbxd.probes.probe import (
    Layer,
    Probe,
    Verdict,
    attempts,
    judge,
    judge_outside,
    program,
    program_outside,
    verdict,
)

# What every environment is to be like: the catalogue of cases has no attack of that name.
WITHOUT_A_CASE = frozenset(
    {"addresses", "filter", "identity", "landlock", "mounts", "names", "proc", "writes"}
)
EXAMPLE = Probe(
    id="example",
    cases=("ESC-01",),
    layer=Layer.SECCOMP,
    source="answer({})",
    inside={"a": frozenset({"EPERM"}), "b": frozenset({"EPERM", "ENOSYS"})},
    controls={"c": "ok"},
    outside={"a": "ok"},
)
RIGHT = {"a": "EPERM", "b": "ENOSYS", "c": "ok"}


def test_a_right_answer_has_nothing_wrong() -> None:
    assert judge(EXAMPLE, RIGHT) == ()
    assert judge_outside(EXAMPLE, {**RIGHT, "a": "ok"}) == ()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({**RIGHT, "a": "ok"}, "a: 'ok', not EPERM"),
        ({**RIGHT, "b": "EINVAL"}, "b: 'EINVAL', not ENOSYS or EPERM"),
        ({**RIGHT, "c": "EPERM"}, "control c: 'EPERM', not ok"),
        ({"b": "EPERM", "c": "ok"}, "a: None, not EPERM"),
        ({**RIGHT, "d": "ok"}, "d: an attempt that the probe does not know"),
        (["EPERM"], "the answer is no object"),
        (None, "the answer is no object"),
    ],
)
def test_a_wrong_answer_is_named(answer: object, named: str) -> None:
    assert judge(EXAMPLE, answer) == (named,)


@pytest.mark.parametrize("answer", [{"a": "EPERM"}, {}, None, []])
def test_a_refusal_outside_makes_the_one_inside_worthless(answer: object) -> None:
    assert len(judge_outside(EXAMPLE, answer)) == 1


@pytest.mark.parametrize("probe", PROBES, ids=[probe.id for probe in PROBES])
def test_a_probe_is_well_formed(probe: Probe) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", probe.id)
    assert bool(probe.cases) == (probe.id not in WITHOUT_A_CASE)
    assert probe.inside
    assert probe.controls, "a probe without a control may fail for another reason"
    assert not probe.inside.keys() & probe.controls.keys()
    assert probe.outside.keys() <= probe.inside.keys()
    assert all("ok" not in admissible for admissible in probe.inside.values())
    assert isinstance(ast.parse(program(probe)), ast.Module)
    assert isinstance(ast.parse(program_outside(probe)), ast.Module)
    assert not probe.outside or "ONLY" in probe.source
    assert set(probe.controls.values()) != {"none"}, "a control that finds nothing is none"


OF_EGRESS_WITHOUT_A_CASE = frozenset({"early-bytes", "half-close", "unlisted-port", "without-yes"})
TARGET = Target(
    has_proxy=True, host="a.example.org", port=443, unlisted_port=1, head_seconds=5, tunnels_max=9
)


@pytest.mark.parametrize("each", EGRESS_PROBES, ids=[each.probe.id for each in EGRESS_PROBES])
def test_a_probe_of_the_proxy_is_well_formed(each: EgressProbe) -> None:
    probe = each.probe
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", probe.id)
    assert bool(probe.cases) == (probe.id not in OF_EGRESS_WITHOUT_A_CASE)
    assert probe.inside
    assert probe.controls, "a probe without a control may fail for another reason"
    assert not probe.inside.keys() & probe.controls.keys()
    assert all(not {"ok", "200"} & admissible for admissible in probe.inside.values())
    assert isinstance(ast.parse(program_of(each, TARGET)), ast.Module)


def test_ids_are_of_one_probe_each() -> None:
    ids = [probe.id for probe in (*PROBES, *(each.probe for each in EGRESS_PROBES))]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (RIGHT, Verdict.OK),
        ({**RIGHT, "a": "ok"}, Verdict.FAILED),
        ({"b": "EPERM", "c": "ok"}, Verdict.FAILED),
        ({**RIGHT, "d": "ok"}, Verdict.FAILED),
        ({**RIGHT, "c": "EPERM"}, Verdict.INCONCLUSIVE),
        ({"a": "ok", "b": "ok"}, Verdict.INCONCLUSIVE),
        (["EPERM"], Verdict.INCONCLUSIVE),
        (None, Verdict.INCONCLUSIVE),
        ({**RIGHT, "a": ["EPERM"]}, Verdict.FAILED),
    ],
)
def test_a_verdict_is_ok_exactly_when_nothing_is_wrong(answer: object, expected: Verdict) -> None:
    judged = attempts(EXAMPLE, answer)
    assert verdict(judged) is expected
    assert (judge(EXAMPLE, answer) == ()) is (expected is Verdict.OK)
    assert verdict(()) is Verdict.FAILED


def test_every_module_of_probes_is_in_the_catalogue() -> None:
    listed = {probe.id for probe in PROBES}
    for each in pkgutil.iter_modules(sbxd.probes.__path__):
        module = importlib.import_module(f"sbxd.probes.{each.name}")
        values = vars(module).values()
        assert {value.id for value in values if isinstance(value, Probe)} <= listed, each.name
        of_egress = [value for value in values if isinstance(value, EgressProbe)]
        assert all(value in EGRESS_PROBES for value in of_egress), each.name
