"""Builds the cached layers that every lane is made of, and the libraries of the Debian package.

`root` (Debian with systemd), `environment` (the project's dependencies in /opt/sbxd, as a layer
over the root), `uml` (kernel and modules), `qemu` (emulator and kernel), `image` (a tar for
sandboxes), `workloads` (a larger one, with compilers and runtimes, for lane `container`),
`monitoring` (Prometheus as three programs, for the same lane). None of them holds a file of the
project: the work tree is bound in at boot, so a change of code never
costs a build.

Invariant: no mirror, registry or proxy is named here or kept in a layer. apt's and pip's settings
are those of the machine, handed in for the time of the build.
"""

import os
import re
import shlex
import shutil
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import cache, kernel, qemu
from .host import REPOSITORY, LabError, require_root, require_tools
from .packages import (
    EXTRAS,
    IMAGE_EXCLUDED,
    IMAGE_PACKAGES,
    MONITORING_PACKAGES,
    MONITORING_PROGRAMS,
    PROGRAMS_NODE,
    PROGRAMS_PACKAGES,
    QEMU_PACKAGES,
    ROOT_PACKAGES,
    SUITE,
    UML_PACKAGE,
    UML_SUITE,
    WORKLOADS_PACKAGES,
)

Say = Callable[[str], None]

# Raise one of these when the way of building changes and the packages do not.
_ROOT_RECIPE = 1
_ENVIRONMENT_RECIPE = 2
_UML_RECIPE = 1
_QEMU_RECIPE = 1
_IMAGE_RECIPE = 1
_MONITORING_RECIPE = 1
_PROGRAMS_RECIPE = 1
_LIBRARIES_RECIPE = 1

# A build's processes end with the one that waits for them, and so do its mounts.
_APART = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child"),
)

_HANDED_OVER = re.compile(r"^Acquire::(Check-|https?::|Retries)")


@dataclass(frozen=True)
class Layers:
    """Paths of complete cache entries."""

    root: Path
    environment: Path
    image: Path
    workloads: Path | None
    programs: Path | None
    monitoring: Path | None
    uml: Path | None
    qemu: Path | None


def obtain(lane: str, say: Say) -> Layers:
    """All layers that a lane needs, built where the cache has them not."""
    require_root()
    require_tools()
    root_recipe = [_ROOT_RECIPE, SUITE, ROOT_PACKAGES]
    requirements = project_requirements()
    try:
        root = cache.obtain("root", root_recipe, _build_root, say)
        environment = cache.obtain(
            "environment",
            [_ENVIRONMENT_RECIPE, root_recipe, requirements],
            lambda target: _build_over(target, root, _environment_script(requirements)),
            say,
        )
        image = _obtain_image("image", IMAGE_PACKAGES, say)
        workloads = programs = monitoring = uml = emulated = None
        if lane in ("container", "gvisor"):
            recipe = [_PROGRAMS_RECIPE, SUITE, PROGRAMS_PACKAGES, PROGRAMS_NODE, IMAGE_EXCLUDED]
            programs = cache.obtain("programs", recipe, _build_programs, say)
        if lane == "container":
            workloads = _obtain_image("workloads", WORKLOADS_PACKAGES, say)
            recipe = [_MONITORING_RECIPE, SUITE, MONITORING_PACKAGES, MONITORING_PROGRAMS]
            monitoring = cache.obtain("monitoring", recipe, _build_monitoring, say)
        if lane == "uml":
            uml = cache.obtain("uml", [_UML_RECIPE, UML_SUITE, UML_PACKAGE], _build_uml, say)
        if lane == "qemu":
            emulated = cache.obtain("qemu", [_QEMU_RECIPE, SUITE, QEMU_PACKAGES], _build_qemu, say)
    except OSError as error:
        raise LabError(f"a layer of the lab could not be built: {error}") from error
    return Layers(root, environment, image, workloads, programs, monitoring, uml, emulated)


def _obtain_image(name: str, packages: tuple[str, ...], say: Say) -> Path:
    recipe = [_IMAGE_RECIPE, SUITE, packages, IMAGE_EXCLUDED]
    return cache.obtain(name, recipe, lambda target: _build_image(target, packages), say)


