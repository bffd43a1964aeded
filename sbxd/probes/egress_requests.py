"""Requests that are refused before a rule is looked at: heads and hosts of no form, other methods,
heads that are too large or too slow."""

from sbxd.probes.egress_probe import REFUSED_AS_UNLISTED, UNLISTED, EgressProbe, Need
from sbxd.probes.probe import Layer, Probe

_HEAD_BYTES_MAX = 8192
_MALFORMED = frozenset({"400 malformed"})


def _heads(id: str, cases: tuple[str, ...], heads: dict[str, str]) -> EgressProbe:
    """Heads that are no requests; text whose characters are bytes."""
    return EgressProbe(
        Probe(
            id=id,
            cases=cases,
            layer=Layer.PROXY,
            source=f"HEADS = {heads!r}"
            + """
found = {name: ask(text.encode("latin-1")) for name, text in HEADS.items()}
answer({**found, "a right request": ask(WELL_FORMED)})
""",
            inside=dict.fromkeys(heads, _MALFORMED),
            controls={"a right request": REFUSED_AS_UNLISTED},
        ),
        Need.PROXY,
    )


_LINE = f"CONNECT {UNLISTED}:443 HTTP/1.1\r\n"
HEADS = _heads(
    "malformed-heads",
    ("EGR-13",),
    {
        "line feeds alone": f"CONNECT {UNLISTED}:443 HTTP/1.1\n\n",
        "a carriage return alone": f"CONNECT {UNLISTED}:443 HTTP/1.1\r\r\n",
        "a NUL": f"CONNECT {UNLISTED}\0:443 HTTP/1.1\r\n\r\n",
        "a tab": f"CONNECT\t{UNLISTED}:443 HTTP/1.1\r\n\r\n",
        "two spaces": f"CONNECT  {UNLISTED}:443 HTTP/1.1\r\n\r\n",
        "a space at the end": f"CONNECT {UNLISTED}:443 HTTP/1.1 \r\n\r\n",
        "a method in small letters": f"connect {UNLISTED}:443 HTTP/1.1\r\n\r\n",
        "user information": f"CONNECT a:b@{UNLISTED}:443 HTTP/1.1\r\n\r\n",
        "an absolute form": f"CONNECT https://{UNLISTED}:443 HTTP/1.1\r\n\r\n",
        "a path": f"CONNECT {UNLISTED}:443/x HTTP/1.1\r\n\r\n",
        "a fragment": f"CONNECT {UNLISTED}:443#x HTTP/1.1\r\n\r\n",
        "a percent sign": "CONNECT conformance%2esbxd.invalid:443 HTTP/1.1\r\n\r\n",
        "no port": f"CONNECT {UNLISTED} HTTP/1.1\r\n\r\n",
        "an empty port": f"CONNECT {UNLISTED}: HTTP/1.1\r\n\r\n",
        "port 0": f"CONNECT {UNLISTED}:0 HTTP/1.1\r\n\r\n",
        "port 65536": f"CONNECT {UNLISTED}:65536 HTTP/1.1\r\n\r\n",
        "a port with a zero before": f"CONNECT {UNLISTED}:0443 HTTP/1.1\r\n\r\n",
        "a port with a sign": f"CONNECT {UNLISTED}:+443 HTTP/1.1\r\n\r\n",
        "HTTP/0.9": f"CONNECT {UNLISTED}:443\r\n\r\n",
        "HTTP/2.0": f"CONNECT {UNLISTED}:443 HTTP/2.0\r\n\r\n",
        "the preface of HTTP/2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "SOCKS 5": "\x05\x01\x00",
        "SOCKS 4": "\x04\x01\x01\xbb\0\0\0\x01\0",
        "a greeting of TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "a body": f"{_LINE}Content-Length: 5\r\n\r\nhello",
        "chunks": f"{_LINE}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "a folded field": f"{_LINE}A: b\r\n c\r\n\r\n",
        "a field with a space before its colon": f"{_LINE}A : b\r\n\r\n",
        "a field without a colon": f"{_LINE}A\r\n\r\n",
        "a byte that is not ASCII": f"{_LINE}A: \xe9\r\n\r\n",
    },
)

