"""How far a run is, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console

from shardwise.core.ledger import Kind
from shardwise.recipes.progress import Pace, Status, describe_peaks, show_progress
from shardwise.recipes.rank_table import RankStatus, rank_table

HELD = {Kind.PARAM: 3 * 2**20, Kind.OPTIM: 6 * 2**20}


class Clock:
    """Seconds that pass when told."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_pace_leaves_the_first_step_out() -> None:
    clock = Clock()
    pace = Pace(num_steps=100, items_per_step=500, clock=clock)
    clock.seconds = 60.0
    pace.tick(1)
    assert pace.items_per_second == 0
    for step in range(2, 12):
        clock.seconds += 0.5
        pace.tick(step)
    assert pace.seconds_per_step == pytest.approx(0.5)
    assert pace.items_per_second == pytest.approx(1000)
    assert pace.describe() == (" 1,000 tokens/s", "0:00:44 left")


def test_evaluations_do_not_slow_the_pace() -> None:
    clock = Clock()
    pace = Pace(num_steps=4, items_per_step=10, item="images", clock=clock)
    for step in (1, 2, 3):
        clock.seconds += 2.0
        pace.tick(step)
        with pace.paused():
            clock.seconds += 100.0
    assert pace.seconds_per_step == pytest.approx(2.0)
    assert pace.describe() == ("     5 images/s", "0:00:02 left")


def test_of_many_ranks_the_range_of_peaks_is_shown() -> None:
    assert describe_peaks([2**20 * count for count in (5, 1, 3, 2, 4)]) == "peak 1 to 5 MiB"


def show(*, is_terminal: bool, **options: object) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=140, **options)  # type: ignore[arg-type]
    with show_progress(console, 3, Pace(3, 10)) as on_step:
        for step in (1, 2, 3):
            on_step(Status(step, 5.0 - step, [RankStatus(300 * 2**20, HELD, 5 * 2**20, 0.25), RankStatus(310 * 2**20)]))
    return screen.getvalue()


def test_terminal_shows_a_bar_and_gets_its_cursor_back() -> None:
    shown = show(is_terminal=True)
    assert "step 3/3" in shown
    assert "2.0000" in shown
    assert "peak 300, 310 MiB" in shown
    assert "━" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_terminal_shows_what_each_rank_holds_sends_and_waits() -> None:
    shown = show(is_terminal=True)
    assert "rank 0" in shown and "rank 1" not in shown  # Of rank 1 nothing is known yet.
    assert "9 MiB" in shown and "5 MiB" in shown and "25%" in shown
    assert "parameter shards" in shown and "optimizer state" in shown


def test_bars_have_the_length_of_what_is_held() -> None:
    ranks = [RankStatus(1, HELD), RankStatus(1, {Kind.PARAM: 3 * 2**20})]
    screen = io.StringIO()
    Console(file=screen, width=140).print(rank_table(ranks, has_colour=False))
    bars = [line.split()[2] for line in screen.getvalue().splitlines() if line.startswith("rank")]
    assert bars == ["P" * 12 + "O" * 24, "P" * 12]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_every_kind_has_its_own_mark_at_every_width(width: int) -> None:
    screen = io.StringIO()
    status = RankStatus(1, dict.fromkeys(Kind, 2**30), 2**30, 0.5)
    Console(file=screen, width=width).print(rank_table([status] * 12, has_colour=False, width=width))
    lines = screen.getvalue().splitlines()
    assert all(any(f" {kind.value}" in line for line in lines) for kind in Kind)
    bars = [line.split()[2] for line in lines if line.startswith("rank")]
    assert len(bars) == 8 and "and 4 more" in lines
    assert len(set(bars[0])) == len(Kind)
    assert all(line.rstrip().endswith("50%") for line in lines if line.startswith("rank"))


def test_elsewhere_there_are_plain_lines_now_and_then_and_at_the_end() -> None:
    lines = show(is_terminal=False).splitlines()
    assert [line.split()[:4] for line in lines] == [["step", "1/3", "loss", "4.0000"], ["step", "3/3", "loss", "2.0000"]]
    assert "\x1b" not in "".join(lines)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[38;5" not in show(is_terminal=True)


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    pace = Pace(2, 10)
    with show_progress(None, 2, pace) as on_step:
        on_step(Status(1, 3.0))
        on_step(Status(2, 2.0))
    assert capsys.readouterr() == ("", "")
    assert pace.items_per_second > 0
