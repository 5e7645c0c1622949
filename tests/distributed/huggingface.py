"""Training runs of models of transformers and peft, on one rank, and what is demanded of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise.devices.pool import Poison
from shardwise.runtime.parameter import Face
from tests.distributed.architectures import CASES, Batch, Case

STAGES = (0, 1, 2, 3)
NUM_STEPS = 3
MAX_NORM = 0.05
"""Below every norm that comes up, so that clipping always acts."""


@dataclass
class Run:
    """What one training run has shown on one rank."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer_state: dict[str, Tensor] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    generated: list[Tensor] = field(default_factory=list)


# What runs on the ranks


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill released memory with NaN. Workers serve other tests as well, so it is turned off again."""
    Poison.enabled = True
    try:
        yield
    finally:
        Poison.enabled = False


def build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on every rank with the weights of rank 0's seed, dropout drawn by rank, and an optimizer of its trained weights."""
    torch.manual_seed(0)
    model = case.build().train()
    assert sum(param.numel() for param in model.parameters()) < 500_000
    torch.manual_seed(100 + dist.get_rank())
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.1)


def batches(case: Case) -> list[Batch]:
    """Data that differ between ranks and steps."""
    generators = [torch.Generator().manual_seed(1000 * step + dist.get_rank()) for step in range(NUM_STEPS)]
    return [case.batch(generator) for generator in generators]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


def optimizer_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(param): name for name, param in model.named_parameters()}
    held = {(names[id(param)], key): value for param, state in optimizer.state.items() for key, value in state.items()}
    return {f"{name}.{key}": value.clone() for (name, key), value in held.items()}


def plain_loss(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def train(case: Case, stage: int, *, max_norm: float = MAX_NORM, loss_of: Callable[[Any, Batch], Tensor] = plain_loss) -> Run:
    """Three steps at one stage; then full values, gradients and optimizer state."""
    model, optimizer = build(case)
    before = state_of(model)
    handle = shardwise.shard(model, optimizer, stage=stage, **case.shard_options)
    assert len(handle.units) > 2, "a model of one unit would test little"
    has_faces = stage == 3 or "param_dtype" in case.shard_options
    run = Run()
    for step, batch in enumerate(batches(case)):
        assert all(isinstance(param, Face) == has_faces for param in model.parameters())
        loss = loss_of(model, batch)
        loss.backward()
        run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).clone())
        run.losses.append(loss.detach().clone())
        if step == NUM_STEPS - 1:
            with shardwise.gathered(model):
                run.grads = grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    with shardwise.gathered(model):
        run.weights = state_of(model)
    run.moved = {name for name, value in run.weights.items() if not torch.equal(value, before[name])}
    shardwise.unshard(model, optimizer)
    assert_same(run.weights, state_of(model), "gathered and unshard")
    run.optimizer_state = optimizer_state_of(model, optimizer)
    return run


def train_with_ddp(case: Case) -> Run:
    """The same three steps with torch's own data parallelism, without clipping."""
    model, optimizer = build(case)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    run = Run()
    for batch in batches(case):
        loss = wrapped(**batch).loss
        loss.backward()
        run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))
        run.losses.append(loss.detach().clone())
        run.grads = grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    run.weights, run.optimizer_state = state_of(model), optimizer_state_of(model, optimizer)
    return run


def train_at_all_stages(name: str) -> dict[int, Run]:
    with poisoned():
        return {stage: train(CASES[name], stage) for stage in STAGES}


def train_like_ddp(name: str) -> tuple[Run, dict[int, Run]]:
    with poisoned():
        return train_with_ddp(CASES[name]), {stage: train(CASES[name], stage, max_norm=math.inf) for stage in (0, 3)}


# What is demanded of them


def assert_same(expected: dict[str, Tensor | None], found: dict[str, Tensor | None], what: str) -> None:
    """Equal names, forms and bits; NaN is equal to nothing."""
    assert expected.keys() == found.keys(), what
    for name, value in expected.items():
        other = found[name]
        if value is None or other is None:
            assert value is other, f"{what}: '{name}' has a value on one side only"
            continue
        assert type(other) in (Tensor, nn.Parameter), f"{what}: '{name}' is a {type(other).__name__}"
        assert value.shape == other.shape and value.dtype == other.dtype, f"{what}: '{name}' has another form"
        num_different = int((value != other).sum())
        assert num_different == 0, f"{what}: '{name}' differs in {num_different} of {value.numel()} elements"


def assert_same_run(expected: Run, found: Run, what: str) -> None:
    """Losses and norms first: they tell in which step runs went apart."""
    for key in ("losses", "norms", "generated"):
        ours, theirs = ({str(step): value for step, value in enumerate(getattr(run, key))} for run in (expected, found))
        assert_same(ours, theirs, f"{what}, {key}")
    for key in ("grads", "weights", "optimizer_state"):
        assert_same(getattr(expected, key), getattr(found, key), f"{what}, {key}")


def assert_worth_comparing(runs: list[Run]) -> None:
    """The run has trained: ranks had other data, norms were clipped, and what has a gradient has moved."""
    first, second = runs
    assert all(torch.isfinite(loss) for run in runs for loss in run.losses)
    assert all(bool(ours != theirs) for ours, theirs in zip(first.losses, second.losses, strict=True))
    assert all(norm > MAX_NORM for norm in first.norms)
    squares = [grad.double().pow(2).sum() for grad in first.grads.values() if grad is not None]
    assert torch.stack(squares).sum().sqrt().item() == pytest.approx(MAX_NORM, rel=1e-3), "clipping has left something out"
    trained = {name for name, grad in first.grads.items() if grad is not None and bool(grad.any())}
    assert len(trained) > 4
    assert trained <= first.moved
    untouched = {name for name in first.grads if f"{name}.step" not in first.optimizer_state}
    assert untouched.isdisjoint(first.moved)
