"""Which of the images of an archive is meant: pure, and never a guess.

An index may offer one image for several platforms, or several images. The one for this machine's
platform is taken; when more than one is left, the caller must name one, by its reference or by
its digest, and the refusal lists them.
"""

from collections.abc import Sequence

from sbxd.oci.documents import Descriptor, InvalidImage, SavedImage
from sbxd.oci.media import INDEX_TYPES, MANIFEST_TYPES

NESTED_MAX = 4
_NAMES_SHOWN = 10
_REFERENCES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_ATTESTATION = "vnd.docker.reference.type"


def names_of(descriptor: Descriptor) -> tuple[str, ...]:
    """What the image may be asked for by: its references and its digest."""
    found = [descriptor.annotations[key] for key in _REFERENCES if key in descriptor.annotations]
    return (*found, descriptor.digest)


def choose(
    offered: Sequence[Descriptor], architecture: str, reference: str | None = None
) -> Descriptor:
    """One manifest or index of those that an index offers. Raises InvalidImage.

    architecture: as images name it (`amd64`). reference: what the caller asked for, on the
    outermost index only.
    """
    images = [
        each
        for each in offered
        if each.media_type in MANIFEST_TYPES | INDEX_TYPES and _ATTESTATION not in each.annotations
    ]
    if not images:
        raise InvalidImage("the index names no image")
    if reference is not None:
        named = [each for each in images if reference in names_of(each)]
        if not named:
            raise InvalidImage(f"no image is called that; there are: {_shown(images)}")
        images = named
    fitting = [each for each in images if _fits(each, architecture)]
    if not fitting:
        raise InvalidImage(
            f"no image for linux/{architecture}; there are: "
            + ", ".join(sorted({_platform(each) for each in images})[:_NAMES_SHOWN])
        )
    if len({each.digest for each in fitting}) > 1:
        # A variant is a machine that can do more; the plain one runs everywhere.
        plain = [each for each in fitting if each.platform and not each.platform.variant]
        if len({each.digest for each in plain}) != 1:
            raise InvalidImage(f"more than one image: name one of {_shown(fitting)}")
        fitting = plain
    return fitting[0]


def choose_saved(offered: Sequence[SavedImage], reference: str | None = None) -> SavedImage:
    """One image of a docker-archive. Raises InvalidImage."""
    found = [each for each in offered if reference is None or reference in (each.repo_tags or ())]
    if len(found) == 1:
        return found[0]
    tags = sorted({tag for each in offered for tag in each.repo_tags or ()})
    listed = ", ".join(tags[:_NAMES_SHOWN]) or "none has a name"
    problem = "more than one image" if found else "no image is called that"
    raise InvalidImage(f"{problem}; there are: {listed}" if offered else "it holds no image")


def _fits(descriptor: Descriptor, architecture: str) -> bool:
    platform = descriptor.platform
    return platform is None or (platform.os, platform.architecture) == ("linux", architecture)


def _platform(descriptor: Descriptor) -> str:
    platform = descriptor.platform
    return f"{platform.os}/{platform.architecture}"[:40] if platform else "no platform"


def _shown(images: Sequence[Descriptor]) -> str:
    return ", ".join(names_of(each)[0][:200] for each in images[:_NAMES_SHOWN])
