"""The lexical rules for workspace paths, one by one; the generated ones are in properties."""

from pathlib import PurePosixPath

import pytest

from sbxd.policy.containment import relative_bytes, resolve
from sbxd.port.errors import WorkspaceEscape


@pytest.mark.parametrize(
    ("path", "absolute"),
    [
        (".", "/workspace"),
        (b".", "/workspace"),
        ("a", "/workspace/a"),
        ("a/b.csv", "/workspace/a/b.csv"),
        (b"a/b", "/workspace/a/b"),
        (PurePosixPath("a/b"), "/workspace/a/b"),
        ("...", "/workspace/..."),
        ("..a/.b", "/workspace/..a/.b"),
        ("a\\..\\b", "/workspace/a\\..\\b"),
        ("%2e%2e/etc", "/workspace/%2e%2e/etc"),
        ("\u2044\u2215\uff0f", "/workspace/\u2044\u2215\uff0f"),
        ("\uff0e\uff0e/a", "/workspace/\uff0e\uff0e/a"),
        ("~root/-rf\n", "/workspace/~root/-rf\n"),
        (b"\xff\xfe", "/workspace/\udcff\udcfe"),
    ],
)
def test_a_legal_path_is_itself_under_the_root(
    path: str | bytes | PurePosixPath, absolute: str
) -> None:
    assert resolve(path) == PurePosixPath(absolute)


@pytest.mark.case("FS-01")
@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/passwd",
        "/workspace/a",
        "//a",
        "..",
        "../a",
        "a/..",
        "a/../b",
        "a/./b",
        "./a",
        "a/.",
        "a//b",
        "a/",
        "./",
        "a\0",
        "\0",
        "a\0/../b",
        "\ud800",
        b"",
        b"/a",
        b"a/../b",
        b"a\0b",
        PurePosixPath("../a"),
        PurePosixPath("/a"),
    ],
)
def test_a_path_that_breaks_a_rule_is_an_escape(path: str | bytes | PurePosixPath) -> None:
    with pytest.raises(WorkspaceEscape):
        resolve(path)


def test_a_component_of_255_bytes_is_legal_and_one_of_256_is_not() -> None:
    assert resolve("x" * 255)
    assert resolve("é" * 127)
    for path in ("x" * 256, "é" * 128, "a/" + "x" * 256 + "/b"):
        with pytest.raises(WorkspaceEscape):
            resolve(path)


def test_a_result_of_4096_bytes_is_legal_and_one_of_4097_is_not() -> None:
    room = 4096 - len("/workspace/")
    longest = "/".join(["x" * 200] * 21)[:room]
    assert len(str(resolve(longest)).encode()) <= 4096
    exact = ("y/" * 2100)[: room - 1] + "y"
    assert len(str(resolve(exact)).encode()) == 4096
    with pytest.raises(WorkspaceEscape):
        resolve(exact + "y")


def test_something_that_is_no_path_is_an_escape_and_not_a_crash() -> None:
    with pytest.raises(WorkspaceEscape):
        resolve(7)  # type: ignore[arg-type]


def test_a_name_that_is_not_utf8_returns_to_its_bytes() -> None:
    raw = b"caf\xe9/\x80\x81"
    assert relative_bytes(resolve(raw).relative_to("/workspace")) == raw


def test_the_text_of_a_refusal_does_not_repeat_the_path() -> None:
    with pytest.raises(WorkspaceEscape) as refused:
        resolve("/var/lib/somewhere/secret")
    assert "secret" not in refused.value.detail
