"""The conformance suite of the egress boundary, for who drives it: the tests, and an operator."""

from sbxd.probes.egress_destinations import (
    AROUND,
    EARLY_BYTES,
    HALF_CLOSE,
    TUNNELS,
    UNLISTED_HOST,
    UNLISTED_PORT,
    WITHOUT_YES,
)
from sbxd.probes.egress_requests import HEADS, HOSTS, HUGE_HEAD, METHODS, SLOW_HEAD

EGRESS_PROBES = (
    AROUND,
    WITHOUT_YES,
    HEADS,
    HOSTS,
    METHODS,
    HUGE_HEAD,
    SLOW_HEAD,
    UNLISTED_HOST,
    UNLISTED_PORT,
    EARLY_BYTES,
    HALF_CLOSE,
    TUNNELS,
)
