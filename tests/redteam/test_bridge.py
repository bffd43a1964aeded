"""The orchestration bridge of a live daemon: one socket, one token, one connection, one turn.

Every refusal has its control in `test_a_script_calls_the_worker_with_the_reference_client`, or in
the same test: the same program with the one thing right that is wrong in the attack.
"""

import errno
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio

from sbxd.client.bridge import BridgeHoldExceeded
from sbxd.port.command import KillReason
from sbxd.port.environment import BRIDGE_SOCKET_PATH, BridgeEndpoint
from sbxd.port.errors import BudgetExhausted, ExecutionRejected, RejectedCode
from sbxd.port.limits import GIB, MIB, EnvironmentBudgets
from sbxd.wire.messages import BRIDGE_FRAME_BYTES_MAX
from tests.redteam.bridging import PROGRAM, look, upper
from tests.redteam.live import LIMITS, admin, default_image, fresh_bridge, live, specification

pytestmark = pytest.mark.needs("daemon")

REFERENCE_CLIENT = Path(__file__).parents[2] / "examples" / "bridge_client.py"


def events(environment_id: str, kind: str) -> list[dict[str, Any]]:
    """The environment's events of one kind in the journal."""
    subprocess.run(["journalctl", "--sync"], check=True, timeout=60)
    words = [f"SBX_ENVIRONMENT_ID={environment_id}", f"SBX_EVENT={kind}"]
    done = subprocess.run(
        ["journalctl", "--output=json", "--all", *words],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def everything_in_the_journal() -> bytes:
    return subprocess.run(
        ["journalctl", "--output=export", "--all", "--boot"],
        check=True,
        capture_output=True,
        timeout=120,
    ).stdout


@pytest.mark.also("uml")
async def test_a_script_calls_the_worker_with_the_reference_client() -> None:
    seen: list[bytes] = []

    async def handler(frame: bytes) -> bytes:
        seen.append(frame)
        return frame.upper()

    async with live(bridge=fresh_bridge()) as sandbox:
        await sandbox.workspace.write("bridge_client.py", REFERENCE_CLIENT.read_bytes())
        result = await sandbox.with_bridge(handler).run("python3", "bridge_client.py", "one", "two")
        assert (result.exit_code, result.stdout) == (0, b"ONE\nTWO\n"), result
        assert seen == [b"one", b"two"]


async def test_a_turn_is_in_the_journal_with_its_counts_and_without_its_token_or_words() -> None:
    bridge = fresh_bridge()
    async with live(bridge=bridge) as sandbox:
        await look(
            sandbox,
            "present(b'wrong-wrong-wrong')\n"
            "end, _ = present(TOKEN)\n"
            "send(end, b'planted-frame')\n"
            "answer(receive(end).decode())",
        )
        environment_id = sandbox.handle.environment_id
    assert len(events(environment_id, "BridgeOpened")) == 1
    (refused,) = events(environment_id, "BridgeRefused")
    assert (refused["SBX_REFUSAL"], refused["SBX_VIOLATION"]) == ("WRONG_TOKEN", "BRIDGE_DENIED")
    (closed,) = events(environment_id, "BridgeClosed")
    assert (closed["SBX_OPENED"], closed["SBX_REFUSED"]) == ("true", "1")
    assert closed["SBX_COUNTS_BYTES_FROM_ENVIRONMENT"] == str(len("planted-frame"))
    assert closed["SBX_COUNTS_FRAMES_FROM_WORKER"] == "1"
    whole = everything_in_the_journal()
    assert environment_id.encode() in whole, "the control: this is the journal that was written"
    assert bridge.token.encode() not in whole
    assert b"planted-frame" not in whole


async def test_a_second_use_of_the_token_is_refused_while_and_after_the_first() -> None:
    async with live(bridge=fresh_bridge()) as sandbox:
        found = await look(
            sandbox,
            "first, said = present(TOKEN)\n"
            "_, during = present(TOKEN)\n"
            "send(first, b'ping')\n"
            "alive = receive(first).decode()\n"
            "first.close()\n"
            "_, after = present(TOKEN)\n"
            "answer([said, during, alive, after])",
        )
        assert found == ["ACCEPTED", "REFUSED TOKEN_USED", "PING", "REFUSED TOKEN_USED"]


async def test_a_wrong_token_and_anothers_are_refused_and_the_right_one_still_works() -> None:
    other = fresh_bridge()
    async with live(bridge=other) as _, live(bridge=fresh_bridge(), tenant="tenant-2") as sandbox:
        found = await look(
            sandbox,
            f"tries = [b'x' * 32, TOKEN[:-1], TOKEN + b'x', {other.token.encode()!r}]\n"
            "said = [present(token)[1] for token in tries]\n"
            "answer([said, present(TOKEN)[1]])",
        )
        assert found == [["REFUSED WRONG_TOKEN"] * 4, "ACCEPTED"]


@pytest.mark.also("uml")
async def test_it_is_no_network_and_works_without_one() -> None:
    async with live(bridge=fresh_bridge()) as sandbox:
        found = await look(
            sandbox,
            "outside = attempt(socket.create_connection, ('192.0.2.1', 80), 5)\n"
            "answer([outside, present(TOKEN)[1]])",
        )
        assert found[0] in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES), found
        assert found[1] == "ACCEPTED"


