"""How models are called: every way of it gives the same bits at every stage, and those of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.testing import World
from tests.distributed.helpers import (
    VARIANTS,
    WIDTH,
    Block,
    Net,
    Stage,
    adamw,
    backward,
    batch,
    check_stages,
    gradients,
    shard,
    train_steps,
    weights,
)

pytestmark = pytest.mark.dist


# ---------------------------------------------------------------- which modules are called, and how often


def train_part_alone(stage: Stage) -> Any:
    model = Net()
    calls = [model, model, model.blocks[1], model.blocks[1], model, model.head, model]
    return train_steps(stage, model, lambda step: calls[step](batch(step, 4, WIDTH)).square().mean(), len(calls))


@pytest.mark.parametrize("ranks", [2, 3])
def test_submodule_is_trained_alone_after_the_root(world: World, ranks: int) -> None:
    check_stages(world, train_part_alone, ranks=ranks)


class CalledTwice(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, again, last = self.blocks
        x = again(first(x * self.scale))
        return self.head(last(again(x)) + again(x[:2]).sum(0))


def train_called_twice(stage: Stage) -> Any:
    model = CalledTwice()
    return train_steps(stage, model, lambda step: model(batch(step, 4, WIDTH)).square().mean())


def test_module_called_several_times_in_one_forward(world: World) -> None:
    check_stages(world, train_called_twice)


def train_weights_read_by_parent(stage: Stage) -> Any:
    class Reader(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[:2]:
                x = block(x)
            x = x + F.linear(x, self.blocks[2].down.weight.T[:WIDTH] * self.scale)
            return F.linear(x, self.head.weight, self.head.bias) + self.blocks[2](x).mean()

    model = Reader()
    return train_steps(stage, model, lambda step: model(batch(step, 4, WIDTH)).square().mean())


def test_weights_read_without_a_call_of_their_module(world: World) -> None:
    check_stages(world, train_weights_read_by_parent)


class Embedded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x * self.scale)
        return self.head(x)


def train_embedded(stage: Stage) -> Any:
    """Gathers at stage 3, from the second step on: head and root stay over the turn, and no backward reads the embedding."""
    model = Embedded()
    optimizer = adamw(model)
    handle = shard(stage, model, optimizer)
    counts = []
    for step in range(5):
        if handle is not None:
            handle.engine.executor.totals.reset()
        loss = model(batch(step, 4, 3, high=7)).square().mean()
        if step == 2:  # A reader after all, in one backward: it gets the values, and the next step is prepared for it.
            loss.register_hook(lambda grad: grad * model.tokens.weight.detach().square().mean())
        backward(stage, loss, model)
        optimizer.step()
        optimizer.zero_grad()
        counts.append(0 if handle is None else handle.engine.executor.totals.num_collectives["gather"])
    if stage == 3 and handle is not None:
        num_units = len(handle.units)
        twice = 2 * num_units - 2
        assert num_units == 6 and counts[1:] == [twice - 1, twice, twice, twice - 1], counts
    return weights(stage, model)


@pytest.mark.parametrize("ranks", [2, 3])
def test_backward_gathers_no_table_that_it_does_not_read(world: World, ranks: int) -> None:
    check_stages(world, train_embedded, ranks=ranks)


def train_with_forward_before_update(stage: Stage) -> Any:
    """A forward with gradients between the backward and the update: what it kept gathered must not outlive the update."""
    model = Net()
    optimizer = adamw(model)
    shard(stage, model, optimizer)
    outputs = []
    for step in range(3):
        backward(stage, model(batch(step, 4, WIDTH)).square().mean(), model)
        outputs.append(model(batch(step, 4, WIDTH)).detach().clone())
        optimizer.step()
        outputs.append(model(batch(step, 4, WIDTH)).detach().clone())
        optimizer.zero_grad()
    return {"outputs": outputs, "weights": weights(stage, model)}


def test_nothing_that_a_forward_kept_outlives_an_update(world: World) -> None:
    check_stages(world, train_with_forward_before_update)


class Skipping(Net):
    """Whose middle block can be left out."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x * self.scale)
        x = x if self.skips else self.blocks[1](x)
        return self.head(self.blocks[2](x))


def train_skipping(stage: Stage, skipped_steps: tuple[int, ...]) -> Any:
    model = Skipping()
    optimizer = adamw(model)
    shard(stage, model, optimizer)
    seen = []
    for step in range(5):
        model.skips = step in skipped_steps
        before = weights(stage, model.blocks[1])
        backward(stage, model(batch(step, 4, WIDTH)).square().mean(), model)
        has_grad = [param.grad is not None for param in model.blocks[1].parameters()]
        assert has_grad == [not model.skips] * 4, f"stage {stage}, step {step}: {has_grad}"
        seen.append(gradients(stage, model))
        optimizer.step()
        optimizer.zero_grad()
        is_same = all(torch.equal(before[name], value) for name, value in weights(stage, model.blocks[1]).items())
        assert is_same == model.skips, f"stage {stage}, step {step}: weight decay moved what has no gradient"
    return seen, weights(stage, model)


