"""Real Prometheus over a real daemon: what it scrapes, its rules and the dashboard's queries.

The programs are Debian's, unpacked beside the lane and not installed.
"""

import http.server
import json
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.monitoring import queries

pytestmark = pytest.mark.needs("daemon", "image", "monitoring")

PROGRAMS = Path("/opt/prometheus")
IMAGE = "/var/cache/sbxd-lab/image.tar"
SECONDS = 240
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def run(*command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=SECONDS, check=False
    )


# This lane has no memory controller (test_lane_facts.py): what comes of it has no sample.
NOT_COUNTED = {"sbxd_pool_idle_memory_bytes"}


def promtool(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return run(str(PROGRAMS / "promtool"), *arguments, stdin=stdin)


@pytest.fixture(scope="module")
def used_daemon() -> None:
    """A daemon that has run commands of each end that takes no limits of the host."""
    if not json.loads(run("sbxctl", "image", "ls", "--json").stdout):
        assert run("sbxctl", "image", "import", IMAGE).returncode == 0
    assert run("sbxctl", "run", "--disk=64M", "--", "true").returncode == 0
    ended = run("sbxctl", "run", "--disk=64M", "--timeout=1", "--", "sleep", "100")
    assert ended.returncode == 230, ended.stderr
    denied = run("sbxctl", "run", "--disk=64M", "--", "no-such-program")
    assert denied.returncode == 240, denied.stderr


# --- the rules ----------------------------------------------------------------------------------


def test_the_rules_are_ones_that_prometheus_loads() -> None:
    done = promtool("check", "rules", str(queries.RULES))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(queries.alerts()) + len(queries.recorded())} rules found" in done.stdout


def test_each_alert_fires_on_what_it_is_for_and_on_nothing_next_to_it() -> None:
    done = promtool("test", "rules", str(queries.RULE_TESTS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_series_that_makes_it_fire() -> None:
    text = queries.RULE_TESTS.read_text()
    fired = {
        block.partition("\n")[0].strip()
        for block in text.split("alertname:")[1:]
        if "exp_labels" in block
    }
    assert fired == queries.alerts()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (">= 50", ">= 5000"),
        ("sbxd_quarantined_environments > 0", "sbxd_quarantined_environments > 2"),
        ("sbxd_up == 0", "sbxd_up == 2"),
        ("unless sum", "or sum"),
        ("< 0.1 *", "< 0.01 *"),
    ],
)
def test_control_a_rule_that_is_changed_fails_its_test(
    tmp_path: Path, ours: str, theirs: str
) -> None:
    text = queries.RULES.read_text()
    assert ours in text
    (tmp_path / queries.RULES.name).write_text(text.replace(ours, theirs))
    (tmp_path / "test.yml").write_text(queries.RULE_TESTS.read_text())
    assert promtool("test", "rules", str(tmp_path / "test.yml")).returncode != 0


# --- the texts ----------------------------------------------------------------------------------