def package_parts(wanted: Path, builders: Path, guest: Path, place: Path, say: Say) -> Path:
    """What of the Debian package is compiled or fetched, made in a clean root of its Debian.

    Args:
        wanted: requirements, each with the digests of its files.
        builders: the same for what compiles those that are to be compiled.
        guest: the folder with the source of a gVisor sandbox's process 1, and its `build.sh`.
        place: where the package has all of this.

    Returns: `place` as it was made: `python`, plain modules as `pip install --target` lays them,
    and `sbx-guest-init`.
    """
    require_root()
    require_tools()
    root_recipe = [_ROOT_RECIPE, SUITE, ROOT_PACKAGES]
    sources = {
        "w": wanted,
        "b": builders,
        **{path.name: path for path in sorted(guest.iterdir())},
    }
    modules = shlex.quote(str(place / "python"))
    # Without debugging information nothing of the folder that they are compiled in is left.
    script = (
        *(f"cat >/tmp/{n} <<'END-OF-FILE'\n{p.read_text()}END-OF-FILE" for n, p in sources.items()),
        "python3 -m venv /tmp/build",
        'export PATH="/tmp/build/bin:$PATH" CFLAGS="-g0 -O2" LDFLAGS="-s" PYTHONHASHSEED=0',
        "pip install --quiet --no-cache-dir --no-deps --require-hashes -r /tmp/b",
        "pip install --quiet --no-cache-dir --no-deps --require-hashes -r /tmp/w "
        f"--no-build-isolation --no-compile --target {modules}",
        f"PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={modules} pip check",
        f"find {modules} -name '*.so' -exec strip --strip-unneeded '{{}}' +",
        f"sh /tmp/build.sh {shlex.quote(str(place / 'sbx-guest-init'))}",
    )
    try:
        root = cache.obtain("root", root_recipe, _build_root, say)
        layer = cache.obtain(
            "package",
            [_LIBRARIES_RECIPE, root_recipe, script],
            lambda target: _build_over(target, root, script),
            say,
        )
    except OSError as error:
        raise LabError(f"the package's parts could not be built: {error}") from error
    return layer / place.relative_to("/")


