"""Lays a package's files out, and packs the Debian package.

Invariants: the same input gives the same bytes (sorted names, one time, fixed modes and owners,
one compressor thread); everything that is read lies in the repository or in the folder of
parts; a library that needs a shared object of which no Debian package is known is an error.
Deliberately absent: debhelper. What it would do here is one list of files, four scripts that are
meant to be read, and dpkg-deb (decision 0101).
"""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import manual

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PLACE = Path("/usr/lib/sbxd")
LIBRARIES = PLACE / "python"
GUEST_INIT = PLACE / "sbx-guest-init"
SCRIPTS = ("postinst", "prerm", "postrm")

# Where each command lies. The interpreter reads no variable, no user's and no distribution's
# packages: the standard library and the package's own modules are all that there is to import.
COMMANDS = {
    "sbxctl": "/usr/bin/sbxctl",
    "sbxd": "/usr/bin/sbxd",
    "sbxd-launcher": "/usr/lib/sbxd/sbxd-launcher",
    "sbxd-worker": "/usr/bin/sbxd-worker",
}
COMMAND = """#!/usr/bin/python3 -IS
import sys

sys.path.insert(0, "{libraries}")

from {module} import {function}  # noqa: E402

sys.exit({function}())
"""

DEPENDS = (
    "apparmor (>= 4)",
    "e2fsprogs",
    "init-system-helpers (>= 1.54~)",
    "libseccomp2",
    "mount",
    "passwd",
    "python3 (<< 3.14)",
    "python3 (>= 3.13~)",
    "runsc",
    "systemd (>= 257)",
)
# The shared objects that a compiled module may need, and whose they are.
SHARED_OBJECTS = {
    "ld-linux-x86-64.so.2": "libc6 (>= 2.41)",
    "libc.so.6": "libc6 (>= 2.41)",
    "libgcc_s.so.1": "libgcc-s1",
    "libm.so.6": "libc6 (>= 2.41)",
    "libpthread.so.0": "libc6 (>= 2.41)",
    "librt.so.1": "libc6 (>= 2.41)",
    "libstdc++.so.6": "libstdc++6",
    "libsystemd.so.0": "libsystemd0 (>= 257)",
}

# Of the libraries: what nobody imports.
_LEFT_OUT = re.compile(
    r"^(bin|include)/|(^|/)(_?tests|__pycache__|isoschematron)/|\.(c|h|pxd|pxi|pyi|pyx)$"
    r"|\.dist-info/(INSTALLER|RECORD|REQUESTED|WHEEL|direct_url\.json|top_level\.txt"
    r"|entry_points\.txt|sboms/.*)$"
)


class BuildError(Exception):
    """The package cannot be built. The text says why."""


def build(parts: Path, output: Path, source_date: int) -> Path:
    """Make the package.

    Args:
        parts: what is at PLACE and not in the repository: the private libraries, as `pip install
            --target` lays them, and the compiled GUEST_INIT.
        output: the folder for it, made if need be.
        source_date: the one time of everything in it, in seconds since 1970.

    Raises: BuildError; OSError.
    """
    version = debian_version(project_version(), source_date)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sbxd-package-") as scratch:
        root = Path(scratch) / "root"
        lay(root, parts, source_date)
        _lay_documents(root, version, source_date)
        settle(root, source_date)
        _lay_control(root, version)
        settle(root / "DEBIAN", source_date)
        target = output / f"sbxd_{version}_amd64.deb"
        _pack(root, target, source_date)
    return target


def project_version() -> str:
    """As pyproject.toml has it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def lay(root: Path, parts: Path, source_date: int) -> None:
    """What every kind of package has: the listed files, the code, pages and completions."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    _lay_files(root)
    _lay_python(root, parts / LIBRARIES.name, project)
    write(inside(root, str(GUEST_INIT)), (parts / GUEST_INIT.name).read_bytes())
    for name, text in manual.pages(source_date).items():
        section = name.rpartition(".")[2]
        write(inside(root, f"/usr/share/man/man{section}/{name}.gz"), _gzip(text))
    for path, text in manual.completions().items():
        write(inside(root, path), text.encode())


def settle(root: Path, source_date: int) -> None:
    """One mode for programs and folders, one for the rest, and one time for all."""
    programs = {inside(root, path) for path in (*COMMANDS.values(), str(GUEST_INIT))}
    programs |= {root / name for name in SCRIPTS}
    for entry in [root, *root.rglob("*")]:
        entry.chmod(0o755 if entry.is_dir() or entry in programs else 0o644)
        os.utime(entry, (source_date, source_date), follow_symlinks=False)


def filled(script: Path, values: Mapping[str, str]) -> str:
    """A script with each @MARK@ replaced, and the part that both kinds of package share.

    Raises BuildError when a mark is left.
    """
    text = script.read_text()
    shared = (REPOSITORY / "packaging" / "installed.sh").read_text().partition("\n")[2].rstrip()
    for mark, value in {**values, "@INSTALLED@": shared}.items():
        text = text.replace(mark, value)
    if left := re.search(r"@[A-Z]+@", text):
        raise BuildError(f"{script.name}: nothing is known for {left[0]}")
    return text


