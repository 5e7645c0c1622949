"""What went from and to disk: of one run by rank, and of several runs side by side. Reads figures and writes HTML."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.report import figures
from shardwise.report.charts import bar_chart
from shardwise.report.parts import Cell, Page, in_bytes, in_percent, in_seconds, section, table
from shardwise.report.runs import RunLog
from shardwise.report.sections import bytes_text

_COLOURS = {"read": 0, "written": 1}
_HEADS = ["read a step", "written a step", "waited for", "of a step"]


def disk(run: RunLog, page: Page, prefix: str) -> str:
    """Bytes by rank, and how long they were waited for; nothing, if no state rests on disk."""
    flows = {f"rank {rank}": figures.disk_flow(run.steady_records_of(rank)) for rank in run.ranks}
    about = "A step of each rank, on average. What is read ahead and written behind while the rank computes is not waited for."
    return _section(flows, page, f"{prefix}disk", "rank", about)


def disk_of_runs(runs: Mapping[str, RunLog], page: Page) -> str:
    """The same of several runs; nothing, if none has state on disk."""
    flows = {name: figures.disk_flow(run.steady_records) for name, run in runs.items()}
    return _section(flows, page, "disk", "run", "A step of a rank, on average.")


def _section(flows: Mapping[str, figures.DiskFlow | None], page: Page, anchor: str, by: str, about: str) -> str:
    found = {name: flow for name, flow in flows.items() if flow is not None}
    if not found:
        return ""
    bars = {name: {"read": flow.read_bytes, "written": flow.written_bytes} for name, flow in found.items()}
    title = f"Bytes from and to disk a step by {by}"
    rows: list[list[Cell | str]] = [
        [
            name,
            in_bytes(flow.read_bytes),
            in_bytes(flow.written_bytes),
            in_seconds(flow.waited_seconds),
            in_percent(flow.waited_part),
        ]
        for name, flow in found.items()
    ]
    chart = bar_chart(bars, _COLOURS, title=title, x=bytes_text)
    body = page.figure(chart, legend=_COLOURS, behind="") + table([by, *_HEADS], rows, caption=title)
    return section(anchor, "Disk", body, about)
