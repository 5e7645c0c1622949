"""The systems that are compared. Each takes a plain model and returns a function that does one training step."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.recipes.models import Block

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Running:
    """A system that trains: its step, and the bytes it has sent so far, where it counts them."""

    step: Step
    wire_bytes: Callable[[], int | None] = lambda: None


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def alone(model: nn.Module) -> Running:
    """One process, nothing sent: what the compute alone takes."""
    return Running(_plain_step(model, _adamw(model)))


def ddp(model: nn.Module) -> Running:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return Running(_plain_step(wrapped, _adamw(wrapped)))


def zero_redundancy(model: nn.Module) -> Running:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return Running(_plain_step(wrapped, optimizer))


def fsdp1(model: nn.Module) -> Running:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    return Running(_plain_step(wrapped, _adamw(wrapped)))


def fsdp2(model: nn.Module, *, reshard: bool) -> Running:
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return Running(_plain_step(model, _adamw(model)))


def deepspeed(model: nn.Module, *, stage: int) -> Running:
    import deepspeed as ds

    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = ds.initialize(model=model, optimizer=_adamw(model), config=config, dist_init_required=False)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Running(step)


def ours(model: nn.Module, *, stage: int) -> Running:
    optimizer = _adamw(model)
    handle = shardwise.shard(model, optimizer, stage=stage)
    return Running(_plain_step(model, optimizer), wire_bytes=handle.totals.wire_bytes.total)


def _has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def _systems() -> dict[str, Callable[[nn.Module], Running]]:
    systems: dict[str, Callable[[nn.Module], Running]] = {
        "DDP": ddp,
        "alone": alone,
        "DDP + ZeroRedundancyOptimizer": zero_redundancy,
        "FSDP1": fsdp1,
        "FSDP2": partial(fsdp2, reshard=True),
        "FSDP2, no reshard": partial(fsdp2, reshard=False),
    }
    if _has_deepspeed():
        systems |= {f"DeepSpeed stage {stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)}
    return systems | {f"Shardwise stage {stage}": partial(ours, stage=stage) for stage in range(4)}


SYSTEMS = _systems()
BASELINE = "DDP"


def world_size() -> int:
    return dist.get_world_size()
