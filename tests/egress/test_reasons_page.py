"""docs/egress.md has every reason, and its commands and tables are what the programs take.

To write the table of reasons anew: python -m tests.egress.test_reasons_page
"""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from sbxctl.advice import ADVICE
from sbxctl.exits import Exit
from sbxd.egress.answers import status_of
from sbxd.egress.decisions import ProxyReason, Reason
from sbxd.policy.destinations import policy_problems
from sbxd.policy.egress import EgressRefusal
from sbxd.settings import Settings
from tests.service.fake_socket import sbxctl

PAGE = Path(__file__).parents[2] / "docs" / "egress.md"
BEGIN, END = "<!-- reasons -->\n", "<!-- end of reasons -->\n"
REASONS: tuple[Reason, ...] = (*EgressRefusal, *ProxyReason)
# No tunnel was asked of a proxy, or it was open already when its first bytes were judged.
WITHOUT_AN_ANSWER = {
    EgressRefusal.PAGE_NOT_PUBLIC_HTTPS,
    EgressRefusal.UNSUBSCRIBE_NOT_PUBLIC_HTTPS,
    ProxyReason.SNI_ABSENT,
    ProxyReason.SNI_MISMATCH,
}
BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def table() -> str:
    """The table of reasons."""
    rows = ["| reason | answer | what was the case | what an operator does |", "|---|---|---|---|"]
    for reason in REASONS:
        answer = "" if reason in WITHOUT_AN_ANSWER else str(status_of(reason).value)
        advice = ADVICE[reason.value]
        rows.append(f"| `{reason.value}` | {answer} | {advice.meaning} | {advice.remedy} |")
    return "\n".join(rows) + "\n"


def commands() -> list[str]:
    """Each command line of sbxctl in the page, without what is said of it."""
    lines = [
        line for _, block in BLOCKS.findall(PAGE.read_text("utf-8")) for line in block.splitlines()
    ]
    found = [
        line.removeprefix("$ ") for line in lines if line.removeprefix("$ ").startswith("sbxctl ")
    ]
    return sorted({re.split(r"\s{3,}", line)[0] for line in found})


def test_the_page_has_every_reason_with_its_answer_and_remedy() -> None:
    assert PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0] == table(), __doc__


def test_the_configurations_of_the_page_are_ones() -> None:
    found = [block for kind, block in BLOCKS.findall(PAGE.read_text("utf-8")) if kind == "toml"]
    assert found
    for block in found:
        settings = msgspec.convert(tomllib.loads(block), Settings)
        assert settings.egress.destinations
        assert policy_problems(settings.egress) == ()


@pytest.mark.parametrize("line", commands())
async def test_a_command_of_the_page_is_one(line: str, tmp_path: Path) -> None:
    """It gets as far as the socket, which is not there, or the journal."""
    words = line.replace("HOST:PORT", "files.example.org:443").replace("RUN", "run-1").split()
    ran = await sbxctl("--socket", str(tmp_path / "none"), *words[1:])
    assert ran.code == Exit.UNAVAILABLE, ran.stderr


def test_a_command_is_found_where_it_is() -> None:
    assert "sbxctl egress check HOST:PORT --explain" in commands()
    assert len(commands()) >= 7


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], "utf-8")