_HOSTS = {
    **{host: host for host in (
        "127.0.0.1", "169.254.169.254", "10.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1",
        "0x7f.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "[fe80::1%25lo]", "[example.com]",
        "127.0.0.1.", "a.b.0x1", "*.invalid", f"{UNLISTED}.", "a..invalid", ".invalid",
        "-a.invalid", "a-.invalid", "a_b.invalid",
    )},
    "digits of full width": "\uff11\uff12\uff17.0.0.1".encode().decode("latin-1"),
    "an ideographic full stop": "127\u30020\u30020\u30021".encode().decode("latin-1"),
    "a label that is not ASCII": "b\u00fccher.invalid".encode().decode("latin-1"),
    "a label of 64 bytes": f"{'a' * 64}.invalid",
    "a name of 254 bytes": f"{'.'.join(['a' * 61] * 4)}.invalid"[-254:],
    "no host": "",
}  # fmt: skip
HOSTS = _heads(
    "malformed-hosts",
    ("EGR-06", "EGR-19"),
    {name: f"CONNECT {host}:443 HTTP/1.1\r\n\r\n" for name, host in _HOSTS.items()},
)

_METHODS = {
    "GET of a URL": f"GET http://{UNLISTED}/",
    "POST to a URL": f"POST http://{UNLISTED}/",
    "OPTIONS": "OPTIONS *",
    "TRACE": "TRACE /",
    "GET of a path": "GET /",
    "GET of metrics": "GET /metrics",
    "PUT of a configuration": "PUT /config",
    "DELETE": "DELETE /",
    "PURGE": "PURGE /",
}
METHODS = EgressProbe(
    Probe(
        id="methods",
        cases=("EGR-15",),
        layer=Layer.PROXY,
        source=f"METHODS = {_METHODS!r}"
        + """
found = {name: ask(f"{line} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n".encode())
         for name, line in METHODS.items()}
answer({**found, "a right request": ask(WELL_FORMED)})
""",
        inside=dict.fromkeys(_METHODS, frozenset({"405 method_not_allowed"})),
        controls={"a right request": REFUSED_AS_UNLISTED},
    ),
    Need.PROXY,
)

HUGE_HEAD = EgressProbe(
    Probe(
        id="huge-head",
        cases=("EGR-16",),
        layer=Layer.PROXY,
        source=f"ROOM = {_HEAD_BYTES_MAX}"
        + """
def padded(size):
    rest = size - len(WELL_FORMED) - len(b"A: \\r\\n")
    return WELL_FORMED[:-2] + b"A: " + b"a" * rest + b"\\r\\n\\r\\n"

answer({
    "one byte more than the most": ask(padded(ROOM + 1)),
    "twice the most": ask(padded(2 * ROOM)),
    "the most": ask(padded(ROOM)),
})
""",
        inside=dict.fromkeys(
            ("one byte more than the most", "twice the most"), frozenset({"431 head_too_large"})
        ),
        controls={"the most": REFUSED_AS_UNLISTED},
    ),
    Need.PROXY,
)

SLOW_HEAD = EgressProbe(
    Probe(
        id="slow-head",
        cases=("EGR-16",),
        layer=Layer.PROXY,
        source="""
import threading
def drip():
    "A byte a second, so that the connection is never idle."
    over = threading.Event()
    def feed(s):
        for byte in WELL_FORMED:
            if over.wait(1):
                return
            try:
                s.send(bytes([byte]))
            except OSError:
                return
    with start(WELL_FORMED[:1]) as s:
        feeder = threading.Thread(target=feed, args=(s,))
        feeder.start()
        try:
            return outcome(head(s))
        finally:
            over.set()
            feeder.join()

answer({
    "begun and not ended": ask(WELL_FORMED[:-2]),
    "a byte a second": drip(),
    "at once": ask(WELL_FORMED),
})
""",
        inside=dict.fromkeys(
            ("begun and not ended", "a byte a second"), frozenset({"408 head_too_late"})
        ),
        controls={"at once": REFUSED_AS_UNLISTED},
    ),
    Need.PROXY,
)
