"""What a run has changed of its plan by itself, as a part of its page."""

from __future__ import annotations

from shardwise.report.parts import Cell, in_percent, section, table
from shardwise.report.runs import RunLog


def adaptations(run: RunLog, prefix: str) -> str:
    """What was done, after which step, and what was measured; nothing, where the plan stayed as it was."""
    if not run.adaptations:
        return ""
    rows: list[list[Cell | str]] = [
        [Cell(str(each.step), each.step), each.change, each.reason, in_percent(each.held_part), in_percent(each.waited_part)]
        for each in run.adaptations
    ]
    heads = ["after step", "what was changed", "why", "of the memory, at the peak", "of a step, waited for gathers and disk"]
    about = "What all ranks have agreed to change, and what was measured on the rank that held the most."
    return section(f"{prefix}adaptations", "Changes of the plan", table(heads, rows, caption="Changes of the plan"), about)
