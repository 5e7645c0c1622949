"""``Sharded.pool_report``: what the memory that buffers are taken from holds, lends and wastes, for people to read."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.sizes import format_bytes
from shardwise.devices.pool import PoolReport
from shardwise.runtime.engine import Engine
from shardwise.stores.staging import StagingReport


@dataclass(frozen=True)
class MemoryReport:
    """The pool of buffers for gathered parameters and gradients, and the memory between disk and computation, if there is any."""

    pool: PoolReport
    staging: StagingReport | None = None

    def to_rows(self) -> dict[str, dict[str, int]]:
        """Bytes by place and by what becomes of them."""
        rows = {
            "buffers": {
                "taken": self.pool.taken_bytes,
                "lent": self.pool.lent_bytes,
                "idle": self.pool.idle_bytes,
                "wasted": self.pool.slack_bytes,
                "largest free": self.pool.largest_idle_bytes,
            }
        }
        if self.staging is not None:
            rows["disk staging"] = {
                "taken": self.staging.touched_bytes,
                "lent": self.staging.live_bytes - self.staging.slack_bytes,
                "idle": max(0, self.staging.touched_bytes - self.staging.live_bytes),
                "wasted": self.staging.slack_bytes,
                "largest free": self.staging.largest_free_bytes,
            }
        return rows

    def __str__(self) -> str:
        rows = self.to_rows()
        heads = list(next(iter(rows.values())))
        lines = [f"{'':<14}" + "".join(f"{head:>14}" for head in heads)]
        for name, values in rows.items():
            lines.append(f"{name:<14}" + "".join(f"{format_bytes(value):>14}" for value in values.values()))
        return "\n".join(lines)


def report_of(engine: Engine) -> MemoryReport:
    """What this rank's engine holds now."""
    return MemoryReport(engine.pool.report, None if engine.disk is None else engine.disk.report)
