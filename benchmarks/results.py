"""What was measured, and what may be concluded from it. Ratios are drawn within one interleaved run only."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1


class ComparisonError(ValueError):
    """Two measurements that cannot be compared."""


@dataclass(frozen=True)
class Timing:
    """Seconds of the steps of one system. ``run`` names the run, in which systems took turns if it is interleaved."""

    system: str
    run: str
    is_interleaved: bool
    seconds: tuple[float, ...]
    wire_bytes: int | None = None

    @property
    def median(self) -> float:
        """Of the steps."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """How many times the baseline's step a step takes: the median over rounds, and the middle half of them."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def compare(system: Timing, baseline: Timing) -> Ratio:
    """Round by round: the machine's noise hits both alike.

    Raises:
        ComparisonError: The two did not take turns in one run, so that a ratio would show the machine and not the systems.
    """
    for timing in (system, baseline):
        if not timing.is_interleaved:
            raise ComparisonError(f"The steps of {timing.system} were not interleaved with others (run {timing.run}).")
    if system.run != baseline.run:
        raise ComparisonError(
            f"{system.system} was measured in run {system.run}, {baseline.system} in run {baseline.run}. Measure both in one run."
        )
    ratios = sorted(mine / theirs for mine, theirs in zip(system.seconds, baseline.seconds, strict=True))
    quarter = len(ratios) // 4
    return Ratio(statistics.median(ratios), ratios[quarter], ratios[-1 - quarter])


@dataclass
class Results:
    """Everything that one call of the benchmarks has measured."""

    facts: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, list[Timing]] = field(default_factory=dict)
    peaks_mib: dict[str, dict[str, float]] = field(default_factory=dict)
    most_layers: dict[str, dict[str, int]] = field(default_factory=dict)
    overhead: dict[str, dict[str, float]] = field(default_factory=dict)
    growth: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: dict[str, float] = field(default_factory=dict)
    offload: dict[str, float] = field(default_factory=dict)
    delayed: dict[str, float] = field(default_factory=dict)

    def ratios(self, workload: str, baseline: str) -> dict[str, Ratio]:
        """By system, within one workload. Where systems were measured in several runs, the baseline took part in each."""
        timings = self.timings.get(workload, [])
        bases = {timing.run: timing for timing in timings if timing.system == baseline}
        if not bases:
            return {}
        first = next(iter(bases.values()))
        return {timing.system: compare(timing, bases.get(timing.run, first)) for timing in timings}

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """What `write` wrote."""
        fields = json.loads(path.read_text())
        if fields.pop("schema") != SCHEMA:
            raise ComparisonError(f"{path} has another schema than {SCHEMA}: measure again.")
        fields["timings"] = {
            name: [Timing(**{**timing, "seconds": tuple(timing["seconds"])}) for timing in timings]
            for name, timings in fields["timings"].items()
        }
        return cls(**fields)


def table(results: Results, baseline: str) -> str:
    """The results as a Markdown table, a row for each system."""
    ratios = {name: results.ratios(name, baseline) for name in results.timings}
    columns = [f"step time / {baseline}, {name}" for name in results.timings]
    columns += [f"sent a step, {name}" for name in results.timings]
    columns += [f"peak MiB, {name}" for name in results.peaks_mib]
    columns += [f"most layers, {name}" for name in results.most_layers]
    rows = []
    for system in _systems(results):
        cells = [str(ratios[name].get(system, "")) for name in results.timings]
        cells += [_sent(results.timings[name], system) for name in results.timings]
        cells += [_number(values, system) for values in results.peaks_mib.values()]
        cells += [_number(values, system) for values in results.most_layers.values()]
        rows.append(f"| {system} | " + " | ".join(cells) + " |")
    head = "| system | " + " | ".join(columns) + " |"
    return "\n".join([head, "| --- " * (len(columns) + 1) + "|", *rows])


def _systems(results: Results) -> list[str]:
    seen: dict[str, None] = {}
    for timings in results.timings.values():
        seen.update(dict.fromkeys(timing.system for timing in timings))
    for values in (*results.peaks_mib.values(), *results.most_layers.values()):
        seen.update(dict.fromkeys(values))
    return list(seen)


def _sent(timings: Sequence[Timing], system: str) -> str:
    found = next((timing.wire_bytes for timing in timings if timing.system == system), None)
    return "" if found is None else f"{found / 1e6:.1f} MB"


def _number(values: Mapping[str, float], system: str) -> str:
    return f"{values[system]:.0f}" if system in values else ""
