"""Pieces of the page: tables, legends, figures, tabs, cards. Pure text; whatever comes in is escaped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

from shardwise.core.sizes import format_bytes


@dataclass(frozen=True)
class Cell:
    """A figure as people read it, and the number by which it is sorted."""

    text: str
    value: float


def in_bytes(num_bytes: float) -> Cell:
    """A byte count."""
    return Cell(format_bytes(round(num_bytes)), num_bytes)


def in_seconds(seconds: float) -> Cell:
    """A duration."""
    return Cell(format_seconds(seconds), seconds)


def in_bandwidth(bytes_per_second: float) -> Cell:
    """A speed; nothing where it is not known."""
    return Cell(f"{format_bytes(round(bytes_per_second))}/s" if bytes_per_second else "", bytes_per_second)


def in_percent(part: float) -> Cell:
    """A part of one."""
    return Cell(f"{part:.1%}", part)


def format_seconds(seconds: float) -> str:
    """A duration with its unit.

    >>> format_seconds(0.01234), format_seconds(2.5), format_seconds(0.0000021), format_seconds(0)
    ('12.3 ms', '2.50 s', '2.1 µs', '0 ms')
    """
    if seconds == 0:
        return "0 ms"
    if abs(seconds) < 1e-4:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell | str]], *, caption: str, has_long_text: bool = False) -> str:
    """A table that can be sorted by each column."""
    first = rows[0] if rows else ()
    texts = [at < len(first) and isinstance(first[at], str) for at in range(len(heads))]
    head = "".join(
        f'<th scope="col"{" class=text" if is_text else ""}><button type="button">{escape(name)}</button></th>'
        for name, is_text in zip(heads, texts, strict=True)
    )
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    label = f'aria-label="{escape(caption)}"' + (' class="long"' if has_long_text else "")
    return f'<div class="scroll"><table {label}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return f'<td class="text">{escape(cell)}</td>'
    return f'<td data-value="{cell.value!r}">{escape(cell.text)}</td>'


class Page:
    """Makes pieces of one page: those that need names of their own within it."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def figure(self, chart: str, *, legend: Mapping[str, int], behind: str, caption: str = "") -> str:
        """A chart with a legend that shows and hides, and the table behind it."""
        number = next(self._numbers)
        boxes = "".join(
            f'<label><input type="checkbox" id="series-{number}-{at}" value="{escape(name)}" checked>'
            f'<span class="swatch b{colour}"></span>{escape(name)}</label>'
            for at, (name, colour) in enumerate(legend.items())
        )
        keys = f'<fieldset class="legend" aria-label="what is shown">{boxes}</fieldset>' if boxes else ""
        note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        more = f"<details><summary>The figures</summary>{behind}</details>" if behind else ""
        return f'<figure>{keys}<div class="plot">{chart}</div>{note}{more}</figure>'

    def tabs(self, panels: Mapping[str, str], *, label: str) -> str:
        """Panels of which one is shown."""
        if len(panels) == 1:
            return next(iter(panels.values()))
        number = next(self._numbers)
        choices, bodies = [], []
        for at, (name, body) in enumerate(panels.items()):
            checked, hidden = ("checked", "") if at == 0 else ("", " hidden")
            box = f'<input type="radio" name="tab-{number}" id="tab-{number}-{at}" value="{at}" {checked}>'
            choices.append(f"<label>{box} {escape(name)}</label>")
            bodies.append(f'<div class="tab{hidden}" data-tab="{at}"><h3>{escape(name)}</h3>{body}</div>')
        choice = f'<fieldset class="tabs" aria-label="{escape(label)}">{"".join(choices)}</fieldset>'
        return f'<div class="tabbed">{choice}{"".join(bodies)}</div>'


def cards(figures: Mapping[str, str]) -> str:
    """Headline figures."""
    items = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in figures.items()
    )
    return f'<div class="cards">{items}</div>'


def section(anchor: str, title: str, body: str, about: str = "") -> str:
    """A part of the page."""
    text = f'<p class="soft">{escape(about)}</p>' if about else ""
    return f'<section id="{escape(anchor)}"><h2>{escape(title)}</h2>{text}{body}</section>'


def warning(text: str) -> str:
    """Something that needs to be seen."""
    return f'<p class="warn">{escape(text)}</p>'
