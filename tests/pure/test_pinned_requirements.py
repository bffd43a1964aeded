"""What a build of the packages fetches is named exactly: no file of it can be another tomorrow."""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import cache, layers

REPOSITORY = Path(__file__).parents[2]
DEB = REPOSITORY / "packaging" / "deb"
FILES = ("requirements.txt", "build-requirements.txt")
PIN = re.compile(r"([a-z0-9-]+)==([0-9a-z.]+) --hash=sha256:[0-9a-f]{64}")


def lines(name: str) -> list[str]:
    text = re.sub(r"\\\n\s*", "", (DEB / name).read_text())
    return [line for line in text.splitlines() if not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    found = [PIN.fullmatch(line) for line in lines(name)]
    return {pin[1]: pin[2] for pin in found if pin}


def pyproject() -> dict[str, dict[str, list[str]]]:
    document: dict[str, dict[str, list[str]]] = tomllib.loads(
        (REPOSITORY / "pyproject.toml").read_text()
    )
    return document


@pytest.mark.parametrize("name", FILES)
def test_every_line_names_one_version_and_the_digest_of_its_file(name: str) -> None:
    assert lines(name)
    assert [line for line in lines(name) if not PIN.fullmatch(line)] == []


def test_every_dependency_of_the_project_is_pinned() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in ("daemon", "cli", "artifacts", "postgres"):
        wanted += project["optional-dependencies"][extra]
    names = {re.split(r"[<>=\[]", each)[0] for each in wanted}
    assert names <= pins("requirements.txt").keys()


def test_the_projects_build_requires_the_very_versions_that_the_packages_are_built_with() -> None:
    wanted = pyproject()["build-system"]["requires"]
    pinned = {f"{name}=={version}" for name, version in pins("build-requirements.txt").items()}
    assert wanted
    assert set(wanted) <= pinned


def test_what_fetches_and_compiles_is_pinned_too() -> None:
    assert {"cython", "pip", "setuptools", "wheel"} <= pins("build-requirements.txt").keys()


# --- how a build fetches them ---------------------------------------------------------------------


def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The commands that make the parts of a package."""
    recipes: list[list[object]] = []

    def obtain(name: str, recipe: list[object], build: object, say: Callable[[str], None]) -> Path:
        del build, say
        if name == "package":
            recipes.append(recipe)
        return Path("/nowhere")

    monkeypatch.setattr(cache, "obtain", obtain)
    monkeypatch.setattr(layers, "require_root", lambda: None)
    monkeypatch.setattr(layers, "require_tools", lambda: None)
    wanted, builders = (DEB / name for name in FILES)
    layers.package_parts(wanted, builders, REPOSITORY / "guest", Path("/usr/lib/sbxd"), print)
    for part in recipes[0]:
        if isinstance(part, tuple):
            yield from part


def test_nothing_is_fetched_but_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    fetching = [
        shlex.split(script)
        for script in scripts(monkeypatch)
        if re.match(r"(\S*/)?(python3? -m )?pip (install|download|wheel)\b", script)
    ]
    assert len(fetching) == 2
    for words in fetching:
        assert {"--require-hashes", "--no-deps"} <= set(words), words
    builders, libraries = fetching
    assert builders[builders.index("-r") + 1] == "/tmp/b"
    assert "--no-build-isolation" in libraries, "else pip fetches what compiles them itself"


def test_every_other_command_of_a_build_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [each for each in scripts(monkeypatch) if not each.startswith(("cat ", "pip install"))]
    assert any("venv" in each for each in others), "the control: there are others"
    assert not re.search(r"\b(install|download|curl|wget|git|apt-get)\b", "\n".join(others))
