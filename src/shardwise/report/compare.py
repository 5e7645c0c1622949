"""Several runs on one page: side by side on common scales, and each of them below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import mean

from shardwise.report import figures
from shardwise.report.charts import Line, bar_chart, line_chart
from shardwise.report.disk import disk_of_runs
from shardwise.report.memory import layers_of, memory_figure
from shardwise.report.page import headline, run_body
from shardwise.report.parts import Cell, Page, format_seconds, in_bytes, in_seconds, section, table
from shardwise.report.runs import RunLog
from shardwise.report.sections import (
    OP_COLOURS,
    bytes_text,
    colour_of_kind,
    phase_colours,
    thinned,
)

_NUM_LINE_COLOURS = 10
_NARROW = 430


def compare_body(runs: Sequence[RunLog]) -> str:
    """All runs side by side, and then one after the other."""
    page = Page()
    named = name_runs(runs)
    details = "".join(
        f'<details class="run"><summary>{escape(name)}</summary>{run_body(run, page, f"run{at}-")}</details>'
        for at, (name, run) in enumerate(named.items())
    )
    return "".join(
        [
            _figures(named),
            _memory_through_step(named, page),
            _memory(named, page),
            _time(named, page),
            _traffic(named, page),
            disk_of_runs(named, page),
            _loss(named, page),
            section("runs", "Each run", details),
        ]
    )


def name_runs(runs: Sequence[RunLog]) -> dict[str, RunLog]:
    """A name for each run that tells it from the others."""
    names = [run.name for run in runs]
    return {name if names.count(name) == 1 else str(run.path): run for name, run in zip(names, runs, strict=True)}


def _figures(runs: Mapping[str, RunLog]) -> str:
    found = {name: headline(run) for name, run in runs.items()}
    heads = list(dict.fromkeys(key for figures in found.values() for key in figures))
    rows: list[list[Cell | str]] = [[key, *(_figure(values.get(key, "-")) for values in found.values())] for key in heads]
    return section("figures", "Side by side", table(["", *found], rows, caption="Headline figures of all runs"))


def _figure(text: str) -> Cell:
    return Cell(text, 0.0)


def _memory_through_step(runs: Mapping[str, RunLog], page: Page) -> str:
    traces = {}
    for name, run in runs.items():
        if run.traced_steps:
            found = run.traces_of(run.traced_steps[-1])
            traces[name] = found[min(found)]
    stacks = [layers_of(trace, runs[name].allocator_tiers) for name, trace in traces.items()]
    tops = [sum(layer.values[at] for layer in layers) for xs, layers in stacks for at in range(len(xs))]
    high = max(tops, default=0.0)
    panels = "".join(
        f"<div><h3>{escape(name)}, rank {trace.rank}</h3>{memory_figure(trace, runs[name].allocator_tiers, page, high, _NARROW)}</div>"
        for name, trace in traces.items()
    )
    about = "One step of the first rank of each run, on one scale."
    return section("step-memory", "Memory through one step", f'<div class="multiples">{panels}</div>', about)


def _memory(runs: Mapping[str, RunLog], page: Page) -> str:
    bars: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        by_rank = [figures.peak_by_kind(log.steps) for log in run.ranks.values()]
        kinds = sorted({kind for peaks in by_rank for kind in peaks}, key=colour_of_kind)
        bars[name] = {kind: max(peaks.get(kind, 0) for peaks in by_rank) for kind in kinds}
    legend = {kind: colour_of_kind(kind) for parts in bars.values() for kind in parts}
    chart = bar_chart(bars, legend, title="The most of each kind on any rank, by run", x=bytes_text)
    rows: list[list[Cell | str]] = [[name, *(in_bytes(parts.get(kind, 0)) for kind in legend)] for name, parts in bars.items()]
    behind = table(["run", *legend], rows, caption="The most of each kind on any rank")
    about = "The most of each kind on any rank, which need not have been at the same time."
    return section("memory", "Memory by kind", page.figure(chart, legend=legend, behind=behind), about)


def _time(runs: Mapping[str, RunLog], page: Page) -> str:
    found = {name: figures.mean_phases(run.steady_records) for name, run in runs.items()}
    colours = phase_colours(found.values())
    bars = {name: {phase: phases.get(phase, 0.0) for phase in colours} for name, phases in found.items()}
    chart = bar_chart(bars, colours, title="Seconds of a step by phase and run", x=format_seconds)
    rows: list[list[Cell | str]] = [[name, *(in_seconds(value) for value in parts.values())] for name, parts in bars.items()]
    behind = table(["run", *colours], rows, caption="Seconds of a step by phase and run")
    about = "Means over ranks and steps. Runs that did not take turns on one machine are not measured against each other."
    return section("time", "Time of a step", page.figure(chart, legend=colours, behind=behind), about)


def _traffic(runs: Mapping[str, RunLog], page: Page) -> str:
    flows = {name: figures.flows(run.steady_records) for name, run in runs.items()}
    ops = dict.fromkeys(flow.name for found in flows.values() for flow in found)
    legend = {op: OP_COLOURS.get(op, 11) for op in ops}
    bars = {name: {flow.name: flow.wire_bytes for flow in found} for name, found in flows.items()}
    chart = bar_chart(bars, legend, title="Bytes sent a step by op and run", x=bytes_text)
    rows: list[list[Cell | str]] = [[name, *(in_bytes(parts.get(op, 0)) for op in ops)] for name, parts in bars.items()]
    behind = table(["run", *ops], rows, caption="Bytes sent a step by op and run")
    return section("traffic", "Bytes sent a step", page.figure(chart, legend=legend, behind=behind), "By a rank, on average.")


def _loss(runs: Mapping[str, RunLog], page: Page) -> str:
    series = {name: figures.series(run, "loss") for name, run in runs.items()}
    lines = [Line(name, thinned(points), at % _NUM_LINE_COLOURS) for at, (name, points) in enumerate(series.items()) if points]
    chart = line_chart(lines, title="Loss by step and run", x_label="step", y=lambda value: f"{value:.4g}")
    rows: list[list[Cell | str]] = []
    for name, points in series.items():
        losses = [value for _, value in points]
        if losses:
            rows.append([name, *(Cell(f"{value:.6g}", value) for value in (losses[0], losses[-1], mean(losses)))])
    behind = table(["run", "first", "last", "mean"], rows, caption="Losses by run")
    about = "With a lossless wire, stages of one model at one number of ranks give one line: the same bits."
    return section("loss", "Loss", page.figure(chart, legend={line.name: line.colour for line in lines}, behind=behind), about)
