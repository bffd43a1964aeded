"""Where an artifact's bytes lie: a key made of the tenant's and the artifact's id alone.

Invariant (gate.sandbox.artifact_key_opaque): this module knows no metadata; both inputs are the
platform's, and both are checked against their whole grammar before they become text.

S1 shards by the first two characters of the id. Those of a UUIDv7 are the top eight bits of a
48-bit time and change every 34 years: every artifact would lie in one directory. The last two are
random, so the shard is theirs (decision 0071).
"""

import re

from sbxd.port.artifact import ARTIFACT_ID_PATTERN, ArtifactId
from sbxd.port.ids import IDENTIFIER_PATTERN, TenantId


def storage_key(tenant_id: TenantId, artifact_id: ArtifactId) -> str:
    """`tenant/shard/artifact`: three components, none of them empty, "." or "..".

    Raises: ValueError when either is not of its grammar.
    """
    if not re.match(IDENTIFIER_PATTERN, tenant_id):
        raise ValueError("not a tenant id")
    if not re.match(ARTIFACT_ID_PATTERN, artifact_id):
        raise ValueError("not an artifact id")
    return f"{tenant_id}/{artifact_id[-2:]}/{artifact_id}"
