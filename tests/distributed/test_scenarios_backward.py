"""Backward passes: of several forwards, through checkpoints, with failures, and accumulated. The same bits at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.testing import World
from tests.distributed.helpers import (
    WIDTH,
    Net,
    Stage,
    adamw,
    assert_same,
    backward,
    batch,
    check_stages,
    shard,
    train_steps,
    weights,
)

pytestmark = pytest.mark.dist


# ---------------------------------------------------------------- several forwards, checkpointed regions


class Checkpointed(Net):
    """Whose regions are recomputed in backward: blocks one by one, nested, or several in one region."""

    def __init__(self, kind: str, use_reentrant: bool) -> None:
        super().__init__(num_blocks=4)
        self.kind = kind
        self.use_reentrant = use_reentrant

    def again(self, function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x, use_reentrant=self.use_reentrant)

    def run(self, start: int, stop: int, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[start:stop]:
            x = block(x)
        return x

    def run_nested(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.blocks[2], self.again(self.blocks[1], self.blocks[0](x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        if self.kind == "each":
            for block in self.blocks:
                x = self.again(block, x)
        elif self.kind == "nested":
            x = self.blocks[3](self.again(self.run_nested, x))
        elif self.kind == "region":
            x = self.again(lambda y: self.run(2, 4, y), self.again(lambda y: self.run(0, 2, y), x))
        else:
            x = self.run(0, 4, x)
        return self.head(x)


def train_two_forwards(stage: Stage, kind: str, use_reentrant: bool) -> Any:
    model = Checkpointed(kind, use_reentrant)

    def loss_at(step: int) -> torch.Tensor:
        first = model(batch(step, 4, WIDTH))
        second = model(batch(step + 100, 3, WIDTH))
        return first.square().mean() + (second.mean() * first).sum() if step else first.square().mean()

    return train_steps(stage, model, loss_at, 4)


CHECKPOINTS = [("none", False), *((kind, reentrant) for kind in ("each", "nested", "region") for reentrant in (False, True))]


@pytest.mark.parametrize(("kind", "use_reentrant"), CHECKPOINTS)
def test_two_forwards_then_one_backward(world: World, kind: str, use_reentrant: bool) -> None:
    # Reentrant regions bring gradients in rounds. Rounds that the step before did not have are averaged by themselves, which may
    # round differently.
    check_stages(world, train_two_forwards, kind, use_reentrant, rtol=1e-5 if use_reentrant else 0.0)


class Outer(nn.Module):
    """A checkpointed call of a whole model, which checkpoints its own regions."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Checkpointed("region", use_reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.inner.use_reentrant)


def train_nested_models(stage: Stage, use_reentrant: bool) -> Any:
    model = Outer(use_reentrant)

    def loss_at(step: int) -> torch.Tensor:
        return model(batch(step, 4, WIDTH)).square().mean() + model(batch(step + 100, 3, WIDTH)).abs().mean()

    return train_steps(stage, model, loss_at)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_model_with_checkpointed_regions(world: World, use_reentrant: bool) -> None:
    check_stages(world, train_nested_models, use_reentrant)


def train_checkpointed_from_outside(stage: Stage, use_reentrant: bool) -> Any:
    """The whole model in a checkpoint that it knows nothing of, and once more without."""
    model = Checkpointed("each", use_reentrant)

    def loss_at(step: int) -> torch.Tensor:
        x = batch(step, 4, WIDTH).requires_grad_()
        return checkpoint(model, x, use_reentrant=use_reentrant).square().mean() + (model(x).abs().mean() if step > 1 else 0.0)

    return train_steps(stage, model, loss_at, 4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_model_called_in_a_checkpoint(world: World, use_reentrant: bool) -> None:
    check_stages(world, train_checkpointed_from_outside, use_reentrant, rtol=1e-5 if use_reentrant else 0.0)


def train_backwards_of_two_forwards(stage: Stage) -> Any:
    model = Net()
    optimizer = adamw(model)
    shard(stage, model, optimizer)
    for step in range(3):
        losses = [model(batch(step + 10 * part, 4, WIDTH)).square().mean() for part in range(2)]
        backward(stage, losses[1], model)
        backward(stage, losses[0], model)
        optimizer.step()
        optimizer.zero_grad()
    return weights(stage, model)


def test_two_forwards_then_a_backward_of_each(world: World) -> None:
    check_stages(world, train_backwards_of_two_forwards)


# ---------------------------------------------------------------- failures in mid-step


class Failing(torch.autograd.Function):
    """The same values; raises in backward when told to."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Failing.fails:
            raise ArithmeticError("planted in backward")
        return grad


class Fragile(Net):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x * self.scale))
        if self.fails:
            raise ArithmeticError("planted in forward")
        return self.head(self.blocks[2](Failing.apply(x)))


def train_through_failures(stage: Stage, where: str, is_checked: bool, fail_steps: tuple[int, ...]) -> Any:
    model = Fragile()
    optimizer = adamw(model)
    shard(stage, model, optimizer)
    losses = []
    for step in range(4):
        if step in fail_steps:
            with pytest.raises(ArithmeticError, match="planted"):
                fail(stage, model, batch(step + 50, 4, WIDTH), where)
            if is_checked:
                weights(stage, model)  # Values can be read between the failure and the next step.
            optimizer.zero_grad()
        loss = model(batch(step, 4, WIDTH)).square().mean()
        backward(stage, loss, model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, weights(stage, model)


def fail(stage: Stage, model: Fragile, x: torch.Tensor, where: str) -> None:
    model.fails, Failing.fails = where == "forward", where == "backward"
    try:
        loss = model(x).square().mean()
        loss.backward()
    finally:
        model.fails = Failing.fails = False


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_in_mid_step_then_clean_steps(world: World, where: str, is_checked: bool) -> None:
    failed = check_stages(world, train_through_failures, where, is_checked, (0, 2, 3))
    clean = check_stages(world, train_through_failures, where, is_checked, (), stages=())
    assert_same(failed, clean)


# ---------------------------------------------------------------- accumulation


def train_accumulating(stage: Stage, is_synced: bool) -> Any:
    model = Net()
    optimizer = adamw(model)
    handle = shard(stage, model, optimizer)
    seen = []
    for step in range(3):
        if handle is not None:
            handle.engine.executor.totals.reset()
        for part in range(3):
            loss = model(batch(3 * step + part, 4, WIDTH)).square().mean() / 3
            backward(stage, loss, model, is_synced=is_synced or part == 2)
        optimizer.step()
        optimizer.zero_grad()
        counts = None if handle is None else dict(handle.engine.executor.totals.num_collectives)
        seen.append(weights(stage, model))
    if handle is not None:
        expected = expected_counts(int(stage), len(handle.units), num_backwards=3, num_reductions=3 if is_synced else 1)
        assert counts == expected, f"stage {stage}: {counts} where {expected} was expected"
    return seen


def expected_counts(stage: int, num_units: int, num_backwards: int, num_reductions: int) -> dict[str, int]:
    """Collectives of one step, by what they are for. Small ones do not grow with the units."""
    counts = {"use": 2 * num_reductions, "digest": num_reductions, "reduce": num_units * num_reductions}
    if stage == 0:
        counts["gather gradients"] = num_units * num_reductions
    else:
        # Head and root are closed last and opened first: they stay over the turn.
        counts["gather"] = num_units if stage < 3 else (2 * num_units - 2) * num_backwards
    return counts


@pytest.mark.parametrize("is_synced", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_accumulation_with_exact_collective_counts(world: World, ranks: int, is_synced: bool) -> None:
    check_stages(world, train_accumulating, is_synced, ranks=ranks)
