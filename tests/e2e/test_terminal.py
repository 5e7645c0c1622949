"""`shardwise train` on a terminal: the bar, the table of ranks, and the end of both."""

import re
from pathlib import Path

import pytest

from tests.e2e.commands import in_terminal
from tests.e2e.test_train import FOREVER, TINY

pytestmark = pytest.mark.e2e
SAVING = ("--set", "train.save_every=3", "--out", "run")


def plain(screen: str) -> list[str]:
    """All lines that were ever on a screen, without colours and moves of the cursor."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", screen))


@pytest.mark.parametrize("width", [80, 140])
def test_training_that_saves_runs_to_its_end_on_a_terminal(tmp_path: Path, width: int) -> None:
    answer = in_terminal(*TINY, *SAVING, "--steps", "12", folder=tmp_path, width=width)
    lines = plain(answer.stdout)
    assert answer.exit_code == 0, "\n".join(lines)
    assert "Report:     run/report.html" in lines
    bars = [line for line in lines if line.startswith("step 12/12 ━")]
    assert bars and all(line.rstrip().endswith("left") or "peak " in line for line in bars)
    assert ("peak " in bars[-1]) == (width == 140)
    # A rank is one line, with all its figures; each kind of memory has its colour, checkpoints' copies too.
    assert any(re.fullmatch(r"rank 1  █+ +[0-9.]+ KiB +[0-9.]+ KiB +\d+% *", line) for line in lines)
    assert any("█ copies for checkpoints" in line for line in lines)
    assert max(map(len, bars)) <= width
    assert answer.stdout.rindex("\x1b[?25h") > answer.stdout.rindex("\x1b[?25l")


def test_interrupt_key_ends_all_ranks_and_says_how_to_go_on(tmp_path: Path) -> None:
    # That the terminal is let go of means that no process holds it any more: all ranks have ended.
    answer = in_terminal(*FOREVER, *SAVING, folder=tmp_path, width=80, press=(r"step +\d\d/", b"\x03"))
    assert answer.exit_code == 130
    said = " ".join(plain(answer.stdout)[-3:])
    assert "Traceback" not in answer.stdout
    assert re.search(r"To go on after step \d+, with the same numbers: shardwise train --resume run", said)
    assert any(line.startswith("shardwise: Stopped by SIGINT: all ranks were ended.") for line in plain(answer.stdout))
    assert answer.stdout.rindex("\x1b[?25h") > answer.stdout.rindex("\x1b[?25l")
