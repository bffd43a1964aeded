"""The listing of one directory of a workspace, in pages.

Invariant: at most one page is held, and it is small whatever the directory holds: whoever takes a
page slowly has the next one asked for later.
"""

from sbxd.lifecycle.environments import LIST_PAGE_ENTRIES, EntriesSink
from sbxd.mechanism.protocol import Sandbox
from sbxd.port.workspace import LISTING_ENTRIES_MAX, LISTING_HASH_BYTES_MAX


async def list_pages(
    sandbox: Sandbox,
    path: bytes,
    on_entries: EntriesSink,
    *,
    entries_max: int = LISTING_ENTRIES_MAX,
) -> bool:
    """Give the entries of a directory to `on_entries`; whether it holds more than was told.

    Raises what `Sandbox.list_page` raises, also after some pages.
    """
    after, omitted = b"", False
    left, hash_left = entries_max, LISTING_HASH_BYTES_MAX
    while True:
        page = await sandbox.list_page(
            path, after=after, maximum=min(left, LIST_PAGE_ENTRIES), hash_bytes_max=hash_left
        )
        omitted = omitted or page.omitted
        if page.entries:
            after = page.entries[-1].path.encode("utf-8", "surrogateescape")
            await on_entries(page.entries)
        left -= len(page.entries)
        hash_left = max(0, hash_left - page.hashed_bytes)
        if not page.more:
            return omitted
        if not left:
            return True
