"""``python -m benchmarks``: measure, and write a table, JSON and charts."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.launch import MALLOC_SETTINGS, MeasurementError, Serving, measure
from benchmarks.results import Results, Timing, table
from benchmarks.systems import BASELINE, SYSTEMS

PARTS = ("speed", "memory", "layers", "overhead", "growth")
MOST_LAYERS = 64
LAYERS_MIB = 1024
NUM_WARMUP_STEPS = 3


def main() -> int:
    """Run what was asked for."""
    args = _parse()
    systems = [name for name in SYSTEMS if not args.systems or any(part.lower() in name.lower() for part in args.systems)]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    results = Results(facts=_facts(args))
    parts = args.only or PARTS
    for part in parts:
        globals()[f"_{part}"](results, systems, args)
        results.write(out / "results.json")
    text = table(results, BASELINE)
    (out / "table.md").write_text(text + "\n")
    print(text)
    _print_rest(results)
    from benchmarks.charts import draw

    for path in draw(results, out):
        print(f"chart: {path}")
    print(f"all figures: {out / 'results.json'}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare Shardwise with every peer that is installed. Systems take turns step by step in one run.",
        epilog="example: python -m benchmarks --only speed memory --rounds 20 --systems ddp fsdp2 shardwise",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="systems whose names contain one of these (default: all)")
    parser.add_argument("--workloads", nargs="+", default=["compute", "comm"], metavar="NAME", help="(default: compute comm)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="steps of each system (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks for step times (default: %(default)s)")
    parser.add_argument("--memory-ranks", type=int, default=4, metavar="N", help="ranks for memory (default: %(default)s)")
    parser.add_argument("--out", default="benchmarks/out", metavar="PATH", help="folder for results (default: %(default)s)")
    return parser.parse_args()


def _facts(args: argparse.Namespace) -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "threads a rank": 1,
        "ranks for step times": args.ranks,
        "ranks for memory": args.memory_ranks,
        "precision": "fp32, fused AdamW, no clipping",
        "malloc": "default for step times; by column for memory",
        "spread": "median over rounds (middle half)",
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _speed(results: Results, systems: Sequence[str], args: argparse.Namespace) -> None:
    """Each system has processes of its own, so that none works in a heap that another has left; they take turns step by step."""
    chosen = list(systems) if BASELINE in systems else [BASELINE, *systems]
    for workload in args.workloads:
        _say(f"step times, {workload}: {len(chosen)} systems in turns, {args.rounds} rounds ...")
        run = uuid.uuid4().hex[:8]
        serving: dict[str, Serving] = {}
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
        try:
            for name in chosen:
                serving[name] = Serving(workload, name, ranks=args.ranks)
                serving[name].step(0)
            for step in range(1, NUM_WARMUP_STEPS + args.rounds):
                shift = step % len(chosen)
                for name in chosen[shift:] + chosen[:shift]:
                    answers[name].append(serving[name].step(step))
        finally:
            for each in serving.values():
                each.close()
        results.timings[workload] = [
            Timing(
                name,
                run,
                True,
                tuple(answer["seconds"] for answer in answers[name][NUM_WARMUP_STEPS - 1 :]),
                answers[name][-1]["wire_bytes"],
            )
            for name in chosen
        ]


def _memory(results: Results, systems: Sequence[str], args: argparse.Namespace) -> None:
    for malloc in MALLOC_SETTINGS:
        column = f"compute, {args.memory_ranks} ranks, {malloc} malloc"
        values = results.peaks_mib.setdefault(column, {})
        for name in systems:
            if name == "alone":
                continue
            _say(f"peak memory of {name}, {malloc} malloc ...")
            try:
                by_rank = measure(
                    "memory", {"workload": "compute", "system": name, "num_steps": 5}, ranks=args.memory_ranks, malloc=malloc
                )
            except MeasurementError as error:
                _say(str(error))
                continue
            values[name] = max(rank["peak_mib"] for rank in by_rank)


def _layers(results: Results, systems: Sequence[str], args: argparse.Namespace) -> None:
    """By bisection: the deepest model whose peak stays under a limit on every rank."""
    for malloc in MALLOC_SETTINGS:
        values = results.most_layers.setdefault(f"{LAYERS_MIB} MiB a rank, {malloc} malloc", {})
        for name in systems:
            if name in ("alone", "FSDP2, no reshard") or (name.startswith("Shardwise") and not name.endswith("3")):
                continue
            _say(f"most layers under {LAYERS_MIB} MiB: {name}, {malloc} malloc ...")
            low, high = 0, MOST_LAYERS + 1
            while high - low > 1:
                middle = (low + high + 1) // 2 if high <= MOST_LAYERS else MOST_LAYERS if low == 0 else (low + high) // 2
                low, high = (middle, high) if _fits(name, middle, malloc, args.memory_ranks) else (low, middle)
            values[name] = low


def _fits(name: str, num_blocks: int, malloc: str, ranks: int) -> bool:
    arguments = {"workload": "", "system": name, "num_steps": 3, "num_blocks": num_blocks}
    try:
        peak = max(rank["peak_mib"] for rank in measure("memory", arguments, ranks=ranks, malloc=malloc))
    except MeasurementError as error:
        _say(str(error))
        return False
    _say(f"  {num_blocks} layers: {peak:.0f} MiB")
    return peak <= LAYERS_MIB


def _overhead(results: Results, systems: Sequence[str], args: argparse.Namespace) -> None:
    for stage in range(4):
        name = f"Shardwise stage {stage}"
        if name in systems:
            _say(f"CPU seconds inside the engine, stage {stage} ...")
            by_rank = measure("overhead", {"workload": "compute", "stage": stage, "num_steps": 6}, ranks=args.ranks)
            results.overhead[name] = max(by_rank, key=lambda rank: float(rank["part"]))


def _growth(results: Results, systems: Sequence[str], args: argparse.Namespace) -> None:
    for ranks in (1, 2, 4, 8):
        for factor in (1, 2, 4):
            _say(f"growth: {ranks} ranks, {factor}x layers ...")
            by_rank = measure("state", {"workload": "comm", "stage": 3, "factor": factor}, ranks=ranks)
            worst = max(by_rank, key=lambda rank: int(rank["state_bytes"]))
            results.growth.append({"ranks": ranks, "factor": factor, **worst})


def _print_rest(results: Results) -> None:
    for name, values in results.overhead.items():
        print(f"{name}: {values['part']:.1%} of the step's CPU seconds are spent in the engine's own code")
    for row in results.growth:
        per_param = row["state_bytes"] / row["num_params"]
        print(
            f"{row['ranks']} ranks, {row['factor']}x layers: {per_param:.2f} bytes of state a parameter and rank, "
            f"{1e6 * row['seconds_per_token'] / row['factor']:.0f} us a token and 1x layers"
        )


if __name__ == "__main__":
    sys.exit(main())
