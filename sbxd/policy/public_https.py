"""The two transports whose rule is code and not the operator's list: HTTPS to any public host.

One fetches what a browser page needs, one sends a one-click unsubscribe request. Port 443, a
name with the shape of a public one, and then everything that `evaluate` does for a listed host:
one lookup, every address judged. Invariants: a transport is made here and nowhere else, and no
serialised policy can select one (it is no type that a decoder knows, and `EgressPolicy` has no
field for it); each refuses under a reason of its own and is named in every decision's `rule`;
neither widens what an environment's policy grants.
"""

import re

from sbxd.policy.egress import EgressRefusal, Refused

HTTPS_PORT = 443
_TOP_LEVEL = re.compile(r"[a-z]{2,63}|xn--[a-z0-9-]{1,59}")
# Top-level names that never mean one public host: special-use names (RFC 6761, 6762, 7686, 8375,
# 9476), what ICANN reserved for private use, and what home and office networks made up.
_NOT_PUBLIC = frozenset(
    {
        "alt", "arpa", "corp", "example", "home", "internal", "intranet", "invalid", "lan",
        "local", "localdomain", "localhost", "mail", "onion", "private", "test",
    }
)  # fmt: skip


class PublicHttps:
    """A rule of code for `evaluate`. There are two: BROWSER_PAGE and UNSUBSCRIBE."""

    __slots__ = ("_name", "_refusal")

    def __init__(self, name: str, refusal: EgressRefusal) -> None:
        self._name = name
        self._refusal = refusal

    def __repr__(self) -> str:
        return self._name

    @property
    def name(self) -> str:
        """What every decision under this rule carries as its `rule`."""
        return self._name

    def rule_for(self, host: str, port: int) -> str | Refused:
        """The rule's name for port 443 of a canonical host that could be public, or the refusal."""
        if port != HTTPS_PORT:
            return self._refused(host, port, f"port {port}, and only {HTTPS_PORT} is dialled")
        _, dot, top = host.rpartition(".")
        if not dot:
            return self._refused(host, port, f"{host} is a single label and no public name")
        if top in _NOT_PUBLIC or not _TOP_LEVEL.fullmatch(top):
            return self._refused(host, port, f"no public name ends in .{top}")
        return self._name

    def _refused(self, host: str, port: int, detail: str) -> Refused:
        return Refused(
            reason=self._refusal,
            host=host,
            port=port,
            rule=self._name,
            detail=detail,
            remedy="Only HTTPS on port 443 of a host with a public name is reached this way.",
        )


BROWSER_PAGE = PublicHttps("public-https:browser-page", EgressRefusal.PAGE_NOT_PUBLIC_HTTPS)
UNSUBSCRIBE = PublicHttps("public-https:unsubscribe", EgressRefusal.UNSUBSCRIBE_NOT_PUBLIC_HTTPS)
