"""gate.sandbox.spec_has_no_host_path: no path of the host crosses the port.

Three structural checks: over the types that cross (no field could hold one), over the places
that make an error that crosses (none puts one in), and over every literal (host paths are written
in two modules). What is excepted is listed with its reason, and an exception that is not used
fails too. The last part plants violations and expects each to be found.
"""

import ast
import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import msgspec
import pytest

from sbxctl.__main__ import DEFAULT_SOCKET
from sbxd.port import (
    artifact,
    command,
    credentials,
    egress,
    environment,
    errors,
    ids,
    limits,
    workspace,
)
from sbxd.settings import Settings
from sbxd.wire import descriptions, leases, messages, observing, repair
from sbxd.wire import egress as egress_messages
from tests.gates.source import Module, aliases, called, dotted, literals, load

pytestmark = pytest.mark.gate("gate.sandbox.spec_has_no_host_path")

PORT_MODULES = (
    artifact, command, credentials, egress, environment, errors, ids, limits, workspace,
    descriptions, egress_messages, leases, messages, observing, repair,
)  # fmt: skip

# Words of a field's name that stand for something of the host.
HOST_WORDS = frozenset(
    {
        "bundle", "cgroup", "cid", "container", "device", "directory", "fd", "file", "folder",
        "host", "inode", "mount", "mountpoint", "path", "paths", "pid", "root", "rootfs", "scope",
        "slice", "socket", "uid", "unit", "volume",
    }
)  # fmt: skip
FIELD_EXCEPTIONS = {
    ("EgressDestination", "host"): "the DNS name of a destination",
    **dict.fromkeys((("EgressCheck", "host"), ("EgressChecked", "host")), "a destination's name"),
    ("EgressShown", "host_network"): "the host's own prefixes, for its operator",
    ("FileChange", "path"): "relative to /workspace; its constructor refuses another",
    ("WireChange", "path"): "relative to /workspace",
    ("ExecutionCommand", "working_directory"): "relative to /workspace",
    ("WireCommand", "working_directory"): "relative to /workspace",
    ("BridgeEndpoint", "socket_path"): "a path inside the environment, from the worker",
    ("WorkspaceRead", "path"): "relative to /workspace",
    ("WorkspaceWrite", "path"): "relative to /workspace",
    ("WorkspaceList", "path"): "relative to /workspace",
    ("WorkspaceProvenanceQuery", "path"): "relative to /workspace",
    ("EnvironmentInfo", "owner_uid"): "admin socket only: the uid of the connected worker",
    ("EnvironmentInfo", "scope"): "admin socket only: the unit's name, for systemctl",
}

# What is raised or sent across the port, and what a mechanism hands to the layer that does.
ERRORS = frozenset(
    {
        "ArtifactIntegrityError", "ArtifactRejected", "ArtifactUnavailable",
        "BudgetExhausted", "CommandNotStarted", "EscapeSuspected", "ExecutionRejected",
        "ExecutionUnavailable", "ServiceShuttingDown", "Failed", "MechanismError", "Rejected",
        "RunBudgetTooLow", "RunFailed", "SandboxEscapeSuspected", "SandboxLost", "StaleLease",
        "Unavailable", "WorkspaceError", "WorkspaceEscape", "WorkspaceEscaped", "WorkspaceFailed",
    }
)  # fmt: skip
# Of an OSError, what holds no path.
HARMLESS_OF_OSERROR = frozenset({"errno", "strerror"})
OS_ERRORS = frozenset(
    {
        "BaseException", "BlockingIOError", "BrokenPipeError", "ChildProcessError",
        "ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "Exception",
        "FileExistsError", "FileNotFoundError", "IOError", "InterruptedError",
        "IsADirectoryError", "NotADirectoryError", "OSError", "PermissionError",
        "ProcessLookupError", "TimeoutError", "anyio.BrokenResourceError",
    }
)  # fmt: skip
# Names that hold a path wherever they appear.
PATH_NAME = re.compile(
    r"(?:^|_)(?:path|paths|directory|directories|filename|filename2|mountpoint|rootfs)$"
    r"|^(?:__file__|STATE_DIRECTORY|CGROUP_ROOT)$"
)