@pytest.mark.parametrize("skipped_steps", [(0, 3), (2, 3)])
def test_module_skipped_on_some_steps_keeps_its_weights(world: World, skipped_steps: tuple[int, ...]) -> None:
    check_stages(world, train_skipping, skipped_steps)


class Reordering(Net):
    """Whose blocks are called in an order that changes from call to call."""

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        x = x * self.scale
        for place in range(3):
            x = self.blocks[(place + turn) % 3](x)
        return self.head(x)


def train_changing_order(stage: Stage) -> Any:
    """Gradients that were accumulated inside no_sync are reduced together with those of the last backward."""
    model = Reordering()
    optimizer = adamw(model)
    shard(stage, model, optimizer)
    seen = []
    for step in range(4):
        for part in range(3):
            loss = model(batch(3 * step + part, 4, WIDTH), step + part).square().mean()
            backward(stage, loss, model, is_synced=part == 2)
        seen.append(gradients(stage, model))
        optimizer.step()
        optimizer.zero_grad()
    return seen, weights(stage, model)


@pytest.mark.parametrize("ranks", [2, 3])
def test_modules_called_in_a_changing_order_while_accumulating(world: World, ranks: int) -> None:
    check_stages(world, train_changing_order, ranks=ranks)


class Methods(Net):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x)).square().mean()


def train_methods(stage: Stage) -> Any:
    model = Methods()

    def loss_at(step: int) -> torch.Tensor:
        x = batch(step, 4, WIDTH)
        return (model.loss(x), model(x).abs().mean(), model.loss(model.encode(x)) + model(x).mean())[step % 3]

    return train_steps(stage, model, loss_at, 6)


def test_methods_other_than_forward(world: World) -> None:
    check_stages(world, train_methods)


# ---------------------------------------------------------------- what forward returns


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Output:
    left: torch.Tensor
    right: torch.Tensor
    more: Any = None


RETURNED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "list": lambda a, b, c: [a, b, c],
    "tuple": lambda a, b, c: (a, b, c),
    "named tuple": lambda a, b, c: Pair(a, b),
    "dict": lambda a, b, c: {"left": a, "none": None, "right": b, "unused": c},
    "dataclass": Output,
    "nested": lambda a, b, c: {"x": [Output(a, b, (c, {"deep": Pair(a * 2, b * 2)}))], "y": 3},
}
READ: dict[str, Callable[[Any], tuple[torch.Tensor, torch.Tensor]]] = {
    "list": lambda out: (out[0], out[1]),
    "tuple": lambda out: (out[0], out[1]),
    "named tuple": lambda out: (out.left, out.right),
    "dict": lambda out: (out["left"], out["right"]),
    "dataclass": lambda out: (out.left, out.right),
    "nested": lambda out: (out["x"][0].left, out["x"][0].more[1]["deep"].right),
}


class Heads(nn.Module):
    """Three heads, the third of which no loss uses; blocks return containers as well."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body = nn.ModuleList(Block() for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(3))
        self.inner = Inner(kind)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.body:
            x = block(x)
        left, right = READ[self.kind](self.inner(x))
        outputs = [head(part) for head, part in zip(self.heads, (left, right, left + right), strict=True)]
        return RETURNED[self.kind](*outputs)


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return RETURNED[self.kind](*(part(x) for part in self.parts))


def train_returned(stage: Stage, kind: str) -> Any:
    model = Heads(kind)

    def loss_at(step: int) -> torch.Tensor:
        output = model(batch(step, 4, WIDTH))
        assert type(output) is type(RETURNED[kind](*torch.zeros(3)))
        left, right = READ[kind](output)
        return left.square().mean() + (right.abs().mean() if step else 0)

    return train_steps(stage, model, loss_at)


@pytest.mark.parametrize("kind", RETURNED)
def test_forward_returns_containers_with_unused_outputs(world: World, kind: str) -> None:
    (plain, _) = check_stages(world, train_returned, kind)
    # The test's own ground: what no loss used has no gradient, and what the first loss did not use has none in the first step.
    assert plain["first_grads"]["heads.0.weight"] is not None
    assert plain["first_grads"]["heads.1.weight"] is None
    assert plain["first_grads"]["heads.2.weight"] is None


# ---------------------------------------------------------------- settings of stage 3


SETTLED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "part alone": (train_part_alone, ()),
    "called twice": (train_called_twice, ()),
    "read by parent": (train_weights_read_by_parent, ()),
    "forward before update": (train_with_forward_before_update, ()),
    "skipping": (train_skipping, ((0, 3),)),
    "changing order": (train_changing_order, ()),
    "methods": (train_methods, ()),
    "nested outputs": (train_returned, ("nested",)),
}


@pytest.mark.parametrize("name", SETTLED)
def test_prefetch_release_and_units_change_no_number(world: World, name: str) -> None:
    train, args = SETTLED[name]
    check_stages(world, train, *args, stages=tuple(VARIANTS))
