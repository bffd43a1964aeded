"""What a program of a test says to its bridge, byte by byte, and a handler to answer it."""

import json
from typing import Any

from sbxd.port.environment import BRIDGE_SOCKET_PATH
from tests.redteam.live import Live

# Of the socket as a program sees it: what connect says, and what the daemon answers to a token.
PROGRAM = f"""
import errno, json, os, socket, struct, sys

def answer(value):
    print(json.dumps(value))

def connected(path={BRIDGE_SOCKET_PATH!r}):
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(60)
    end.connect(path)
    return end

def attempt(call, *arguments):
    try:
        call(*arguments)
    except OSError as problem:
        return problem.errno
    return 0

def send(end, data):
    end.sendall(struct.pack(">I", len(data)) + data)

def exactly(end, size):
    data = b""
    while len(data) < size:
        piece = end.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return data

def receive(end):
    header = exactly(end, 4)
    return None if header is None else exactly(end, struct.unpack(">I", header)[0])

def present(token):
    end = connected()
    send(end, token)
    return end, (receive(end) or b"").decode()

TOKEN = os.environ.get("SBX_BRIDGE_TOKEN", "").encode()
"""


async def upper(frame: bytes) -> bytes:
    return frame.upper()


async def look(sandbox: Live, source: str, **options: int) -> Any:
    """What a program that calls `answer` once, with the bridge at hand, answered."""
    result = await sandbox.with_bridge(upper).python(PROGRAM + source, **options)
    assert result.exit_code == 0, result
    return json.loads(result.stdout)