def project_requirements() -> list[str]:
    """The dependencies that pyproject.toml declares, with the lab's extras."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted: list[str] = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    return sorted(set(wanted))


def _mmdebstrap(*arguments: str) -> None:
    dump = kernel.run("apt-config", "dump", "--format", "%F %v%n") if _has_apt() else ""
    options = []
    for line in dump.splitlines():
        name, _, value = line.partition(" ")
        if _HANDED_OVER.match(name) and value:
            options.append(f'--aptopt={name} "{value}"')
    kernel.run(*_APART, "--mount-proc", "mmdebstrap", "--mode=root", *options, *arguments)


def _has_apt() -> bool:
    return shutil.which("apt-config") is not None


def _build_root(target: Path) -> None:
    _mmdebstrap("--variant=minbase", f"--include={','.join(ROOT_PACKAGES)}", SUITE, str(target))
    # The same id each time: systemd then takes no boot for the first one.
    (target / "etc" / "machine-id").write_text("5b0d1ab05b0d1ab05b0d1ab05b0d1ab0\n")
    # mmdebstrap leaves the machine's own here.
    (target / "etc" / "hostname").write_text("sbxd-lab\n")
    (target / "etc" / "resolv.conf").write_text("")


def _build_image(target: Path, packages: tuple[str, ...], *more: str) -> None:
    _mmdebstrap(
        "--variant=minbase",
        "--format=tar",
        f"--include={','.join(packages)}",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in IMAGE_EXCLUDED),
        # A Java's own installation wants the folder that is excluded above.
        '--essential-hook=mkdir -p "$1/usr/share/man/man1"',
        *more,
        SUITE,
        str(target),
    )


def _build_programs(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kernel.run("npm", "pack", "--silent", "--pack-destination", folder, PROGRAMS_NODE)
        (packed,) = Path(folder).glob("*.tgz")
        member = "package/bin/node"
        kernel.run("tar", "-xzf", str(packed), "-C", folder, "--strip-components=2", member)
        into = f"--customize-hook=copy-in {folder}/node /usr/local/bin"
        _build_image(target, PROGRAMS_PACKAGES, into)


def _build_monitoring(target: Path) -> None:
    whole = target.with_name(target.name + "-whole")
    shutil.rmtree(whole, ignore_errors=True)
    wanted = ",".join(MONITORING_PACKAGES)
    _mmdebstrap("--variant=extract", f"--include={wanted}", SUITE, str(whole))
    target.mkdir()
    for program in MONITORING_PROGRAMS:
        shutil.copy2(whole / "usr/bin" / program, target / program)
    shutil.rmtree(whole)


def _build_uml(target: Path) -> None:
    whole = target.with_name(target.name + "-whole")
    shutil.rmtree(whole, ignore_errors=True)
    _mmdebstrap("--variant=extract", f"--include={UML_PACKAGE}", UML_SUITE, str(whole))
    target.mkdir()
    shutil.copy2(whole / "usr/bin/linux.uml", target / "linux.uml")
    shutil.copytree(whole / "usr/lib/uml/modules", target / "modules", symlinks=True)
    shutil.rmtree(whole)


def _build_qemu(target: Path) -> None:
    whole = target.with_name(target.name + "-whole")
    shutil.rmtree(whole, ignore_errors=True)
    _mmdebstrap("--variant=minbase", f"--include={','.join(QEMU_PACKAGES)}", SUITE, str(whole))
    qemu.build(whole, target)


def _environment_script(requirements: list[str]) -> tuple[str, ...]:
    wanted = " ".join(shlex.quote(requirement) for requirement in requirements)
    return (
        "python3 -m venv /opt/sbxd",
        f"/opt/sbxd/bin/pip install --quiet --no-cache-dir {wanted}",
    )


def _build_over(target: Path, root: Path, script: tuple[str, ...]) -> None:
    """Fill `target` as an overlay's upper layer over `root` by a script that may use pip; in a
    child, for its mounts."""
    target.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kernel.die_with_parent()
            kernel.private_mounts()
            _run_over(target, root, script)
            status = 0
        except OSError as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1] != 0:
        raise OSError("the libraries could not be installed (see above)")


def _run_over(target: Path, root: Path, script: tuple[str, ...]) -> None:
    # An upper layer cannot be on another file system than its work folder. The mount point is an
    # empty folder that is removed with rmdir alone: a recursive removal would follow the mounts.
    work = target.with_name(target.name + "-work")
    shutil.rmtree(work, ignore_errors=True)
    merged = Path(tempfile.mkdtemp(prefix="sbxd-lab-"))
    try:
        kernel.overlay([root], target, work, merged)
        try:
            _run_in(merged, script)
        finally:
            kernel.run("umount", "--recursive", str(merged))
    finally:
        merged.rmdir()
    shutil.rmtree(work)


def _run_in(merged: Path, commands: tuple[str, ...]) -> None:
    for folder in ("tmp", "mnt"):
        kernel.mount("tmpfs", merged / folder, kind="tmpfs")
    kernel.mount("proc", merged / "proc", kind="proc")
    for node in ("null", "zero", "urandom"):
        kernel.bind(f"/dev/{node}", merged / "tmp" / "dev" / node)
    kernel.mount(merged / "tmp/dev", merged / "dev", "rbind")
    for file in ("/etc/resolv.conf", "/etc/hosts"):
        if Path(file).exists():
            kernel.bind(file, merged / file.lstrip("/"), "ro")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in _pip_settings(merged)]
    script = "\n".join(
        (
            "set -e",
            "export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LANG=C.UTF-8",
            *lines,
            *commands,
        )
    )
    environment = {"PATH": os.environ["PATH"]}
    kernel.run(*_APART, "chroot", str(merged), "/bin/sh", "-c", script, environment=environment)


def _pip_settings(merged: Path) -> list[tuple[str, str]]:
    """The machine's pip settings as PIP_ variables; the files they name are bound under /mnt."""
    settings: dict[str, str] = {}
    try:
        listed = kernel.run("python3", "-m", "pip", "config", "list")
    except OSError:
        listed = ""  # no pip on this machine: it then has no settings either
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.partition(".")
        if section in ("global", "install", ":env:"):
            settings["PIP_" + option.upper().replace("-", "_")] = value.strip("'\"")
    for name, value in os.environ.items():
        if name.startswith("PIP_") or name.lower() in ("http_proxy", "https_proxy", "no_proxy"):
            settings[name] = value
    bound: list[tuple[str, str]] = []
    for number, (name, value) in enumerate(sorted(settings.items())):
        words = []
        for place, word in enumerate(value.replace("\\n", " ").split()):
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                inside = Path("/mnt") / f"pip-{number}-{place}" / path.name
                # An index links to its neighbours (../../files), so its parent comes along.
                source = path.parent if word.startswith("file://") else path
                target = inside.parent if word.startswith("file://") else inside
                kernel.bind(source, merged / str(target).lstrip("/"), "ro")
                word = word.replace(str(path), str(inside))
            words.append(word)
        bound.append((name, " ".join(words)))
    return bound
