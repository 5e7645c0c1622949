"""Traced steps in the format of Chrome's and Perfetto's trace viewers: a process a rank, a thread a lane, memory as counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.core.records import Lane, StepTrace
from shardwise.report.runs import RunLog

_LANES = (Lane.LOOP, Lane.COMPUTE, Lane.COMMUNICATION)


def chrome_trace(run: RunLog) -> dict[str, Any]:
    """All traced steps of all ranks, laid over each other at the steps' common exchanges."""
    events: list[dict[str, Any]] = []
    for rank in run.ranks:
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for number, lane in enumerate(_LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}})
    begin_seconds = 0.0
    for step in run.traced_steps:
        traces = run.traces_of(step)
        latest = max(trace.synced_seconds for trace in traces.values())
        end_seconds = begin_seconds
        for trace in traces.values():
            for event in _events(trace, begin_seconds + latest - trace.synced_seconds):
                events.append(event)
                end_seconds = max(end_seconds, (event["ts"] + event.get("dur", 0)) / 1e6)
        begin_seconds = end_seconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(trace: StepTrace, shift_seconds: float) -> Iterator[dict[str, Any]]:
    for span in trace.spans:
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.lane,
            "pid": trace.rank,
            "tid": _LANES.index(span.lane) if span.lane in _LANES else len(_LANES),
            "ts": (span.begin_seconds + shift_seconds) * 1e6,
            "dur": (span.end_seconds - span.begin_seconds) * 1e6,
            "args": {"step": trace.step, **({"bytes": span.wire_bytes} if span.wire_bytes else {})},
        }
    for seconds, *values in trace.memory:
        held = dict(zip(trace.kinds[:-1], values, strict=False))
        yield {"ph": "C", "name": "memory", "pid": trace.rank, "ts": (seconds + shift_seconds) * 1e6, "args": held}
