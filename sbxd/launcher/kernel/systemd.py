"""PID 1 as the launcher needs it: start one transient scope, stop one, list ours.

The adapter for pystemd; its blocking calls run only in a forked helper, never in the launcher's
loop. PID 1's private socket is used where it exists (root only, and no message bus in between),
else the system bus. Deliberately absent: any change of a live unit
but of its CPU weight, and any unit that is not ours; and lxml, which pystemd loads to read what
PID 1 says of its own interfaces: the host's root has no use for a parser of XML, and each of its
forks would copy it.
"""

import importlib.util
import os
import sys
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

# pystemd's parts without what the package itself loads.
if (_found := importlib.util.find_spec("pystemd")) is not None and "pystemd" not in sys.modules:
    sys.modules["pystemd"] = types.ModuleType("pystemd")
    sys.modules["pystemd"].__path__ = list(_found.submodule_search_locations or ())

from pystemd.dbusexc import DBusBaseError, DBusNoSuchUnitError
from pystemd.dbuslib import DBusAddress, apply_signature

from sbxd.launcher.kernel import cgroup, hostpaths
from sbxd.launcher.requests import CPU_WEIGHT_MAX, CgroupLimits

_NAME = b"org.freedesktop.systemd1"
_PATH = b"/org/freedesktop/systemd1"
_MANAGER = b"org.freedesktop.systemd1.Manager"
_BACK_STOP_KILL_US = 1_000_000

_Property = tuple[bytes, bytes, Any]


class SystemdRefused(OSError):
    """PID 1 refused a request, or its job ended in something else than "done"."""


class Unit(NamedTuple):
    """One of our scopes, as PID 1 lists it."""

    environment_id: str
    active_state: str


def scope_properties(
    what: str, anchor_pid: int, limits: CgroupLimits, back_stop_seconds: int
) -> list[_Property]:
    """The properties of one scope: name, D-Bus type, value. Golden-tested. what: it is for.

    The ceilings are the box's limits: the scope holds nothing but the box once it is built.
    """
    ceiling = cgroup.box_limits(limits)
    return [
        (b"Description", b"s", f"sbxd {what}".encode()),
        (b"Slice", b"s", hostpaths.SLICE.encode()),
        (b"PIDs", b"au", [anchor_pid]),
        (b"Delegate", b"b", True),
        (b"CollectMode", b"s", b"inactive-or-failed"),
        (b"KillSignal", b"i", 9),
        (b"SendSIGHUP", b"b", False),
        (b"TimeoutStopUSec", b"t", _BACK_STOP_KILL_US),
        (b"RuntimeMaxUSec", b"t", back_stop_seconds * 1_000_000),
        (b"OOMPolicy", b"s", b"continue"),
        (b"MemoryMax", b"t", ceiling.memory_bytes),
        (b"MemorySwapMax", b"t", 0),
        (b"TasksMax", b"t", ceiling.pids_max),
        (b"CPUQuotaPerSecUSec", b"t", ceiling.cpu_millicores * 1000),
        (b"CPUWeight", b"t", CPU_WEIGHT_MAX),
    ]


