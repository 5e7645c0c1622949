"""What must hold, and whether it does in what was measured. ``python -m benchmarks`` ends with 1 if something does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.results import Results

STEP_TIMES = {
    "compute": {0: 1.05, 1: 1.05, 2: 1.05, 3: 1.10},
    "comm": {0: 1.10, 1: 1.10, 2: 1.10, 3: 1.35},
}
"""The longest step, in steps of the baseline, by workload and stage: the median over rounds."""
PEAK_MIB = 275.0
"""The most memory of stage 3 at four ranks, compute workload, default malloc."""
FEWEST_LAYERS = 58
"""Layers that fit into 1 GiB a rank at stage 3 and four ranks, default malloc."""
OVERHEAD = 0.05
"""The engine's part of the CPU seconds of a step."""
ACCOUNTING = 0.01
"""The same of the accounting, which records every step meanwhile."""
GROWTH = 1.05
"""State times ranks, and time a token and layer, against those of the smallest: bytes that do not fall as 1/N, or time that rises."""
STATE_MARGIN_BYTES = 0.1
"""What is not sharded, in bytes a parameter: buffers of a few scalars, and padding."""


CHECKPOINT = {
    "save, Shardwise / DCP": 1.0,
    "load, Shardwise / DCP": 1.0,
    "stall of a save beside the steps / one copy": 1.0,
    "CPU seconds of a save / of ten steps": 0.03,
    "MiB of a load above own shards and a unit": 64.0,
}
"""200 million parameters with AdamW at 2 ranks; the compute workload for saves beside the steps. What these cost is counted in CPU
seconds, since wall time of ten steps varies by more on a machine whose cores are all busy; the ratio of wall times is shown as well."""


DEVICE_PEAK = 1.0
"""Peak bytes on a simulated device against FSDP2's: stage 3, and stage 2 against FSDP2 without resharding after the forward."""
LEDGER_ERROR = 0.05
"""How far the ledger's peak may be from that of a simulated device."""
DELAYED_STEP = {"comm": 0.95}
"""Step time with updates beside the next step, against exact ones, one rank and a core free, optimizer on the host, by workload."""
DELAYED_LOSS = 1.02
"""The loss on held-out text of a small GPT after 300 steps with delayed updates, against exact ones."""
HOST_UPDATE = 0.85
"""The speed of an update on the host, against one plain call with the same traffic."""


DISK_UPDATE = 0.8
"""Bytes a second of an update on disk, against a plain sequential direct read and write of as many."""
DISK_STEP = 1.15
"""A step with the optimizer on disk, against the larger of compute and I/O. With exact updates nothing of an update may begin before
all gradients are known: what does not fit into staging memory cannot overlap with the backward (decision 014)."""


@dataclass(frozen=True)
class Verdict:
    """One bound, and what was measured against it."""

    what: str
    found: float
    limit: float
    is_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the bound is kept."""
        return self.found >= self.limit if self.is_least else self.found <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.is_least else "<="
        return f"{'holds ' if self.holds else 'BROKEN'} {self.what}: {self.found:.4g} (must be {sign} {self.limit:.4g})"


def verdicts(results: Results, baseline: str) -> list[Verdict]:
    """On all that was measured and has a bound."""
    return [
        *_step_times(results, baseline),
        *_memory(results),
        *_overhead(results),
        *_growth(results),
        *_checkpoint(results),
        *_offload(results),
        *_delayed(results),
    ]


def _checkpoint(results: Results) -> Iterator[Verdict]:
    for what, limit in CHECKPOINT.items():
        if what in results.checkpoint:
            yield Verdict(what, results.checkpoint[what], limit)


def _offload(results: Results) -> Iterator[Verdict]:
    for what, found in results.offload.items():
        if what.startswith("peak on the device, "):
            yield Verdict(what, found, DEVICE_PEAK)
        elif what.startswith("ledger against the device"):
            yield Verdict(what, found, LEDGER_ERROR)
        elif what == "host update, part of the memory limit":
            yield Verdict(what, found, HOST_UPDATE, is_least=True)
        elif what.endswith("part of a plain program's rate"):
            yield Verdict(what, found, DISK_UPDATE, is_least=True)
        elif what.endswith("step / the larger of both"):
            yield Verdict(what, found, DISK_STEP)


def _delayed(results: Results) -> Iterator[Verdict]:
    for what, found in results.delayed.items():
        workload = what.rpartition(", ")[2]
        if what.startswith("step time") and workload in DELAYED_STEP:
            yield Verdict(what, found, DELAYED_STEP[workload])
        elif what == "loss, held out, delayed / exact":
            yield Verdict(what, found, DELAYED_LOSS)


def _step_times(results: Results, baseline: str) -> Iterator[Verdict]:
    for workload, limits in STEP_TIMES.items():
        ratios = results.ratios(workload, baseline) if workload in results.timings else {}
        for stage, limit in limits.items():
            ratio = ratios.get(f"Shardwise stage {stage}")
            if ratio is not None:
                yield Verdict(f"step time of stage {stage} / {baseline}, {workload}", ratio.median, limit)


def _memory(results: Results) -> Iterator[Verdict]:
    for column, peaks in results.peaks_mib.items():
        if column == "compute, 4 ranks, default malloc" and "Shardwise stage 3" in peaks:
            yield Verdict(f"peak MiB of stage 3, {column}", peaks["Shardwise stage 3"], PEAK_MIB)
    for column, layers in results.most_layers.items():
        if "default malloc" in column and "Shardwise stage 3" in layers:
            yield Verdict(f"layers of stage 3 under {column}", layers["Shardwise stage 3"], FEWEST_LAYERS, is_least=True)


def _overhead(results: Results) -> Iterator[Verdict]:
    for system, values in results.overhead.items():
        yield Verdict(f"the engine's part of CPU seconds, {system}", values["part"], OVERHEAD)
        if "accounting_part" in values:
            yield Verdict(f"the accounting's part of CPU seconds, {system}", values["accounting_part"], ACCOUNTING)


def _growth(results: Results) -> Iterator[Verdict]:
    rows = {(row["ranks"], row["factor"]): row for row in results.growth}
    for (ranks, factor), row in rows.items():
        alone = rows.get((1, factor))
        if alone is not None and ranks > 1:
            whole, own = (each["state_bytes"] / each["num_params"] for each in (alone, row))
            yield Verdict(
                f"bytes of state a parameter, {ranks} ranks, {factor}x layers", own, GROWTH * whole / ranks + STATE_MARGIN_BYTES
            )
        shallow = rows.get((ranks, 1))
        if shallow is not None and factor > 1:
            ratio = row["seconds_per_token"] / factor / shallow["seconds_per_token"]
            yield Verdict(f"time a token and layer, {factor}x layers / 1x, {ranks} ranks", ratio, GROWTH)
