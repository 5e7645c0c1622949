"""Memory on a run's page: through one step, and by kind and rank. Reads figures and writes HTML."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shardwise.core.ledger import MAPPED, Kind, Tier
from shardwise.core.records import StepTrace
from shardwise.report import figures
from shardwise.report.charts import WIDTH, Layer, area_chart, bar_chart
from shardwise.report.parts import Cell, Page, in_bytes, section, table
from shardwise.report.runs import RunLog, as_number
from shardwise.report.sections import KIND_COLOURS, bytes_text, colour_of_kind

ACTIVATIONS = "activations and temporary values"


def layers_of(trace: StepTrace, allocator_tiers: Collection[str]) -> tuple[list[float], list[Layer]]:
    """Milliseconds, and bytes of memory by kind. What the allocator gave out beyond the ledger and the least of it are activations.

    Args:
        allocator_tiers: Those whose memory the allocator gives out; what rests in others is none of it.
    """
    xs = [row[0] * 1e3 for row in trace.memory]
    columns = list(zip(*(row[1:] for row in trace.memory), strict=True)) if trace.memory else []
    by_name = {name: values for name, values in zip(trace.kinds[:-1], columns, strict=False) if any(values)}
    layers = [
        Layer(name.removeprefix("device: "), values, colour_of_kind(name))
        for name, values in by_name.items()
        if not name.startswith(f"{Tier.DISK.value}: ")
    ]
    layers.sort(key=lambda layer: (layer.colour in (1, 8), layer.colour))
    if columns and any(columns[-1]):
        booked = [values for name, values in by_name.items() if _is_allocated(name, allocator_tiers)]
        beside = [allocated - sum(values[at] for values in booked) for at, allocated in enumerate(columns[-1])]
        base = min(beside)
        layers.append(Layer(ACTIVATIONS, [value - base for value in beside], KIND_COLOURS[Kind.ACTIVATION.value]))
    return xs, layers


def _is_allocated(name: str, allocator_tiers: Collection[str]) -> bool:
    tier, _, kind = name.partition(": ")
    return tier in allocator_tiers and kind != MAPPED.value


def memory_through_step(run: RunLog, page: Page, prefix: str) -> str:
    """The saw-tooth of gather and release."""
    title = "Memory through one step"
    if not run.traced_steps:
        return section(f"{prefix}step-memory", title, '<p class="nothing">No step was traced yet.</p>')
    step = run.traced_steps[-1]
    panels = {}
    for rank, trace in run.traces_of(step).items():
        panels[f"rank {rank}"] = memory_figure(trace, run.allocator_tiers, page)
    about = (
        f"Step {step}. What the ledger holds by kind, at each change; above it what else the allocator has given out since the "
        "step was at its leanest: activations and temporary values."
    )
    return section(f"{prefix}step-memory", title, page.tabs(panels, label="rank"), about)


def memory_figure(trace: StepTrace, allocator_tiers: Collection[str], page: Page, high: float = 0.0, width: int = WIDTH) -> str:
    """One rank's memory through one step."""
    xs, layers = layers_of(trace, allocator_tiers)
    title, x_label = f"Memory by kind on rank {trace.rank}", "ms since the step began"
    chart = area_chart(xs, layers, title=title, x_label=x_label, y=bytes_text, high=high, width=width)
    rows: list[list[Cell | str]] = [
        [layer.name, in_bytes(layer.values[0]), in_bytes(max(layer.values)), in_bytes(layer.values[-1])] for layer in layers
    ]
    behind = table(["kind", "at the begin", "at most", "at the end"], rows, caption="Memory by kind in the step")
    return page.figure(chart, legend={layer.name: layer.colour for layer in layers}, behind=behind)


def memory(run: RunLog, page: Page, prefix: str) -> str:
    """The most of each kind by rank, and the ledger beside what the machine says."""
    bars: dict[str, dict[str, float]] = {}
    rows: list[list[Cell | str]] = []
    for rank, log in run.ranks.items():
        peaks = figures.peak_by_kind(log.steps)
        bars[f"rank {rank}"] = dict(sorted(peaks.items(), key=lambda item: colour_of_kind(item[0])))
        seen = [record for record in log.steps if record.process is not None]
        last = seen[-1] if seen else None
        held = {} if last is None else {(each.tier, each.kind): each.live_bytes for each in last.held}
        live = sum(num_bytes for (tier, _), num_bytes in held.items() if tier != Tier.DISK.value)
        process = None if last is None else last.process
        if process is not None:
            on_host = sum(num_bytes for (tier, _), num_bytes in held.items() if tier in run.resident_tiers)
            rest = process.resident_bytes - on_host
            rows.append(
                [
                    f"rank {rank}",
                    in_bytes(max(record.peak_bytes for record in log.steps)),
                    in_bytes(live),
                    in_bytes(process.allocated_bytes),
                    in_bytes(process.resident_bytes),
                    in_bytes(rest),
                    in_bytes(process.peak_resident_bytes),
                ]
            )
    kinds = {kind: colour_of_kind(kind) for parts in bars.values() for kind in parts}
    chart = bar_chart(bars, kinds, title="The most of each kind by rank", x=bytes_text)
    behind = table(
        ["rank", *kinds], [[rank, *(in_bytes(parts.get(kind, 0)) for kind in kinds)] for rank, parts in bars.items()],
        caption="The most of each kind by rank",
    )  # fmt: skip
    heads = ["rank", "most at once", "live between steps", "allocated", "resident", "unattributed", "most resident"]
    reconciled = table(heads, rows, caption="The ledger beside what the machine says") if rows else ""
    about = (
        "The most of each kind, which need not have been at the same time. Below, the ledger beside what the machine says: the rest "
        "is unattributed, the program itself among it."
    )
    body = page.figure(chart, legend=kinds, behind=behind) + reconciled + _pools(run)
    return section(f"{prefix}memory", "Memory by kind", body, about)


def _pools(run: RunLog) -> str:
    """What the memory that buffers are taken from held, lent and wasted at the end; nothing where nobody wrote it down."""
    heads = ("taken", "lent", "idle", "wasted", "largest free")
    rows: list[list[Cell | str]] = []
    for rank, log in run.ranks.items():
        found: dict[str, Any] = next((note["pool"] for note in reversed(log.notes) if isinstance(note.get("pool"), dict)), {})
        for name, values in found.items():
            if isinstance(values, dict):
                rows.append([f"rank {rank}", str(name), *(in_bytes(as_number(values.get(head))) for head in heads)])
    return table(["rank", "memory", *heads], rows, caption="Memory that buffers are taken from, at the end") if rows else ""
