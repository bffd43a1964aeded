"""gate.sandbox.workspace_containment: under the root or WorkspaceEscape, and nothing else.

This is the lexical part, over generated input. The part that needs a file system (symbolic link
chains) is proven against the steward.
"""

from pathlib import PurePosixPath

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sbxd.policy.containment import PATH_BYTES_MAX, relative_bytes, resolve
from sbxd.port.errors import WorkspaceEscape

pytestmark = pytest.mark.gate("gate.sandbox.workspace_containment")

PIECES = st.sampled_from(
    [
        "",
        ".",
        "..",
        "...",
        "/",
        "//",
        "\0",
        "\\",
        "..\\",
        "%2e%2e%2f",
        "\u2044",
        "\uff0f",
        "\uff0e\uff0e",
        "\udcff",
        "\udc2f",
        "\ud800",
        " ",
        "\n",
        "~",
        "a",
        "é",
        "workspace",
        "etc/passwd",
        "x" * 254,
        "x" * 255,
        "x" * 256,
        "y/" * 2048,
    ]
)
PATHS = (
    st.lists(PIECES, max_size=8).map("/".join)
    | st.lists(PIECES, max_size=8).map("".join)
    | st.text(max_size=64)
    | st.binary(max_size=64)
    | st.lists(st.binary(max_size=260), max_size=20).map(b"/".join)
)


def climbs(path: PurePosixPath) -> bool:
    """Judged by walking, independently of how the rules are written."""
    depth = 0
    for part in path.parts[1:]:
        depth += {"..": -1, ".": 0}.get(part, 1)
        if depth < 1:
            return True
    return False


@pytest.mark.case("FS-01")
@settings(max_examples=600)
@given(PATHS)
@example("a/../../etc")
@example("y/" * 2048)
def test_every_input_is_under_the_root_or_an_escape(path: str | bytes) -> None:
    try:
        result = resolve(path)
    except WorkspaceEscape:
        return
    assert result.is_absolute()
    assert result.parts[:2] == ("/", "workspace")
    assert not climbs(result)
    assert "\0" not in str(result)
    encoded = str(result).encode("utf-8", "surrogateescape")
    assert len(encoded) <= PATH_BYTES_MAX
    assert all(len(part) <= 255 for part in encoded.split(b"/"))
    # Nothing was normalised: the bytes given are the bytes that follow the root.
    given_bytes = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    if given_bytes != b".":
        assert encoded == b"/workspace/" + given_bytes


@settings(max_examples=300)
@given(
    st.lists(
        st.binary(min_size=1, max_size=255).filter(
            lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
        ),
        min_size=1,
        max_size=10,
    )
)
def test_every_name_that_linux_can_hold_is_legal_and_round_trips(names: list[bytes]) -> None:
    raw = b"/".join(names)
    relative = resolve(raw).relative_to("/workspace")
    assert relative_bytes(relative) == raw
    assert relative_bytes(str(relative)) == raw


def test_the_walk_of_this_test_notices_a_climb() -> None:
    assert climbs(PurePosixPath("/workspace/../etc"))
    assert climbs(PurePosixPath("/workspace/a/../../etc"))
    assert not climbs(PurePosixPath("/workspace/a"))
