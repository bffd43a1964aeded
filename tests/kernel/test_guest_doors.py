"""The doors of process 1 on an ordinary kernel: its relay at one end, the daemon's at the other.

The programs are real ones in the guest's own pid, mount and network namespaces; what only gVisor's
kernel does otherwise is in test_gvisor_network.py.
"""

import hashlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
import trio

from sbxd.jail import frames
from sbxd.jail.frames import Which
from sbxd.mechanism.guest_doors import GuestDoor
from tests.kernel.test_guest_init import ALLOW_ALL, SECONDS, WORKSPACE, Guest

pytestmark = pytest.mark.needs("root", "cgroup2")

PLACES = {Which.PROXY: "('127.0.0.1', 3128)", Which.BRIDGE: "'/dev/sbx-bridge'"}
PROGRAM = """
import errno, hashlib, json, os, socket, struct, sys, time
def connected(place):
    end = socket.socket(socket.AF_INET if isinstance(place, tuple) else socket.AF_UNIX)
    end.connect(place)
    return end
def outcome(call, *arguments):
    try:
        call(*arguments)
    except OSError as problem:
        return errno.errorcode[problem.errno]
    return "ok"
def rest(end):
    data = b""
    while piece := end.recv(65536):
        data += piece
    return data
"""


class Doored:
    """Process 1 with its doors."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.doors = {which: GuestDoor(which) for which in Which}
        self._number = 0

    def open(self, which: Which) -> None:
        """As the daemon does before a command."""
        self.doors[which].begin()
        channels = self.doors[which].make_channels()
        self.guest.send(frames.Door(which), tuple(channels))
        for channel in channels:
            os.close(channel)

    def begin(self, source: str) -> int:
        self._number += 1
        return self.guest.run(self._number, sys.executable, "-c", PROGRAM + source)

    async def finish(self, reader: int) -> Any:
        """What the program printed, once nothing is left of it."""
        text = await trio.to_thread.run_sync(read_all, reader)
        for kind in (frames.Started, frames.Exited, frames.Quiet):
            assert isinstance(await trio.to_thread.run_sync(self.guest.receive), kind)
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise AssertionError(text) from None

    async def run(self, source: str) -> Any:
        return await self.finish(self.begin(source))


def read_all(descriptor: int) -> str:
    with open(descriptor) as file:
        return file.read()


@asynccontextmanager
async def doored() -> AsyncIterator[Doored]:
    with ExitStack() as held:
        if not WORKSPACE.exists():
            WORKSPACE.mkdir()
            held.callback(WORKSPACE.rmdir)
        one = Guest()
        held.callback(one.channel.close)
        held.callback(one.process.wait)
        held.callback(one.process.kill)
        assert one.receive() == frames.Ready()
        one.send(frames.Filter(ALLOW_ALL))
        one.send(frames.Limit(64))
        one.send(frames.Port(1))
        made = Doored(one)
        for door in made.doors.values():
            held.callback(door.close)
        with trio.fail_after(SECONDS):
            yield made


async def received(end: socket.socket) -> bytes:
    """Everything until the end of that direction."""
    data = bytearray()
    while True:
        await trio.lowlevel.wait_readable(end)
        piece = end.recv(1 << 16)
        if not piece:
            return bytes(data)
        data += piece


async def sent(end: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[end.send(view) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(end)


@pytest.mark.parametrize("which", list(Which))
async def test_what_a_command_says_comes_out_and_the_answer_goes_in(which: Which) -> None:
    async with doored() as one:
        one.open(which)
        reader = one.begin(f"""
end = connected({PLACES[which]})
end.sendall(b"question")
end.shutdown(socket.SHUT_WR)
print(json.dumps(rest(end).decode()))
""")
        with await one.doors[which].accept() as end:
            assert await received(end) == b"question"
            await sent(end, b"answer")
            end.shutdown(socket.SHUT_WR)
            assert await one.finish(reader) == "answer"


@pytest.mark.parametrize("which", list(Which))
async def test_a_door_listens_for_one_command_and_may_be_opened_again(which: Which) -> None:
    knock = f"print(json.dumps(outcome(connected, {PLACES[which]})))"
    async with doored() as one:
        assert await one.run(knock) == "ECONNREFUSED"
        for _ in range(3):
            one.open(which)
            assert await one.run(knock) == "ok", "the control"
            assert await one.run(knock) == "ECONNREFUSED"


@pytest.mark.parametrize("which", list(Which))
async def test_a_command_that_is_not_started_closes_the_door(which: Which) -> None:
    knock = f"print(json.dumps(outcome(connected, {PLACES[which]})))"
    async with doored() as one:
        one.open(which)
        os.close(one.guest.run(99, "/nonexistent"))
        assert one.guest.receive() == frames.RunFailed(99, 2, "execute")
        assert await one.run(knock) == "ECONNREFUSED"


@pytest.mark.parametrize("which", list(Which))
async def test_much_goes_both_ways_at_once_and_arrives_whole(which: Which) -> None:
    size = 16 << 20
    payload = os.urandom(1 << 20) * (size >> 20)
    async with doored() as one:
        one.open(which)
        reader = one.begin(f"""
