"""The results as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.results import Results
from benchmarks.systems import BASELINE

OURS, THEIRS = "#1f6f5c", "#9aa5b1"


def draw(results: Results, folder: Path) -> list[Path]:
    """Write all charts for which there are figures; returns their paths. Without matplotlib there are none, and it says so."""
    try:
        import matplotlib
    except ImportError:
        print("no charts: matplotlib is missing (pip install -c constraints.txt -e '.[bench]')")
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    if results.timings or results.peaks_mib:
        paths.append(_bars(results, folder / "comparison.svg", pyplot))
    if results.growth:
        paths.append(_lines(results, folder / "growth.svg", pyplot))
    return paths


def _bars(results: Results, path: Path, pyplot: Any) -> Path:
    panels: list[tuple[str, dict[str, float], dict[str, tuple[float, float]]]] = []
    for workload in results.timings:
        ratios = results.ratios(workload, BASELINE)
        spread = {name: (ratio.median - ratio.low, ratio.high - ratio.median) for name, ratio in ratios.items()}
        panels.append((f"step time / {BASELINE}, {workload}-bound", {n: r.median for n, r in ratios.items()}, spread))
    panels += [(f"peak MiB a rank\n{name}", values, {}) for name, values in results.peaks_mib.items()]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 4.2), squeeze=False)
    for axis, (title, values, spread) in zip(axes[0], panels, strict=True):
        names = list(values)[::-1]
        colors = [OURS if name.startswith("Shardwise") else THEIRS for name in names]
        errors = [[spread[n][side] for n in names] for side in (0, 1)] if spread else None
        axis.barh(names, [values[name] for name in names], color=colors, xerr=errors, ecolor="#444", capsize=2)
        for place, name in enumerate(names):
            text = f"{values[name]:.2f}" if spread else f"{values[name]:.0f}"
            axis.text(values[name], place, f" {text}", va="center", fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
        if spread:
            axis.axvline(1.0, color="#444", linewidth=0.8, linestyle=":")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _lines(results: Results, path: Path, pyplot: Any) -> Path:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for factor in sorted({row["factor"] for row in results.growth}):
        rows = sorted((row for row in results.growth if row["factor"] == factor), key=lambda row: row["ranks"])
        left.plot([r["ranks"] for r in rows], [r["state_bytes"] / 2**20 for r in rows], "o-", label=f"{factor}x layers")
    ranks = sorted({row["ranks"] for row in results.growth})
    for factor in sorted({row["factor"] for row in results.growth}):
        first = next(row for row in results.growth if row["ranks"] == ranks[0] and row["factor"] == factor)
        left.plot(ranks, [first["state_bytes"] / 2**20 / n for n in ranks], ":", color="#888", linewidth=0.8)
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    left.set_title("state MiB a rank, stage 3 (dotted: 1/N)", fontsize=10)
    left.set_xlabel("ranks")
    left.legend(fontsize=8)
    for count in ranks:
        rows = sorted((row for row in results.growth if row["ranks"] == count), key=lambda row: row["factor"])
        times = [1e6 * row["seconds_per_token"] / row["factor"] for row in rows]
        right.plot([row["factor"] for row in rows], times, "o-", label=f"{count} ranks")
    right.set_title("microseconds a token, divided by layers", fontsize=10)
    right.set_xlabel("layers, times 10")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