HOST_PATH = re.compile(
    r"(?:^|[\s'\"=:(`])/(?:bin|boot|dev|etc|home|lib|lib64|media|mnt|opt|proc|root|run|sbin|srv"
    r"|sys|tmp|usr|var)(?:/|$|[\s'\":)`])"
)
PATH_MODULES = frozenset({"sbxd.launcher.kernel.hostpaths", "sbxd.settings"})
INSIDE = "inside the environment: "
DOCTOR = "doctor reads the host's kernel, and tells an operator where: "
# (module, how the literal starts) -> why it may be there.
LITERAL_EXCEPTIONS = {
    ("sbxd.client.operator_guard", "/etc/sbxd/worker.toml"): "the worker tier's own configuration",
    ("sbxctl.journal_kept", "/var/log/journal"): "where journald keeps records on disk",
    ("sbxd.jail.build", "/dev/null"): "init's own stdin, before it has a root of its own",
    ("sbxd.jail.mounts", "/dev/"): "the host's device nodes, cloned one by one into the new /dev",
    ("sbxd.jail.mounts", "/proc/self/fd"): INSIDE + "what /dev/fd points to",
    ("sbxd.jail.workload", "/proc/self/oom_score_adj"): INSIDE + "the child's own /proc",
    ("sbxd.launcher.kernel.image_names", ""): INSIDE + "homes and shells of the image's users",
    ("sbxd.launcher.kernel.oci_spec", ""): INSIDE + "the guest's own",
    ("sbxd.launcher.sentry", "/usr/local/bin:/usr/bin:/bin"): INSIDE + "the canary's search path",
    ("sbxd.launcher.kernel.runsc", "/dev/null"): "of the small root that runsc is given",
    ("sbxd.launcher.kernel.runsc", "/tmp"): "of the small root that runsc is given",
    ("sbxd.policy.child_environment", "/usr/local/sbin:"): INSIDE + "the image's PATH",
    ("sbxd.policy.child_environment", "/tmp"): INSIDE + "TMPDIR",
    ("sbxd.port.environment", "/dev/sbx-bridge"): INSIDE + "the bridge's socket",
    ("sbxd.probes.files", ""): INSIDE + "what the probes try there",
    ("sbxd.probes.hardening", ""): INSIDE + "what the probes try there",
    ("sbxd.probes.kernel_surface", ""): INSIDE + "what the probes try there",
    ("sbxd.probes.process", ""): INSIDE + "what the probes try there",
    ("sbxd.probes.surroundings", ""): INSIDE + "what the probes try there",
    ("sbxd.__main__", "/etc/sbxd/config.toml"): "where the settings are, before there are any",
    ("sbxctl.__main__", "/run/sbxd/admin.sock"): "the default that an operator may override",
    ("sbxctl.doctor", "/run/systemd/system"): DOCTOR + "systemd",
    ("sbxctl.doctor", "/sys/fs/cgroup/cgroup.controllers"): DOCTOR + "controllers",
    ("sbxctl.doctor", "the unified hierarchy"): DOCTOR + "the text of a fix",
    ("sbxctl.doctor", "/proc/sys/user/"): DOCTOR + "user namespaces",
    ("sbxctl.image", "to give it a name"): "the text of a hint to an operator",
    ("sbxctl.rootfs", "--customize-hook"): "inside the image that is being made",
    ("sbxctl.service_state", "/run/systemd/units"): "what runs, for any user to see",
}
# What turns an OSError into text without its file name; their bodies are checked below.
SANITIZERS = frozenset({"sbxd.client.channel._cause", "sbxd.launcher.steps.describe"})
HARMLESS_OF_ERRORS = HARMLESS_OF_OSERROR | {"detail", "code", "step"}


