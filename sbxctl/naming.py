"""Which live environment a command line names: by its whole id, or by how the id begins."""

import click

from sbxd.client.admin import AdminClient
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.port.ids import EnvironmentId
from sbxd.wire.descriptions import EnvironmentInfo

ID_DIGITS = 32
PREFIX_DIGITS_MIN = 4
# What an ENVIRONMENT_ID may be on a command line.
NAME_PATTERN = rf"[0-9a-f]{{{PREFIX_DIGITS_MIN},{ID_DIGITS}}}"
_SHOWN_MAX = 5


async def find(admin: AdminClient, name: str) -> EnvironmentInfo:
    """The one live environment whose id is `name` or begins with it.

    Args: name: as NAME_PATTERN.
    Raises: ExecutionRejected ENVIRONMENT_GONE when there is none; click.UsageError when there are
    several; the errors of the connection.
    """
    if len(name) == ID_DIGITS:
        return await admin.inspect(EnvironmentId(name))
    found = [each for each in await admin.list() if each.handle.environment_id.startswith(name)]
    if not found:
        raise ExecutionRejected(
            RejectedCode.ENVIRONMENT_GONE,
            f"no live environment has an id that begins with {name}",
            field="environment_id",
        )
    if len(found) > 1:
        ids = [each.handle.environment_id for each in found[:_SHOWN_MAX]]
        more = f" and {len(found) - _SHOWN_MAX} more" if len(found) > _SHOWN_MAX else ""
        raise click.UsageError(
            f"{name} is not unique: {', '.join(ids)}{more}; write more of the id"
        )
    return found[0]
