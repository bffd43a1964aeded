"""Two environments of one reserve, and two commands of one environment, have nothing random in
common: no slot is a copy of another.

Source: CASES LIF-11. Each slot is built by itself; a mechanism that restores a template has to pass
this too. The host name is the same on purpose: it says nothing.
"""

import msgspec
import pytest

from sbxd.launcher.prepare import TMP_BYTES_MIN
from tests.redteam.inventory import wait_settled
from tests.redteam.live import Live, admin, live

pytestmark = [pytest.mark.needs("daemon"), pytest.mark.also("uml"), pytest.mark.also("gvisor")]

# What programs take for random, each by the way that they have of getting it.
SOURCE = """
import os, random, secrets, ssl, tempfile, uuid

answer({
    "urandom": os.urandom(16).hex(),
    "device": open("/dev/urandom", "rb").read(16).hex(),
    "uuid4": str(uuid.uuid4()),
    "generator": random.random(),
    "hash seed": hash("a word"),
    "tls": ssl.RAND_bytes(16).hex(),
    "secrets": secrets.token_hex(8),
    "temporary name": next(tempfile._get_candidate_names()),
})
"""


async def drawn(one: Live) -> dict[str, object]:
    found: dict[str, object] = await one.look(SOURCE)
    return found


@pytest.mark.case("LIF-11")
async def test_two_slots_of_one_reserve_and_two_commands_of_one_slot_share_nothing_random() -> None:
    await wait_settled(within_seconds=180)
    async with admin() as client:
        of_reserve = (await client.describe()).default_limits
    async with live(of_reserve) as first, live(of_reserve) as second:
        draws = [await drawn(first), await drawn(second), await drawn(first), await drawn(second)]
    for name in draws[0]:
        values = [each[name] for each in draws]
        assert len(set(map(str, values))) == len(draws), name


async def test_a_generator_that_is_seeded_alike_is_noticed() -> None:
    """The control: what is the same in both is seen to be."""
    source = "import random; random.seed(7); answer({'generator': random.random()})"
    async with live() as first, live() as second:
        assert await first.look(source) == await second.look(source)


SIZES = """
def size(place):
    found = os.statvfs(place)
    return found.f_blocks * found.f_frsize
answer({place: size(place) for place in ("/tmp", "/dev/shm")})
"""


@pytest.mark.case("LIF-11")
async def test_what_follows_from_the_memory_limit_follows_the_request_from_the_pool_too() -> None:
    """A pooled sandbox was built with the default limits, before anybody asked."""
    await wait_settled(within_seconds=180)
    async with admin() as client:
        built = (await client.describe()).default_limits
    for memory_bytes in (built.memory_bytes, built.memory_bytes // 4, built.memory_bytes * 2):
        asked = msgspec.structs.replace(built, memory_bytes=memory_bytes)
        async with live(asked) as one:
            found = await one.look("import os\n" + SIZES)
        size = max(memory_bytes // 4, TMP_BYTES_MIN)
        assert found == dict.fromkeys(("/tmp", "/dev/shm"), size), memory_bytes
