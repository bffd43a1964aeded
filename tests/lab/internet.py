"""An internet for one lane: public-looking hosts behind a router, a name server, TLS with a CA.

    main namespace (the daemon)  --lab0--  router  --  servers
    93.184.217.2/30, fd00:5b::2/64         forwards    93.184.216.0/24, 2a00:5b::/64, and on its
                                                       loopback a private and the metadata address

Everything is the test's own: two network namespaces, one process with the servers
(`internet_servers`), /etc/resolv.conf of the lane. `up` builds it and `down` takes it away; both
leave the lane as it was. Public addresses are behind the router since what is on a link of the
host is refused as the host's own network.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.internet_content import write_content

ROUTER, SERVERS = "lab-router", "lab-servers"
NAME_SERVER = "93.184.216.53"
ALLOWED, OTHER, MIXED = "93.184.216.10", "93.184.216.11", "93.184.216.12"
ALLOWED_6 = "2a00:5b::10"
PRIVATE, METADATA = "10.77.0.5", "169.254.169.254"
LINK, LINK_PEER = "93.184.217.2", "93.184.217.1"
WAIT_SECONDS = 120.0
RESOLV_CONF = Path("/etc/resolv.conf")

# Names and what the name server says of them; a list of lists is one answer per question.
NAMES: Mapping[str, object] = {
    "files.lab-allowed.com": [ALLOWED],
    "pypi.lab-allowed.com": [ALLOWED],
    "npm.lab-allowed.com": [ALLOWED],
    "git.lab-allowed.com": [ALLOWED],
    "six.lab-allowed.com": [ALLOWED_6],
    "other.lab-public.com": [OTHER],
    "private.lab-allowed.com": [PRIVATE],
    "metadata.lab-allowed.com": [METADATA],
    "mixed.lab-allowed.com": [ALLOWED, PRIVATE],
    "mixed-six.lab-allowed.com": [ALLOWED, "fd00:5b::2"],
    "mapped.lab-allowed.com": ["::ffff:169.254.169.254"],
    "on-link.lab-allowed.com": [LINK_PEER],
    "host.lab-allowed.com": [LINK],
    "many.lab-allowed.com": [*(f"93.184.216.{n}" for n in range(100, 120)), PRIVATE],
    "rebinding.lab-allowed.com": [[ALLOWED], [PRIVATE], [METADATA]],
}


@dataclass(frozen=True)
class Internet:
    """What stands. ca: the certificate to trust, PEM. content: the folder that is served."""

    directory: Path

    @property
    def ca(self) -> bytes:
        return (self.directory / "ca.pem").read_bytes()

    @property
    def content(self) -> Path:
        return self.directory / "content"

    def questions(self) -> list[str]:
        """Every name that was asked for so far, in order."""
        return self._lines("questions")

    def connections(self) -> list[str]:
        """The local address and port of every connection that was accepted, in order."""
        return self._lines("connections")

    def reaches(self, address: str, port: int) -> bool:
        """Whether the host gets there; a host without such a server is got to as well. The
        connection is among `connections` when this returns."""
        before = len(self.connections())
        try:
            socket.create_connection((address, port), 10).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        deadline = time.monotonic() + WAIT_SECONDS
        while address not in (LINK, LINK_PEER) and len(self.connections()) == before:
            assert time.monotonic() < deadline, "the connection is not accepted"
            time.sleep(0.01)
        return True

    def _lines(self, name: str) -> list[str]:
        path = self.directory / name
        return path.read_text().splitlines() if path.exists() else []


@contextmanager
def internet() -> Iterator[Internet]:
    """The internet for the length of the block. Needs root in a lane."""
    before = RESOLV_CONF.read_text()
    with tempfile.TemporaryDirectory(prefix="sbxd-internet-") as name:
        os.chmod(name, 0o755)
        built = Internet(Path(name))
        _certify(built.directory)
        write_content(built.content)
        (built.directory / "names.json").write_text(json.dumps(NAMES))
        _tear_down()
        try:
            _build_links()
            command = [
                *("ip", "netns", "exec", SERVERS, sys.executable, "-m"),
                *("tests.lab.internet_servers", name),
            ]
            servers = subprocess.Popen(command, cwd=Path(__file__).parents[2])
            try:
                _wait(lambda: (built.directory / "ready").exists(), servers)
                # Each question once, so that they can be counted: then it has its time.
                RESOLV_CONF.write_text(f"nameserver {NAME_SERVER}\noptions timeout:30 attempts:1\n")
                # Seen before anybody counts: it is accepted a moment after it is there.
                built.reaches(ALLOWED, 443)
                assert built.connections(), "the servers are not reached"
                yield built
            finally:
                servers.terminate()
                servers.wait(WAIT_SECONDS)
        finally:
            RESOLV_CONF.write_text(before)
            _tear_down()


def _wait(holds: Callable[[], bool], servers: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert servers.poll() is None, "the servers ended"
        assert time.monotonic() < deadline, "the servers are not ready"
        time.sleep(0.05)


def _build_links() -> None:
    for name in (ROUTER, SERVERS):
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    _ip("link", "add", "lab0", "type", "veth", "peer", "name", "up0", "netns", ROUTER)
    _ip(
        "-n",
        ROUTER,
        "link",
        "add",
        "down0",
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        SERVERS,
    )
    _ip("addr", "add", f"{LINK}/30", "dev", "lab0")
    _ip("addr", "add", "fd00:5b::2/64", "dev", "lab0", "nodad")
    _ip("link", "set", "lab0", "up")
    for device, address in (
        ("up0", f"{LINK_PEER}/30"),
        ("up0", "fd00:5b::1/64"),
        ("down0", "93.184.216.1/24"),
        ("down0", "2a00:5b::1/64"),
    ):
        _ip("-n", ROUTER, "addr", "add", address, "dev", device, *_nodad(address))
    for device in ("up0", "down0"):
        _ip("-n", ROUTER, "link", "set", device, "up")
    for address in (NAME_SERVER, ALLOWED, OTHER, MIXED):
        _ip("-n", SERVERS, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", SERVERS, "addr", "add", f"{ALLOWED_6}/64", "dev", "eth0", "nodad")
    for address in (PRIVATE, METADATA):
        _ip("-n", SERVERS, "addr", "add", f"{address}/32", "dev", "lo")
    _ip("-n", SERVERS, "link", "set", "eth0", "up")
    _ip("-n", SERVERS, "route", "add", "default", "via", "93.184.216.1")
    _ip("-n", SERVERS, "-6", "route", "add", "default", "via", "2a00:5b::1")
    for address in (PRIVATE, METADATA):
        _ip("-n", ROUTER, "route", "add", f"{address}/32", "via", ALLOWED)
    _ip("route", "add", "default", "via", LINK_PEER)
    _ip("-6", "route", "add", "default", "via", "fd00:5b::1")
    forward = (
        "echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding"
    )
    subprocess.run(["ip", "netns", "exec", ROUTER, "sh", "-ec", forward], check=True)


def _nodad(address: str) -> tuple[str, ...]:
    return ("nodad",) if ":" in address else ()


def _tear_down() -> None:
    """Idempotent: a run that was killed may have left something."""
    for command in (
        ("link", "del", "lab0"),
        ("netns", "del", ROUTER),
        ("netns", "del", SERVERS),
    ):
        subprocess.run(("ip", *command), capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True)


def _certify(directory: Path) -> None:
    """A CA of this run, and one certificate of it for every name."""
    names = ",".join(f"DNS:{name}" for name in NAMES)
    (directory / "leaf.cnf").write_text(
        f"subjectAltName={names}\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
        "authorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n"
    )
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    _openssl(
        directory,
        *("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2"),
        *("-subj", "/CN=lab CA", "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    _openssl(directory, "req", *key, "-keyout", "leaf.key", "-out", "leaf.csr", "-subj", "/CN=lab")
    _openssl(
        directory,
        *("x509", "-req", "-in", "leaf.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2"),
        *("-out", "leaf.pem", "-extfile", "leaf.cnf", "-CAcreateserial"),
    )


def _openssl(directory: Path, *words: str) -> None:
    subprocess.run(("openssl", *words), cwd=directory, check=True, capture_output=True)