class Connection:
    """One open connection to PID 1."""

    def __init__(self, bus: Any, sender: bytes | None) -> None:
        self._bus = bus
        self._sender = sender
        self._results: dict[bytes, bytes] = {}  # job path -> result
        results = self._results

        def job_removed(message: Any, error: object = None, userdata: object = None) -> None:
            message.process_reply(False)
            _, job, _, result = message.body
            results[bytes(job)] = bytes(result)

        self._job_removed = job_removed  # sd-bus holds no reference of its own
        bus.match_signal(sender, _PATH, _MANAGER, b"JobRemoved", job_removed)
        if sender is not None:
            self._call(b"Subscribe", b"", [])

    def _call(self, method: bytes, signature: bytes, values: Sequence[Any]) -> Any:
        arguments = apply_signature(signature, list(values)) if signature else []
        try:
            return self._bus.call_method(_NAME, _PATH, _MANAGER, method, arguments).body
        except DBusBaseError as problem:
            raise _refusal(problem) from None

    def start_scope(self, name: str, properties: Sequence[_Property]) -> bytes:
        """Ask for the scope; returns the job to wait for."""
        arguments: list[tuple[int, Any]] = apply_signature(b"ss", [name.encode(), b"fail"])
        arguments += _property_list(properties)
        arguments += [(ord("a"), b"(sa(sv))"), (-1, None)]
        try:
            reply = self._bus.call_method(_NAME, _PATH, _MANAGER, b"StartTransientUnit", arguments)
        except DBusBaseError as problem:
            raise _refusal(problem) from None
        return bytes(reply.body)

    def wait_job(self, job: bytes, deadline: float) -> None:
        """Until the job is done. Raises SystemdRefused when it failed, TimeoutError at the
        deadline (monotonic seconds)."""
        while job not in self._results:
            left_us = int((deadline - time.monotonic()) * 1_000_000)
            if left_us <= 0:
                raise TimeoutError(110, "PID 1 did not finish a job in time")
            if self._bus.process().is_empty():
                self._bus.wait(left_us)
        result = self._results.pop(job)
        if result != b"done":
            raise SystemdRefused(5, f"a job of PID 1 ended as {result.decode()}")

    def stop_scope(self, name: str, deadline: float) -> None:
        """Stop the unit and wait; a unit that is not loaded is no error."""
        try:
            reply = self._bus.call_method(
                _NAME,
                _PATH,
                _MANAGER,
                b"StopUnit",
                apply_signature(b"ss", [name.encode(), b"replace"]),
            )
        except DBusNoSuchUnitError:
            return
        except DBusBaseError as problem:
            raise _refusal(problem) from None
        self.wait_job(bytes(reply.body), deadline)

    def set_cpu_weight(self, name: str, weight: int) -> None:
        """Change the weight of a scope until it ends; a gone one is no error."""
        arguments: list[tuple[int, Any]] = apply_signature(b"sb", [name.encode(), True])
        arguments += _property_list([(b"CPUWeight", b"t", weight)])
        try:
            self._bus.call_method(_NAME, _PATH, _MANAGER, b"SetUnitProperties", arguments)
        except DBusNoSuchUnitError:
            return
        except DBusBaseError as problem:
            raise _refusal(problem) from None

    def list_scopes(self) -> list[Unit]:
        """Our scopes that PID 1 has loaded, whatever their state."""
        pattern = f"{hostpaths.SCOPE_PREFIX}*{hostpaths.SCOPE_SUFFIX}".encode()
        units = self._call(b"ListUnitsByPatterns", b"asas", [[], [pattern]]) or []
        listed = []
        for unit in units:
            environment_id = hostpaths.environment_of_scope(bytes(unit[0]).decode())
            if environment_id is not None:
                listed.append(Unit(environment_id, bytes(unit[3]).decode()))
        return listed

    def version(self) -> str:
        """PID 1's version string."""
        text = self._bus.get_property(_NAME, _PATH, _MANAGER, b"Version", b"s")
        return bytes(text).decode()


@contextmanager
def connect() -> Iterator[Connection]:
    """Connect for the length of the block. Raises SystemdRefused when nothing answers."""
    private = os.path.exists(hostpaths.SYSTEMD_PRIVATE_SOCKET)
    path = hostpaths.SYSTEMD_PRIVATE_SOCKET if private else hostpaths.SYSTEM_BUS_SOCKET
    bus = DBusAddress(f"unix:path={path}".encode(), peer_to_peer=private)
    try:
        bus.open()
    except DBusBaseError as problem:
        raise _refusal(problem) from None
    try:
        yield Connection(bus, None if private else _NAME)
    finally:
        bus.close()


def _property_list(properties: Sequence[_Property]) -> list[tuple[int, Any]]:
    arguments: list[tuple[int, Any]] = [(ord("a"), b"(sv)")]
    for key, kind, value in properties:
        arguments.append((ord("r"), b"sv"))
        arguments += apply_signature(b"s", [key])
        arguments.append((ord("v"), kind))
        arguments += apply_signature(kind, [value])
        arguments += [(-1, None), (-1, None)]
    arguments.append((-1, None))
    return arguments


def _refusal(problem: DBusBaseError) -> SystemdRefused:
    number = problem.errno if isinstance(getattr(problem, "errno", None), int) else 0
    return SystemdRefused(abs(number) or 5, f"PID 1 refused: {problem}"[:300])
