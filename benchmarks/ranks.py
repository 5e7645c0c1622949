"""What one rank of a measurement does. Run as ``python -m benchmarks.ranks FOLDER`` by `launch`."""

from __future__ import annotations

import cProfile
import gc
import json
import os
import pstats
import resource
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import checkpoints, delayed, disk, offload
from benchmarks.launch import ANSWER
from benchmarks.systems import SYSTEMS, Running
from benchmarks.workloads import TINY, WORKLOADS, Workload, deep

NUM_WARMUP_STEPS = 3
MiB = 2**20


def serve(workload: str, system: str) -> None:
    """Do a step whenever a line comes in, and say how long it took. Other systems have processes of their own, which rest."""
    load = WORKLOADS[workload]
    running = SYSTEMS[system](load.model())
    for line in sys.stdin:
        step = int(line)
        batch = load.batch(step, dist.get_rank())
        before = running.wire_bytes()
        seconds, loss = _timed(running, batch)
        after = running.wire_bytes()
        sent = None if before is None or after is None else after - before
        answer = {"seconds": seconds, "loss": float(loss).hex(), "wire_bytes": sent}
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)


def _timed(running: Running, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, torch.Tensor]:
    dist.barrier()
    begin = time.perf_counter()
    loss = running.step(*batch)
    dist.barrier()
    return time.perf_counter() - begin, loss


def memory(workload: str, system: str, num_steps: int, num_blocks: int = 0) -> dict[str, Any]:
    """The most resident memory of a system above what the process held after imports and one step of a tiny model."""
    _one_step(SYSTEMS["DDP"](TINY.model()), TINY)
    gc.collect()
    before = _resident_bytes()
    load = deep(num_blocks) if num_blocks else WORKLOADS[workload]
    model = load.model()
    num_params = sum(param.numel() for param in model.parameters())
    running = SYSTEMS[system](model)
    del model
    gc.collect()
    built = _resident_bytes() - before
    Path("/proc/self/clear_refs").write_text("5")
    peaks = []
    for step in range(num_steps):
        running.step(*load.batch(step, dist.get_rank()))
        peaks.append((_peak_bytes() - before) / MiB)
    return {"peak_mib": peaks[-1], "by_step": peaks, "built_mib": built / MiB, "num_params": num_params}


def _one_step(running: Running, load: Workload) -> None:
    running.step(*load.batch(0, dist.get_rank()))


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().split("\n"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"This system does not say {key} of a process.")


def _resident_bytes() -> int:
    return _status("VmRSS:")


def _peak_bytes() -> int:
    return _status("VmHWM:")


