"""What the proxy answers, as bytes: a status line that says why, and a body for whoever reads it.

Most clients show of a refused CONNECT no more than the status line, so the reason phrase carries
the refusal; the body names host, port, rule and remedy, one per line; Proxy-Status (RFC 9209) is
for programs.

Invariants: whatever goes in, an answer has the lines that are written here and no other (every
value is reduced to printable ASCII on one line and cut); at most ANSWER_BYTES_MAX bytes, so that it
fits any socket's buffer; no address is named, since the sandbox is not to learn what names of the
operator's network resolve to.
"""

import re
from http import HTTPStatus

from msgspec import Struct

from sbxd.egress.decisions import ProxyReason, Reason
from sbxd.policy.egress import EgressRefusal, Refused

ANSWER_BYTES_MAX = 4096
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

_PHRASE_MAX = 400
_LINE_MAX = 500
_UNPRINTABLE = re.compile(r"[^ -~]")

# Status and RFC 9209 error type of each reason; what is not here is a policy's 403.
_STATUS: dict[Reason, tuple[HTTPStatus, str]] = {
    EgressRefusal.HOST_MALFORMED: (HTTPStatus.BAD_REQUEST, "http_request_error"),
    EgressRefusal.PORT_MALFORMED: (HTTPStatus.BAD_REQUEST, "http_request_error"),
    EgressRefusal.RESOLUTION_FAILED: (HTTPStatus.BAD_GATEWAY, "dns_error"),
    EgressRefusal.NO_ADDRESS: (HTTPStatus.BAD_GATEWAY, "dns_error"),
    EgressRefusal.RESOLUTION_TIMED_OUT: (HTTPStatus.GATEWAY_TIMEOUT, "dns_timeout"),
    EgressRefusal.ADDRESS_REFUSED: (HTTPStatus.FORBIDDEN, "destination_ip_prohibited"),
    EgressRefusal.HOST_NETWORK: (HTTPStatus.FORBIDDEN, "destination_ip_prohibited"),
    EgressRefusal.HOST_NETWORK_UNKNOWN: (HTTPStatus.BAD_GATEWAY, "destination_ip_unroutable"),
    ProxyReason.MALFORMED: (HTTPStatus.BAD_REQUEST, "http_request_error"),
    ProxyReason.METHOD_NOT_ALLOWED: (HTTPStatus.METHOD_NOT_ALLOWED, "http_request_denied"),
    ProxyReason.HEAD_TOO_LARGE: (
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        "http_request_error",
    ),
    ProxyReason.HEAD_TOO_LATE: (HTTPStatus.REQUEST_TIMEOUT, "http_request_error"),
    ProxyReason.TOO_MANY_TUNNELS: (HTTPStatus.SERVICE_UNAVAILABLE, "connection_limit_reached"),
    ProxyReason.DIAL_FAILED: (HTTPStatus.BAD_GATEWAY, "connection_refused"),
    ProxyReason.DIAL_TOO_LATE: (HTTPStatus.GATEWAY_TIMEOUT, "connection_timeout"),
    ProxyReason.PEER_MISMATCH: (HTTPStatus.BAD_GATEWAY, "destination_ip_unroutable"),
}
_FORBIDDEN = (HTTPStatus.FORBIDDEN, "http_request_denied")
# What these found is an address, which the sandbox is not told.
_WITHOUT_DETAIL = {
    EgressRefusal.ADDRESS_REFUSED: "the name resolves to an address that is never dialled",
    EgressRefusal.HOST_NETWORK: "the name resolves to an address that is never dialled",
    EgressRefusal.HOST_NETWORK_UNKNOWN: "the route to its address could not be judged",
    EgressRefusal.ADDRESS_MALFORMED: "the name resolves to what is no address",
}


class Refusal(Struct, frozen=True, kw_only=True):
    """Why there is no tunnel, and what to do. host, port: None when none was read."""

    reason: Reason
    detail: str
    remedy: str
    host: str | None = None
    port: int | None = None
    rule: str | None = None


def refusal_of(refused: Refused) -> Refusal:
    """What the policy refused, without the address that it found."""
    return Refusal(
        reason=refused.reason,
        detail=_WITHOUT_DETAIL.get(refused.reason, refused.detail),
        remedy=refused.remedy,
        host=refused.host,
        port=refused.port,
        rule=refused.rule,
    )


def status_of(reason: Reason) -> HTTPStatus:
    """The status that a reason is answered with."""
    return _STATUS.get(reason, _FORBIDDEN)[0]


def answer(refusal: Refusal) -> bytes:
    """The whole answer to a refused connection."""
    status, error = _STATUS.get(refusal.reason, _FORBIDDEN)
    where = "" if refusal.host is None else f"{refusal.host}:{refusal.port} "
    phrase = one_line(f"{where}{refusal.reason}: {refusal.detail}", _PHRASE_MAX)
    lines = [f"sbxd egress proxy: refused ({refusal.reason})"]
    if refusal.host is not None:
        lines += [f"host: {refusal.host}", f"port: {refusal.port}"]
    lines += [
        f"rule: {refusal.rule or 'none'}",
        f"why: {refusal.detail}",
        f"remedy: {refusal.remedy}",
    ]
    body = "".join(one_line(line, _LINE_MAX) + "\n" for line in lines)
    fields = [
        "Content-Type: text/plain; charset=us-ascii",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        f'Proxy-Status: sbxd; error={error}; details="{refusal.reason}"',
        "Connection: close",
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        fields.append("Allow: CONNECT")
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        fields.append("Retry-After: 1")
    head = f"HTTP/1.1 {status.value} {phrase}\r\n" + "".join(f"{field}\r\n" for field in fields)
    return f"{head}\r\n{body}".encode("ascii")


def unrecorded(host: str | None, port: int | None) -> bytes:
    """The answer when a decision could not be recorded, which is why there is no other."""
    where = "" if host is None else f"{host}:{port} "
    body = "sbxd egress proxy: the audit log cannot be written, so nothing is let through\n"
    return (
        f"HTTP/1.1 503 {one_line(where, _PHRASE_MAX)}audit_unavailable\r\n"
        f"Content-Type: text/plain; charset=us-ascii\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: 5\r\nConnection: close\r\n\r\n{body}"
    ).encode("ascii")


def one_line(text: str, characters_max: int) -> str:
    """Text as printable ASCII without a line's end, cut."""
    return _UNPRINTABLE.sub("?", text[:characters_max])
