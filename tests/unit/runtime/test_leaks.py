"""What a user drops is freed: models with all that stands behind them, and graphs of forwards without a backward."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import shardwise


def new_model() -> nn.Module:
    # Tanh and softmax save their own outputs for the backward.
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8))


def use(stage: int, *, last: str) -> list[weakref.ref]:
    """Train a model for two steps and drop it, after the part of a step named by `last`."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = shardwise.shard(model, optimizer, stage=stage)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).sum()
        if last == "forward":
            break
        loss.backward()
        optimizer.step()
    if last == "unshard":
        shardwise.unshard(model, optimizer)
    if last == "zero_grad":
        optimizer.zero_grad()
    return [weakref.ref(item) for item in (handle.engine, model, optimizer, next(model.parameters()))]


@pytest.mark.parametrize("last", ["forward", "step", "zero_grad", "unshard"])
@pytest.mark.parametrize("stage", range(4))
def test_dropped_model_is_freed(stage: int, last: str) -> None:
    references = use(stage, last=last)
    gc.collect()
    gc.collect()  # What a graph in C++ held becomes garbage in the first collection.
    assert [reference() for reference in references] == [None] * 4


def num_tensors() -> int:
    gc.collect()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("stage", range(4))
def test_forward_without_backward_leaves_nothing_behind(stage: int) -> None:
    model = new_model()
    shardwise.shard(model, stage=stage)
    model(torch.ones(2, 8))
    before = num_tensors()
    for _ in range(5):
        model(torch.ones(2, 8))
    assert num_tensors() == before
