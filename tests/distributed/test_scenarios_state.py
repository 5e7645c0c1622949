"""What parameters, groups and gradients go through: at every stage the same bits, and those of plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.testing import World
from tests.distributed.helpers import (
    PLAIN,
    STAGES,
    VARIANTS,
    WIDTH,
    Stage,
    assert_same,
    backward,
    batch,
    check_stages,
    gradients,
    shard,
    train_at,
    weights,
)

pytestmark = pytest.mark.dist


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def step(stage: Stage, optimizer: torch.optim.Optimizer, loss: torch.Tensor, *models: nn.Module) -> None:
    backward(stage, loss, *models)
    optimizer.step()
    optimizer.zero_grad()


# ---------------------------------------------------------------- parameters of odd forms


def train_odd_shapes(stage: Stage, widths: tuple[int, ...], bias: bool) -> Any:
    model = mlp(*widths, bias=bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    shard(stage, model, optimizer)
    losses = []
    for number in range(10):
        loss = model(batch(number, 4, widths[0])).square().mean()
        losses.append(loss.detach().clone())
        backward(stage, loss, model)
        optimizer.step()
        (model if number % 4 < 2 else optimizer).zero_grad(set_to_none=number % 2 == 0)
    return losses, weights(stage, model)


@pytest.mark.parametrize("ranks", [2, 3])
def test_odd_shapes_over_ten_adam_steps(world: World, ranks: int) -> None:
    check_stages(world, train_odd_shapes, (15, 7, 17, 16), True, ranks=ranks)


@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_than_parameters(world: World, ranks: int) -> None:
    check_stages(world, train_odd_shapes, (3, 1), False, ranks=ranks)


class Tied(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.body = mlp(WIDTH, 2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.embedding(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train_tied(stage: Stage, vocabulary: int) -> Any:
    model = Tied(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = weights(PLAIN, model)
    shard(stage, model, optimizer)
    for number in range(3):
        step(stage, optimizer, model(batch(number, 2, 9, high=vocabulary)), model)
    if stage != PLAIN:
        shardwise.unshard(model, optimizer)
    assert model.head.weight is model.embedding.weight
    assert type(model.head.weight) is nn.Parameter
    assert [id(param) for param in optimizer.param_groups[0]["params"]] == [id(param) for param in model.parameters()]
    after = weights(PLAIN, model)
    assert bool((before["embedding.weight"] != after["embedding.weight"]).any(1).all()), "rows of the vocabulary did not change"
    moments = [optimizer.state[param] for param in model.parameters()]
    return after, moments


@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 37), (3, 101)])
def test_tied_weights_with_an_odd_vocabulary(world: World, ranks: int, vocabulary: int) -> None:
    check_stages(world, train_tied, vocabulary, ranks=ranks)


# ---------------------------------------------------------------- frozen parameters


def train_thawing(stage: Stage, kind: str) -> Any:
    """Freeze and unfreeze parts of a model between steps: whole units, and single parameters of them."""
    model = mlp(WIDTH, WIDTH, WIDTH, WIDTH, WIDTH)
    first, second, third = model[0], model[2], model[4]
    if kind != "freeze":
        first.requires_grad_(False)
        second.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    shard(stage, model, optimizer)
    seen = []
    for number in range(6):
        if number == 2:
            first.requires_grad_(kind != "freeze")
            second.bias.requires_grad_(kind != "freeze")
        if number == 4:
            third.weight.requires_grad_(False)
            first.requires_grad_(kind != "both")
        before = weights(stage, model)
        backward(stage, model(batch(number, 4, WIDTH)).square().mean(), model)
        seen.append(gradients(stage, model))
        optimizer.step()
        optimizer.zero_grad()
        after = weights(stage, model)
        for name, param in model.named_parameters():
            assert (seen[-1][name] is not None) == param.requires_grad, f"stage {stage}, step {number}: gradient of {name}"
            assert torch.equal(before[name], after[name]) != param.requires_grad, f"stage {stage}, step {number}: {name}"
    return seen, weights(stage, model)


@pytest.mark.parametrize("kind", ["thaw", "freeze", "both"])
def test_parameters_frozen_and_unfrozen_in_mid_run(world: World, kind: str) -> None:
    check_stages(world, train_thawing, kind)


# ---------------------------------------------------------------- clipping


CLIPPERS: dict[str, Callable[..., torch.Tensor]] = {
    "torch": nn.utils.clip_grad_norm_,
    "shardwise": shardwise.clip_grad_norm_,
}


def train_clipped(stage: Stage, clipper: str, of_model: bool) -> Any:
    model = mlp(15, 7, 17, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    shard(stage, model, optimizer)
    norms = []
    for number, power in enumerate((1.0, 2.0, float("inf"), 2.0)):
        backward(stage, model(batch(number, 4, 15)).square().sum(), model)
        full = gradients(stage, model)
        params: Iterable[torch.Tensor] = model.parameters() if of_model else optimizer.param_groups[0]["params"]
        norm = CLIPPERS[clipper](params, 0.1, norm_type=power)
        assert type(norm) is torch.Tensor
        line = torch.cat([grad.flatten() for grad in full.values() if grad is not None]).double()
        torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(line, power), rtol=1e-5, atol=0)
        assert norm > 0.2, "nothing to clip"
        clipped = gradients(stage, model)
        line = torch.cat([grad.flatten() for grad in clipped.values() if grad is not None]).double()
        torch.testing.assert_close(torch.linalg.vector_norm(line, power).item(), 0.1, rtol=1e-4, atol=0)
        norms.append(norm.clone())
        optimizer.step()
        optimizer.zero_grad()
    return norms, weights(stage, model)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("of_model", [True, False], ids=["model", "optimizer"])
@pytest.mark.parametrize("clipper", CLIPPERS)
def test_clipping_by_norms_1_2_and_infinity(world: World, clipper: str, of_model: bool, ranks: int) -> None:
    check_stages(world, train_clipped, clipper, of_model, ranks=ranks, rtol=1e-5)


def test_norms_have_the_same_bits_on_every_rank(world: World) -> None:
    results = world.run(train_at, train_clipped, STAGES, ("torch", True), ranks=3)
    for by_stage in results[1:]:
        assert_same(by_stage, results[0])


# ---------------------------------------------------------------- parameter groups


def train_groups(stage: Stage) -> Any:
    model = mlp(WIDTH, WIDTH, WIDTH, 5)
    groups = [{"params": model[0].parameters(), "lr": 0.03}, {"params": []}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    shard(stage, model, optimizer)
    before = weights(stage, model)
    for number in range(6):
        if number == 2:
            optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.02})
            assert_same(weights(stage, model[4]), {name[2:]: value for name, value in before.items() if name[0] == "4"})
        if number == 4:
            optimizer.param_groups[0]["lr"] = 0.001
        step(stage, optimizer, model(batch(number, 4, WIDTH)).square().mean(), model)
        model.zero_grad()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 0, 2, 2]
    after = weights(stage, model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    return after


@pytest.mark.parametrize("ranks", [2, 3])
def test_empty_group_and_a_group_added_in_mid_run(world: World, ranks: int) -> None:
    check_stages(world, train_groups, ranks=ranks)


def train_optimizer_made_later(stage: Stage) -> Any:
    model = mlp(WIDTH, WIDTH, 5)
    shard(stage, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(3):
        step(stage, optimizer, model(batch(number, 4, WIDTH)).square().mean(), model)
    return weights(stage, model)


def test_optimizer_made_after_sharding(world: World) -> None:
    check_stages(world, train_optimizer_made_later)


# ---------------------------------------------------------------- several models


def train_two_models(stage: Stage, has_one_optimizer: bool) -> Any:
    left, right = mlp(WIDTH, WIDTH, WIDTH), mlp(WIDTH, WIDTH, 5)
    both = [*left.parameters(), *right.parameters()]
    if has_one_optimizer:
        optimizers = [torch.optim.AdamW(both, lr=0.01)]
    else:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (left, right)]
    shard(stage, left, optimizers[0])
    shard(stage, right, optimizers[-1])
    losses = []
    for number in range(4):
        x = batch(number, 4, WIDTH)
        hidden = left(x)
        loss = right(hidden).square().mean() + (left(hidden).mean() if number % 2 else hidden.abs().mean())
        losses.append(loss.detach().clone())
        backward(stage, loss, left, right)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights(stage, left), weights(stage, right)


@pytest.mark.parametrize("has_one_optimizer", [False, True])
def test_two_models_with_one_loss(world: World, has_one_optimizer: bool) -> None:
    check_stages(world, train_two_models, has_one_optimizer)


# ---------------------------------------------------------------- values brought in from outside


def train_loaded(stage: Stage) -> Any:
    model = mlp(15, 7, 17, 16)
    saved = {
        name: torch.full_like(value, 0.01 * (number + 1)) for number, (name, value) in enumerate(model.state_dict().items())
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shard(stage, model, optimizer)
    step(stage, optimizer, model(batch(0, 4, 15)).square().mean(), model)
    if stage == PLAIN:
        model.load_state_dict(saved)
    else:
        with shardwise.gathered(model):
            if dist.get_rank() == 0:
                model.load_state_dict(saved)
    loaded = weights(stage, model)
    step(stage, optimizer, model(batch(1, 4, 15)).square().mean(), model)
    return loaded, weights(stage, model)


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_loaded_on_rank_0_alone(world: World, ranks: int) -> None:
    check_stages(world, train_loaded, ranks=ranks)


def train_doubled(stage: Stage, is_before_optimizer: bool) -> Any:
    model = mlp(15, 7, 17, 16)
    optimizer = None if is_before_optimizer else torch.optim.AdamW(model.parameters(), lr=0.01)
    shard(stage, model, optimizer)
    model.double()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(3):
        step(stage, optimizer, model(batch(number, 4, 15).double()).square().mean(), model)
    after = weights(stage, model)
    assert {value.dtype for value in after.values()} == {torch.float64}
    return after


@pytest.mark.parametrize("is_before_optimizer", [True, False])
def test_cast_to_float64_after_sharding(world: World, is_before_optimizer: bool) -> None:
    check_stages(world, train_doubled, is_before_optimizer)


def train_from_meta(stage: Stage, widths: tuple[int, ...]) -> Any:
    with torch.device("cpu" if stage == PLAIN else "meta"):
        torch.manual_seed(0)
        model = mlp(*widths)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shard(stage, model, optimizer, init_seed=0) if stage != PLAIN else None
    before = weights(stage, model)
    for number in range(3):
        step(stage, optimizer, model(batch(number, 4, widths[0])).square().mean(), model)
    return before, weights(stage, model)


@pytest.mark.parametrize(("ranks", "widths"), [(2, (15, 7, 17, 16)), (3, (3, 1))])
def test_model_built_on_the_meta_device(world: World, ranks: int, widths: tuple[int, ...]) -> None:
    """Also where some ranks own nothing. The same numbers as a model that is built on the CPU with the same seed."""
    check_stages(world, train_from_meta, widths, ranks=ranks)


def train_with_another_plan(stage: Stage, second: int) -> Any:
    """Sharded anew in the middle of a step, with a group that was added since the last one."""
    model = mlp(15, 7, 17, 16)
    layers = [each for each in model if isinstance(each, nn.Linear)]
    optimizer = torch.optim.AdamW(layers[0].parameters(), lr=0.01)
    shard(stage, model, optimizer)
    step(stage, optimizer, model(batch(0, 4, 15)).square().mean(), model)
    model.zero_grad()
    backward(stage, model(batch(1, 4, 15)).square().mean(), model)
    optimizer.add_param_group({"params": list(layers[-1].parameters()), "lr": 0.02})
    if stage != PLAIN:
        shardwise.unshard(model, optimizer)
        shardwise.shard(model, optimizer, stage=second)
    backward(stage, model(batch(2, 4, 15)).square().mean(), model)
    optimizer.step()
    return weights(stage, model)


@pytest.mark.parametrize("second", [0, 1, 2, 3])
def test_another_plan_in_the_middle_of_a_step(world: World, second: int) -> None:
    check_stages(world, train_with_another_plan, second)


def train_frozen_between(stage: Stage, with_unshard: bool) -> Any:
    """Freezes a layer between a forward and what follows, while its weights may still be gathered for a backward that never comes."""
    model = mlp(15, 7, 17, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shard(stage, model, optimizer)
    model(batch(0, 4, 15))
    model[0].requires_grad_(False)
    if with_unshard and stage != PLAIN:
        shardwise.unshard(model, optimizer)
        shard(stage, model, optimizer)
    before = weights(stage, model)
    step(stage, optimizer, model(batch(1, 4, 15)).square().mean(), model)
    after = weights(stage, model)
    assert torch.equal(before["0.weight"], after["0.weight"])
    return after


@pytest.mark.parametrize("with_unshard", [False, True])
def test_a_layer_is_frozen_after_a_forward_without_backward(world: World, with_unshard: bool) -> None:
    check_stages(world, train_frozen_between, with_unshard, stages=(*STAGES, *VARIANTS))
