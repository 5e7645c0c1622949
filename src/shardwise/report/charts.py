"""Charts as SVG text: lines, stacked areas, stacked bars, lanes. Pure; knows nothing of runs. All text is escaped here.

Colours are classes (``c0``, ``c1``, ...) that the page's style sheet fills, so that one picture serves light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

WIDTH, HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 14, 12, 36
_BAR_HEIGHT, _BAR_GAP = 24, 10
_LANE_HEIGHT, _LANE_GAP = 20, 4
_LABEL_WIDTH = 150
NUM_COLOURS = 12

Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """One line: its name, its points, and the number of its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int


@dataclass(frozen=True)
class Layer:
    """One layer of a stack: its name, a value for each x, and the number of its colour."""

    name: str
    values: Sequence[float]
    colour: int


@dataclass(frozen=True)
class Block:
    """Something on a lane, from one x to another."""

    name: str
    begin: float
    end: float
    colour: int


def nice_ticks(high: float, count: int = 4) -> list[float]:
    """Round values from 0 to just above a value.

    >>> nice_ticks(7.3), nice_ticks(0)
    ([0.0, 2.0, 4.0, 6.0, 8.0], [0.0, 1.0])
    """
    if not high > 0 or not math.isfinite(high):
        return [0.0, 1.0]
    raw = high / count
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [size * number for number in range(math.ceil(high / size * 0.999) + 1)]


def binary_ticks(high: float, count: int = 4) -> list[float]:
    """The same for bytes: steps of 1, 2 or 5 of a power of 1024 and its tenfolds."""
    if not high > 0:
        return [0.0, 1.0]
    unit = 1024.0 ** max(0, math.floor(math.log(high, 1024)))
    return [tick * unit for tick in nice_ticks(high / unit, count)]


def line_chart(lines: Sequence[Line], *, title: str, x_label: str, y: Format, from_zero: bool = False) -> str:
    """Lines over a common x."""
    points = [point for line in lines for point in line.points]
    if not points:
        return _nothing(title)
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    values = [value for _, value in points if math.isfinite(value)]
    high = max(values, default=1.0)
    low = 0.0 if from_zero or min(values, default=0.0) <= 0 or min(values) < 0.6 * high else min(values)
    ticks = nice_ticks(high) if low == 0.0 else [low + (high - low) * part / 4 for part in range(5)]
    frame = _Frame(low_x, high_x, ticks[0], ticks[-1])
    parts = [frame.axes(ticks, y, x_label, lambda value: f"{value:,.0f}")]
    for line in lines:
        path = " ".join(
            f"{'L' if at else 'M'}{frame.x(x):.1f} {frame.y(value):.1f}"
            for at, (x, value) in enumerate((x, v) for x, v in line.points if math.isfinite(v))
        )
        parts.append(f'<path class="line s{line.colour}" data-series="{escape(line.name)}" d="{path}"/>')
        if len(line.points) == 1:
            x, value = line.points[0]
            parts.append(f'<circle class="f{line.colour}" cx="{frame.x(x):.1f}" cy="{frame.y(value):.1f}" r="3"/>')
    return _svg(title, "".join(parts))


def area_chart(  # noqa: PLR0913
    xs: Sequence[float], layers: Sequence[Layer], *, title: str, x_label: str, y: Format, high: float = 0.0, width: int = WIDTH
) -> str:
    """Layers on top of each other. Values hold from their x to the next one. ``high`` is the top of the scale, if it is more."""
    if not xs or not layers:
        return _nothing(title)
    sums = [sum(layer.values[at] for layer in layers) for at in range(len(xs))]
    ticks = binary_ticks(max(high, *sums))
    frame = _Frame(0.0, xs[-1], ticks[0], ticks[-1], width)
    parts = [frame.axes(ticks, y, x_label, lambda value: f"{value:,.0f}")]
    base = [0.0] * len(xs)
    for layer in layers:
        top = [below + max(0.0, value) for below, value in zip(base, layer.values, strict=True)]
        upper = _stairs(frame, xs, top)
        lower = _stairs(frame, xs, base)[::-1]
        path = "M" + " L".join(f"{x:.1f} {value:.1f}" for x, value in (*upper, *lower)) + "Z"
        tip = f"<title>{escape(layer.name)}: at most {escape(y(max(layer.values)))}</title>"
        parts.append(f'<path class="f{layer.colour}" data-series="{escape(layer.name)}" d="{path}">{tip}</path>')
        base = top
    return _svg(title, "".join(parts), width=width)


