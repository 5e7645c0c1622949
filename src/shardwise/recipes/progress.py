"""How far a run is: a bar on a terminal, a plain line every few seconds elsewhere. Knows nothing of models or ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from shardwise.recipes.rank_table import RankStatus, rank_table

LINE_INTERVAL_SECONDS = 5.0
NUM_PEAKS_SHOWN = 4
WIDTH_FOR_PEAKS = 110
"""Of a terminal. On a narrower one there is no room for them beside the bar."""
_MIB = 1024**2


@dataclass(frozen=True)
class Status:
    """Where a run is: steps done, the loss of the last one, and what each rank did in it."""

    step: int
    loss: float
    ranks: Sequence[RankStatus] = ()

    @property
    def peak_bytes(self) -> list[int]:
        """The most memory that each rank has had."""
        return [rank.peak_bytes for rank in self.ranks]


OnStep = Callable[[Status], None]


class Pace:
    """Speed and time left, from the steps done so far. The first is left out: it warms up."""

    def __init__(
        self, num_steps: int, items_per_step: int, item: str = "tokens", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self._items_per_step = items_per_step
        self._item = item
        self._clock = clock
        self._first_seconds = clock()
        self._first_step = 0
        self._step = 0
        self._seconds = self._first_seconds
        self._paused_seconds = 0.0

    def tick(self, step: int) -> None:
        """Take note that a step is done."""
        self._step, self._seconds = step, self._clock() - self._paused_seconds
        if self._first_step == 0:
            self._first_step, self._first_seconds = step, self._seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not the steps' own, such as an evaluation."""
        start_seconds = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - start_seconds

    @property
    def seconds_per_step(self) -> float:
        """Mean duration of a step; 0 while there is none to measure."""
        num_measured = self._step - self._first_step
        return (self._seconds - self._first_seconds) / num_measured if num_measured else 0.0

    @property
    def items_per_second(self) -> float:
        """Items of all ranks a second; 0 while unknown."""
        return self._items_per_step / self.seconds_per_step if self.seconds_per_step else 0.0

    def describe(self) -> tuple[str, str]:
        """Speed and time left, as text."""
        if not self.seconds_per_step:
            return f"{'-':>6} {self._item}/s", "-:--:-- left"
        left = timedelta(seconds=round((self._num_steps - self._step) * self.seconds_per_step))
        return f"{self.items_per_second:>6,.0f} {self._item}/s", f"{left} left"


def describe_peaks(peak_bytes: Sequence[int]) -> str:
    """The peak of each rank, or of many ranks the range.

    >>> describe_peaks([300 * 1024**2, 310 * 1024**2]), describe_peaks([])
    ('peak 300, 310 MiB', '')
    """
    if not peak_bytes:
        return ""
    sizes = [f"{round(count / _MIB):,}" for count in peak_bytes]
    if len(sizes) > NUM_PEAKS_SHOWN:
        return f"peak {round(min(peak_bytes) / _MIB):,} to {round(max(peak_bytes) / _MIB):,} MiB"
    return f"peak {', '.join(sizes)} MiB"


class _StepColumn(ProgressColumn):
    """``step  12/240``, of constant width, in one line."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """Text of the column."""
        total = str(int(task.total or 0))
        return Text(f"step {int(task.completed):>{len(total)}}/{total}")


@contextmanager
def show_progress(console: Console | None, num_steps: int, pace: Pace) -> Iterator[OnStep]:
    """Show how far a run is while the context lasts; without a console, nothing is shown."""
    if console is None:
        yield lambda status: pace.tick(status.step)
    elif console.is_terminal:
        with _bar(console, num_steps, pace) as on_step:
            yield on_step
    else:
        yield _line_writer(console, num_steps, pace)


@contextmanager
def _bar(console: Console, num_steps: int, pace: Pace) -> Iterator[OnStep]:
    columns = (
        _StepColumn(),
        BarColumn(bar_width=None),
        TextColumn("loss [bold]{task.fields[loss]}[/bold]"),
        TextColumn("{task.fields[speed]}", style="dim"),
        TextColumn("{task.fields[left]}", style="dim"),
        TextColumn("{task.fields[peaks]}", style="dim"),
    )
    progress = Progress(*columns, console=console, expand=True)
    with Live(progress, console=console, refresh_per_second=4) as live:
        speed, left = pace.describe()
        task = progress.add_task("train", total=num_steps, loss="-.----", speed=speed, left=left, peaks="")

        def on_step(status: Status) -> None:
            pace.tick(status.step)
            speed, left = pace.describe()
            peaks = describe_peaks(status.peak_bytes) if console.width >= WIDTH_FOR_PEAKS else ""
            progress.update(task, completed=status.step, loss=f"{status.loss:.4f}", speed=speed, left=left, peaks=peaks)
            live.update(Group(progress, rank_table(status.ranks, has_colour=not console.no_color, width=console.width)))

        yield on_step


def _line_writer(console: Console, num_steps: int, pace: Pace) -> OnStep:
    last_seconds = -LINE_INTERVAL_SECONDS

    def on_step(status: Status) -> None:
        nonlocal last_seconds
        pace.tick(status.step)
        now = time.monotonic()
        if now - last_seconds >= LINE_INTERVAL_SECONDS or status.step == num_steps:
            last_seconds = now
            step = f"step {status.step:>{len(str(num_steps))}}/{num_steps}"
            line = "  ".join([step, f"loss {status.loss:.4f}", *pace.describe(), describe_peaks(status.peak_bytes)])
            console.print(line.rstrip(), soft_wrap=True, highlight=False)

    return on_step
