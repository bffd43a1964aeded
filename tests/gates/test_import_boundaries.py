"""gate.sandbox.no_runtime_in_worker, and the layers: imports point down only.

Three looks at the same thing: a table of who may import whom, held against every import
statement; a walk that follows imports to their end, so that a chain of legal steps cannot lead a
worker to a container runtime; and an interpreter that imports the worker's packages and shows
what came with them. The last part of the file plants violations and expects each to be found.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gates.imports import (
    COMPUTED,
    graph,
    is_stdlib,
    reachable,
    within,
)
from tests.gates.source import REPOSITORY, Module, aliases, called, load

pytestmark = pytest.mark.gate("gate.sandbox.no_runtime_in_worker")

# Of the standard library, what a pure module may not touch: the machine, the clock, chance.
IMPURE = (
    "_posixsubprocess", "asyncio", "concurrent", "ctypes", "fcntl", "multiprocessing", "os",
    "posix", "pty", "random", "secrets", "select", "selectors", "shutil", "signal", "socket",
    "subprocess", "tempfile", "threading", "time",
)  # fmt: skip
SPAWNING = ("_posixsubprocess", "multiprocessing", "pty", "subprocess")
RUNTIMES = (
    "containerd", "docker", "kubernetes", "libvirt", "lxc", "nomad", "podman", "pyroute2",
    "pyseccomp", "pystemd", "qemu", "runc", "seccomp",
)  # fmt: skip
KERNEL_LIBRARIES = ("pyroute2", "pyseccomp", "pystemd", "seccomp")
KERNEL_ADAPTERS = ("sbxd.launcher.kernel", "sbxd.egress.netlink")


@dataclass(frozen=True)
class Layer:
    """What the modules below `name` may import besides themselves.

    internal: modules of ours (or below them). third: top-level names of other projects.
    no_stdlib: what they may not import of the standard library.
    """

    name: str
    internal: tuple[str, ...] = ()
    third: tuple[str, ...] = ()
    no_stdlib: tuple[str, ...] = ()


PURE = ("sbxd.port", "sbxd.policy", "sbxd.wire", "sbxd.settings")
LAYERS = (
    # Pure: the vocabulary, the rules, the protocol, the configuration as data.
    Layer("sbxd.port", (), ("msgspec",), IMPURE),
    Layer("sbxd.settings", ("sbxd.port",), ("msgspec",), IMPURE),
    Layer("sbxd.policy", ("sbxd.port", "sbxd.settings"), ("msgspec",), IMPURE),
    Layer("sbxd.wire", ("sbxd.port",), ("msgspec",), IMPURE),
    # The formats of images, for whoever takes one apart.
    Layer("sbxd.oci", (), ("msgspec",), IMPURE),
    Layer("sbxd.audit.events", ("sbxd.port", "sbxd.policy"), ("msgspec",), IMPURE),
    Layer("sbxd.audit.lease_events", ("sbxd.audit.events", "sbxd.port"), ("msgspec",), IMPURE),
    Layer("sbxd.audit.stream_events", ("sbxd.audit.events",), ("msgspec",), IMPURE),
    Layer("sbxd.audit.header", ("sbxd.audit.encode",), ("msgspec",), IMPURE),
    Layer("sbxd.audit.encode", ("sbxd.audit.events",), ("msgspec",), IMPURE),
    # Descriptors in flight, for every side; what closes the ends of those that send them.
    Layer("sbxd.rights", (), (), (*SPAWNING, "threading", "time")),
    Layer("sbxd.closing", ("sbxd.rights",), (), SPAWNING),
    # The worker's side.
    Layer("sbxd.client", (*PURE, "sbxd.rights", "sbxd.closing"), ("msgspec", "anyio"), SPAWNING),
    Layer("sbxd.client.guard_httpx", (*PURE, "sbxd.client"), ("httpx", "httpcore"), SPAWNING),
    Layer("sbxd.fake", PURE, ("msgspec", "anyio"), SPAWNING),
    Layer("sbxd.tools", (*PURE, "sbxd.client", "sbxd.artifacts"), ("msgspec", "anyio"), SPAWNING),
    Layer("sbxd.tools.mcp_server", (*PURE, "sbxd.tools", "sbxd.artifacts"), ("mcp",), SPAWNING),
    Layer("sbxd.tools.mcp_http", (*PURE, "sbxd.tools"), ("anyio", "mcp", "mcp_types", "starlette"),
          SPAWNING),
    Layer("sbxd.tools.openai_agents", ("sbxd.port", "sbxd.tools"), ("agents",), SPAWNING),
    Layer("sbxd.tools.openai_sandbox", (*PURE, "sbxd.client", "sbxd.tools"), ("agents",), SPAWNING),
    Layer("sbxd.tools.deepagents_backend", (*PURE, "sbxd.client", "sbxd.tools"), ("deepagents",),
          SPAWNING),
    Layer("sbxd.artifacts", PURE, ("msgspec", "anyio"), SPAWNING),
    Layer("sbxd.artifacts.metadata_sqlite", (*PURE, "sbxd.artifacts"), ("anyio", "aiosqlite"),
          SPAWNING),
    Layer("sbxd.artifacts.metadata_postgres", (*PURE, "sbxd.artifacts"), ("anyio", "psycopg"),
          SPAWNING),
    Layer("sbxd.worker_cli",
          (*PURE, "sbxd.client", "sbxd.artifacts", "sbxd.tools", "sbxd.closing",
           "sbxd.extras"),
          ("msgspec", "anyio", "click"), SPAWNING),
    Layer("sbxd.worker_cli.mcp", (*PURE, "sbxd.client", "sbxd.artifacts", "sbxd.tools",
                                  "sbxd.worker_cli"),
          ("anyio", "click", "mcp", "uvicorn"), SPAWNING),
    # The daemon.
    Layer("sbxd.config", PURE, ("msgspec",), SPAWNING),
    Layer("sbxd.audit", PURE, ("msgspec", "trio"), SPAWNING),
    Layer("sbxd.fake.service", (*PURE, "sbxd.fake", "sbxd.lifecycle.environments", "sbxd.audit"),
          ("msgspec", "anyio", "trio"), SPAWNING),
    Layer("sbxd.extras", (), (), SPAWNING),
    Layer("sbxd.auditing", ("sbxd.audit", "sbxd.settings"), (), SPAWNING),
    Layer("sbxd.notify", ("sbxd.rights",), (), SPAWNING),
    Layer("sbxd.host", (*PURE, "sbxd.audit", "sbxd.config"), ("msgspec",), SPAWNING),
    Layer("sbxd.mechanisms", ("sbxd.host", "sbxd.mechanism", "sbxd.settings"), ("trio",),
          SPAWNING),
    Layer("sbxd.doors",
          ("sbxd.audit.events", "sbxd.rights", "sbxd.closing", "sbxd.service.listener",
           "sbxd.service.unix"),
          (), SPAWNING),
    Layer("sbxd.mechanism",
          (*PURE, "sbxd.rights", "sbxd.closing", "sbxd.launcher.requests", "sbxd.launcher.channel",
           "sbxd.jail.frames", "sbxd.steward.frames"),
          ("msgspec", "trio"), SPAWNING),
    Layer("sbxd.mechanism.protocol", ("sbxd.port", "sbxd.wire"), (), IMPURE),
    Layer("sbxd.lifecycle", (*PURE, "sbxd.audit", "sbxd.mechanism.protocol"),
          ("msgspec", "trio", "trio_asyncio", "aiosqlite"), SPAWNING),
    Layer("sbxd.egress", ("sbxd.port", "sbxd.policy", "sbxd.settings"), ("msgspec", "trio"),
          SPAWNING),
    Layer("sbxd.egress.netlink", ("sbxd.egress.host_network", "sbxd.policy"), ("pyroute2",),
          SPAWNING),
    Layer("sbxd.service",
          (*PURE, "sbxd.oci", "sbxd.audit", "sbxd.lifecycle", "sbxd.mechanism.protocol",
           "sbxd.rights", "sbxd.closing"),
          ("msgspec", "trio"), SPAWNING),
    Layer("sbxd.proxies",
          (*PURE, "sbxd.audit", "sbxd.egress", "sbxd.lifecycle.network",
           "sbxd.mechanism.protocol", "sbxd.service.egress"),
          ("trio",), SPAWNING),
    Layer("sbxd.metrics",
          (*PURE, "sbxd.audit", "sbxd.lifecycle.environments", "sbxd.lifecycle.pool"),
          ("msgspec", "trio"), SPAWNING),
    Layer("sbxd.observing",
          (*PURE, "sbxd.metrics", "sbxd.lifecycle.environments"), ("trio",), SPAWNING),
    Layer("sbxd.daemon",
          (*PURE, "sbxd.config", "sbxd.audit", "sbxd.auditing", "sbxd.fake", "sbxd.mechanism",
           "sbxd.lifecycle",
           "sbxd.egress", "sbxd.proxies", "sbxd.service", "sbxd.notify", "sbxd.doors",
           "sbxd.host", "sbxd.mechanisms", "sbxd.daemon_images", "sbxd.metrics",
           "sbxd.observing"),
          ("msgspec", "trio"), SPAWNING),
    Layer("sbxd.daemon_images",
          (*PURE, "sbxd.config", "sbxd.audit", "sbxd.fake.service", "sbxd.lifecycle.registry",
           "sbxd.service.images"),
          ("trio",), SPAWNING),
    Layer("sbxd.__main__",
          ("sbxd.daemon", "sbxd.config", "sbxd.settings", "sbxd.notify", "sbxd.closing"),
          ("trio",), SPAWNING),
    # Root, and what it forks. No trio, no asyncio: one poll loop.
    Layer("sbxd.launcher",
          ("sbxd.port", "sbxd.settings", "sbxd.rights", "sbxd.jail", "sbxd.steward"),
          ("msgspec",), ("asyncio", "concurrent", "multiprocessing", "threading")),
    Layer("sbxd.launcher.channel", ("sbxd.launcher.requests", "sbxd.rights"), ("msgspec",),
          SPAWNING),
    Layer("sbxd.launcher.requests", ("sbxd.port",), ("msgspec",), IMPURE),
    Layer("sbxd.launcher.kernel",
          ("sbxd.port", "sbxd.settings", "sbxd.launcher.requests", "sbxd.launcher.steps",
           "sbxd.jail", "sbxd.oci"),
          ("msgspec", *KERNEL_LIBRARIES), ("asyncio", "concurrent", "threading")),
    Layer("sbxd.launcher.kernel.image_stream", ("sbxd.oci",), ("zstandard",),
          ("asyncio", "concurrent", "threading")),
    Layer("sbxd.jail", ("sbxd.steward",), (), ("asyncio", "concurrent", "subprocess", "threading")),
    Layer("sbxd.jail.frames", (), (), IMPURE),
    Layer("sbxd.steward", ("sbxd.jail.syscalls",), (),
          ("asyncio", "concurrent", "subprocess", "threading")),
    # What runs inside an environment and tries things: a program of its own.
    Layer("sbxd.probes"),
    # The operator's side. doctor and image building may run programs.
    Layer("sbxctl",
          (*PURE, "sbxd.audit.position", "sbxd.audit.sink", "sbxd.audit.vocabulary", "sbxd.client",
           "sbxd.extras", "sbxd.oci", "sbxd.probes"),
          ("msgspec", "anyio", "trio", "click", "rich")),
    # The file is judged by the daemon's own functions.
    Layer("sbxctl.config", (*PURE, "sbxd.config", "sbxctl"), ("msgspec", "click")),
)  # fmt: skip

# The packages that a worker imports; nothing of the other side may come with them.
WORKER = ("sbxd.client", "sbxd.fake", "sbxd.tools", "sbxd.artifacts", "sbxd.worker_cli", *PURE)
# One module of `fake` is the daemon's: `sandbox = "fake"`.
DAEMON_PART_OF_FAKE = "sbxd.fake.service"
FORBIDDEN_TO_WORKERS = (
    "sbxd.audit", "sbxd.daemon", "sbxd.daemon_images", "sbxd.egress", "sbxd.jail",
    "sbxd.launcher", "sbxd.lifecycle", "sbxd.metrics", "sbxd.observing",
    "sbxd.mechanism", "sbxd.service", "sbxd.steward", "trio", *RUNTIMES, *SPAWNING,
)  # fmt: skip
# Ways to start a program that need no import of their own.
SPAWNERS = frozenset(
    {f"os.{name}" for name in ("fork", "forkpty", "popen", "posix_spawn", "posix_spawnp", "system")}
    | {f"os.{kind}{form}" for kind in ("exec", "spawn") for form in
       ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")}
    | {"anyio.open_process", "anyio.run_process", "anyio.to_process.run_sync"}
    | {"asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"}
    | {"trio.run_process", "trio.lowlevel.open_process"}
)  # fmt: skip


def layer_of(name: str) -> Layer | None:
    """The most specific layer that a module belongs to."""
    fitting = [layer for layer in LAYERS if within(name, (layer.name,))]
    return max(fitting, key=lambda layer: len(layer.name), default=None)


def is_worker(name: str) -> bool:
    return within(name, WORKER) and not within(name, (DAEMON_PART_OF_FAKE,))


def layer_violations(modules: Mapping[str, Module]) -> list[str]:
    """Each import that the table does not allow."""
    found = []
    for name, imports in graph(modules).items():
        if name in ("sbxd", "sbxctl"):
            found += [f"{name}:{each.line} imports {each.target}" for each in imports]
            continue
        layer = layer_of(name)
        if layer is None:
            found.append(f"{name} belongs to no layer of the table")
            continue
        for each in imports:
            if not allowed(layer, each.target):
                found.append(f"{name}:{each.line} imports {each.target} ({layer.name} may not)")
    return found


def allowed(layer: Layer, target: str) -> bool:
    if target == COMPUTED:
        return False
    if target in ("sbxd", "sbxctl"):
        return True  # empty packages
    if within(target, ("sbxd", "sbxctl")):
        own = layer_of(target)
        return own is layer or within(target, (layer.name, *layer.internal))
    if is_stdlib(target):
        return not within(target, layer.no_stdlib)
    return within(target, layer.third)


def worker_violations(modules: Mapping[str, Module]) -> list[str]:
    """Each way by which a module of the worker's side reaches what it must not, with the chain;
    and each call that starts a program."""
    found = []
    edges = graph(modules)
    for name in filter(is_worker, modules):
        for target, chain in reachable(edges, name).items():
            if within(target, FORBIDDEN_TO_WORKERS):
                steps = " -> ".join(f"{step.target} (line {step.line})" for step in chain)
                found.append(f"{name} reaches {target}: {steps}")
        module = modules[name]
        names = aliases(module.tree)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and called(node, names) in SPAWNERS:
                found.append(f"{name}:{node.lineno} starts a program: {called(node, names)}")
    return found


def kernel_library_violations(modules: Mapping[str, Module]) -> list[str]:
    """Each import of a kernel library outside of launcher/kernel and the daemon's adapter."""
    return [
        f"{name}:{each.line} imports {each.target}"
        for name, imports in graph(modules).items()
        for each in imports
        if within(each.target, KERNEL_LIBRARIES) and not within(name, KERNEL_ADAPTERS)
    ]