import threading
end = connected({PLACES[which]})
digest, count = hashlib.sha256(), 0
def send():
    end.sendall(bytes(range(256)) * {size // 256})
    end.shutdown(socket.SHUT_WR)
thread = threading.Thread(target=send)
thread.start()
while piece := end.recv(10_000):
    digest.update(piece)
    count += len(piece)
thread.join()
print(json.dumps([count, digest.hexdigest()]))
""")
        with await one.doors[which].accept() as end:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sent, end, payload)
                got = await received(end)
                wanted = bytes(range(256)) * (size // 256)
                assert (len(got), got == wanted) == (size, True)
            end.shutdown(socket.SHUT_WR)
            assert await one.finish(reader) == [size, hashlib.sha256(payload).hexdigest()]


@pytest.mark.parametrize("is_waiting", [True, False], ids=["the control: it waits", "it does not"])
async def test_what_a_command_leaves_under_way_is_a_reset_and_no_end(is_waiting: bool) -> None:
    """It has sent and ended its direction, and is gone before its kernel has passed all on."""
    size = 4 << 20
    async with doored() as one:
        one.open(Which.PROXY)
        reader = one.begin(f"""
end = connected(('127.0.0.1', 3128))
end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {size * 2})
end.settimeout(None if {is_waiting} else 2)
try:
    end.sendall(bytes({size}))
    end.shutdown(socket.SHUT_WR)
except TimeoutError:
    pass
if {is_waiting}: rest(end)
""")
        with await one.doors[Which.PROXY].accept() as end:
            if is_waiting:
                assert len(await received(end)) == size
                end.shutdown(socket.SHUT_WR)
                await one.finish(reader)
                return
            end.shutdown(socket.SHUT_WR)
            await one.finish(reader)
            with pytest.raises(ConnectionResetError):
                await received(end)


async def test_a_connection_that_the_daemon_breaks_off_is_reset() -> None:
    async with doored() as one:
        one.open(Which.PROXY)
        reader = one.begin("""
end = connected(('127.0.0.1', 3128))
print(json.dumps(outcome(rest, end)))
""")
        (await one.doors[Which.PROXY].accept()).close()
        assert await one.finish(reader) == "ECONNRESET"


@pytest.mark.parametrize(
    "end",
    [
        "end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); end.close()",
        "os.kill(os.getpid(), 9)",
        "time.sleep(1000)",
    ],
    ids=["reset by the program", "killed", "killed by the daemon"],
)
async def test_a_connection_that_breaks_in_the_guest_is_reset_here(end: str) -> None:
    """Killed, the program has no say in how its kernel ends a connection; that is not told apart
    from an end that the relay saw, and else it is a reset."""
    async with doored() as one:
        one.open(Which.PROXY)
        reader = one.begin(f"""
end = connected(('127.0.0.1', 3128))
end.sendall(b"x")
end.recv(1)
{end}
""")
        with await one.doors[Which.PROXY].accept() as here:
            await sent(here, b"y")
            if "sleep" in end:
                one.guest.send(frames.Kill(1))
                with pytest.raises(ConnectionResetError):
                    await received(here)
            elif "LINGER" in end:
                with pytest.raises(ConnectionResetError):
                    await received(here)
            await one.finish(reader)


async def test_nobody_can_take_the_proxys_port_before_during_or_after() -> None:
    source = """
def bind(place, *options):
    with socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET) as end:
        for option in options:
            end.setsockopt(socket.SOL_SOCKET, option, 1)
        end.bind(place)
        end.listen()
