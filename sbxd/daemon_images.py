"""The image store as the daemon has it: made, opened, and told who stands on its images.

A part of the composition root (`sbxd.daemon`), and of nobody else.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from sbxd.audit.events import ImageAliasResolved, ImageAliasUnresolved
from sbxd.audit.sink import AuditSink
from sbxd.config import resolve_aliases
from sbxd.fake.service import FakeEnvironments
from sbxd.lifecycle.registry import Registry
from sbxd.service.images import ImageStore, Unpacker, Users
from sbxd.settings import Settings

FILE_THREADS = 4


class NothingToUnpack:
    """The image store's mechanism where nothing is executed."""

    async def unpack_image(self, image_digest: str) -> None:
        """As `Unpacker`."""
        await trio.lowlevel.checkpoint()

    async def drop_image(self, image_digest: str) -> None:
        """As `Unpacker`."""
        await trio.lowlevel.checkpoint()


@dataclass(frozen=True)
class Known:
    """The image store's digests, as a container that is always current."""

    known: Callable[[], frozenset[str]]

    def __contains__(self, digest: object) -> bool:
        return digest in self.known()


@dataclass(frozen=True)
class RegistryUsers:
    """The environments and slots that stand on images."""

    registry: Registry

    def in_use(self, digest: str) -> int:
        """As `Users`."""
        return self.registry.images_in_use().get(digest, 0)

    def reserved(self, digest: str) -> int:
        """As `Users`."""
        return self.registry.images_reserved().get(digest, 0)

    def changed(self) -> None:
        """As `Users`."""
        self.registry.reserve.wake()

    async def wait_free(self, digest: str) -> None:
        """As `Users`."""
        await self.registry.wait_image_free(digest)


@dataclass(frozen=True)
class FakeUsers:
    """Environments in memory: they need no image to stand on."""

    environments: Callable[[], FakeEnvironments]

    def in_use(self, digest: str) -> int:
        """As `Users`."""
        return self.environments().images_in_use().get(digest, 0)

    def reserved(self, digest: str) -> int:
        """As `Users`."""
        return 0

    def changed(self) -> None:
        """Nothing is prepared ahead."""

    async def wait_free(self, digest: str) -> None:
        """As `Users`."""
        await trio.lowlevel.checkpoint()


def image_store(settings: Settings, unpacker: Unpacker, users: Users) -> ImageStore:
    """The store below the state directory. Nothing is read before `open_images`."""
    return ImageStore(
        Path(settings.state_directory) / "images",
        unpacker,
        settings=settings.images,
        users=users,
        limiter=trio.CapacityLimiter(FILE_THREADS),
    )


async def open_images(
    settings: Settings, images: ImageStore, audit: AuditSink, log: logging.Logger
) -> None:
    """Read what is there and record what each alias stands for. Raises AuditUnavailable."""
    for problem in await images.open():
        log.warning("%s", problem)
    resolution = resolve_aliases(settings.images, images.known())
    for alias, digest in resolution.resolved.items():
        await audit.emit(ImageAliasResolved(alias=alias, image_digest=digest))
    for alias, digest in resolution.missing.items():
        await audit.emit(ImageAliasUnresolved(alias=alias, image_digest=digest))