async def test_without_a_bridge_nobody_listens_and_nothing_of_it_is_told() -> None:
    source = (
        PROGRAM + "answer([errno.errorcode[attempt(connected)], "
        "sorted(n for n in os.environ if 'BRIDGE' in n)])"
    )
    for bridge in (None, fresh_bridge()):
        async with live(bridge=bridge) as sandbox:
            result = await sandbox.python(source)  # without a handler
            assert json.loads(result.stdout) == ["ECONNREFUSED", []], result
    async with live() as sandbox:
        with pytest.raises(ExecutionRejected) as refused:
            await sandbox.with_bridge(upper).python(source)
        assert (refused.value.code, refused.value.field) == (RejectedCode.BRIDGE_REFUSED, "bridge")


async def test_after_the_turn_there_is_no_second_one_and_nobody_listens() -> None:
    async with live(bridge=fresh_bridge()) as sandbox:
        with pytest.raises(ExecutionRejected) as absent:  # not started: no turn
            await sandbox.with_bridge(upper).run("no-such-program")
        assert absent.value.code is RejectedCode.COMMAND_NOT_FOUND
        assert await look(sandbox, "answer(present(TOKEN)[1])") == "ACCEPTED"
        with pytest.raises(ExecutionRejected) as refused:
            await sandbox.with_bridge(upper).run("true")
        assert refused.value.code is RejectedCode.BRIDGE_REFUSED
        result = await sandbox.python(PROGRAM + "answer(errno.errorcode[attempt(connected)])")
        assert json.loads(result.stdout) == "ECONNREFUSED"


async def test_another_place_for_the_socket_is_refused_with_the_field_and_the_fix() -> None:
    image = await default_image()
    async with live() as sandbox:
        elsewhere = BridgeEndpoint(socket_path="/run/bridge.sock", token="t" * 32)
        with pytest.raises(ExecutionRejected) as refused:
            await sandbox.remote.provision(specification(image, bridge=elsewhere))
    assert refused.value.field == "bridge.socket_path"
    assert BRIDGE_SOCKET_PATH in refused.value.detail


@pytest.mark.also("uml")
async def test_the_socket_can_be_connected_to_and_nothing_else() -> None:
    async with live(bridge=fresh_bridge()) as sandbox:
        found = await look(
            sandbox,
            f"path = {BRIDGE_SOCKET_PATH!r}\n"
            "mine = socket.socket(socket.AF_UNIX)\n"
            "datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
            "tries = {\n"
            "    'remove': attempt(os.unlink, path),\n"
            "    'replace': attempt(os.rename, path, '/dev/other'),\n"
            "    'move in': attempt(mine.bind, '/dev/mine'),\n"
            "    'mode': attempt(os.chmod, path, 0o777),\n"
            "    'open': attempt(os.open, path, os.O_RDWR),\n"
            "    'datagram': attempt(datagram.connect, path),\n"
            "}\n"
            "answer([{k: errno.errorcode[v] for k, v in tries.items()}, present(TOKEN)[1]])",
        )
    denied = ("EROFS", "EACCES", "EPERM")
    tries, control = found
    assert control == "ACCEPTED"
    assert tries.pop("open") in ("ENXIO", "EACCES")
    assert tries.pop("datagram") in ("EPROTOTYPE", "ECONNREFUSED")
    assert set(tries.values()) <= set(denied), tries


