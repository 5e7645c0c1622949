"""How far a run is: a bar on a terminal, a plain line every few seconds elsewhere. Knows nothing of models or ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

LINE_INTERVAL_SECONDS = 5.0

OnStep = Callable[[int, float], None]
"""Takes the number of steps done and the loss of the last one."""


class Pace:
    """Speed and time left, from the steps done so far. The first is left out: it warms up."""

    def __init__(self, num_steps: int, tokens_per_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_steps = num_steps
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._first_seconds = clock()
        self._first_step = 0
        self._step = 0
        self._seconds = self._first_seconds

    def tick(self, step: int) -> None:
        """Take note that a step is done."""
        self._step, self._seconds = step, self._clock()
        if self._first_step == 0:
            self._first_step, self._first_seconds = step, self._seconds

    @property
    def seconds_per_step(self) -> float:
        """Mean duration of a step; 0 while there is none to measure."""
        num_measured = self._step - self._first_step
        return (self._seconds - self._first_seconds) / num_measured if num_measured else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks a second; 0 while unknown."""
        return self._tokens_per_step / self.seconds_per_step if self.seconds_per_step else 0.0

    def describe(self) -> tuple[str, str]:
        """Speed and time left, as text."""
        if not self.seconds_per_step:
            return f"{'-':>6} tokens/s", "-:--:-- left"
        left = timedelta(seconds=round((self._num_steps - self._step) * self.seconds_per_step))
        return f"{self.tokens_per_second:>6,.0f} tokens/s", f"{left} left"


class _StepColumn(ProgressColumn):
    """``step  12/240``, of constant width."""

    def render(self, task: Task) -> Text:
        """Text of the column."""
        total = str(int(task.total or 0))
        return Text(f"step {int(task.completed):>{len(total)}}/{total}")


@contextmanager
def show_progress(console: Console | None, num_steps: int, pace: Pace) -> Iterator[OnStep]:
    """Show how far a run is while the context lasts; without a console, nothing is shown."""
    if console is None:
        yield lambda step, loss: pace.tick(step)
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
    )
    with Progress(*columns, console=console, expand=True) as progress:
        speed, left = pace.describe()
        task = progress.add_task("train", total=num_steps, loss="-.----", speed=speed, left=left)

        def on_step(step: int, loss: float) -> None:
            pace.tick(step)
            speed, left = pace.describe()
            progress.update(task, completed=step, loss=f"{loss:.4f}", speed=speed, left=left)

        yield on_step


def _line_writer(console: Console, num_steps: int, pace: Pace) -> OnStep:
    last_seconds = -LINE_INTERVAL_SECONDS

    def on_step(step: int, loss: float) -> None:
        nonlocal last_seconds
        pace.tick(step)
        now = time.monotonic()
        if now - last_seconds >= LINE_INTERVAL_SECONDS or step == num_steps:
            last_seconds = now
            speed, left = pace.describe()
            line = f"step {step:>{len(str(num_steps))}}/{num_steps}  loss {loss:.4f}  {speed}  {left}"
            console.print(line, soft_wrap=True, highlight=False)

    return on_step