@pytest.fixture(scope="module")
def product() -> dict[str, Module]:
    return load()


def test_every_import_points_down(product: dict[str, Module]) -> None:
    assert layer_violations(product) == []


def test_no_worker_module_reaches_a_runtime_or_the_daemon(product: dict[str, Module]) -> None:
    assert worker_violations(product) == []


def test_only_the_launchers_kernel_package_imports_kernel_libraries(
    product: dict[str, Module],
) -> None:
    assert kernel_library_violations(product) == []


def test_the_walk_sees_the_product(product: dict[str, Module]) -> None:
    """Control: known imports are found, so an empty list of violations means something."""
    edges = graph(product)
    reached = reachable(edges, "sbxd.client.remote")
    assert "sbxd.wire.messages" in reached
    assert "msgspec" in reached
    assert sum(is_worker(name) for name in product) > 20
    assert any(within(each.target, ("pystemd",)) for name in edges for each in edges[name])


IMPORT_AND_SHOW = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
names = sys.argv[1:]
# The daemon's part, and what a worker imports only when it has the library (httpx loads trio).
apart = {
    "sbxd.fake.service", "sbxd.client.guard_httpx", "sbxd.tools.openai_agents",
    "sbxd.tools.openai_sandbox", "sbxd.tools.deepagents_backend",
}
for name in names:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        if found.name not in apart:
            importlib.import_module(found.name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded_by(*names: str) -> set[str]:
    """What an interpreter of its own has loaded after importing packages with all their modules."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_SHOW, *names],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(json.loads(done.stdout))


def test_importing_the_workers_packages_loads_no_runtime_and_nothing_of_the_daemon() -> None:
    loaded = loaded_by(
        *("sbxd.client", "sbxd.fake", "sbxd.artifacts", "sbxd.tools", "sbxd.worker_cli"),
        *("sbxd.port", "sbxd.policy", "sbxd.wire"),
    )
    assert {"sbxd.client.remote", "sbxd.fake.environment", "anyio"} <= loaded
    assert {"sbxd.artifacts.metadata_postgres", "sbxd.worker_cli.artifacts"} <= loaded
    assert {"sbxd.tools.toolbox", "sbxd.tools.mcp_http", "mcp"} <= loaded
    # anyio itself loads `subprocess`; what our own modules name is the walk's business above.
    forbidden = tuple(each for each in FORBIDDEN_TO_WORKERS if each not in SPAWNING)
    assert sorted(name for name in loaded if within(name, forbidden)) == []


@pytest.mark.parametrize(
    ("adapter", "framework"),
    [
        ("sbxd.tools.openai_agents", "agents"),
        ("sbxd.tools.openai_sandbox", "agents.sandbox"),
        ("sbxd.tools.deepagents_backend", "deepagents"),
    ],
)
def test_a_frameworks_adapter_loads_no_runtime_and_nothing_of_the_daemon(
    adapter: str, framework: str
) -> None:
    loaded = loaded_by(adapter)
    assert framework in loaded
    # What a framework itself loads besides is its own: a spawner is of the standard library.
    forbidden = tuple(each for each in FORBIDDEN_TO_WORKERS if within(each, ("sbxd",)))
    assert sorted(name for name in loaded if within(name, (*forbidden, *RUNTIMES))) == []


def test_importing_the_pure_packages_loads_no_socket_and_no_subprocess() -> None:
    loaded = loaded_by("sbxd.port", "sbxd.policy", "sbxd.wire", "sbxd.settings")
    assert "sbxd.policy.admission" in loaded
    # `os` is there before any of our code: the interpreter itself loads it.
    forbidden = ("anyio", "asyncio", "multiprocessing", "socket", "subprocess", "trio", *RUNTIMES)
    assert sorted(name for name in loaded if within(name, forbidden)) == []


def test_control_the_interpreter_shows_what_does_come_along() -> None:
    assert "trio" in loaded_by("sbxd.audit")
    assert "subprocess" in loaded_by("anyio")


# --- negative controls: planted violations are found --------------------------------------------


def plant(tmp_path: Path, files: dict[str, str]) -> dict[str, Module]:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(tmp_path).parents[:-1]:
            init = tmp_path / folder / "__init__.py"
            if not init.exists():
                init.write_text("")
    (tmp_path / "sbxctl").mkdir(exist_ok=True)
    return load(tmp_path)


CLEAN = {
    "sbxd/port/ids.py": "import msgspec\nfrom enum import StrEnum\n",
    "sbxd/policy/rules.py": "from sbxd.port import ids\n",
    "sbxd/client/remote.py": "import anyio\nfrom sbxd.policy.rules import x\n",
    "sbxd/launcher/kernel/systemd.py": "import pystemd.systemd1\n",
}


def test_control_a_clean_tree_has_no_violation(tmp_path: Path) -> None:
    modules = plant(tmp_path, CLEAN)
    assert layer_violations(modules) == []
    assert worker_violations(modules) == []
    assert kernel_library_violations(modules) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sbxd/port/bad.py", "import os\n"),
        ("sbxd/port/bad.py", "import os.path as p\n"),
        ("sbxd/port/bad.py", "from socket import socket\n"),
        ("sbxd/port/bad.py", "from sbxd.policy import rules\n"),
        ("sbxd/port/bad.py", "from ..policy.rules import x\n"),
        ("sbxd/policy/bad.py", "import trio\n"),
        ("sbxd/policy/bad.py", "def f():\n    import subprocess\n"),
        ("sbxd/policy/bad.py", "from sbxd.client.remote import x\n"),
        ("sbxd/wire/bad.py", "import time\n"),
        ("sbxd/wire/bad.py", "if TYPE_CHECKING:\n    from sbxd.service.session import x\n"),
        ("sbxd/client/bad.py", "import docker\n"),
        ("sbxd/client/bad.py", "import importlib\nimportlib.import_module('docker')\n"),
        ("sbxd/client/bad.py", "from importlib import import_module as i\ni('docker')\n"),
        ("sbxd/client/bad.py", "import importlib\nimportlib.import_module(name)\n"),
        ("sbxd/client/bad.py", "__import__('podman')\n"),
        ("sbxd/client/bad.py", "import trio\n"),
        ("sbxd/client/bad.py", "from sbxd.mechanism.protocol import Mechanism\n"),
        ("sbxd/lifecycle/bad.py", "from sbxd.launcher.requests import Prepare\n"),
        ("sbxd/lifecycle/bad.py", "from sbxd.mechanism.namespaces import x\n"),
        ("sbxd/service/bad.py", "from sbxd.mechanism import launcher_channel\n"),
        ("sbxd/mechanism/bad.py", "from sbxd.lifecycle.registry import x\n"),
        ("sbxd/launcher/bad.py", "import trio\n"),
        ("sbxd/launcher/bad.py", "import pystemd\n"),
        ("sbxd/launcher/bad.py", "from sbxd.lifecycle import registry\n"),
        ("sbxd/jail/bad.py", "import msgspec\n"),
        ("sbxd/jail/bad.py", "from sbxd.launcher.kernel import hostpaths\n"),
        ("sbxd/steward/bad.py", "from sbxd.port.command import FileChange\n"),
        ("sbxd/newcomer/bad.py", "x = 1\n"),
        ("sbxctl/bad.py", "from sbxd.launcher.kernel import probe\n"),
        ("sbxd/__init__.py", "from sbxd.client import remote\n"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, name: str, text: str) -> None:
    assert layer_violations(plant(tmp_path, CLEAN | {name: text}))


@pytest.mark.parametrize(
    "extra",
    [
        {"sbxd/client/bad.py": "def f():\n    import subprocess\n"},
        {"sbxd/client/bad.py": "import os\nos.system('docker run')\n"},
        {"sbxd/client/bad.py": "from os import posix_spawn as go\ngo('runsc', [], {})\n"},
        {"sbxd/client/bad.py": "import os as o\no.execvp('runc', [])\n"},
        {"sbxd/client/bad.py": "import anyio\nasync def f():\n    await anyio.run_process('x')\n"},
        {"sbxd/tools/bad.py": "import sbxd.daemon\n", "sbxd/daemon.py": ""},
        # Through a chain whose every step but the last looks harmless.
        {
            "sbxd/client/bad.py": "from sbxd.policy.middle import x\n",
            "sbxd/policy/middle.py": "from sbxd.policy.end import y\n",
            "sbxd/policy/end.py": "def f():\n    from docker.client import Client\n",
        },
        # Through the __init__ of a package on the way.
        {
            "sbxd/wire/__init__.py": "import podman\n",
            "sbxd/wire/messages.py": "",
            "sbxd/client/bad.py": "import sbxd.wire.messages\n",
        },
    ],
)
def test_a_planted_way_to_a_runtime_is_found(tmp_path: Path, extra: dict[str, str]) -> None:
    assert worker_violations(plant(tmp_path, CLEAN | extra))


def test_a_planted_kernel_library_is_found(tmp_path: Path) -> None:
    for number, line in enumerate(("import pyroute2", "from pystemd import dbuslib")):
        modules = plant(tmp_path / str(number), CLEAN | {"sbxd/service/bad.py": line})
        assert kernel_library_violations(modules)
