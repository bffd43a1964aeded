"""What the dashboard and the rules ask for, taken out of the files."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"
DASHBOARD = FOLDER / "sbxd.dashboard.json"
RULES = FOLDER / "sbxd.rules.yml"
RULE_TESTS = FOLDER / "sbxd.rules.test.yml"

# Of others: node_exporter, Prometheus itself, the worker tier (`sbxd-worker artifacts metrics`).
FOREIGN = frozenset({"ALERTS", "node_textfile_mtime_seconds"})
OF_WORKERS = "sbxd_artifact_"

_NAME = re.compile(r"\b(?:sbxd[_:][a-z0-9_:]+|ALERTS|node_[a-z0-9_]+)\b")
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')


def dashboard() -> dict[str, Any]:
    found = json.loads(DASHBOARD.read_text())
    assert isinstance(found, dict)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """The title of each panel and each of its queries, for one host."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$instance", ".*")


def named(text: str) -> set[str]:
    """The names of metrics in an expression."""
    return set(_NAME.findall(_STRINGS.sub('""', text)))


def recorded() -> set[str]:
    """The names that the rules record."""
    return set(re.findall(r"- record: (\S+)", RULES.read_text()))


def alerts() -> set[str]:
    """The names of the alerts."""
    return set(re.findall(r"- alert: (\S+)", RULES.read_text()))


def rule_expressions() -> str:
    """The text of all rules without annotations, comments and names."""
    lines = RULES.read_text().splitlines()
    kept, within = [], False
    for line in lines:
        word = line.strip()
        if word.startswith("expr:"):
            within = True
        elif re.match(r"(for|labels|annotations|- alert|- record|- name):?", word):
            within = False
        if within and not word.startswith("#"):
            kept.append(word)
    return "\n".join(kept)
