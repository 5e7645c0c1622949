"""Ratios are drawn within one interleaved run only, and what is written can be read again."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.results import ComparisonError, Results, Timing, compare, table

DDP = Timing("DDP", "a", True, (1.0, 2.0, 4.0, 1.0))
OURS = Timing("Shardwise stage 3", "a", True, (1.1, 2.2, 4.4, 2.0), wire_bytes=3_000_000)


def test_ratio_is_taken_round_by_round() -> None:
    # The medians alone would give 2.1 / 1.5: the machine was slow in some rounds.
    ratio = compare(OURS, DDP)
    assert ratio.median == pytest.approx(1.1) and ratio.low == pytest.approx(1.1) and ratio.high == pytest.approx(1.1)


def test_runs_that_did_not_take_turns_are_not_compared() -> None:
    with pytest.raises(ComparisonError, match=r"in run b, DDP in run a. Measure both in one run"):
        compare(replace(OURS, run="b"), DDP)
    with pytest.raises(ComparisonError, match="steps of DDP were not interleaved"):
        compare(OURS, replace(DDP, is_interleaved=False))
    results = Results(timings={"comm": [DDP, replace(OURS, run="b")]})
    with pytest.raises(ComparisonError):
        table(results, "DDP")


def test_results_survive_a_file(tmp_path: Path) -> None:
    results = Results({"cores": 2}, {"comm": [DDP, OURS]}, {"4 ranks": {"DDP": 533.0}}, {}, {}, [])
    results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == results
    row = table(results, "DDP").split("\n")[-1]
    assert row == "| Shardwise stage 3 | 1.10 (1.10-1.10) | 3.0 MB |  |"
