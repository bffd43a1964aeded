"""The capability that a tool is handed: to add an artifact to its own run, and nothing else.

Invariants: tenant, run and origin are bound when the pipeline makes the writer, and no argument
changes them; a writer cannot read, list or remove. Trust is inherited: what a tool says can only
lower it.
"""

from collections.abc import AsyncIterator
from typing import final

from sbxd.artifacts.store import Draft, DurableArtifactStore, Expected
from sbxd.port.artifact import ArtifactOrigin, ArtifactRef, ContentRule, TrustLevel
from sbxd.port.ids import RunId, TenantId


@final
class RunArtifactWriter:
    """Implements `sbxd.port.artifact.ArtifactWriter`.

    Args:
        run_id: None only where the origin has no run yet (an upload, a knowledge source).
        trust_max: the most that what is written here may be trusted.
    """

    __slots__ = ("__origin", "__run_id", "__store", "__tenant_id", "__trust_max")

    def __init__(
        self,
        store: DurableArtifactStore,
        *,
        tenant_id: TenantId,
        run_id: RunId | None,
        origin: ArtifactOrigin,
        trust_max: TrustLevel = TrustLevel.EXTERNAL_UNTRUSTED,
    ) -> None:
        self.__store = store
        self.__tenant_id = tenant_id
        self.__run_id = run_id
        self.__origin = origin
        self.__trust_max = trust_max

    async def create(
        self,
        stream: AsyncIterator[bytes],
        filename: str,
        media_type: str,
        trust: TrustLevel,
        *,
        expected: Expected | None = None,
        rule: ContentRule = ContentRule.ANY,
    ) -> ArtifactRef:
        """Store a stream.

        Args:
            filename: metadata, as it came; at most 4096 characters.
            media_type: `type/subtype`, at most with a charset.
            trust: lowered to the writer's `trust_max`.
            expected: size and SHA-256 as the sender computed them, asked when the stream has
                ended; None when there is no other party that knows.
            rule: TEXT refuses what is not UTF-8 or holds a NUL.

        Raises and leaves behind what `DurableArtifactStore.receive` does.
        """
        draft = Draft(
            tenant_id=self.__tenant_id,
            run_id=self.__run_id,
            origin=self.__origin,
            filename=filename,
            media_type=media_type,
            trust=_lower(trust, self.__trust_max),
        )
        return await self.__store.receive(stream, draft, expected=expected, rule=rule)


def _lower(one: TrustLevel, other: TrustLevel) -> TrustLevel:
    if TrustLevel.EXTERNAL_UNTRUSTED in (one, other):
        return TrustLevel.EXTERNAL_UNTRUSTED
    return TrustLevel.INTERNAL_TOOL