def _stairs(frame: _Frame, xs: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    points = []
    for at, value in enumerate(values):
        points.append((frame.x(xs[at]), frame.y(value)))
        if at + 1 < len(xs):
            points.append((frame.x(xs[at + 1]), frame.y(value)))
    return points


def bar_chart(rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, int], *, title: str, x: Format) -> str:
    """A bar a row, its parts one after the other."""
    if not rows or not any(any(parts.values()) for parts in rows.values()):
        return _nothing(title)
    ticks = nice_ticks(max(sum(max(0.0, value) for value in parts.values()) for parts in rows.values()))
    width = WIDTH - _LABEL_WIDTH - 90
    height = len(rows) * (_BAR_HEIGHT + _BAR_GAP) + 8
    found = []
    for at, (name, parts) in enumerate(rows.items()):
        top = 4 + at * (_BAR_HEIGHT + _BAR_GAP)
        middle = top + _BAR_HEIGHT / 2 + 4
        found.append(f'<text class="tick" x="{_LABEL_WIDTH - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>')
        sizes = [max(0.0, value) / ticks[-1] * width for value in parts.values()]
        for (part, value), size, end in zip(parts.items(), sizes, accumulate(sizes), strict=True):
            tip = f"<title>{escape(part)}: {escape(x(value))}</title>"
            place = f'x="{_LABEL_WIDTH + end - size:.1f}" y="{top}" width="{size:.1f}" height="{_BAR_HEIGHT}"'
            found.append(f'<rect class="f{colours.get(part, 0)}" data-series="{escape(part)}" {place}>{tip}</rect>')
        total = x(sum(max(0.0, value) for value in parts.values()))
        found.append(f'<text class="tick" x="{_LABEL_WIDTH + sum(sizes) + 6:.1f}" y="{middle:.1f}">{escape(total)}</text>')
    return _svg(title, "".join(found), height)


def lane_chart(lanes: Mapping[str, Sequence[Block]], *, title: str, end: float, x: Format) -> str:
    """Blocks on lanes, over one x from 0 to ``end``."""
    if not any(lanes.values()) or end <= 0:
        return _nothing(title)
    width = WIDTH - _LABEL_WIDTH - _RIGHT
    height = len(lanes) * (_LANE_HEIGHT + _LANE_GAP) + 30
    found = []
    for tick in nice_ticks(end, 5):
        if tick <= end * 1.001:
            at = _LABEL_WIDTH + tick / end * width
            found.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - 22}"/>')
            found.append(f'<text class="tick" x="{at:.1f}" y="{height - 6}" text-anchor="middle">{escape(x(tick))}</text>')
    for number, (name, blocks) in enumerate(lanes.items()):
        top = 2 + number * (_LANE_HEIGHT + _LANE_GAP)
        found.append(
            f'<text class="tick" x="{_LABEL_WIDTH - 8}" y="{top + _LANE_HEIGHT - 6}" text-anchor="end">{escape(name)}</text>'
        )
        for block in blocks:
            left, size = _LABEL_WIDTH + block.begin / end * width, max(0.6, (block.end - block.begin) / end * width)
            tip = f"<title>{escape(block.name)}: {escape(x(block.end - block.begin))} from {escape(x(block.begin))}</title>"
            place = f'x="{left:.1f}" y="{top}" width="{size:.1f}" height="{_LANE_HEIGHT}"'
            found.append(f'<rect class="f{block.colour} block" {place}>{tip}</rect>')
    return _svg(title, "".join(found), height)


@dataclass(frozen=True)
class _Frame:
    """Where values come to lie in the picture."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    width: int = WIDTH

    def x(self, value: float) -> float:
        span = (self.high_x - self.low_x) or 1.0
        return _LEFT + (value - self.low_x) / span * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        span = (self.high_y - self.low_y) or 1.0
        return HEIGHT - _BOTTOM - (value - self.low_y) / span * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, ticks: Sequence[float], y: Format, x_label: str, x: Format) -> str:
        parts = []
        for tick in ticks:
            at = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(y(tick))}</text>')
        for part in range(5):
            value = self.low_x + (self.high_x - self.low_x) * part / 4
            anchor = "start" if part == 0 else "end" if part == 4 else "middle"
            place = f'x="{self.x(value):.1f}" y="{HEIGHT - 18}" text-anchor="{anchor}"'
            parts.append(f'<text class="tick" {place}>{escape(x(value))}</text>')
        parts.append(
            f'<text class="tick" x="{self.width - _RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(x_label)}</text>'
        )
        return "".join(parts)


def _svg(title: str, body: str, height: float = HEIGHT, width: int = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title)}">{body}</svg>'


def _nothing(title: str) -> str:
    return f'<p class="nothing" role="note">{escape(title)}: nothing was recorded.</p>'
