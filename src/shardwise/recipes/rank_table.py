"""A compact table of ranks for a terminal: memory by kind as a bar, bytes sent a step, and the part of the time spent waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.core.ledger import Kind
from shardwise.core.sizes import format_bytes

BAR_WIDTH = 36
NUM_RANKS_SHOWN = 8
_LEAST_BAR_WIDTH = 8
_WIDTH_BESIDE_BAR = 46
"""Of the other columns, with the longest names and figures."""
_STYLES = {
    Kind.PARAM: ("blue", "P"),
    Kind.GATHERED: ("yellow", "G"),
    Kind.GRAD: ("green", "D"),
    Kind.FULL_GRAD: ("red", "F"),
    Kind.OPTIM: ("magenta", "O"),
    Kind.MASTER: ("cyan", "M"),
    Kind.BUFFER: ("white", "B"),
    Kind.WIRE: ("bright_red", "W"),
    Kind.STAGING: ("bright_magenta", "S"),
    Kind.POOL: ("bright_black", "."),
    Kind.SNAPSHOT: ("bright_yellow", "C"),
    Kind.ACTIVATION: ("bright_cyan", "A"),
}


@dataclass(frozen=True)
class RankStatus:
    """What one rank did in its last step.

    Args:
        peak_bytes: The most memory that the whole process has had.
        held_bytes: The most of each kind in the step.
        sent_bytes: In the step.
        waiting: The part of the step in which it waited for others.
    """

    peak_bytes: int
    held_bytes: Mapping[Kind, int] = field(default_factory=dict)
    sent_bytes: int = 0
    waiting: float = 0.0


def rank_table(ranks: Sequence[RankStatus], *, has_colour: bool = True, width: int = 100) -> RenderableType:
    """The table, or nothing while nothing is known. Its bars are what gives way on a narrow screen."""
    known = [(rank, status) for rank, status in enumerate(ranks) if status.held_bytes]
    if not known:
        return Text("")
    kinds = [kind for kind in Kind if any(status.held_bytes.get(kind) for _, status in known)]
    most = max(sum(status.held_bytes.values()) for _, status in known)
    bar_width = max(_LEAST_BAR_WIDTH, min(BAR_WIDTH, width - _WIDTH_BESIDE_BAR))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for name in ("", "held by kind", "", "sent a step", "waiting"):
        table.add_column(name, justify="left" if name in ("", "held by kind") else "right", no_wrap=True)
    for rank, status in known[:NUM_RANKS_SHOWN]:
        total = format_bytes(sum(status.held_bytes.values()))
        bar = _bar(status.held_bytes, kinds, bar_width / most, has_colour)
        table.add_row(f"rank {rank}", bar, total, format_bytes(status.sent_bytes), f"{status.waiting:.0%}")
    num_more = len(known) - NUM_RANKS_SHOWN
    more = [Text(f"and {num_more} more", style="dim")] if num_more > 0 else []
    return Group(table, *more, _legend(kinds, has_colour))


def _bar(held: Mapping[Kind, int], kinds: Sequence[Kind], columns_per_byte: float, has_colour: bool) -> Text:
    """Each kind gets its share of the columns; rounding is carried on, so that the whole has the right length."""
    text, done, shown = Text(), 0, 0
    for kind in kinds:
        done += held.get(kind, 0)
        end = round(done * columns_per_byte)
        style, letter = _STYLES[kind]
        text.append(("█" if has_colour else letter) * (end - shown), style=style)
        shown = end
    return text


def _legend(kinds: Sequence[Kind], has_colour: bool) -> RenderableType:
    """In columns: a kind and its name stay on one line."""
    entries = []
    for kind in kinds:
        style, letter = _STYLES[kind]
        entries.append(Text.assemble(("█ " if has_colour else f"{letter} ", style), (kind.value, "dim")))
    return Columns(entries, padding=(0, 2, 0, 0))
