"""What the image store makes of a mechanism that fails: whose fault it is, and what is left."""

from pathlib import Path

import pytest

from sbxd.mechanism.protocol import MechanismError
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    UnavailableCode,
)
from tests.service.test_images import Bench, a_tar, put


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "images")


async def test_an_image_that_the_launcher_cannot_remove_stays_known(bench: Bench) -> None:
    store = await bench.opened()
    digest = await put(store, a_tar())
    bench.unpacker.keeping = True
    with pytest.raises(ExecutionUnavailable) as caught:
        await store.remove(digest)
    assert caught.value.code is UnavailableCode.SETUP_FAILED
    assert store.known() == {digest}
    bench.unpacker.keeping = False
    await store.remove(digest)
    assert store.known() == frozenset()


@pytest.mark.parametrize(
    ("step", "number", "code"),
    [
        ("image_unpack", 0, RejectedCode.INVALID_IMAGE),
        ("image_unpack", 74, RejectedCode.INVALID_IMAGE),
        ("image_unpack", 28, UnavailableCode.SETUP_FAILED),
        ("helper", 0, UnavailableCode.SETUP_FAILED),
    ],
)
async def test_what_is_wrong_with_an_image_is_told_from_what_is_wrong_with_the_host(
    step: str, number: int, code: RejectedCode | UnavailableCode, bench: Bench
) -> None:
    store = await bench.opened()
    bench.unpacker.failing = True
    bench.unpacker.failure = MechanismError(step, number, "layer 1 is refused: \x1b[2Jx")
    with pytest.raises((ExecutionRejected, ExecutionUnavailable)) as caught:
        await put(store, a_tar())
    assert caught.value.code is code
    assert code is UnavailableCode.SETUP_FAILED or caught.value.detail.isprintable()