def port_types() -> Iterator[type]:
    """Every data type of the port and of the wire."""
    for module in PORT_MODULES:
        yield from types_of(module)


def types_of(module: ModuleType) -> Iterator[type]:
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and value.__module__ == module.__name__
            and (issubclass(value, msgspec.Struct) or dataclasses.is_dataclass(value))
        ):
            yield value


def field_violations(kind: type) -> list[tuple[str, str]]:
    """Fields of a type whose name or annotation could hold something of the host."""
    found = []
    for name, hint in typing.get_type_hints(kind).items():
        if typing.get_origin(hint) is typing.ClassVar:
            continue
        if HOST_WORDS & set(name.split("_")) or any(
            isinstance(part, type) and issubclass(part, PurePath) for part in parts_of(hint)
        ):
            found.append((kind.__name__, name))
    return found


def parts_of(hint: Any) -> Iterator[Any]:
    yield hint
    for argument in typing.get_args(hint):
        yield from parts_of(argument)


def error_violations(module: Module) -> list[str]:
    """Each construction of an error that crosses the port whose arguments hold a path: a name
    that stands for one, or an OSError as a whole (its text repeats the file name)."""
    found: list[str] = []
    names = aliases(module.tree)

    def visit(node: ast.AST, caught: frozenset[str]) -> None:
        if isinstance(node, ast.ExceptHandler) and node.name and is_os_error(node.type, names):
            caught = caught | {node.name}
        if isinstance(node, ast.Call):
            made = called(node, names).rpartition(".")[2]
            if made in ERRORS or made in local_error_makers(module):
                for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    found.extend(
                        f"{module.name}:{node.lineno} {made}({text})"
                        for text in paths_in(argument, caught, module.name, names)
                    )
        for child in ast.iter_child_nodes(node):
            visit(child, caught)

    visit(module.tree, frozenset())
    return found


def local_error_makers(module: Module) -> frozenset[str]:
    """Functions of the module that return an error that crosses the port."""
    return frozenset(
        node.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.returns, ast.Name)
        and node.returns.id in ERRORS
    )


def is_os_error(kind: ast.expr | None, names: Mapping[str, str]) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    for each in kinds:
        text = ast.unparse(each)
        if text in OS_ERRORS or names.get(text, text) in OS_ERRORS:
            return True
    return False


def paths_in(
    argument: ast.expr, caught: frozenset[str], module: str, names: Mapping[str, str]
) -> Iterator[str]:
    match argument:
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in caught:
            if attribute not in HARMLESS_OF_OSERROR:
                yield f"{name}.{attribute}"
            return
        case ast.Call(func=ast.Name(id="type")):
            return
        case ast.Call() if is_sanitizer(called(argument, names), module):
            return
        case ast.Name(id=name):
            if name in caught or PATH_NAME.search(name):
                yield name
        case ast.Attribute(attr=attribute) if PATH_NAME.search(attribute):
            yield ast.unparse(argument)
            return
        case ast.Constant(value=str(text)) if HOST_PATH.search(text):
            yield repr(text)
    for child in ast.iter_child_nodes(argument):
        if isinstance(child, ast.expr | ast.keyword):
            inner = child.value if isinstance(child, ast.keyword) else child
            yield from paths_in(inner, caught, module, names)


def is_sanitizer(name: str, module: str) -> bool:
    return name in SANITIZERS or f"{module}.{name}" in SANITIZERS


def sanitizer_violations(function: ast.FunctionDef) -> list[str]:
    """Each use of the error that a sanitizer makes but to ask its type, its number or text that
    holds no path."""
    error = function.args.args[0].arg
    harmless = {
        id(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in HARMLESS_OF_ERRORS
    } | {
        id(node.args[0])
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "type")
    }
    return [
        f"line {node.lineno}"
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == error and id(node) not in harmless
    ]