def test_promtool_finds_nothing_wrong_with_a_live_exposition(used_daemon: None) -> None:
    text = run("sbxctl", "metrics", "--format", "prometheus").stdout
    done = promtool("check", "metrics", stdin=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert 'sbxd_commands_total{mechanism="namespaces",killed_by="TIMEOUT"} ' in text
    control = text.replace("# TYPE sbxd_commands_total counter", "# TYPE sbxd_commands_total gauge")
    assert promtool("check", "metrics", stdin=control).returncode != 0


# --- a Prometheus that runs ---------------------------------------------------------------------


@contextmanager
def program(name: str, log: Path, *arguments: str) -> Iterator[None]:
    """One of the programs for the length of the block."""
    with log.open("wb") as file:
        process = subprocess.Popen([str(PROGRAMS / name), *arguments], stdout=file, stderr=file)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


class _Page(http.server.BaseHTTPRequestHandler):
    def __init__(self, read: Callable[[], str], *arguments: Any) -> None:
        self._read = read
        super().__init__(*arguments)

    def do_GET(self) -> None:
        raw = self._read().encode()
        self.send_response(200)
        self.send_header("Content-Type", OPENMETRICS)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


@contextmanager
def page(read: Callable[[], str]) -> Iterator[int]:
    """An HTTP server on the loopback whose every page is this text; its port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Page, read))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def configuration(folder: Path, targets: dict[str, int]) -> Path:
    """Of a Prometheus that scrapes each every few seconds, with our rules."""
    file = folder / "prometheus.yml"
    jobs = [
        {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        for name, port in targets.items()
    ]
    document = {
        "global": {"scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "2s"},
        "rule_files": [str(queries.RULES)],
        "scrape_configs": jobs,
    }
    file.write_text(json.dumps(document))  # which is YAML too
    return file


PORT = 19090
NODE_PORT = 19100


def ask(path: str, **arguments: str) -> Any:
    """Prometheus's answer, None while there is none."""
    url = f"http://127.0.0.1:{PORT}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            answer = json.loads(reply.read())
    except OSError:
        return None
    assert answer["status"] == "success", answer
    return answer["data"]


def value(expression: str) -> float | None:
    data = ask("query", query=expression)
    if data is None or not data["result"]:
        return None
    return float(data["result"][0]["value"][1])


async def eventually(true: Callable[[], bool], what: str) -> None:
    """Ask again until it is so."""
    with trio.move_on_after(SECONDS):
        while not await trio.to_thread.run_sync(true):
            await _pause()
        return
    raise AssertionError(f"never: {what}")


async def _pause() -> None:
    with trio.move_on_after(0.5):
        await trio.sleep_forever()


async def test_prometheus_reads_what_the_timer_writes_and_the_dashboard_asks(
    used_daemon: None, tmp_path: Path
) -> None:
    textfiles = tmp_path / "node-exporter"
    textfiles.mkdir()
    # As docs/monitoring.md says: a link to what the unit writes.
    (textfiles / "sbxd.prom").symlink_to("/run/sbxd-metrics/sbxd.prom")
    assert run("systemctl", "start", "sbxd-metrics.service").returncode == 0
    with ExitStack() as running:
        text = run("sbxctl", "metrics").stdout
        live = running.enter_context(page(lambda: text))
        cut = running.enter_context(page(lambda: text.replace("# EOF\n", "")))
        running.enter_context(
            program(
                "prometheus-node-exporter",
                tmp_path / "node.log",
                "--collector.disable-defaults",
                "--collector.textfile",
                f"--collector.textfile.directory={textfiles}",
                f"--web.listen-address=127.0.0.1:{NODE_PORT}",
            )
        )
        targets = {"node": NODE_PORT, "live": live, "cut": cut}
        settings = configuration(tmp_path, targets)
        checked = promtool("check", "config", str(settings))
        assert checked.returncode == 0, checked.stdout + checked.stderr
        running.enter_context(
            program(
                "prometheus",
                tmp_path / "prometheus.log",
                f"--config.file={settings}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{PORT}",
            )
        )
        await eventually(lambda: value('sbxd_up{job="node"}') == 1, "the textfile is scraped")
        await eventually(lambda: value('up{job="live"}') == 1, "OpenMetrics is scraped")
        await eventually(lambda: value('up{job="cut"}') == 0, "and refused without its end")
        assert value("node_textfile_scrape_error") == 0
        timeouts = value('sbxd_commands_total{job="live",killed_by="TIMEOUT"}')
        assert timeouts is not None
        assert timeouts >= 1
        # What Prometheus made of the types in both formats.
        for name, kind in (
            ("sbxd_denials_total", "counter"),
            ("sbxd_provision_seconds", "histogram"),
            ("sbxd_up", "gauge"),
        ):
            assert {each["type"] for each in ask("metadata", metric=name)[name]} == {kind}, name
        await eventually(
            lambda: (
                value("count(sbxd:utilization:ratio)") is not None
                or value("count(sbxd:orphans_reaped:increase1h)") is not None
            ),
            "the rules record",
        )
        groups = ask("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == queries.alerts() | queries.recorded()
        assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
        series = set(ask("label/__name__/values"))
        for title, expression in queries.expressions():
            assert ask("query", query=expression) is not None, (title, expression)
            for name in queries.named(expression) - queries.FOREIGN:
                if not name.startswith(queries.OF_WORKERS) and name not in queries.recorded():
                    assert (name in series) == (name not in NOT_COUNTED), (title, name)


def test_the_timer_and_the_file_of_a_daemon_that_is_down(used_daemon: None) -> None:
    written = Path("/run/sbxd-metrics/sbxd.prom")
    assert run("systemctl", "start", "sbxd-metrics.service").returncode == 0
    assert "sbxd_up 1\n" in written.read_text()
    assert written.stat().st_mode & 0o777 == 0o644
    stop = ("sbxd-admin.socket", "sbxd.socket", "sbxd.service")
    try:
        assert run("systemctl", "stop", *stop).returncode == 0
        down = written.with_name("down.prom")
        assert run("sbxctl", "metrics", "--textfile", str(down)).returncode == 241
        assert "sbxd_up 0\n" in down.read_text()
        down.unlink()
    finally:
        assert run("systemctl", "start", "sbxd.socket", "sbxd-admin.socket").returncode == 0
    assert run("systemctl", "start", "sbxd-metrics.timer").returncode == 0
    shown = run("systemctl", "show", "--property=TimersMonotonic", "sbxd-metrics.timer").stdout
    assert "OnUnitInactiveUSec=15s" in shown
    assert run("systemctl", "stop", "sbxd-metrics.timer").returncode == 0
