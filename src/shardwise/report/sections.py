"""The sections of a run's page, a function each. They read figures and write HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import mean

from shardwise.core.ledger import Kind
from shardwise.core.records import Lane, Phase, Span
from shardwise.core.sizes import format_bytes
from shardwise.report import figures
from shardwise.report.charts import Block, Line, bar_chart, lane_chart, line_chart
from shardwise.report.parts import (
    Cell,
    Page,
    format_seconds,
    in_bandwidth,
    in_bytes,
    in_percent,
    in_seconds,
    section,
    table,
    warning,
)
from shardwise.report.runs import RunLog
from shardwise.telemetry.meter import Place

KIND_COLOURS = {kind.value: at for at, kind in enumerate(Kind)}
PHASE_COLOURS = {phase.value: at for at, phase in enumerate((Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION))}
PHASE_COLOURS |= {Phase.DISK.value: 3, Phase.OPTIMIZER.value: 4, Phase.DATA.value: 5, Phase.OTHER.value: 7}
_BLOCK_COLOURS = {"forward": 0, "backward": 1, "gather": 2, "reduce": 3}
_OPTIMIZER_LANE = "optimizer"
_OPTIMIZER_PLACES = (Place.AFTER_BACKWARD.value, Place.UPDATE.value)
OP_COLOURS = {"gather": 2, "reduce": 3, "gather gradients": 6, "digest": 7, "use": 10, "buffers": 8}
_MOST_NAMED = 3
_MOST_STEPS_NAMED = 5
_MOST_POINTS = 600


def colour_of_kind(name: str) -> int:
    """Of a kind of memory, in whatever tier it rests."""
    kind = name.partition(" (")[0].rpartition(": ")[2]
    return KIND_COLOURS.get(kind, KIND_COLOURS[Kind.POOL.value])


def phase_colours(found: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """The phases that are shown: all of them, but that of the disk only where it is waited for."""
    has_disk = any(phases.get(Phase.DISK.value) for phases in found)
    return {phase: colour for phase, colour in PHASE_COLOURS.items() if has_disk or phase != Phase.DISK.value}


def bytes_text(value: float) -> str:
    """A byte count on an axis."""
    return format_bytes(round(value))


def loss(run: RunLog, page: Page, prefix: str) -> str:
    """The loss by step."""
    points = figures.series(run, "loss")
    if not points:
        return section(f"{prefix}loss", "Loss", '<p class="nothing">No loss was logged: recording.log(loss=...) adds it.</p>')
    chart = line_chart([Line("loss", thinned(points), 0)], title="Loss by step", x_label="step", y=lambda value: f"{value:.4g}")
    rows = [[Cell(str(step), step), Cell(f"{loss:.6g}", loss)] for step, loss in thinned(points)]
    body = page.figure(chart, legend={"loss": 0}, behind=table(["step", "loss"], rows, caption="Loss by step"))
    return section(f"{prefix}loss", "Loss", body, "Mean over the ranks.")


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """No more points than a picture shows: means of neighbours."""
    size = max(1, -(-len(points) // _MOST_POINTS))
    groups = (points[at : at + size] for at in range(0, len(points), size))
    return [(group[-1][0], mean(value for _, value in group)) for group in groups]


def time(run: RunLog, page: Page, prefix: str) -> str:
    """Where the time of a step goes."""
    found = {f"rank {rank}": figures.mean_phases(run.steady_records_of(rank)) for rank in run.ranks}
    colours = phase_colours(found.values())
    bars = {rank: {phase: phases.get(phase, 0.0) for phase in colours} for rank, phases in found.items()}
    chart = bar_chart(bars, colours, title="Seconds of a step by phase and rank", x=format_seconds)
    rows: list[list[Cell | str]] = [
        [rank, *(in_seconds(value) for value in parts.values()), in_seconds(sum(parts.values()))]
        for rank, parts in bars.items()
    ]
    behind = table(["rank", *colours, "all"], rows, caption="Seconds of a step by phase and rank")
    walls = [(step, mean(record.seconds for record in by_rank.values())) for step, by_rank in run.whole_steps.items()]
    line = line_chart(
        [Line("a step", thinned(walls), 0)], title="Seconds of each step", x_label="step", y=format_seconds, from_zero=True
    )
    later = table(
        ["step", "seconds"], [[Cell(str(step), step), in_seconds(value)] for step, value in thinned(walls)], caption="By step"
    )
    body = page.figure(chart, legend=colours, behind=behind) + page.figure(line, legend={}, behind=later)
    return section(f"{prefix}time", "Time of a step", body, "Means without the first two steps. The parts add up to the step.")


def timeline(run: RunLog, page: Page, prefix: str) -> str:
    """What each rank did in one step."""
    title = "Timeline of one step"
    if not run.traced_steps:
        return section(f"{prefix}timeline", title, '<p class="nothing">No step was traced yet.</p>')
    step = run.traced_steps[-1]
    traces = run.traces_of(step)
    latest = max(trace.synced_seconds for trace in traces.values())
    lanes: dict[str, list[Block]] = {}
    rows: list[list[Cell | str]] = []
    for rank, trace in traces.items():
        shift = latest - trace.synced_seconds
        for name in (Lane.COMPUTE, Lane.COMMUNICATION, _OPTIMIZER_LANE):
            spans = [span for span in trace.spans if _lane_of(span) == name]
            blocks = [Block(s.name, s.begin_seconds + shift, s.end_seconds + shift, _colour_of(s)) for s in spans]
            lanes[f"rank {rank} {name}"] = sorted(
                blocks, key=lambda block: block.begin - block.end
            )  # The longest at the bottom.
            for span in spans:
                length = span.end_seconds - span.begin_seconds
                sent = in_bytes(span.wire_bytes) if span.wire_bytes else Cell("", 0)
                rows.append([f"rank {rank}", name, span.name, in_seconds(span.begin_seconds + shift), in_seconds(length), sent])
    end = max((block.end for blocks in lanes.values() for block in blocks), default=0.0)
    chart = lane_chart(lanes, title=f"What each rank did in step {step}", end=end, x=format_seconds)
    legend = "Forward, backward, gather, reduce and update have a colour each; a collective is shown from its issue to its end."
    behind = table(["rank", "lane", "what", "begins", "takes", "bytes"], rows, caption="Spans of the step")
    about = f"Step {step}. Ranks are laid over each other where all left the step's common exchange: no clocks are compared."
    keys = page.figure(chart, legend={}, behind=behind, caption=legend)
    return section(f"{prefix}timeline", title, keys, about)


def _lane_of(span: Span) -> str:
    if span.lane != Lane.LOOP:
        return span.lane
    return _OPTIMIZER_LANE if span.name in _OPTIMIZER_PLACES else ""


def _colour_of(span: Span) -> int:
    return 4 if span.lane == Lane.LOOP else _BLOCK_COLOURS.get(span.name.partition(" ")[0], 7)


def traffic(run: RunLog, page: Page, prefix: str) -> str:
    """Collectives by op, unit and link."""
    records = run.steady_records
    if not any(record.traffic for record in records):
        text = '<p class="nothing">No bytes went over any link: there is one rank, or no step was recorded.</p>'
        return section(f"{prefix}traffic", "Communication", text)
    ops = figures.flows(records)
    colours = {flow.name: OP_COLOURS.get(flow.name, 11) for flow in ops}
    bars: dict[str, dict[str, float]] = {}
    for rank in run.ranks:
        own = figures.flows(run.steady_records_of(rank))
        bars[f"rank {rank}"] = {flow.name: flow.wire_bytes for flow in own}
    chart = bar_chart(bars, colours, title="Bytes sent a step by op and rank", x=bytes_text)
    behind = _flow_table(ops, "op")
    body = page.figure(chart, legend=colours, behind="") + behind
    capacity = run.host_number("link_bytes_per_second")
    if capacity:
        used = sum(flow.wire_bytes for flow in ops) / (sum(flow.moving_seconds for flow in ops) or 1.0)
        link = "" if run.header is None else str(run.header.host.get("link"))
        measured = f"{format_bytes(round(capacity))}/s before the first step"
        body += f"<p>The link ({escape(link)}) was measured at {measured}; while bytes moved, {used / capacity:.0%} of it was used.</p>"
    others = {
        "by unit": _flow_table(figures.flows(records, "unit"), "unit"),
        "by link": _flow_table(figures.flows(records, "link"), "link"),
    }
    details = "".join(f"<details><summary>{name}</summary>{text}</details>" for name, text in others.items())
    about = "A step of one rank, on average. Hidden are the seconds in which bytes moved while the rank computed."
    return section(f"{prefix}traffic", "Communication", body + details, about)


def _flow_table(found: Sequence[figures.Flow], by: str) -> str:
    heads = [by, "collectives", "bytes", "moving", "bandwidth", "waited for", "hidden"]
    rows: list[list[Cell | str]] = [
        [
            flow.name,
            Cell(f"{flow.num_collectives:.3g}", flow.num_collectives),
            in_bytes(flow.wire_bytes),
            in_seconds(flow.moving_seconds),
            in_bandwidth(flow.bytes_per_second),
            in_seconds(flow.waited_seconds),
            in_seconds(flow.hidden_seconds),
        ]
        for flow in found
    ]
    return table(heads, rows, caption=f"Collectives by {by}")


def stragglers(run: RunLog, prefix: str) -> str:
    """Which rank others wait for."""
    found = figures.stragglers(run)
    if not found:
        text = '<p class="nothing">There is nobody to wait for: one rank, or no step that all ranks have recorded.</p>'
        return section(f"{prefix}stragglers", "Waits and stragglers", text)
    seconds = figures.typical_step_seconds(run)
    heads = [
        "rank",
        "typically slower by",
        "of a step",
        "mostly in",
        "there",
        "on average",
        "slow steps",
        "arrives after",
        "came last",
    ]
    rows: list[list[Cell | str]] = [
        [
            f"rank {each.rank}",
            in_seconds(each.typical_seconds),
            in_percent(each.typical_seconds / seconds if seconds else 0.0),
            each.phase,
            in_seconds(each.phase_seconds),
            in_seconds(each.lost_seconds),
            Cell(str(len(each.slow_steps)), len(each.slow_steps)),
            in_seconds(each.arrived_seconds),
            Cell(f"{each.num_last} of {each.num_steps}", each.num_last),
        ]
        for each in found
    ]
    about = (
        "Collectives even out the times of steps; what is compared here is how long each rank was busy, and after how much work "
        "it arrived at the exchange in which all ranks compare what they did. Slow steps are single ones that stand out."
    )
    body = _verdict(found, seconds) + table(heads, rows, caption="How long ranks keep each other")
    return section(f"{prefix}stragglers", "Waits and stragglers", body, about)


def _verdict(found: Sequence[figures.Straggling], seconds: float) -> str:
    """Which ranks are slow step after step, and which in single steps: these have other causes."""
    least = figures.STRAGGLER_PART * seconds
    typical = sorted((each for each in found if each.typical_seconds >= least), key=lambda each: -each.typical_seconds)
    texts = [
        f"Others wait for rank {each.rank}: typically {format_seconds(each.typical_seconds)} of a step "
        f"({each.typical_seconds / seconds:.0%}), of which {format_seconds(each.phase_seconds)} in {each.phase}. "
        f"It came last in {each.num_last} of {each.num_steps} steps."
        for each in typical[:_MOST_NAMED]
        if seconds
    ]
    single = sorted((each for each in found if each.slow_steps), key=lambda each: -each.slow_seconds_a_step)
    texts += [
        f"Others waited for rank {each.rank} in {_few_steps(each.slow_steps)}, not typically: "
        f"{format_seconds(each.slow_seconds)} more than usual on average, mostly in {each.slow_phase}."
        for each in single[:_MOST_NAMED]
        if each.slow_seconds_a_step >= least
    ]
    return "".join(map(warning, texts)) or "<p>No rank keeps the others by more than 5 % of a step.</p>"


def _few_steps(steps: Sequence[int]) -> str:
    names = ", ".join(map(str, steps[:_MOST_STEPS_NAMED])) + (", ..." if len(steps) > _MOST_STEPS_NAMED else "")
    return f"{len(steps)} single step{'s' if len(steps) > 1 else ''} ({names})"


def configuration(run: RunLog, prefix: str) -> str:
    """What ran, where, under which plan."""
    header = run.header
    if header is None:
        return section(f"{prefix}configuration", "Configuration", '<p class="nothing">No rank has written a header.</p>')
    groups: dict[str, Mapping[str, object]] = {"plan": header.plan, "asked for": header.config, "versions": header.versions}
    groups["host of rank " + str(header.rank)] = header.host
    tables = []
    for name, values in groups.items():
        if values:
            rows: list[list[Cell | str]] = [[key, _value(value)] for key, value in values.items()]
            tables.append(f"<h3>{escape(name)}</h3>" + table(["key", "value"], rows, caption=name, has_long_text=True))
    return section(f"{prefix}configuration", "Configuration", "".join(tables), f"Hash {header.hash}.")


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
