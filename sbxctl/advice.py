"""What an operator does about each reason for which a connection of a sandbox has no tunnel.

Keyed by the reason as the audit and the proxy's answer have it. A test holds that every reason of
`sbxd.policy.egress` and of `sbxd.egress.decisions` is here, and that docs/egress.md has the table.
"""

from msgspec import Struct


class Advice(Struct, frozen=True):
    """meaning: what was the case. remedy: what an operator, who can change the list, does."""

    meaning: str
    remedy: str


_NOT_OURS = "Nothing to configure: the program sends what is no request."
_NEVER = "No setting permits it. Use a service with a public address."

ADVICE = {
    "host_malformed": Advice(
        "The host is an address, or no DNS name in plain ASCII.",
        "Give one plain name: addresses can neither be listed nor be asked for.",
    ),
    "port_malformed": Advice("The port is none of 1 to 65535.", "Give a port of that range."),
    "mode_deny": Advice(
        "The policy denies every destination.",
        "Set egress.mode to allowlist and list destinations, then restart sbxd.",
    ),
    "host_not_listed": Advice(
        "No destination of the environment's list covers the host.",
        "List it, if runs are to reach it, and restart sbxd; the worker's specification has to "
        "carry it as well.",
    ),
    "port_not_listed": Advice(
        "The host is listed, and not with this port.",
        "List the port as well: there is no default port.",
    ),
    "host_not_qualified": Advice(
        "A name of one label, which would depend on a search domain.",
        "Ask for the full name.",
    ),
    "resolution_failed": Advice(
        "The host's resolver gave no address.",
        "Look the name up on this host (`getent ahosts NAME`); check its resolver.",
    ),
    "resolution_timed_out": Advice(
        "The resolver gave no answer within egress.resolve_seconds.",
        "Check this host's resolver, or raise the bound.",
    ),
    "no_address": Advice("The name has no address.", "Check the name."),
    "address_malformed": Advice(
        "The resolver answered with what is no address.", "Check this host's resolver."
    ),
    "too_many_addresses": Advice(
        "The name has more addresses than are judged.", "Use a name with fewer."
    ),
    "address_refused": Advice(
        "The name resolves to a private, local, metadata or other address that is never dialled; "
        "one of many refuses all.",
        _NEVER,
    ),
    "host_network": Advice(
        "The name resolves to an address of this host, or on its links.",
        "No setting permits it. Put the service behind a router of this host.",
    ),
    "host_network_unknown": Advice(
        "The kernel did not say whether an address is on this host's links.",
        "See whether sbxd may use AF_NETLINK sockets (RestrictAddressFamilies= of its unit).",
    ),
    "page_not_public_https": Advice(
        "A resource of a page is not public HTTPS (worker's guard only).",
        "None: the rule is of the code.",
    ),
    "unsubscribe_not_public_https": Advice(
        "A link for unsubscribing is not public HTTPS (worker's guard only).",
        "None: the rule is of the code.",
    ),
    "malformed": Advice(
        "Not a CONNECT request that can be read in one way only; an address as its host is one.",
        _NOT_OURS,
    ),
    "method_not_allowed": Advice(
        "A method besides CONNECT: a plain http:// URL.",
        "Have the program use https://.",
    ),
    "head_too_large": Advice("More than 8 KiB of request.", _NOT_OURS),
    "head_too_late": Advice("No whole request within egress.head_seconds.", _NOT_OURS),
    "too_many_tunnels": Advice(
        "The environment has egress.tunnels_max tunnels.",
        "Have the program use fewer connections, or raise the cap.",
    ),
    "budget_exhausted": Advice(
        "The environment used up its operations, of which each connection is one.",
        "Raise budgets.operations_max of the specification, or find out what it does.",
    ),
    "dial_failed": Advice(
        "Every rule allowed it, and the server could not be connected to.",
        "Check the route of this host to the address.",
    ),
    "dial_too_late": Advice(
        "No connection within egress.dial_seconds.",
        "Check the route and firewalls, or raise the bound.",
    ),
    "peer_mismatch": Advice(
        "The connection leads to another address than the one that was dialled.",
        "Look for a rule of this host that redirects connections of the daemon.",
    ),
    "sni_absent": Advice(
        "require_matching_sni is set, and the tunnel begins without a TLS server name.",
        "Use HTTPS; leave the check on unless a listed service is not TLS.",
    ),
    "sni_mismatch": Advice(
        "require_matching_sni is set, and the TLS server name is not the requested host.",
        "Find out what the run does: this is how domain fronting looks.",
    ),
}