@pytest.mark.also("uml")
async def test_an_abstract_socket_of_that_name_is_another_and_reaches_nobody() -> None:
    async with live(bridge=fresh_bridge()) as sandbox:
        found = await look(
            sandbox,
            "name = '\\0' + '/dev/sbx-bridge'\n"
            "before = errno.errorcode[attempt(connected, name)]\n"
            "listener = socket.socket(socket.AF_UNIX)\n"
            "listener.bind(name); listener.listen()\n"
            "answer([before, attempt(connected, name), present(TOKEN)[1]])",
        )
        assert found == ["ECONNREFUSED", 0, "ACCEPTED"]


@pytest.mark.also("uml")
async def test_a_second_environment_reaches_only_its_own_socket() -> None:
    """While the bridge of one is open and waits, the other's is not listened on."""
    probe = PROGRAM + (
        "status = os.stat('/dev/sbx-bridge')\n"
        "answer([errno.errorcode.get(attempt(connected)), status.st_dev])"
    )
    found: dict[str, Any] = {}

    async def handler(frame: bytes) -> bytes:
        found["own"] = json.loads(frame)
        found["other"] = json.loads((await second.python(probe)).stdout)
        return b"done"

    async with live(bridge=fresh_bridge()) as first, live(bridge=fresh_bridge()) as second:
        result = await first.with_bridge(handler).python(
            PROGRAM + "end, said = present(TOKEN)\n"
            "send(end, str(os.stat('/dev/sbx-bridge').st_dev).encode())\n"
            "answer([said, receive(end).decode()])"
        )
        assert json.loads(result.stdout) == ["ACCEPTED", "done"], result
    assert found["other"][0] == "ECONNREFUSED"
    async with admin() as client:
        mechanism = (await client.describe()).mechanism
    if mechanism == "namespaces":  # a guest's kernel numbers devices for itself
        assert found["other"][1] != found["own"]


async def test_a_half_closed_connection_still_gets_its_answers_and_then_the_end() -> None:
    async with live(bridge=fresh_bridge()) as sandbox:
        found = await look(
            sandbox,
            "end, _ = present(TOKEN)\n"
            "for word in (b'a', b'b', b'c'): send(end, word)\n"
            "end.shutdown(socket.SHUT_WR)\n"
            "answer([(receive(end) or b'end').decode() for _ in range(4)])",
        )
        assert found == ["A", "B", "C", "end"]


@pytest.mark.parametrize(
    ("sent", "accepted"),
    [
        (b"\0\0\0\0", True),
        ((BRIDGE_FRAME_BYTES_MAX + 1).to_bytes(4, "big"), True),
        (b"\xff\xff\xff\xff" + b"x" * 100, True),
        ((2000).to_bytes(4, "big") + b"x" * 2000, False),  # longer than any token
        (b"\0\0\0\x20half", False),
    ],
    ids=["empty", "one too long", "4 GiB", "a token of 2000 bytes", "half a token"],
)
async def test_an_illegal_frame_ends_the_connection_and_not_the_command(
    sent: bytes, accepted: bool
) -> None:
    async with live(bridge=fresh_bridge()) as sandbox:
        start = "present(TOKEN)[0]" if accepted else "connected()"
        found = await look(
            sandbox,
            f"end = {start}\nend.sendall({sent!r})\nend.shutdown(socket.SHUT_WR)\n"
            "try:\n    last = receive(end)\nexcept ConnectionResetError:\n    last = None\n"
            "answer(None if last is None else last.decode())",
        )
        assert found == (None if accepted else "REFUSED NO_TOKEN")


