"""Whatever saves and whatever loads: ranks, stage, layout, precision and optimizer are drawn at random, and every bit comes back."""

import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise.testing import World
from tests.distributed.training import as_bytes, differences

pytestmark = [pytest.mark.dist, pytest.mark.slow]
NUM_DRAWS = 36
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}],
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "fused": True}, {"momentum": 0.5, "foreach": False}],
    "Adagrad": [{}, {"foreach": True}, {"fused": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}, {}],
    "NAdam": [{}, {"foreach": True}],
    "Adamax": [{}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "Adadelta": [{}],
    "Rprop": [{}, {"foreach": True}],
    "ASGD": [{"t0": 2}, {"foreach": True}],
    "Adafactor": [{}, {"weight_decay": 0.1}],
    "Muon": [{}, {"weight_decay": 0.1}],
}
NEEDS_WHOLE = ("Adafactor", "Muon")


@dataclass(frozen=True)
class Side:
    """How one side trains."""

    ranks: int
    stage: int
    layout: str
    weights: tuple[float, ...] | None
    compute: str
    options: dict[str, Any]


def draw_side(draw: random.Random, optimizer: str) -> Side:
    ranks = draw.randint(1, 4)
    layout = "whole" if optimizer in NEEDS_WHOLE else draw.choice(["even", "weighted", "whole"])
    weights = (*(float(draw.randint(0, 3)) for _ in range(ranks - 1)), 1.0) if layout == "weighted" else None
    compute = draw.choice(["float32", "bfloat16"])
    return Side(ranks, draw.randrange(4), layout, weights, compute, draw.choice(OPTIMIZERS[optimizer]))


class Mixed(nn.Module):
    """Matrices (one of a single column), vectors, a single number, nothing, other strides, tied, frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 33)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.column = nn.Parameter(torch.randn(33, 1))
        self.second = nn.Linear(33, 33)
        self.tied = nn.Linear(33, 33, bias=False)
        self.tied.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Linear(33, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(33, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.conv(x[:, :3, None, None].expand(-1, -1, 4, 4)).mean((1, 2, 3))
        x = self.first(x) * self.scale + self.column.T + self.nothing.sum() + seen[:, None]
        x = self.norm(self.tied(self.second(x).tanh()).float()).to(x.dtype)
        return self.frozen(x)


class Trial:
    """A training of one side."""

    def __init__(self, optimizer: str, side: Side, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Mixed()
        if optimizer == "Adafactor":  # It divides by the number of elements.
            self.model.nothing.requires_grad_(False)
        params = [param for param in self.model.parameters() if param.requires_grad]
        matrices = [param for param in params if param.dim() == 2 and param.numel()]
        others = [param for param in params if not any(param is matrix for matrix in matrices)]
        if optimizer == "Muon":
            plain = torch.optim.AdamW(others, lr=1e-2)
            self.optimizers = [torch.optim.Muon(matrices, lr=1e-2, **side.options), plain]
        else:
            groups = [{"params": matrices, "lr": 2e-2}, {"params": others}]
            self.optimizers = [getattr(torch.optim, optimizer)(groups, lr=1e-2, **side.options)]
        plan: dict[str, Any] = {"layout": side.layout}
        if side.weights is not None:
            plan["weights"] = side.weights
        if side.compute != "float32":
            plan |= {"param_dtype": side.compute, "reduce_dtype": "float32"}
        shardwise.shard(self.model, self.optimizers, stage=side.stage, **plan)

    def steps(self, first: int, count: int) -> None:
        rank = dist.get_rank()
        for step in range(first, first + count):
            draw = torch.Generator().manual_seed(100 * step + rank)
            loss = self.model(torch.randn(6, 9, generator=draw)).float().square().mean()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def everything(self) -> dict[str, Any]:
        """All of the state, full and plain. A collective, after which it is not sharded any more."""
        shardwise.unshard(self.model, self.optimizers)
        found = {f"weight {name}": as_bytes(tensor) for name, tensor in self.model.state_dict().items()}
        named = {id(param): name for name, param in self.model.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for param, state in optimizer.state.items():
                found |= {f"{number}: {key} of {named[id(param)]}": as_bytes(value) for key, value in state.items()}
            found[f"{number}: groups"] = [
                {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
            ]
        return found


def save(optimizer: str, side: Side, path: str) -> list[dict[str, Any]]:
    """What is saved, and what comes of one more step."""
    found = []
    for num_more in (0, 1):
        trial = Trial(optimizer, side, 1)
        trial.steps(0, 3)
        if not num_more:
            shardwise.save(path, trial.model, trial.optimizers)
        trial.steps(3, num_more)
        found.append(trial.everything())
    return found


def load(optimizer: str, side: Side, path: str, num_before: int) -> list[dict[str, Any]]:
    """What is loaded, and what comes of one more step."""
    found = []
    for num_more in (0, 1):
        trial = Trial(optimizer, side, 2)
        trial.steps(0, num_before)
        loaded = shardwise.load(path, trial.model, trial.optimizers)
        assert (
            loaded.step == 3 * len(trial.optimizers) and not loaded.missing and not loaded.unexpected and not loaded.misshapen
        )
        trial.steps(3, num_more)
        found.append(trial.everything())
    return found


@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_every_bit_comes_back(world: World, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    optimizer = list(OPTIMIZERS)[seed % len(OPTIMIZERS)]
    saver, loader = draw_side(draw, optimizer), draw_side(draw, optimizer)
    if draw.random() < 0.3:
        loader = replace(loader, ranks=saver.ranks, compute=saver.compute, layout="whole", weights=None)
    what = f"{optimizer}: {asdict(saver)} -> {asdict(loader)}"
    expected = world.run(save, optimizer, saver, str(tmp_path / "a"), ranks=saver.ranks)
    found = world.run(load, optimizer, loader, str(tmp_path / "a"), draw.choice([0, 2]), ranks=loader.ranks)
    is_same = (saver.ranks, saver.compute) == (loader.ranks, loader.compute)
    for rank, (loaded, stepped) in enumerate(found):
        before, after = expected[rank if saver.ranks == loader.ranks else 0]
        assert differences(before, loaded) == [], what
        if is_same:
            assert differences(after, stepped) == [], what
