"""Records as a run would have written them, made by hand."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from shardwise.core.records import SCHEMA, DiskUse, Header, Held, Phase, Process, Span, StepRecord, StepTrace, Traffic
from shardwise.telemetry.files import JsonLines


def header(rank: int, num_ranks: int, **changes: Any) -> Header:
    values: dict[str, Any] = {
        "rank": rank,
        "num_ranks": num_ranks,
        "started_at": 1e9,
        "plan": {"stage": 3},
        "versions": {"torch": "2.13.0"},
        "host": {"name": "somewhere", "num_parameters": 1000},
        "config": {"task": "gpt"},
        "hash": "abc",
        "schema": SCHEMA,
    }
    return Header(**{**values, **changes})


def record(step: int, rank: int, *, forward: float = 0.05, waited: float = 0.02, **changes: Any) -> StepRecord:
    phases = dict.fromkeys((phase.value for phase in Phase), 0.0)
    phases |= {"data": 0.01, "forward": forward, "backward": 0.1, "optimizer": 0.01, "exposed communication": waited}
    values: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "ended_at": 1e9 + step,
        "seconds": sum(phases.values()),
        "phases": phases,
        "arrived_seconds": 0.1,
        "held": (Held("device", "parameter shards", 4000, 4000), Held("device", "gathered parameters", 0, 9000)),
        "peak_bytes": 13000,
        "process": Process(50_000, 90_000, 95_000),
        "traffic": (
            Traffic("gather", "blocks.0", "host memory", 2, 2, 8000, 0.001, 0.015),
            Traffic("reduce", "blocks.0", "host memory", 1, 1, 4000, 0.010, 0.005),
        ),
        "values": {"loss": 5.0 / step, "tokens": 256},
    }
    return StepRecord(**{**values, **changes})


def trace(step: int, rank: int, synced: float = 0.15) -> StepTrace:
    spans = (
        Span("compute", "forward blocks.0", 0.01, 0.06),
        Span("communication", "gather blocks.0", 0.0, 0.02, 8000),
        Span("compute", "backward blocks.0", 0.07, 0.15),
        Span("loop", "update", 0.16, 0.17),
    )
    memory = ((0.0, 4000.0, 0.0, 50_000.0), (0.01, 4000.0, 9000.0, 62_000.0), (0.15, 4000.0, 0.0, 50_000.0))
    kinds = ("device: parameter shards", "device: gathered parameters", "allocated")
    return StepTrace(step, rank, synced, spans, kinds, memory)


def write_run(
    path: Path,
    *,
    num_ranks: int = 2,
    num_steps: int = 6,
    slow: dict[int, float] | None = None,
    slow_steps: Collection[int] | None = None,
    disk: DiskUse | None = None,
    **changes: Any,
) -> Path:
    """A run folder; ranks in ``slow`` take so much longer in their forward, in all steps or some, and others wait for them."""
    every_step = slow or {}
    for rank in range(num_ranks):
        log = JsonLines(path / "ranks" / f"{rank}.jsonl")
        log.start(header(rank, num_ranks, **changes))
        for step in range(1, num_steps + 1):
            slow = every_step if slow_steps is None or step in slow_steps else {}
            own, longest = slow.get(rank, 0.0), max(slow.values(), default=0.0)
            log.step(record(step, rank, forward=0.05 + own, waited=0.02 + longest - own, disk=disk))
            if step == 3:
                log.trace(trace(step, rank, synced=0.15 + 0.01 * rank))
        log.close()
    return path