async def test_frames_of_every_length_come_back_whole() -> None:
    async with live(bridge=fresh_bridge()) as sandbox:
        found = await look(
            sandbox,
            f"end, _ = present(TOKEN)\nsizes = [1, 4096, 65536, 200000, {BRIDGE_FRAME_BYTES_MAX}]\n"
            "wrong = 0\n"
            "for size in sizes * 3:\n"
            "    send(end, b'a' * size)\n"
            "    wrong += receive(end) != b'A' * size\n"
            "answer(wrong)",
        )
        assert found == 0


async def test_a_flood_of_connections_ends_with_nobody_listening_and_a_command_that_works() -> None:
    async with live(bridge=fresh_bridge()) as sandbox:
        found = await look(
            sandbox,
            "end, said = present(TOKEN)\n"
            "outcomes = {}\n"
            "for _ in range(2000):\n"
            "    try:\n"
            "        outcome = present(b'wrong-wrong-wrong')[1]\n"
            "    except OSError as problem:\n"
            "        outcome = errno.errorcode[problem.errno]\n"
            "    outcomes[outcome] = outcomes.get(outcome, 0) + 1\n"
            "send(end, b'still here')\n"
            "answer([said, outcomes, receive(end).decode()])",
        )
        said, outcomes, alive = found
        assert (said, alive) == ("ACCEPTED", "STILL HERE")
        assert outcomes["REFUSED WRONG_TOKEN"] <= 64
        assert outcomes["ECONNREFUSED"] >= 1900
        environment_id = sandbox.handle.environment_id
    assert len(events(environment_id, "BridgeRefused")) == 8
    (closed,) = events(environment_id, "BridgeClosed")
    assert int(closed["SBX_REFUSED"]) >= outcomes["REFUSED WRONG_TOKEN"]


async def test_descriptors_that_take_long_to_close_hold_nobody_else_up() -> None:
    """The kernel closes what came along in whoever receives it, and a lingering TCP socket takes
    its time; on a kernel that can, the sender is refused at once."""
    async with live(bridge=fresh_bridge()) as sandbox, live(tenant="tenant-2") as other:
        result = await sandbox.with_bridge(upper).python(
            PROGRAM + "def lingering():\n"
            "    server = socket.create_server(('127.0.0.1', 0))\n"
            "    first = socket.create_connection(server.getsockname())\n"
            "    second, _ = server.accept()\n"
            "    first.setblocking(False)\n"
            "    try:\n"
            "        while True: first.send(b'x' * 65536)\n"
            "    except BlockingIOError:\n"
            "        pass\n"
            "    first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 40))\n"
            "    return first.detach(), second.detach()\n"
            # Four that say nothing keep the daemon from receiving, so that what is sent with the
            # others is closed here first, and for the last time there.
            "silent, held, outcomes = [connected() for _ in range(4)], [], []\n"
            "for turned in (1, -1):  # which is closed first is the kernel's\n"
            "    end, pair = connected(), lingering()[::turned]\n"
            "    outcomes.append(attempt(socket.send_fds, end, [b'xxxx'], pair))\n"
            "    held.append(end if outcomes[-1] == 0 else (end, pair))\n"
            "    if outcomes[-1] == 0:\n"
            "        for descriptor in pair: os.close(descriptor)\n"
            "answer(outcomes)\n"
            "sys.stdout.flush()\n"
            "for end in silent: receive(end)\n"
            "os._exit(0)",
            timeout_seconds=60,
        )
        outcomes = set(json.loads(result.stdout))
        assert outcomes in ({0}, {errno.EPERM}), result
        with trio.fail_after(20):
            assert (await other.run("echo", "works")).stdout == b"works\n"
    async with live(bridge=fresh_bridge()) as after:
        assert await look(after, "answer(present(TOKEN)[1])") == "ACCEPTED"


