"""Two readings of the meters as what was used between them. Pure."""

from msgspec import Struct

from sbxd.wire.observing import EnvironmentMeter, MetersAre, PoolInfo


class Row(Struct, frozen=True, kw_only=True):
    """One environment. cpu_share: processors in use between the readings (1.5: one and a half);
    None where nobody counts or it was not there before."""

    meter: EnvironmentMeter
    cpu_share: float | None


class Document(Struct, frozen=True, kw_only=True):
    """What `--json` shows."""

    environments: tuple[Row, ...]
    pool: PoolInfo


class Use(Struct, frozen=True, kw_only=True):
    """Everything, as of the later reading."""

    rows: tuple[Row, ...]
    now: MetersAre

    def document(self) -> Document:
        """For a program."""
        return Document(environments=self.rows, pool=self.now.pool)


def used(before: MetersAre | None, now: MetersAre) -> Use:
    """Compare. before: None for a first reading."""
    earlier = {} if before is None else {e.environment_id: e for e in before.environments}
    elapsed_ms = 0 if before is None else now.clock_ms - before.clock_ms
    return Use(
        rows=tuple(
            Row(meter=each, cpu_share=_share(earlier.get(each.environment_id), each, elapsed_ms))
            for each in now.environments
        ),
        now=now,
    )


def _share(before: EnvironmentMeter | None, now: EnvironmentMeter, elapsed_ms: int) -> float | None:
    if before is None or elapsed_ms <= 0 or now.cpu_ms is None:
        return None
    return max(0, now.cpu_ms - (before.cpu_ms or 0)) / elapsed_ms
