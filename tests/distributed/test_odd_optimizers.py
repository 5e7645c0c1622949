"""Every optimizer of torch trains to DDP's bits at every stage, or is refused by name."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import shardwise
from shardwise.testing import World
from tests.distributed.odd import Case, assert_same_at_all_stages, average_grads, copies, run_case

pytestmark = pytest.mark.dist

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adadelta": ("Adadelta", {"lr": 1.0, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adagrad-fused": ("Adagrad", {"lr": 1e-2, "fused": True}),
    "adagrad-foreach": ("Adagrad", {"lr": 1e-2, "foreach": True}),
    "adam": ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    "adam-fused": ("Adam", {"lr": 1e-2, "fused": True}),
    "adamw-amsgrad": ("AdamW", {"lr": 1e-2, "amsgrad": True, "foreach": False}),
    "adamw-foreach": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "adamw-fused": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "adamw-tensor-lr": ("AdamW", {"lr": torch.tensor(1e-2), "weight_decay": 0.1}),
    "adamax": ("Adamax", {"lr": 1e-2, "weight_decay": 0.1}),
    "asgd": ("ASGD", {"lr": 1e-2, "t0": 2, "weight_decay": 0.1}),
    "nadam": ("NAdam", {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": ("RAdam", {"lr": 1e-2, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "rprop": ("Rprop", {"lr": 1e-2}),
    "rprop-foreach": ("Rprop", {"lr": 1e-2, "foreach": True}),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "maximize": True}),
    "sgd-nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd-fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "sgd-foreach": ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "adafactor": ("Adafactor", {"lr": 1e-2, "weight_decay": 0.1}),
    "adafactor-foreach": ("Adafactor", {"lr": 1e-2, "foreach": True}),
    "muon": ("Muon", {"lr": 1e-2, "weight_decay": 0.1}),
}


class Matrices(nn.Module):
    """Shapes that shards cut in odd places. Muon takes two-dimensional parameters only."""

    def __init__(self, has_vectors: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 17, bias=has_vectors),
            nn.Tanh(),
            nn.Linear(17, 15, bias=has_vectors),
            nn.Linear(15, 7, bias=has_vectors),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class AnyOptimizer(Case):
    num_steps = 6

    def model(self) -> nn.Module:
        return Matrices(has_vectors=self.options[0] != "Muon")

    def optimizer(self, params: Iterable[Any]) -> Optimizer:
        name, options = self.options
        return getattr(torch.optim, name)(params, **options)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizer_matches_ddp_at_every_stage(world: World, name: str, options: dict[str, Any]) -> None:
    assert_same_at_all_stages(world, AnyOptimizer, name, options)


@pytest.mark.parametrize("kind", ["adamw-fused", "adafactor", "muon", "rprop"])
def test_three_ranks_agree_at_every_stage(world: World, kind: str) -> None:
    assert_same_at_all_stages(world, AnyOptimizer, *OPTIMIZERS[kind], ranks=3)


class Lbfgs(Case):
    """It calls its closure many times a step, and looks at the loss, which must be the same on all ranks."""

    def model(self) -> nn.Module:
        return Matrices(has_vectors=True)

    def optimizer(self, params: Iterable[Any]) -> Optimizer:
        return torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(model, self.batch(0))
            loss.backward()
            if self.leg == "plain":
                average_grads(optimizer)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            self.seen.append(mean / 2)
            return mean / 2

        optimizer.step(closure)


def test_lbfgs_works_at_stage_0(world: World) -> None:
    for outcomes in world.run(run_case, Lbfgs, ("ddp", 0)):
        expected, found = outcomes["ddp"], outcomes[0]
        assert len(expected.seen) > 8
        assert float(expected.seen[-1]) < 0.9 * float(expected.seen[0])
        assert all(torch.equal(expected.weights[name], found.weights[name]) for name in expected.weights)
        assert [float(loss) for loss in expected.seen] == [float(loss) for loss in found.seen]


def refuse(name: str, stage: int) -> None:
    model = Matrices(has_vectors=True)
    before = copies(model.named_parameters())
    optimizer = getattr(torch.optim, name)(model.parameters())
    with pytest.raises(shardwise.PlanError, match=name):
        shardwise.shard(model, optimizer, stage=stage)
    # Nothing was changed: the model and its optimizer are as plain as before.
    assert all(type(param) is nn.Parameter and torch.equal(param, before[key]) for key, param in model.named_parameters())
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    shardwise.shard(model, stage=stage)
    late = getattr(torch.optim, name)(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(shardwise.PlanError, match=name):
        late.step(lambda: torch.ones(()))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizers_that_cannot_be_sharded_are_refused_by_name(world: World, name: str, stage: int) -> None:
    world.run(refuse, name, stage)
