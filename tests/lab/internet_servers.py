"""The lab's servers, one process in their network namespace: names, HTTPS, and plain TCP.

Run as `python -m tests.lab.internet_servers DIRECTORY`; the folder is `internet.Internet`'s. Every
question and every accepted connection is a line of a file there, written before it is answered, so
that a test can count them.
"""

import ipaddress
import json
import socket
import ssl
import struct
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.lab.internet import ALLOWED, ALLOWED_6, METADATA, NAME_SERVER, OTHER, PRIVATE

TYPE_A, TYPE_AAAA, CLASS_IN = 1, 28, 1
NXDOMAIN = 3
ECHO_PORT = 7777


class Log:
    """One line per thing that happened, complete when the call returns."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = path.open("a", buffering=1)

    def add(self, line: str) -> None:
        with self._lock:
            self._file.write(line + "\n")


class Names:
    """The name server's zone: fixed answers, or one after the other per round of questions."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._table = table
        self._rounds: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def answer(self, name: str, kind: int) -> list[str] | None:
        """Addresses of this type; None for a name that is not there."""
        entry = self._table.get(name.lower())
        if entry is None:
            return None
        if entry and isinstance(entry[0], list):
            with self._lock:
                number = self._rounds.get((name, kind), 0)
                self._rounds[name, kind] = number + 1
            entry = entry[min(number, len(entry) - 1)]
        version = 6 if kind == TYPE_AAAA else 4
        return [each for each in entry if ipaddress.ip_address(each).version == version]


def reply_to(query: bytes, names: Names, questions: Log) -> bytes:
    """The reply to one question, as a name server's that is the authority; TTL 0."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii"))
        at += query[at] + 1
    kind, _ = struct.unpack_from("!HH", query, at + 1)
    question = query[12 : at + 5]
    name = ".".join(labels)
    questions.add(f"{name} {'AAAA' if kind == TYPE_AAAA else 'A' if kind == TYPE_A else kind}")
    found = names.answer(name, kind)
    answers = b"".join(
        struct.pack("!HHHIH", 0xC00C, kind, CLASS_IN, 0, len(raw)) + raw
        for raw in (ipaddress.ip_address(each).packed for each in found or [])
    )
    code = NXDOMAIN if found is None else 0
    head = query[:2] + struct.pack("!HHHHH", 0x8400 | code, 1, len(found or []), 0, 0)
    return head + question + answers


def serve_names(names: Names, questions: Log) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind((NAME_SERVER, 53))
        READY.release()
        while True:
            query, peer = end.recvfrom(4096)
            reply = reply_to(query, names, questions)
            if len(reply) > 512:  # truncated: ask by TCP
                reply = reply[:2] + struct.pack("!H", 0x8600) + query[4:6] + bytes(6) + query[12:]
            end.sendto(reply, peer)


def serve_names_by_tcp(names: Names, questions: Log, connections: Log) -> None:
    with socket.create_server((NAME_SERVER, 53)) as listener:
        READY.release()
        while True:
            end, _ = listener.accept()
            connections.add(f"{NAME_SERVER} 53")
            with end:
                raw = end.recv(4096)
                if raw:
                    reply = reply_to(raw[2:], names, questions)
                    end.sendall(struct.pack("!H", len(reply)) + reply)


class Handler(SimpleHTTPRequestHandler):
    """Files, as HTTP/1.1; silent."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        """Nothing."""

    def end_headers(self) -> None:
        if "/npm/" in self.path and not self.path.endswith(".tgz"):
            self.send_header("X-Kind", "npm")
        super().end_headers()

    def guess_type(self, path: Any) -> str:
        return "application/json" if "/npm/" in self.path else super().guess_type(path)


class Server(ThreadingHTTPServer):
    """One address; every connection is logged before TLS begins."""

    def __init__(self, address: str, context: ssl.SSLContext, directory: Path, log: Log) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._context = context
        self._log = log
        self._line = f"{address} 443"
        super().__init__((address, 443), partial(Handler, directory=str(directory)))

    def get_request(self) -> tuple[socket.socket, Any]:
        end, peer = super().get_request()
        self._log.add(self._line)
        end.settimeout(60)
        return self._context.wrap_socket(end, server_side=True, do_handshake_on_connect=False), peer


def serve_echo(address: str, port: int, log: Log) -> None:
    """Send back what comes, half by half: the end of the stream is answered by an end."""
    with socket.create_server((address, port)) as listener:
        READY.release()
        while True:
            end, _ = listener.accept()
            log.add(f"{address} {port}")
            threading.Thread(target=_echo, args=(end,), daemon=True).start()


def _echo(end: socket.socket) -> None:
    with end:
        while data := end.recv(65536):
            end.sendall(data)


READY = threading.Semaphore(0)


def main(directory: Path) -> None:
    names = Names(json.loads((directory / "names.json").read_text()))
    questions, connections = Log(directory / "questions"), Log(directory / "connections")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "leaf.pem", directory / "leaf.key")
    waiting = [
        threading.Thread(target=serve_names, args=(names, questions), daemon=True),
        threading.Thread(
            target=serve_names_by_tcp, args=(names, questions, connections), daemon=True
        ),
    ]
    for address in (ALLOWED, OTHER, PRIVATE):
        waiting.append(
            threading.Thread(target=serve_echo, args=(address, ECHO_PORT, connections), daemon=True)
        )
    waiting.append(
        threading.Thread(target=serve_echo, args=(METADATA, 80, connections), daemon=True)
    )
    for thread in waiting:
        thread.start()
    for _ in waiting:
        assert READY.acquire(timeout=60)
    servers = [
        Server(address, context, directory / "content", connections)
        for address in (ALLOWED, ALLOWED_6, OTHER, PRIVATE, METADATA)
    ]
    threads = [threading.Thread(target=each.serve_forever) for each in servers]
    for thread in threads:
        thread.start()
    (directory / "ready").touch()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