found = []
for host in ("127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"):
    for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,),
                    (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
        found.append(outcome(bind, (host, 3128), *options))
print(json.dumps([outcome(bind, ("127.0.0.1", 3129)), sorted(set(found))]))
"""
    async with doored() as one:
        for is_open in (False, True, False):
            if is_open:
                one.open(Which.PROXY)
            control, found = await one.run(source)
            assert control == "ok"
            assert set(found) <= {"EADDRINUSE", "EADDRNOTAVAIL", "EAFNOSUPPORT"}, found


async def test_what_is_not_asked_for_is_not_accepted() -> None:
    """Two connect; the daemon asks for one, and the other waits."""
    async with doored() as one:
        one.open(Which.PROXY)
        reader = one.begin("""
ends = [connected(('127.0.0.1', 3128)) for _ in range(2)]
for end in ends: end.sendall(b"x")
ends[0].recv(1)
ends[1].settimeout(0.2)
try: ends[1].recv(1)
except TimeoutError: print(json.dumps("waits"))
""")
        with await one.doors[Which.PROXY].accept() as end:
            await sent(end, b"y")
            assert await one.finish(reader) == "waits"


async def test_connections_beyond_the_relays_places_wait_and_take_the_places_of_others() -> None:
    async with doored() as one:
        one.open(Which.PROXY)
        reader = one.begin("""
ends = [connected(('127.0.0.1', 3128)) for _ in range(256)]
for end in ends: end.recv(1)
late = connected(('127.0.0.1', 3128))
late.settimeout(0.2)
try: late.recv(1)
except TimeoutError: print('["waits",', flush=True)
late.settimeout(20)
ends[17].close()
late.recv(1)
print('"served"]')
""")
        held = []
        enough = trio.Event()

        async def accept() -> None:
            while True:
                end = await one.doors[Which.PROXY].accept()
                held.append(end)
                await sent(end, b"y")
                if len(held) == 18:
                    enough.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)

            async def close_what_ends() -> None:
                await enough.wait()
                assert await received(held[17]) == b""
                held[17].shutdown(socket.SHUT_WR)

            nursery.start_soon(close_what_ends)
            assert await one.finish(reader) == ["waits", "served"]
            nursery.cancel_scope.cancel()
        assert len(held) == 257
        for end in held:
            end.close()


async def test_a_connection_that_the_daemon_has_closed_gives_its_place_back() -> None:
    """Whatever the program does with its end: more come than the relay has places for."""
    async with doored() as one:
        one.open(Which.PROXY)
        reader = one.begin("""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
ends = [connected(('127.0.0.1', 3128)) for _ in range(300)]
print(json.dumps([end.recv(10).decode() for end in ends].count("y")))
""")
        for _ in range(300):
            with await one.doors[Which.PROXY].accept() as end:
                await sent(end, b"y")
                end.shutdown(socket.SHUT_WR)
        assert await one.finish(reader) == 300


async def test_descriptors_of_a_command_do_not_come_through_the_bridge() -> None:
    async with doored() as one:
        one.open(Which.BRIDGE)
        reader = one.begin("""
end = connected('/dev/sbx-bridge')
socket.send_fds(end, [b"x"], [0, 1, 2])
end.recv(1)
""")
        with await one.doors[Which.BRIDGE].accept() as end:
            await trio.lowlevel.wait_readable(end)
            data, descriptors, *_ = socket.recv_fds(end, 10, 10)
            assert (data, descriptors) == (b"x", [])
            await sent(end, b"y")
            await one.finish(reader)


async def test_the_relay_is_a_stranger_without_power_that_a_command_cannot_touch() -> None:
    async with doored() as one:
        one.open(Which.PROXY)
        reader = one.begin("""
end = connected(('127.0.0.1', 3128))
end.recv(1)
found, pid = {}, 1
for name in os.listdir("/proc"):
    if name.isdigit():
        with open(f"/proc/{name}/status") as file:
            fields = dict(line.rstrip("\\n").split(":\\t", 1) for line in file if ":\\t" in line)
        if fields["Name"] == "sbx-relay":
            pid = int(name)
            found = {key: fields[key] for key in ("Uid", "CapPrm", "CapEff", "NoNewPrivs")}
found["kill"] = outcome(os.kill, pid, 9)
found["fd"] = outcome(os.listdir, f"/proc/{pid}/fd")
print(json.dumps(found))
""")
        with await one.doors[Which.PROXY].accept() as end:
            await sent(end, b"y")
            found = await one.finish(reader)
        assert found == {
            "Uid": "10002\t10002\t10002\t10002",
            "CapPrm": "0" * 16,
            "CapEff": "0" * 16,
            "NoNewPrivs": "1",
            "kill": "EPERM",
            "fd": "EACCES",
        }
