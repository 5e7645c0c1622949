"""The page of one run: what it took, by rank and by cause. Reads figures, writes HTML; works nothing out that a table needs."""

from __future__ import annotations

from html import escape
from importlib import resources
from statistics import mean

from shardwise.core.records import Phase
from shardwise.core.sizes import format_bytes
from shardwise.report import disk, figures, memory, sections
from shardwise.report.adaptations import adaptations
from shardwise.report.charts import NUM_COLOURS
from shardwise.report.parts import Page, cards, format_seconds, warning
from shardwise.report.runs import RunLog


def document(title: str, body: str, *, live_seconds: float = 0.0, version: str = "") -> str:
    """A whole file, with nothing to load from elsewhere."""
    style = resources.files("shardwise.report").joinpath("page.css").read_text(encoding="utf-8")
    script = resources.files("shardwise.report").joinpath("page.js").read_text(encoding="utf-8")
    colours = "".join(
        f".f{at}{{fill:var(--c{at})}}.s{at}{{stroke:var(--c{at})}}.b{at}{{background:var(--c{at})}}"
        for at in range(NUM_COLOURS)
    )
    live = '<span class="live soft" role="status">live</span>' if live_seconds else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}{colours}</style></head><body>"
        f'<header><h1>{escape(title)}</h1>{live}<button type="button" class="theme">Light or dark</button></header>'
        f'<main data-live="{live_seconds}" data-version="{escape(version)}">{body}</main><script>{script}</script></body></html>\n'
    )


def run_body(run: RunLog, page: Page | None = None, prefix: str = "") -> str:
    """All sections of one run."""
    page = page or Page()
    parts = [
        "".join(warning(problem) for problem in run.problems[:5]),
        _more_problems(run),
        "".join(warning(f"Rank {rank}: {leak}") for rank, leak in run.leaks),
        cards(headline(run)),
        sections.loss(run, page, prefix),
        memory.memory_through_step(run, page, prefix),
        memory.memory(run, page, prefix),
        sections.time(run, page, prefix),
        sections.timeline(run, page, prefix),
        sections.traffic(run, page, prefix),
        disk.disk(run, page, prefix),
        sections.stragglers(run, prefix),
        adaptations(run, prefix),
        sections.configuration(run, prefix),
    ]
    return "".join(parts)


def _more_problems(run: RunLog) -> str:
    return warning(f"... and {len(run.problems) - 5} more such lines.") if len(run.problems) > 5 else ""


def headline(run: RunLog) -> dict[str, str]:
    """The figures that people look for first."""
    records = run.steady_records
    found = {"ranks": str(len(run.ranks)), "steps recorded": f"{len(run.steps):,}"}
    header = run.header
    if header is not None:
        found = {"ZeRO stage": str(header.plan.get("stage", "?")), **found}
        found["parameters"] = f"{run.host_number('num_parameters'):,.0f}"
    if not records:
        return found
    seconds = mean(record.seconds for record in records)
    waiting = mean(record.phases.get(Phase.COMMUNICATION.value, 0.0) for record in records)
    found["a step"] = format_seconds(seconds)
    for name in ("tokens", "samples", "images", "ratings"):
        rate = figures.rate(run, name)
        if rate:
            found[f"{name}/s, all ranks"] = f"{rate:,.0f}"
    flops, part = figures.flops_per_second(run)
    if flops:
        found["of the model on a rank"] = f"{flops / 1e9:,.3g} GFLOP/s"
        found["of the device's measured peak"] = f"{part:.1%}"
    found["most held on a rank, by the ledger"] = format_bytes(max(record.peak_bytes for record in records))
    found["sent a step by a rank"] = format_bytes(round(mean(record.wire_bytes for record in records)))
    found["of the time waiting for others"] = f"{waiting / seconds:.1%}" if seconds else "-"
    flow = figures.disk_flow(records)
    if flow is not None:
        found["read from disk a step by a rank"] = format_bytes(round(flow.read_bytes))
        found["written to disk a step by a rank"] = format_bytes(round(flow.written_bytes))
        found["of the time waiting for the disk"] = f"{flow.waited_part:.1%}"
    losses = figures.series(run, "loss")
    if losses:
        found["last loss"] = f"{losses[-1][1]:.4f}"
    return found
