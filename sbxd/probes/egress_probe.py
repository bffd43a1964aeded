"""What a probe of the egress proxy is: asked of it from inside, and what it is to answer.

An attempt's outcome is the status and the reason of the proxy's answer ("403 host_not_listed"), or
what the attempt itself says. A probe names what it needs; who drives them gives `program_of` what
of that the operator's policy has, and leaves the others out as not run.

Deliberately absent: a name that anybody has (`.invalid` never resolves), a byte for a listed server
besides the greeting of TLS, and an attempt that a right proxy lets through to anywhere else.
"""

from dataclasses import dataclass
from enum import StrEnum

from sbxd.probes.probe import PRELUDE, Probe

UNLISTED = "conformance.sbxd.invalid"
TUNNELS_TRIED_MAX = 512
REFUSED_AS_UNLISTED = "403 host_not_listed"


class Need(StrEnum):
    """What of the policy a probe is about."""

    NOTHING = "nothing"
    PROXY = "an allowlist that is not empty"
    LISTED = "a listed destination that is no wildcard"
    LISTED_TLS = "a listed destination with port 443 that is no wildcard"
    UNLISTED_PORT = "a port that the listed destination has not"
    TUNNELS = f"a listed destination, and tunnels_max of {TUNNELS_TRIED_MAX} at most"


class Yes(StrEnum):
    """Whether the command has the network."""

    BOTH = "with the network"
    ONE = "without the command's yes"


@dataclass(frozen=True)
class EgressProbe:
    """A probe of an environment that has the operator's destinations."""

    probe: Probe
    need: Need
    yes: Yes = Yes.BOTH


@dataclass(frozen=True)
class Target:
    """What of the policy the programs are told. has_proxy: whether anything is listed. host, port:
    a listed destination, None where there is none that is no wildcard. unlisted_port: one that
    this host has not. head_seconds, tunnels_max: the caps."""

    has_proxy: bool
    host: str | None
    port: int | None
    unlisted_port: int | None
    head_seconds: int
    tunnels_max: int

    def has(self, need: Need) -> bool:
        """Whether a probe with this need can be run."""
        match need:
            case Need.NOTHING:
                return True
            case Need.PROXY:
                return self.has_proxy
            case Need.LISTED:
                return self.host is not None
            case Need.LISTED_TLS:
                return self.host is not None and self.port == 443
            case Need.UNLISTED_PORT:
                return self.host is not None and self.unlisted_port is not None
            case Need.TUNNELS:
                return self.host is not None and self.tunnels_max <= TUNNELS_TRIED_MAX


_CLIENT = f"""
from urllib.parse import urlsplit
URL = urlsplit(os.environ.get("HTTPS_PROXY", "http://127.0.0.1:3128"))
PROXY = (URL.hostname, URL.port)
SECONDS = HEAD_SECONDS + 30


def start(data):
    s = socket.create_connection(PROXY, SECONDS)
    try:
        s.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        pass  # it has answered
    return s


def head(s):
    data = b""
    while b"\\r\\n\\r\\n" not in data and len(data) < 65536:
        piece = s.recv(1)
        if not piece:
            break
        data += piece
    return data


def outcome(answer):
    line, _, fields = answer.decode("latin-1").partition("\\r\\n")
    words = line.split(" ")
    if not line.startswith("HTTP/1.1 ") or len(words) < 2:
        return ascii(answer[:40]) if answer else "closed"
    _, mark, reason = fields.partition('details="')
    return f"{{words[1]}} {{reason.partition(chr(34))[0]}}" if mark else words[1]


def ask(data):
    try:
        with start(data) as s:
            return outcome(head(s))
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)


def request(host, port):
    where = f"{{host}}:{{port}}"
    return f"CONNECT {{where}} HTTP/1.1\\r\\nHost: {{where}}\\r\\n\\r\\n".encode()


def answered(s):
    "Whether what answers speaks TLS: a handshake or an alert."
    return "answered" if s.recv(1) in (b"\\x16", b"\\x15") else "nothing"


def hello():
    import ssl
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outgoing = ssl.MemoryBIO()
    end = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=HOST)
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


WELL_FORMED = request({UNLISTED!r}, 443)
"""


def program_of(each: EgressProbe, target: Target) -> str:
    """What to give to `python3 -c` in an environment that has the operator's destinations."""
    told = {
        "HOST": target.host,
        "PORT": target.port,
        "UNLISTED_PORT": target.unlisted_port,
        "HEAD_SECONDS": target.head_seconds,
        "TUNNELS_MAX": target.tunnels_max,
    }
    values = "".join(f"{name} = {value!r}\n" for name, value in told.items())
    return PRELUDE + values + _CLIENT + each.probe.source