def overhead(workload: str, stage: int, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Seconds inside the engine's own Python code, and inside the accounting, as parts of the CPU seconds of the step.

    A profiler of functions finds them. Of the accounting all counts, also what it calls: it writes records to a folder meanwhile.
    Of the engine, its own code counts.

    What the profiler itself takes is measured and taken off. Not counted: kernels of torch, and calls of the system, which a
    profiler of Python functions finds in the functions that make them. Steps with and without the profiler take turns, and the
    least of each counts: what else runs on the machine only adds.
    """
    import shardwise

    load = WORKLOADS[workload]
    model = load.model()
    running = SYSTEMS[f"Shardwise stage {stage}"](model)
    plain: list[float] = []
    profiled: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, shardwise.record(model, folder):
        for step in range(NUM_WARMUP_STEPS):
            running.step(*load.batch(step, dist.get_rank()))
        for _ in range(num_rounds):
            begin = _cpu_seconds()
            for step in range(num_steps):
                running.step(*load.batch(step, dist.get_rank()))
            plain.append((_cpu_seconds() - begin) / num_steps)
            profile = cProfile.Profile()
            profile.enable()
            for step in range(num_steps):
                running.step(*load.batch(step, dist.get_rank()))
            profile.disable()
            functions = _functions(profile)
            profiled.append({**_in_engine(functions, num_steps), "accounting_seconds": _in_accounting(functions) / num_steps})
    least = min(profiled, key=lambda found: float(found["engine_seconds"]))
    accounting = min(float(found["accounting_seconds"]) for found in profiled)
    return {
        **least,
        "step_seconds": min(plain),
        "part": least["engine_seconds"] / min(plain),
        "accounting_seconds": accounting,
        "accounting_part": accounting / min(plain),
    }


def _in_engine(stats: dict[Function, Any], num_steps: int) -> dict[str, Any]:
    """What a profile shows of the engine, a step."""
    engine = {function for function in stats if _is_engine(*function)}
    num_calls = sum(stats[function][1] for function in engine)
    num_made = sum(calls[1] for row in stats.values() for caller, calls in row[4].items() if caller in engine)
    seconds_called, seconds_calling = _profiler_seconds()
    own = sum(stats[function][2] for function in engine) - num_calls * seconds_called - num_made * seconds_calling
    return {
        "engine_seconds": own / num_steps,
        "num_calls": num_calls / num_steps,
        "largest": _largest(stats, engine, num_steps),
    }


Function = tuple[str, int, str]
_SYSTEM_CALLS = {("cross_memory", "read"), ("malloc", "release_unused")}
"""Functions that do nothing but call the system: their time is that of copying, or of giving memory back."""


def _is_engine(path: str, line: int, name: str) -> bool:
    package = f"{os.sep}shardwise{os.sep}"
    is_ours = package in path and f"{package}recipes{os.sep}" not in path and not _is_accounting(path, line, name)
    return is_ours and (Path(path).stem, name) not in _SYSTEM_CALLS


def _is_accounting(path: str, line: int, name: str) -> bool:
    places = ("telemetry", "core/records.py", "core/events.py", "api/recording.py")
    return any(f"/shardwise/{place}" in path.replace(os.sep, "/") for place in places)


def _in_accounting(stats: dict[Function, Any]) -> float:
    """Seconds from where the accounting is called to where it returns, without what the profiler takes."""
    functions = {function for function in stats if _is_accounting(*function)}
    entered = [calls for name in functions for caller, calls in stats[name][4].items() if caller not in functions]
    seconds_called, seconds_calling = _profiler_seconds()
    num_calls = sum(stats[function][1] for function in functions)
    num_made = sum(calls[1] for row in stats.values() for caller, calls in row[4].items() if caller in functions)
    return sum(float(calls[3]) for calls in entered) - num_calls * seconds_called - num_made * seconds_calling


def _functions(profile: cProfile.Profile) -> dict[Function, Any]:
    stats: Any = pstats.Stats(profile)
    functions: dict[Function, Any] = stats.stats
    return functions


def _largest(stats: dict[Function, Any], engine: set[Function], num_steps: int) -> dict[str, float]:
    """Seconds a step of the functions that take the most."""
    order = sorted(engine, key=lambda function: -stats[function][2])[:12]
    return {f"{Path(path).stem}.{name}": stats[path, line, name][2] / num_steps for path, line, name in order}


@cache
def _profiler_seconds(num_rounds: int = 300) -> tuple[float, float]:
    """What a call takes longer under the profiler: in the function that is called, and in the one that calls.

    As in a step: a few calls of different functions, after a kernel that has taken the caches. In a loop of nothing but calls the
    profiler takes half of that, and its own time would be counted as the engine's.
    """
    names = [f"nothing_{number}" for number in range(20)]
    made: dict[str, Any] = {}
    exec("\n".join(f"def {name}(): pass" for name in names), made)
    functions = [made[name] for name in names]
    values = torch.zeros(2**24)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    profile = cProfile.Profile()
    for number in range(2 * num_rounds):
        is_profiled = number % 2 == 1
        values.add_(1.0)
        if is_profiled:
            profile.enable()
        begin = time.perf_counter()
        for function in functions:
            function()
        seconds[is_profiled].append((time.perf_counter() - begin) / len(functions))
        profile.disable()
    longer = max(0.0, statistics.median(seconds[True]) - statistics.median(seconds[False]))
    called = _seconds_of_an_empty_call()
    return called, max(0.0, longer - called)


def _seconds_of_an_empty_call(num_calls: int = 200_000) -> float:
    """What the profiler finds in a function that does nothing: its own time, with the caches to itself."""

    def nothing() -> None:
        pass

    profile = cProfile.Profile()
    profile.enable()
    for _ in range(num_calls):
        nothing()
    profile.disable()
    return next(float(row[2]) for (_, _, name), row in _functions(profile).items() if name == "nothing") / num_calls


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def state(workload: str, stage: int, factor: int) -> dict[str, Any]:
    """Bytes of state that a rank holds between steps, by the ledger and without free workspace, and seconds a token."""
    import shardwise
    from shardwise.core.ledger import Kind

    load = WORKLOADS[workload].deeper(factor)
    model = load.model()
    num_params = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    handle = shardwise.shard(model, optimizer, stage=stage)
    seconds = []
    for step in range(6):
        tokens, targets = load.batch(step, dist.get_rank())
        dist.barrier()
        begin = time.perf_counter()
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    tokens_a_step = load.num_sequences * load.num_tokens
    return {
        "num_params": num_params,
        "state_bytes": handle.ledger.live_bytes - handle.ledger.live(Kind.POOL),
        "seconds": sorted(seconds)[len(seconds) // 2],
        "seconds_per_token": sorted(seconds)[len(seconds) // 2] / tokens_a_step,
    }


JOBS = {
    "serve": serve,
    "memory": memory,
    "overhead": overhead,
    "state": state,
    "checkpoint_sides": checkpoints.sides,
    "checkpoint_every_ten": checkpoints.every_ten,
    "checkpoint_load_peak": checkpoints.load_peak,
    "sim_device_peak": offload.device_peak,
    "sim_host_update": offload.host_update,
    "sim_delayed_steps": delayed.step_times,
    "delayed_losses": delayed.losses,
    "disk_update": disk.update,
    "disk_steps": disk.steps,
}


def main() -> None:
    """Do the job of a folder, and write down what was measured."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    backend = "gloo"
    if job["what"].startswith("sim_"):
        from shardwise.devices import sim

        sim.enable(ranks)
        torch.accelerator.set_device_index(rank)
        backend = "cpu:gloo,sim:sim"
    dist.init_process_group(
        backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
    )
    try:
        result = JOBS[job["what"]](**job["arguments"])
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
