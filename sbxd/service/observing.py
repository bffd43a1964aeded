"""The operator's questions about a daemon that runs, as replies. Nothing here changes anything."""

from collections.abc import Sequence
from typing import Protocol, assert_never

import msgspec

from sbxd.wire.observing import (
    EnvironmentMeter,
    MetersAre,
    MetersQuery,
    MetricsAre,
    MetricsForm,
    MetricsQuery,
    ObservingReply,
    ObservingRequest,
    PoolInfo,
    StatusIs,
    StatusQuery,
)

METERS_PAGE_BYTES = 512 * 1024


class Observer(Protocol):
    """What knows the daemon's state (`sbxd.observing`)."""

    async def metrics(self, form: MetricsForm) -> str:
        """Every metric, as one text."""
        ...

    async def status(self, request_id: int) -> StatusIs:
        """The daemon on one page."""
        ...

    async def meters(self) -> Sequence[EnvironmentMeter]:
        """What each environment uses, oldest first."""
        ...

    def pool(self) -> PoolInfo:
        """The slots that are prepared ahead."""
        ...

    def clock_ms(self) -> int:
        """A steady clock."""
        ...


async def observe(request: ObservingRequest, observer: Observer) -> ObservingReply:
    """The reply to one question."""
    request_id = request.request_id
    match request:
        case MetricsQuery():
            text = await observer.metrics(request.form)
            return MetricsAre(request_id=request_id, form=request.form, text=text)
        case StatusQuery():
            return await observer.status(request_id)
        case MetersQuery():
            found = await observer.meters()
            page = page_of(found, skip=request.skip)
            return MetersAre(
                request_id=request_id,
                environments=page,
                pool=observer.pool(),
                clock_ms=observer.clock_ms(),
                more=request.skip + len(page) < len(found),
            )
        case _:
            assert_never(request)


def page_of(found: Sequence[EnvironmentMeter], *, skip: int) -> tuple[EnvironmentMeter, ...]:
    """As many from `skip` on as a frame holds."""
    page: list[EnvironmentMeter] = []
    size = 0
    for each in found[skip:]:
        size += len(msgspec.msgpack.encode(each))
        if page and size > METERS_PAGE_BYTES:
            break
        page.append(each)
    return tuple(page)
