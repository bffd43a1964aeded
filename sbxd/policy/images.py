"""Which image is the default: what `sbxctl run` offers and what the reserve prepares.

Invariant: pure. A configured default stands also while its image is not in the store: whoever asks
for it is then told which digest is missing.
"""

from collections.abc import Sequence

from sbxd.settings import ImageSettings


def default_image(settings: ImageSettings, known: Sequence[str]) -> str | None:
    """The digest that the configured default alias names; without one, the first that was imported.

    known: the digests of the image store, in the order of import. None without a default alias
    and without an image.
    """
    if settings.default is not None:
        return settings.aliases.get(settings.default)
    return known[0] if known else None
