"""The host's own addresses with the prefixes on their links, kept current by the kernel's events.

Where a destination is, the kernel is asked at each dial (`sbxd.egress.dialling`). This set is what
is refused besides and what an operator is shown: an address of the host also while another route
leads to it, and a link's prefix also while no route of its own has it.

Theory: route netlink (rtnetlink(7)) tells anyone who listens of every change of an address, which
here only means "read them again", so a lost or unknown message is no loss.

Invariants: the set only grows while the daemon runs; what cannot be read is an error and never an
empty set; routes are not read, so their number does not matter. Deliberately absent: a judgement
(`sbxd.policy.addresses`), the messages (`sbxd.egress.netlink`), the networks behind the host's
routers, which no host knows.
"""

import errno
import os
import socket
from collections.abc import Callable
from typing import Final

import trio

from sbxd.policy.addresses import HostNetwork

PACE_SECONDS: Final = 0.1
PACE_FACTOR: Final = 10
PACKETS_MAX: Final = 10_000

_GROUPS: Final = 0x10 | 0x100  # RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
_RECEIVE_BYTES: Final = 256 * 1024


class HostNetworkUnreadable(Exception):
    """The kernel did not say which addresses the host has."""


Read = Callable[[], frozenset[str]]


class HostNetworkWatch:
    """The growing set. `watch` is its task. read: what there is now, as "address/length"."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.current = HostNetwork()

    def refresh(self) -> None:
        """Add what there is now. Takes as long as a dump of the host's addresses: on most hosts
        about a millisecond. Raises HostNetworkUnreadable."""
        self._add(self._read())

    def _add(self, prefixes: frozenset[str]) -> None:
        self.current = self.current.including(sorted(prefixes))

    async def watch(self) -> None:
        """Refresh at every change of an address, until cancelled; on a host with very many of them
        that change all the time, as often as leaves most of the time for other work.

        Raises HostNetworkUnreadable.
        """
        try:
            with trio.socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as heard:
                await heard.bind((0, _GROUPS))
                while True:
                    began = trio.current_time()
                    self._add(await trio.to_thread.run_sync(self._read))
                    took = trio.current_time() - began
                    await trio.lowlevel.wait_readable(heard.fileno())
                    await trio.sleep(max(PACE_SECONDS, PACE_FACTOR * took))
                    _drain(heard)
        except OSError as problem:
            raise HostNetworkUnreadable(f"route netlink: {problem.strerror}") from None


def _drain(heard: trio.socket.SocketType) -> None:
    """Take what was said of changes; that some was lost (ENOBUFS) means no more than that."""
    with socket.socket(fileno=os.dup(heard.fileno())) as end:
        for _ in range(PACKETS_MAX):
            try:
                end.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as problem:
                if problem.errno != errno.ENOBUFS:
                    raise