def daemon_memory_kib() -> int:
    """The daemon's resident memory."""
    pid = subprocess.run(
        ["systemctl", "show", "-p", "MainPID", "--value", "sbxd.service"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout.strip()
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("the daemon has no memory")


async def test_the_daemons_memory_is_flat_when_a_program_floods_and_the_worker_takes_nothing() -> (
    None
):
    """The program is held back long before it has sent what it would."""
    before, during = 0, 0

    async def never(_frame: bytes) -> bytes:
        nonlocal during
        await trio.sleep_forever()
        raise AssertionError

    async with live(bridge=fresh_bridge()) as sandbox:
        await sandbox.run("true")
        before = daemon_memory_kib()
        result = await sandbox.with_bridge(never).python(
            PROGRAM + "end, said = present(TOKEN)\n"
            "sent = 0\n"
            "end.settimeout(1)\n"
            "try:\n"
            "    while sent < 200 << 20:\n"
            "        send(end, b'x' * 100000)\n"
            "        sent += 100000\n"
            "except OSError:\n"
            "    pass\n"
            "answer([said, sent])"
        )
        during = daemon_memory_kib()
        said, sent = json.loads(result.stdout)
    assert said == "ACCEPTED"
    assert 100_000 < sent < 4 * MIB
    assert during - before < 8 * 1024, (before, during)


async def test_a_held_call_extends_no_clock() -> None:
    async def never(_frame: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with live(bridge=fresh_bridge()) as sandbox:
        result = await sandbox.with_bridge(never).python(
            PROGRAM + "end, said = present(TOKEN)\nsend(end, b'?')\nprint(said, flush=True)\n"
            "receive(end)",
            timeout_seconds=6,
        )
        assert (result.killed_by, result.stdout) == (KillReason.TIMEOUT, b"ACCEPTED\n")
        assert (await sandbox.run("true")).exit_code == 0


async def test_a_call_that_is_held_too_long_cancels_the_command() -> None:
    async def never(_frame: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with live(bridge=fresh_bridge()) as sandbox:
        served = sandbox.with_bridge(never, approval_hold_seconds=0.5)
        with pytest.raises(BridgeHoldExceeded):
            await served.python(PROGRAM + "end, _ = present(TOKEN)\nsend(end, b'?'); receive(end)")
        assert (await sandbox.run("true")).exit_code == 0


async def test_what_the_program_says_counts_as_returned_bytes_and_halts_beyond_them() -> None:
    budgets = EnvironmentBudgets(
        operations_max=50, returned_bytes_max=100_000, wall_seconds_max=600
    )
    async with live(bridge=fresh_bridge(), budgets=budgets) as sandbox:
        result = await sandbox.with_bridge(upper).python(
            PROGRAM + "end, said = present(TOKEN)\n"
            "while True:\n    send(end, b'x' * 30000); receive(end)"
        )
        assert result.killed_by is KillReason.OUTPUT_LIMIT
        with pytest.raises(BudgetExhausted) as exhausted:
            await sandbox.run("true")
        assert exhausted.value.field == "budgets.returned_bytes_max"


async def test_every_connection_is_an_operation_also_a_refused_one() -> None:
    budgets = EnvironmentBudgets(operations_max=10, returned_bytes_max=GIB, wall_seconds_max=600)
    async with live(bridge=fresh_bridge(), budgets=budgets) as sandbox:
        result = await sandbox.with_bridge(upper).python(
            PROGRAM + "for _ in range(40): present(b'wrong-wrong-wrong')"
        )
        assert result.killed_by is KillReason.OUTPUT_LIMIT
        with pytest.raises(BudgetExhausted) as exhausted:
            await sandbox.run("true")
        assert exhausted.value.field == "budgets.operations_max"


async def test_a_bridge_that_is_open_ends_with_its_environment() -> None:
    called = trio.Event()

    async def never(_frame: bytes) -> bytes:
        called.set()
        await trio.sleep_forever()
        raise AssertionError

    async with live(LIMITS, bridge=fresh_bridge()) as sandbox:

        async def destroy_when_it_calls() -> None:
            await called.wait()
            await sandbox.remote.destroy(sandbox.handle)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(destroy_when_it_calls)
            result = await sandbox.with_bridge(never).python(
                PROGRAM + "end, _ = present(TOKEN)\nsend(end, b'?'); receive(end)"
            )
        assert result.killed_by is KillReason.CANCELLED
