"""What a run's records say, worked out: pure functions of what was read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, median

from shardwise.core.records import Phase, StepRecord, Traffic
from shardwise.report.runs import RunLog, as_number

STRAGGLER_PART = 0.05
"""Of a step: what others wait for a rank, from which on it is told of."""
_STANDING_OUT = 5.0
"""Times the usual distance from the middle: noise that is told of is none of a rank's doing."""


@dataclass(frozen=True)
class Straggling:
    """How one rank keeps the others: typically, which is the middle one of all steps, and in single steps that stand out.

    Args:
        rank: Which one.
        lost_seconds: By how much it is busy longer than the others in a step, on average: what they wait for it.
        typical_seconds: The same in the middle one of all steps: a rank that is slow now and then has little of it.
        arrived_seconds: After how much work, on average, it came to the step's common exchange.
        num_last: Steps in which it came last.
        num_steps: Steps that were looked at.
        phase: Where it typically loses the time.
        phase_seconds: How much of it there, in the middle one of all steps.
        slow_steps: Single steps in which it was slower by far than it typically is.
        slow_seconds: By how much, on average over these.
        slow_phase: Where it lost the time of these.
    """

    rank: int
    lost_seconds: float
    typical_seconds: float
    arrived_seconds: float
    num_last: int
    num_steps: int
    phase: str
    phase_seconds: float
    slow_steps: tuple[int, ...] = ()
    slow_seconds: float = 0.0
    slow_phase: str = ""

    @property
    def slow_seconds_a_step(self) -> float:
        """What the single slow steps cost, spread over all."""
        return self.slow_seconds * len(self.slow_steps) / self.num_steps


def stragglers(run: RunLog) -> list[Straggling]:
    """All ranks, the one that others wait for the longest first. Nothing, if there is one rank alone.

    Collectives even out the times of steps, and clocks of hosts differ: what is compared is how long ranks were busy.
    """
    steps = run.steady_steps
    if not steps or len(run.ranks) < 2:
        return []
    return sorted((_straggling(rank, steps) for rank in run.ranks), key=lambda each: -each.lost_seconds)


def typical_step_seconds(run: RunLog) -> float:
    """How long the middle one of all steps takes; 0 without any."""
    return median(record.seconds for record in run.steady_records) if run.steady_records else 0.0


def _straggling(rank: int, steps: Mapping[int, Mapping[int, StepRecord]]) -> Straggling:
    lost = {step: _excess(rank, {r: each.busy_seconds for r, each in by_rank.items()}) for step, by_rank in steps.items()}
    by_phase = {
        phase.value: {
            step: _excess(rank, {r: each.phases.get(phase.value, 0.0) for r, each in by_rank.items()})
            for step, by_rank in steps.items()
        }
        for phase in Phase
        if phase is not Phase.COMMUNICATION
    }
    typical = {phase: median(values.values()) for phase, values in by_phase.items()}
    worst = max(typical, key=lambda phase: typical[phase])
    slow = _standing_out(lost, median(by_rank[rank].seconds for by_rank in steps.values()))
    middle = median(lost.values())
    return Straggling(
        rank=rank,
        lost_seconds=mean(lost.values()),
        typical_seconds=middle,
        arrived_seconds=mean(by_rank[rank].arrived_seconds for by_rank in steps.values()),
        num_last=sum(max(by_rank, key=lambda r: by_rank[r].busy_seconds) == rank for by_rank in steps.values()),
        num_steps=len(steps),
        phase=worst,
        phase_seconds=typical[worst],
        slow_steps=slow,
        slow_seconds=mean(lost[step] - middle for step in slow) if slow else 0.0,
        slow_phase=max(by_phase, key=lambda phase: sum(by_phase[phase][step] - typical[phase] for step in slow))
        if slow
        else "",
    )


def _standing_out(lost: Mapping[int, float], step_seconds: float) -> tuple[int, ...]:
    """Steps that lie above the middle one by far more than steps usually do, and by a part of a step that counts."""
    middle = median(lost.values())
    spread = median(abs(value - middle) for value in lost.values())
    least = max(_STANDING_OUT * spread, STRAGGLER_PART * step_seconds)
    return tuple(step for step, value in lost.items() if value - middle > least)


def _excess(rank: int, values: Mapping[int, float]) -> float:
    return values[rank] - median(value for other, value in values.items() if other != rank)


