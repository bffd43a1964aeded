"""Which image is the default."""

import pytest

from sbxd.policy.images import default_image
from sbxd.settings import ImageSettings

A = "sha256:" + "a" * 64
B = "sha256:" + "b" * 64


@pytest.mark.parametrize(
    ("settings", "known", "expected"),
    [
        (ImageSettings(), [], None),
        (ImageSettings(), [A], A),
        (ImageSettings(), [B, A], B),
        (ImageSettings(aliases={"x": B}, default="x"), [A, B], B),
        (ImageSettings(aliases={"x": B}, default="x"), [A], B),
        (ImageSettings(aliases={"x": B}), [A], A),
    ],
)
def test_the_default_is_the_alias_or_the_first_that_was_imported(
    settings: ImageSettings, known: list[str], expected: str | None
) -> None:
    assert default_image(settings, known) == expected
