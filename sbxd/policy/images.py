"""Which image is the default: what `sbxctl run` offers and what the reserve prepares.

Invariant: pure. A configured default stands also while its image is not in the store: whoever asks
for it is then told which digest is missing.
"""

from collections.abc import Collection

from sbxd.settings import ImageSettings


def default_image(settings: ImageSettings, known: Collection[str]) -> str | None:
    """The digest that the configured default alias names; without one, the only image there is.

    known: the digests of the image store. None without a default alias, unless there is exactly
    one image.
    """
    if settings.default is not None:
        return settings.aliases.get(settings.default)
    return next(iter(known)) if len(known) == 1 else None
