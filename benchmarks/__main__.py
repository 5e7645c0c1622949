"""``python -m benchmarks``: measure, and write a table, JSON and charts."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bounds import verdicts
from benchmarks.launch import MALLOC_SETTINGS, MeasurementError, Serving, measure
from benchmarks.results import Results, Timing, table
from benchmarks.systems import BASELINE, SYSTEMS
from benchmarks.workloads import WORKLOADS

PARTS = ("speed", "memory", "layers", "overhead", "growth", "checkpoint", "offload", "delayed")
MOST_LAYERS = 64
LAYERS_MIB = 1024
NUM_WARMUP_STEPS = 3


def main() -> int:
    """Run what was asked for."""
    args = _parse()
    systems = _chosen(args.systems)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    results = Results(facts=_facts(args))
    parts = args.only or PARTS
    for part in parts:
        globals()[f"_{part}"](results, systems, args)
        results.write(out / "results.json")
    text = table(results, BASELINE)
    (out / "table.md").write_text(text + "\n")
    if results.timings or results.peaks_mib or results.most_layers:
        print(text)
    _print_rest(results)
    found = verdicts(results, BASELINE)
    for verdict in found:
        print(verdict)
    from benchmarks.charts import draw

    for path in draw(results, out):
        print(f"chart: {path}")
    print(f"all figures: {out / 'results.json'}")
    return 0 if all(verdict.holds for verdict in found) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare Shardwise with every peer that is installed. Systems take turns step by step in one run. Ends "
        "with 1 if a bound of benchmarks/bounds.py does not hold.",
        epilog="example: python -m benchmarks --only speed memory --rounds 20 --systems ddp fsdp2 shardwise",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="systems whose names contain one of these (default: all)")
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=["compute", "comm"],
        metavar="NAME",
        help=f"for step times, of {', '.join(WORKLOADS)} (default: compute comm)",
    )
    parser.add_argument("--rounds", type=_count, default=15, metavar="N", help="steps of each system (default: %(default)s)")
    parser.add_argument(
        "--together",
        type=_count,
        default=4,
        metavar="N",
        help="systems in memory at once beside the baseline (default: %(default)s)",
    )
    parser.add_argument("--ranks", type=_count, default=2, metavar="N", help="ranks for step times (default: %(default)s)")
    parser.add_argument("--memory-ranks", type=_count, default=4, metavar="N", help="ranks for memory (default: %(default)s)")
    parser.add_argument("--out", default="benchmarks/out", metavar="PATH", help="folder for results (default: %(default)s)")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on was expected, not '{text}'")
    return int(text)


def _chosen(parts: Sequence[str] | None) -> list[str]:
    """Systems whose names contain one of the parts; all of them, if none is given."""
    systems = [name for name in SYSTEMS if not parts or any(part.lower() in name.lower() for part in parts)]
    if not systems:
        sys.exit(f"No system is called anything like {', '.join(parts or ())}. There are: {'; '.join(SYSTEMS)}.")
    return systems


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
    """A few systems at a time, since all of them are in memory at once; the baseline is among them each time."""
    others = [name for name in systems if name != BASELINE]
    for workload in args.workloads:
        timings = results.timings[workload] = []
        for at in range(0, max(1, len(others)), args.together):
            chosen = [BASELINE, *others[at : at + args.together]]
            _say(f"step times, {workload}: {', '.join(chosen)} in turns, {args.rounds} rounds ...")
            timings.extend(_take_turns(workload, chosen, args))


def _take_turns(workload: str, systems: Sequence[str], args: argparse.Namespace) -> list[Timing]:
    """Each system has processes of its own, so that none works in a heap that another has left; they take turns step by step."""
    serving: dict[str, Serving] = {}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}

    def do_step(name: str, step: int) -> None:
        try:
            if step == 0:
                serving[name] = Serving(workload, name, ranks=args.ranks)
            answers[name].append(serving[name].step(step))
        except MeasurementError as error:
            if name == BASELINE:
                raise
            _say(f"{name} is left out. {error}")
            serving.pop(name).close()
            del answers[name]

    try:
        for step in range(NUM_WARMUP_STEPS + args.rounds):
            order = list(answers)
            shift = step % len(order)
            for name in order[shift:] + order[:shift]:
                do_step(name, step)
    finally:
        for each in serving.values():
            each.close()
    run = uuid.uuid4().hex[:8]
    return [
        Timing(name, run, True, tuple(step["seconds"] for step in steps[NUM_WARMUP_STEPS:]), steps[-1]["wire_bytes"])
        for name, steps in answers.items()
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
            by_rank = measure(
                "overhead", {"workload": "compute", "stage": stage, "num_rounds": 5, "num_steps": 3}, ranks=args.ranks
            )
            results.overhead[name] = max(by_rank, key=lambda rank: float(rank["part"]))


def _growth(results: Results, systems: Sequence[str], args: argparse.Namespace) -> None:
    for ranks in (1, 2, 4, 8):
        for factor in (1, 2, 4):
            _say(f"growth: {ranks} ranks, {factor}x layers ...")
            by_rank = measure("state", {"workload": "comm", "stage": 3, "factor": factor}, ranks=ranks)
            worst = max(by_rank, key=lambda rank: int(rank["state_bytes"]))
            results.growth.append({"ranks": ranks, "factor": factor, **worst})


def _checkpoint(results: Results, systems: Sequence[str], args: argparse.Namespace) -> None:
    _say("saves and loads of 200M parameters with AdamW, Shardwise and DCP in turns ...")
    sides = measure("checkpoint_sides", {"num_rounds": 5}, ranks=2)
    for what in ("save", "load"):
        mine, theirs = (sides[0]["seconds"][f"{name} {what}"] for name in ("shardwise", "dcp"))
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        results.checkpoint[f"{what}, Shardwise / DCP"] = statistics.median(ratios)
        results.checkpoint[f"seconds of a {what}"] = statistics.median(mine)
    stall = max(sides, key=lambda rank: float(rank["stall_seconds"]))
    results.checkpoint["stall of a save beside the steps / one copy"] = stall["stall_seconds"] / stall["copy_seconds"]
    _say("ten steps with a save beside them and ten without, in turns ...")
    tens = measure("checkpoint_every_ten", {"num_rounds": 8}, ranks=2)[0]
    pairs = zip(tens["saved_seconds"], tens["plain_seconds"], strict=True)
    results.checkpoint["ten steps with a save / without"] = statistics.median(a / b for a, b in pairs)
    results.checkpoint["CPU seconds of a save / of ten steps"] = tens["cpu_part"]
    _say("peak memory of a load ...")
    for rank in measure("checkpoint_load_peak", {}, ranks=2):
        over = rank["peak_mib"] - rank["own_mib"] - rank["unit_mib"]
        known = results.checkpoint.get("MiB of a load above own shards and a unit", 0.0)
        results.checkpoint["MiB of a load above own shards and a unit"] = max(known, over)


def _offload(results: Results, systems: Sequence[str], args: argparse.Namespace) -> None:
    from benchmarks import offload

    for ranks in (2, 4):
        peaks = {}
        for system in offload.SYSTEMS:
            _say(f"peak on simulated devices, {ranks} ranks: {system} ...")
            found = measure("sim_device_peak", {"system": system, "workload": "comm"}, ranks=ranks)
            peaks[system] = max(rank["peak_mib"] for rank in found)
            results.offload[f"MiB on the device, {ranks} ranks: {system}"] = peaks[system]
            if found[0]["ledger_mib"]:
                error = max(abs(rank["ledger_mib"] / rank["peak_mib"] - 1) for rank in found)
                results.offload[f"ledger against the device, {ranks} ranks: {system}"] = error
        pairs = {"Shardwise stage 3": "FSDP2", "Shardwise stage 2": "FSDP2, not resharded"}
        for mine, theirs in pairs.items():
            results.offload[f"peak on the device, {ranks} ranks: {mine} / {theirs}"] = peaks[mine] / peaks[theirs]
    _say("updates on the host and plain calls, in turns ...")
    found = measure("sim_host_update", {"workload": "comm", "num_rounds": 10}, ranks=1)
    results.offload["host update, part of the memory limit"] = found[0]["part_of_limit"]
    results.offload["host update, GB/s"] = found[0]["gigabytes_per_second"]
    _disk(results)


def _disk(results: Results) -> None:
    for ranks in (1, 2):
        _say(f"updates on disk and a plain program, in turns, {ranks} ranks ...")
        found = measure("disk_update", {"workload": "comm", "num_rounds": 7}, ranks=ranks)[0]
        results.offload[f"disk update, {ranks} ranks, part of a plain program's rate"] = found["part_of_limit"]
        results.offload[f"disk update, {ranks} ranks, GB/s of a rank"] = found["gigabytes_per_second"]
    for sync, num_tokens in itertools.product(("exact", "delayed"), (16, 128, 768)):
        _say(f"steps with the optimizer on disk, in memory, and plain I/O, in turns: {num_tokens} tokens, {sync} updates ...")
        plan = {} if sync == "exact" else {"sync": "delayed", "delay_warmup": 0}
        # Delayed updates have one update that nothing runs beside: with few steps, that is what would be measured.
        num_steps = 4 if sync == "exact" else 16
        arguments = {"workload": "comm", "num_tokens": num_tokens, "num_rounds": 5, "num_steps": num_steps, "plan": plan}
        found = measure("disk_steps", arguments, ranks=1)[0]
        balance = found["compute_seconds"] / found["io_seconds"]
        what = f"optimizer on disk, {sync} updates, compute {balance:.1f} of I/O"
        results.offload[f"{what}: step / the larger of both"] = found["ratio"]


def _delayed(results: Results, systems: Sequence[str], args: argparse.Namespace) -> None:
    for workload in args.workloads:
        _say(f"exact and delayed updates, {workload}, in turns ...")
        found = measure("sim_delayed_steps", {"workload": workload, "num_rounds": args.rounds}, ranks=1)[0]
        results.delayed[f"step time, delayed / exact, {workload}"] = found["ratio"]
        results.delayed[f"seconds of an exact step, {workload}"] = found["exact_seconds"]
    _say("the loss of exact and of delayed updates ...")
    runs = [measure("delayed_losses", {"num_steps": 300, "seed": seed}, ranks=1)[0] for seed in range(3)]
    for what in ("trained", "held_out"):
        exact, delayed = (statistics.mean(run[f"{way}_{what}"] for run in runs) for way in ("exact", "delayed"))
        results.delayed[f"loss, {what.replace('_', ' ')}, exact"] = exact
        results.delayed[f"loss, {what.replace('_', ' ')}, delayed / exact"] = delayed / exact


def _print_rest(results: Results) -> None:
    for name, values in results.overhead.items():
        print(
            f"{name}: {values['part']:.1%} of the step's CPU seconds are spent in the engine's own code, "
            f"{values['accounting_part']:.2%} in the accounting"
        )
    for what, value in results.checkpoint.items():
        print(f"checkpoint: {what}: {value:.3g}")
    for what, value in results.offload.items():
        print(f"offload: {what}: {value:.3g}")
    for what, value in results.delayed.items():
        print(f"delayed: {what}: {value:.4g}")
    for row in results.growth:
        per_param = row["state_bytes"] / row["num_params"]
        print(
            f"{row['ranks']} ranks, {row['factor']}x layers: {per_param:.2f} bytes of state a parameter and rank, "
            f"{1e6 * row['seconds_per_token'] / row['factor']:.0f} us a token and 1x layers"
        )


if __name__ == "__main__":
    sys.exit(main())