def literal_violations(modules: Mapping[str, Module]) -> list[tuple[str, int, str]]:
    """Each literal that names a place of the host, outside of the two modules that may."""
    return [
        (name, line, text)
        for name, module in modules.items()
        if name not in PATH_MODULES
        for line, text in literals(module.tree)
        if HOST_PATH.search(text)
    ]


def excepted(name: str, text: str) -> tuple[str, str] | None:
    for module, start in LITERAL_EXCEPTIONS:
        if name == module and text.startswith(start):
            return module, start
    return None


@pytest.fixture(scope="module")
def product() -> dict[str, Module]:
    return load()


def test_no_field_of_the_port_could_hold_something_of_the_host() -> None:
    found = {each for kind in port_types() for each in field_violations(kind)}
    assert found - FIELD_EXCEPTIONS.keys() == set()


def test_every_excepted_field_is_still_there() -> None:
    found = {each for kind in port_types() for each in field_violations(kind)}
    assert FIELD_EXCEPTIONS.keys() - found == set()


@pytest.mark.parametrize(
    "kind",
    [
        environment.EnvironmentSpec,
        environment.EnvironmentHandle,
        command.ExecutionResult,
        command.FileChange,
    ],
)
def test_the_four_types_of_the_gate_are_looked_at(kind: type) -> None:
    assert kind in set(port_types())
    excepted_fields = {name for name, _ in FIELD_EXCEPTIONS}
    assert kind is command.FileChange or kind.__name__ not in excepted_fields


def test_a_file_change_cannot_hold_an_absolute_path() -> None:
    for path in ("/var/lib/x", "/workspace/x", ""):
        with pytest.raises(ValueError, match="relative"):
            command.FileChange(
                path=path, change=command.ChangeKind.DELETED, size_bytes=0, sha256=None
            )


def test_no_error_that_crosses_the_port_is_made_with_a_path(product: dict[str, Module]) -> None:
    assert [each for module in product.values() for each in error_violations(module)] == []


@pytest.mark.parametrize("name", sorted(SANITIZERS))
def test_what_is_trusted_to_drop_the_file_name_does(product: dict[str, Module], name: str) -> None:
    module, _, function = name.rpartition(".")
    (body,) = (
        node
        for node in product[module].tree.body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    assert sanitizer_violations(body) == []


@pytest.mark.parametrize("text", ["str(e)", "f'{e}'", "e.filename", "helper(e)", "e.args[0]", "e"])
def test_a_planted_sanitizer_that_keeps_the_file_name_is_found(text: str) -> None:
    function = ast.parse(f"def f(e):\n    return {text}\n").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert sanitizer_violations(function)


def test_the_errors_of_this_gate_exist_and_are_made(product: dict[str, Module]) -> None:
    """Control: the check sees constructions, so an empty list means something."""
    made = {
        called(node, {}).rpartition(".")[2]
        for module in product.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
    }
    assert {"ExecutionRejected", "ExecutionUnavailable", "WorkspaceEscape"} <= made
    defined = {
        node.name
        for module in product.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    assert defined >= ERRORS
    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert public - {"PortError"} <= ERRORS


def test_host_paths_are_written_in_two_modules(product: dict[str, Module]) -> None:
    found = literal_violations(product)
    assert [each for each in found if excepted(each[0], each[2]) is None] == []


def test_every_excepted_literal_is_still_there(product: dict[str, Module]) -> None:
    used = {excepted(name, text) for name, _, text in literal_violations(product)}
    assert LITERAL_EXCEPTIONS.keys() - used == set()


def test_the_two_modules_do_name_host_paths(product: dict[str, Module]) -> None:
    for name in PATH_MODULES:
        assert any(HOST_PATH.search(text) for _, text in literals(product[name].tree))


def test_the_operators_default_socket_is_the_daemons() -> None:
    assert DEFAULT_SOCKET.startswith(Settings().runtime_directory + "/")


# --- negative controls: planted violations are found --------------------------------------------


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("workspace_path", str),
        ("rootfs", str),
        ("anything", Path),
        ("anything", PurePath | None),
        ("anything", tuple[Path, ...]),
        ("container_id", str),
        ("host_uid", int),
        ("mount", bytes),
        ("box_fd", int),
    ],
)
def test_a_planted_field_is_found(field: str, hint: Any) -> None:
    planted = msgspec.defstruct("Planted", [(field, hint)])
    assert field_violations(planted) == [("Planted", field)]