def timers() -> str:
    """The names of the timers, as the scripts list them."""
    return " ".join(sorted(path.name for path in (REPOSITORY / "units").glob("*.timer")))


def debian_version(version: str, source_date: int) -> str:
    """Debian's form of a Python version. One under development is followed by its time, so that
    a later build is an upgrade of an earlier one, and every one comes before the release."""
    release, mark, number = version.partition(".dev")
    if not mark:
        return release
    moment = datetime.fromtimestamp(source_date, UTC)
    return f"{release}~dev{number}+{moment:%Y%m%d%H%M%S}"


def _lay_files(root: Path) -> None:
    lists = tomllib.loads((REPOSITORY / "packaging" / "files.toml").read_text())
    for row in lists["host"] + lists["package"]:
        files = sorted(REPOSITORY.glob(row["from"]))
        if not files:
            raise BuildError(f"packaging/files.toml: nothing is at {row['from']}")
        for file in files:
            write(inside(root, row["to"]) / file.name, file.read_bytes())


def _lay_python(root: Path, libraries: Path, project: dict[str, object]) -> None:
    place = inside(root, str(LIBRARIES))
    for file in sorted(libraries.rglob("*")):
        name = file.relative_to(libraries).as_posix()
        if file.is_file() and not _LEFT_OUT.search(name):
            write(place / name, file.read_bytes())
    for package in ("sbxd", "sbxctl"):
        for file in sorted((REPOSITORY / package).rglob("*")):
            if file.suffix == ".py" or file.name == "py.typed":
                write(place / file.relative_to(REPOSITORY), file.read_bytes())
    about = f"Metadata-Version: 2.1\nName: sbxd\nVersion: {project['version']}\n"
    write(place / f"sbxd-{project['version']}.dist-info" / "METADATA", about.encode())
    scripts = project["scripts"]
    assert isinstance(scripts, dict)
    if scripts.keys() != COMMANDS.keys():
        raise BuildError("tree.COMMANDS does not say where each of pyproject.toml's scripts lies")
    for name, entry in scripts.items():
        module, _, function = entry.partition(":")
        text = COMMAND.format(libraries=LIBRARIES, module=module, function=function)
        write(inside(root, COMMANDS[name]), text.encode())


def _lay_documents(root: Path, version: str, source_date: int) -> None:
    documents = inside(root, "/usr/share/doc/sbxd")
    date = format_datetime(datetime.fromtimestamp(source_date, UTC))
    changes = (HERE / "changelog").read_text().replace("@VERSION@", version).replace("@DATE@", date)
    write(documents / "changelog.gz", _gzip(changes))
    write(documents / "copyright", (HERE / "copyright").read_bytes())
    overrides = (HERE / "lintian-overrides").read_bytes()
    write(inside(root, "/usr/share/lintian/overrides/sbxd"), overrides)


def _lay_control(root: Path, version: str) -> None:
    control = root / "DEBIAN"
    files = sorted(path for path in root.rglob("*") if path.is_file())
    kibibytes = sum(-(-path.stat().st_size // 1024) for path in files)
    names = [path.relative_to(root).as_posix() for path in files]
    values = {
        "@VERSION@": version,
        "@SIZE@": str(kibibytes),
        "@DEPENDS@": ", ".join(sorted({*DEPENDS, *_needed(files)})),
        "@TIMERS@": timers(),
    }
    sums = "".join(
        f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  {name}\n"
        for path, name in zip(files, names, strict=True)
        if not name.startswith("etc/")
    )
    write(control / "md5sums", sums.encode())
    settings = "".join(f"/{name}\n" for name in names if name.startswith("etc/"))
    write(control / "conffiles", settings.encode())
    for name in ("control", *SCRIPTS):
        write(control / name, filled(HERE / name, values).encode())


def _needed(files: list[Path]) -> set[str]:
    """The packages of the shared objects that the compiled modules name."""
    found = set()
    for file in files:
        if ".so" not in file.suffixes:
            continue
        listed = run("readelf", "--dynamic", "--wide", str(file))
        for name in re.findall(r"\(NEEDED\).*\[(.*)\]", listed):
            if name not in SHARED_OBJECTS:
                raise BuildError(f"{file.name} needs {name}, of which no package is known")
            found.add(SHARED_OBJECTS[name])
    return found


def _pack(root: Path, target: Path, source_date: int) -> None:
    os.utime(root, (source_date, source_date))
    unfinished = target.with_name(f".{target.name}")
    run(
        *("dpkg-deb", "--root-owner-group", "--threads-max=1", "-Zxz", "-z3"),
        *("--build", str(root), str(unfinished)),
        source_date=source_date,
    )
    unfinished.replace(target)


def run(*command: str, source_date: int = 0) -> str:
    if not shutil.which(command[0]):
        raise BuildError(f"{command[0]} is not installed (packaging/prerequisites)")
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": str(source_date)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _gzip(text: str) -> bytes:
    return gzip.compress(text.encode(), 9, mtime=0)
