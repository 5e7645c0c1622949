"""What one rank of a measurement does. Run as ``python -m benchmarks.ranks FOLDER`` by `launch`."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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


def overhead(workload: str, stage: int, num_steps: int) -> dict[str, Any]:
    """CPU seconds inside the engine's own Python code as a part of those of the step, by a profiler of functions."""
    import cProfile
    import pstats

    load = WORKLOADS[workload]
    running = SYSTEMS[f"Shardwise stage {stage}"](load.model())
    for step in range(NUM_WARMUP_STEPS):
        running.step(*load.batch(step, dist.get_rank()))
    begin = _cpu_seconds()
    for step in range(num_steps):
        running.step(*load.batch(step, dist.get_rank()))
    plain = _cpu_seconds() - begin
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    for step in range(num_steps):
        running.step(*load.batch(step, dist.get_rank()))
    profile.disable()
    stats: Any = pstats.Stats(profile)
    own = sum(row[2] for (path, _, _), row in stats.stats.items() if f"shardwise{os.sep}" in path)
    return {"engine_seconds": own / num_steps, "step_seconds": plain / num_steps, "part": own / plain}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def state(workload: str, stage: int, factor: int) -> dict[str, Any]:
    """Bytes that a rank holds between steps, by the ledger, and seconds a token."""
    import shardwise

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
        "state_bytes": handle.ledger.live_bytes,
        "seconds": sorted(seconds)[len(seconds) // 2],
        "seconds_per_token": sorted(seconds)[len(seconds) // 2] / tokens_a_step,
    }


JOBS = {"serve": serve, "memory": memory, "overhead": overhead, "state": state}


def main() -> None:
    """Do the job of a folder, and write down what was measured."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
    )
    try:
        result = JOBS[job["what"]](**job["arguments"])
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
