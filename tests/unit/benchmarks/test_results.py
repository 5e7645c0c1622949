"""Ratios are drawn within one interleaved run only, what is written can be read again, and broken bounds are named."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bounds import verdicts
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


def test_each_run_has_a_baseline_of_its_own() -> None:
    slow = replace(DDP, run="b", seconds=(2.0, 4.0, 8.0, 2.0))
    results = Results(
        timings={"comm": [DDP, OURS, slow, replace(OURS, system="FSDP2", run="b", seconds=(3.0, 6.0, 12.0, 3.0))]}
    )
    ratios = results.ratios("comm", "DDP")
    assert ratios["Shardwise stage 3"].median == pytest.approx(1.1) and ratios["FSDP2"].median == pytest.approx(1.5)


def test_results_survive_a_file(tmp_path: Path) -> None:
    results = Results({"cores": 2}, {"comm": [DDP, OURS]}, {"4 ranks": {"DDP": 533.0}}, {}, {}, [])
    results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == results
    row = table(results, "DDP").split("\n")[-1]
    assert row == "| Shardwise stage 3 | 1.10 (1.10-1.10) | 3.0 MB |  |"


def broken(results: Results) -> list[str]:
    return [verdict.what for verdict in verdicts(results, "DDP") if not verdict.holds]


def test_bounds_on_step_times() -> None:
    results = Results(timings={"compute": [DDP, OURS]})
    assert [str(verdict) for verdict in verdicts(results, "DDP")] == [
        "holds  step time of stage 3 / DDP, compute: 1.1 (must be <= 1.1)"
    ]
    slow = replace(OURS, seconds=(1.2, 2.4, 4.8, 1.2))
    assert broken(Results(timings={"compute": [DDP, slow]})) == ["step time of stage 3 / DDP, compute"]
    assert broken(Results(timings={"comm": [DDP, slow]})) == []
    assert broken(Results(timings={"compute": [DDP, replace(OURS, system="Shardwise stage 1")]})) != []
    assert verdicts(Results(timings={"compute": [DDP, replace(OURS, system="FSDP2")]}), "DDP") == []


def test_bounds_on_memory_and_overhead() -> None:
    column, layers = "compute, 4 ranks, default malloc", "1024 MiB a rank, default malloc"
    good = Results(
        peaks_mib={column: {"Shardwise stage 3": 275.0, "DDP": 600.0}},
        most_layers={layers: {"Shardwise stage 3": 58}},
        overhead={"Shardwise stage 0": {"part": 0.05}},
    )
    assert broken(good) == [] and len(verdicts(good, "DDP")) == 3
    bad = Results(
        peaks_mib={column: {"Shardwise stage 3": 275.1}},
        most_layers={layers: {"Shardwise stage 3": 57}},
        overhead={"Shardwise stage 0": {"part": 0.051}},
    )
    assert len(broken(bad)) == 3


def test_bounds_on_growth() -> None:
    def row(ranks: int, factor: int, state_bytes: int, seconds: float) -> dict[str, float]:
        return {
            "ranks": ranks, "factor": factor, "num_params": 100 * factor, "state_bytes": state_bytes, "seconds_per_token": seconds
        }  # fmt: skip

    good = [row(1, 1, 1200, 1.0), row(1, 4, 4800, 3.9), row(4, 1, 300, 1.0), row(4, 4, 1200, 4.0)]
    assert broken(Results(growth=good)) == [] and len(verdicts(Results(growth=good), "DDP")) == 4
    bad = [row(1, 1, 1200, 1.0), row(1, 4, 4800, 4.4), row(4, 1, 400, 1.0)]
    assert broken(Results(growth=bad)) == [
        "time a token and layer, 4x layers / 1x, 1 ranks", "bytes of state a parameter, 4 ranks, 1x layers"
    ]  # fmt: skip
