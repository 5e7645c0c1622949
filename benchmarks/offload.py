"""State off the device, on simulated accelerators: what each system holds there, and how fast the host updates."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.workloads import WORKLOADS

MiB = 2**20
SYSTEMS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP2, not resharded": {"reshard_after_forward": False},
    "FSDP2": {"reshard_after_forward": True},
    **{f"Shardwise stage {stage}": {"stage": stage} for stage in range(4)},
    "Shardwise stage 3, optimizer on the host": {"stage": 3, "tiers": {"optim": "host"}},
    "Shardwise stage 3, all on the host": {"stage": 3, "tiers": {"optim": "host", "grad": "host", "param": "host"}},
}


def device_peak(system: str, workload: str, num_steps: int = 3) -> dict[str, float]:
    """The most that this rank's device held in all steps but the making of the model; and what the ledger says."""
    from shardwise.core.ledger import Tier
    from shardwise.devices import sim

    warnings.simplefilter("ignore")
    rank, load = dist.get_rank(), WORKLOADS[workload]
    model: Any = load.model().to("sim")
    model, optimizer, ledger = _prepare(system, model)
    gc.collect()
    sim.reset_peak(rank)
    for step in range(num_steps):
        tokens, targets = (tensor.to("sim") for tensor in load.batch(step, rank))
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    traffic = sim.traffic(rank)
    booked = 0 if ledger is None else ledger.peak_on(Tier.DEVICE)
    peak = sim.memory(rank).peak_bytes
    return {
        "peak_mib": peak / MiB,
        "ledger_mib": booked / MiB,
        "in_mib": traffic.in_bytes / MiB,
        "out_mib": traffic.out_bytes / MiB,
    }


def _prepare(system: str, model: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    options, ledger = SYSTEMS[system], None
    if system == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif system.startswith("FSDP2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("sim", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if system.startswith("Shardwise"):
        import shardwise

        ledger = shardwise.shard(model, optimizer, **options).ledger
    return model, optimizer, ledger


def host_update(workload: str, num_rounds: int) -> dict[str, float]:
    """Bytes a second of the update on the host, without the copies around it, and of the same traffic in one plain call; in turns."""
    load, rank = WORKLOADS[workload], dist.get_rank()
    model, optimizer, _ = _prepare("Shardwise stage 3, optimizer on the host", load.model().to("sim"))
    num_params = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    plain = _plain_adam(num_params)
    ours, theirs = [], []
    with _copies_timed() as copies:
        for step in range(num_rounds + 2):
            tokens, targets = (tensor.to("sim") for tensor in load.batch(step, rank))
            model(tokens, targets).backward()
            dist.barrier()
            copies.clear()
            begin = time.perf_counter()
            optimizer.step()
            ours.append(time.perf_counter() - begin - sum(copies))
            optimizer.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            plain()
            theirs.append(time.perf_counter() - begin)
    ratios = [mine / other for mine, other in zip(ours[2:], theirs[2:], strict=True)]
    traffic = 28 * num_params
    return {
        "part_of_limit": 1 / statistics.median(ratios),
        "gigabytes_per_second": traffic / statistics.median(ours[2:]) / 1e9,
        "limit_gigabytes_per_second": traffic / statistics.median(theirs[2:]) / 1e9,
    }


def _plain_adam(numel: int) -> Any:
    """One call of torch's kernel over flat tensors: 16 bytes read and 12 written a parameter, at the speed of the memory."""
    params, grads, means, squares = (torch.ones(numel) for _ in range(4))
    step = torch.ones(())

    def run() -> None:
        torch._fused_adamw_(
            [params], [grads], [means], [squares], [], [step],
            lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return run


@contextmanager
def _copies_timed() -> Iterator[list[float]]:
    """Seconds of everything around the optimizer's own work in a step."""
    from shardwise.runtime import engine, turns

    seconds: list[float] = []
    wrapped = [(turns.Turn, "begin"), (turns.Turn, "end"), (engine.Engine, "before_update"), (engine.Engine, "after_update")]
    before = [getattr(owner, name) for owner, name in wrapped]

    def timed(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - begin)

        return run

    for (owner, name), call in zip(wrapped, before, strict=True):
        setattr(owner, name, timed(call))
    try:
        yield seconds
    finally:
        for (owner, name), call in zip(wrapped, before, strict=True):
            setattr(owner, name, call)