def mean_phases(records: Iterable[StepRecord]) -> dict[str, float]:
    """Seconds a step by phase, on average."""
    records = list(records)
    return {phase.value: mean(record.phases.get(phase.value, 0.0) for record in records) for phase in Phase} if records else {}


@dataclass(frozen=True)
class Flow:
    """Collectives that belong together, a step."""

    name: str
    num_collectives: float
    wire_bytes: float
    moving_seconds: float
    waited_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """While bytes were moving; 0 where that took no time."""
        return self.wire_bytes / self.moving_seconds if self.moving_seconds else 0.0

    @property
    def hidden_seconds(self) -> float:
        """How long bytes moved while the rank computed."""
        return max(0.0, self.moving_seconds - self.waited_seconds)


def flows(records: Iterable[StepRecord], by: str = "op") -> list[Flow]:
    """Collectives by op, unit or link, a step of one rank on average; what sends the most first."""
    records = list(records)
    rows: dict[str, list[Traffic]] = {}
    for record in records:
        for row in record.traffic:
            rows.setdefault(getattr(row, by) or "(root)", []).append(row)
    found = [
        Flow(
            name,
            sum(row.num_collectives for row in group) / len(records),
            sum(row.wire_bytes for row in group) / len(records),
            sum(row.moving_seconds for row in group) / len(records),
            sum(row.waited_seconds for row in group) / len(records),
        )
        for name, group in rows.items()
    ]
    return sorted(found, key=lambda flow: -flow.wire_bytes)


@dataclass(frozen=True)
class DiskFlow:
    """What a step of one rank moves from and to its disk on average, and how long it waits for that."""

    read_bytes: float
    written_bytes: float
    waited_seconds: float
    step_seconds: float

    @property
    def waited_part(self) -> float:
        """Of a step."""
        return self.waited_seconds / self.step_seconds if self.step_seconds else 0.0


def disk_flow(records: Iterable[StepRecord]) -> DiskFlow | None:
    """The mean of these steps; None if no state rests on disk, or an older version has recorded them."""
    found = [(record, record.disk) for record in records if record.disk is not None]
    if not found:
        return None
    return DiskFlow(
        mean(disk.read_bytes for _, disk in found),
        mean(disk.written_bytes for _, disk in found),
        mean(record.disk_seconds for record, _ in found),
        mean(record.seconds for record, _ in found),
    )


def peak_by_kind(records: Iterable[StepRecord]) -> dict[str, int]:
    """The most of each kind in any of these steps."""
    peaks: dict[str, int] = {}
    for record in records:
        for each in record.held:
            key = each.kind if each.tier == "device" else f"{each.kind} ({each.tier})"
            peaks[key] = max(peaks.get(key, 0), each.peak_bytes)
    return peaks


def rate(run: RunLog, value: str) -> float:
    """A counted value (tokens, samples) a second, over all ranks; 0 if it was not counted."""
    steps = run.steady_steps.values()
    total = sum(record.values.get(value, 0.0) for record in run.steady_records)
    seconds = sum(mean(record.seconds for record in by_rank.values()) for by_rank in steps)
    return total / seconds if seconds else 0.0


def flops_per_second(run: RunLog) -> tuple[float, float]:
    """Operations of the model a second on one rank, and as a part of what its device was measured to do; 0 where unknown.

    A backward is counted as two forwards; what activation checkpointing computes again is not the model's.
    """
    steps = run.steady_steps.values()
    rates, parts = [], []
    for rank, log in run.ranks.items():
        counted = [as_number(note["forward_flops"]) for note in log.notes if "forward_flops" in note]
        seconds = [by_rank[rank].seconds for by_rank in steps if rank in by_rank]
        if counted and any(seconds) and log.header is not None:
            rates.append(3 * counted[0] / mean(seconds))
            parts.append(rates[-1] / (as_number(log.header.host.get("peak_flops")) or float("inf")))
    return (mean(rates), mean(parts)) if rates else (0.0, 0.0)


def series(run: RunLog, value: str) -> list[tuple[int, float]]:
    """A value that users gave, by step: the mean over the ranks that gave it."""
    found = []
    for step, by_rank in run.steps.items():
        values = [record.values[value] for record in by_rank.values() if value in record.values]
        if values:
            found.append((step, mean(values)))
    return found