def test_control_a_harmless_field_is_not_found() -> None:
    harmless = msgspec.defstruct("Harmless", [("duration_ms", int), ("names", tuple[str, ...])])
    assert field_violations(harmless) == []


def module_of(text: str) -> Module:
    return Module("planted", Path("planted.py"), ast.parse(text), False, text.count("\n"))


HANDLER = """
try:
    work()
except {kind} as problem:
    raise {raised} from None
"""


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("OSError", 'ExecutionUnavailable(code, f"failed: {problem}")'),
        ("OSError", "ExecutionUnavailable(code, str(problem))"),
        ("OSError", "errors.ExecutionUnavailable(code, repr(problem))"),
        ("OSError", "WorkspaceError(code, problem.filename)"),
        ("OSError", "WorkspaceError(code, detail=problem.args[1])"),
        ("(ValueError, FileNotFoundError)", 'MechanismError("step", 0, f"{problem!r}")'),
        ("Exception", 'ExecutionRejected(code, "%s" % problem, field=None)'),
        ("KeyError", 'ExecutionUnavailable(code, f"no socket at {self._socket_path}")'),
        ("KeyError", 'WorkspaceEscape("under " + volume_directory)'),
        ("KeyError", 'SandboxEscapeSuspected(code, "saw /var/lib/sbxd/volumes/1")'),
        ("KeyError", 'Failed(ticket=1, step="x", errno=2, detail=paths.STATE_DIRECTORY)'),
    ],
)
def test_a_planted_path_in_an_error_is_found(kind: str, raised: str) -> None:
    assert error_violations(module_of(HANDLER.format(kind=kind, raised=raised)))


def test_a_planted_path_in_a_local_maker_of_errors_is_found() -> None:
    text = (
        "def refuse(detail) -> ExecutionRejected:\n    return ExecutionRejected(c, detail)\n"
        "def f(path):\n    raise refuse(path)\n"
    )
    assert error_violations(module_of(text))


@pytest.mark.parametrize(
    "raised",
    [
        'ExecutionUnavailable(code, f"connect: {problem.strerror}")',
        'MechanismError("mount", problem.errno or 0)',
        'WorkspaceError(code, f"{type(problem).__name__}")',
        'ValueError(f"{problem}")',
    ],
)
def test_control_an_error_without_a_path_is_not_found(raised: str) -> None:
    assert error_violations(module_of(HANDLER.format(kind="OSError", raised=raised))) == []


@pytest.mark.parametrize(
    "text",
    [
        'x = "/var/lib/sbxd"\n',
        'x = b"/sys/fs/cgroup"\n',
        'x = f"/proc/{pid}/mountinfo"\n',
        'x = f"lowerdir=/run/sbxd/{name}"\n',
        'def f():\n    open("/dev/loop-control")\n',
        'x = "mount /tmp"\n',
    ],
)
def test_a_planted_literal_is_found(text: str) -> None:
    assert literal_violations({"planted": module_of(text)})


@pytest.mark.parametrize(
    "text",
    [
        '"""Reads /proc/self/mountinfo."""\n',
        'def f():\n    """Opens /dev/null."""\n',
        'x = "/workspace"\n',
        'x = "a/var/b and and/or, /variable"\n',
        "# /etc/passwd\n",
    ],
)
def test_control_what_is_no_host_path_is_not_found(text: str) -> None:
    assert literal_violations({"planted": module_of(text)}) == []
