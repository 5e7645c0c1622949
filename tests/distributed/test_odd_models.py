"""Models of every odd kind train to the same bits at every stage: what they return, what they read, what they are made of."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from shardwise.testing import World
from tests.distributed.odd import Block, Case, assert_same_at_all_stages

pytestmark = pytest.mark.dist


# ---------------------------------------------------------------- what modules return and what is done to it


@dataclass
class Result:
    value: torch.Tensor
    extras: dict[str, Any]


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[Any]


class Returning(nn.Module):
    """A unit whose output is a tensor in some container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = Block()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        packed = {"dict": {"y": y}, "list": [y], "dataclass": Result(y, {}), "nested": Result(x, {"deep": [Pair(x, [(y,)])]})}
        return packed[self.kind]


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Returning(kind) for kind in ("dict", "list", "dataclass", "nested")])

    def forward(self, x: torch.Tensor) -> Result:
        x = self.parts[0](x)["y"]
        x = self.parts[1](x)[0]
        x = self.parts[2](x).value
        deep = self.parts[3](x)
        return Result(x, {"last": {"y": deep.extras["deep"][0].right[0][0], "note": "text", "none": None}})


class Containers(Case):
    """Outputs that are dicts, lists, dataclasses and nested ones, of units and of the model."""

    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": False}

    def model(self) -> nn.Module:
        return Wrapping()

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        return model(data).extras["last"]["y"].square().mean()


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y += 1
        y = self.second(y).relu_()
        return self.third(y)


class InPlace(Case):
    """Outputs of units and of the model that are changed in place."""

    def model(self) -> nn.Module:
        return Changing()

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        y = model(data)
        y *= 2
        return y.tanh_().square().mean()


class Exposing(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().forward(x), self.weight, self.bias[:4]


class Tying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = Exposing(16, 16), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weight, part = self.first(x)
        return F.linear(self.middle(y), weight)[:, :4] + part


class ReturnsWeight(Case):
    """A unit that returns its own weight, which is used after other units have come and gone."""

    def model(self) -> nn.Module:
        return Tying()


# ---------------------------------------------------------------- weights read without a call of their module


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block, self.norm = nn.Linear(16, 16), Block(), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.layer.weight, self.layer.bias)
        return F.layer_norm(self.block(y), (16,), self.norm.weight, self.norm.bias) @ self.block.up.weight.T


class ParentReads(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(Reading(), nn.Linear(20, 16), Reading())


class Borrower(nn.Module):
    """Reads the weight of a module that is not its own, on both sides of that module's call."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(16, 16)
        self.lenders = (lender,)  # A tuple: the lender is no submodule.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) @ self.lenders[0].weight.T


class SiblingReads(Case):
    def model(self) -> nn.Module:
        lender = nn.Linear(16, 16)
        return nn.Sequential(Borrower(lender), nn.Tanh(), lender, Block(), Borrower(lender))


class Holder(nn.Module):
    """Keeps the parameter of another module itself, where only its reads can tell."""

    def __init__(self, held: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Linear(16, 16)
        self.held = [held]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) @ self.held[0].T


class HeldElsewhere(Case):
    def model(self) -> nn.Module:
        lender = nn.Linear(16, 16)
        return nn.Sequential(Holder(lender.weight), nn.Tanh(), lender, Block(), Holder(lender.weight))


class Turning(nn.Linear):
    """Leaves a view of its weight behind for others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turned = self.weight.t()
        return super().forward(x)


class Using(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = Turning(16, 16), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(self.first(x)) @ self.first.turned


class ViewLeftBehind(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(Using(), Using())


class Mixer(nn.Module):
    """Mamba's way with its convolution: the weight is reshaped and handed to a function; the module is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(16, 32, bias=False)
        self.conv1d = nn.Conv1d(16, 16, 4, groups=16, padding=3)
        self.decay = nn.Parameter(torch.rand(16))
        self.out_proj = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.in_proj(x).transpose(1, 2).chunk(2, dim=1)
        taps = self.conv1d.weight.view(16, 4)
        windows = F.pad(x, (3, 0)).unfold(2, 4, 1)
        x = F.silu((windows * taps[:, None]).sum(-1) + self.conv1d.bias[:, None])
        x = x.cumsum(2) * torch.exp(-self.decay)[:, None]
        return self.out_proj((x * F.silu(gate)).transpose(1, 2))


class MambaConv(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(Mixer(), nn.LayerNorm(16), Mixer())

    def data(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(3, 6, 16, generator=generator)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.matrix = nn.Parameter(torch.randn(16, 16) / 4)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale) @ self.matrix + self.scale


class NestedUnits(Case):
    """Parents with weights of their own, three deep, used before and after the child."""

    shard_options: ClassVar[dict[str, Any]] = {"units": [Outer, Block]}

    def model(self) -> nn.Module:
        return nn.Sequential(Outer(Outer(Block())), Outer(nn.Sequential(Outer(Block()), Block())))


# ---------------------------------------------------------------- torch's own layers that do odd things


class Watching(Case):
    """Looks at the model in eval mode after every other step: layers of torch take faster paths there."""

    reference = "plain"

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if step % 2 == 0:
            model.eval()
            with torch.no_grad():
                self.seen.append(self.loss(model, self.batch(1000 + step)))
            model.train()
        super().step(model, optimizer, step)


class Singing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(20, 12, batch_first=True)
        self.cell = nn.LSTMCell(12, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lstm.flatten_parameters()
        y = self.gru(self.lstm(x)[0])[0]
        state = (y.new_zeros(len(y), 16), y.new_zeros(len(y), 16))
        for step in y.unbind(1):
            state = self.cell(step, state)
        return state[0]


class Recurrent(Watching):
    """Recurrent layers keep their weights in a list of their own besides their attributes."""

    def model(self) -> nn.Module:
        return nn.Sequential(Singing(), nn.Linear(16, 16))

    def data(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(3, 5, 16, generator=generator)

    def check(self, model: nn.Module) -> None:
        with self.full(model):
            twin = copy.deepcopy(model)
        for layer in (twin[0].lstm, twin[0].gru):
            assert all(
                held is getattr(layer, name) for held, name in zip(layer._flat_weights, layer._flat_weights_names, strict=True)
            )
        with torch.no_grad():
            self.seen.append(twin(self.batch(0)))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.MultiheadAttention(16, 4, batch_first=True)
        self.other = nn.MultiheadAttention(16, 2, kdim=8, vdim=12, add_bias_kv=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.same(x, x, x, need_weights=False)[0]
        return self.other(x, x[..., :8], x[..., :12])[0]


class Attention(Watching):
    """Attention reads the weights of its projection without calling it."""

    def model(self) -> nn.Module:
        return nn.Sequential(Attending(), nn.Linear(16, 16))

    def data(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(3, 5, 16, generator=generator)


class Transformer(Watching):
    """In eval mode an encoder layer hands all weights of its children to one fused operation, with and without a mask."""

    num_steps = 3
    shard_options: ClassVar[dict[str, Any]] = {"units": [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer]}

    def model(self) -> nn.Module:
        return nn.Transformer(16, 4, 2, 1, dim_feedforward=24, dropout=0.0, batch_first=True)

    def data(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(2, 5, 16, generator=generator), torch.randn(2, 4, 16, generator=generator)

    def loss(self, model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        mask = torch.arange(5).expand(2, 5) > 2
        return model(*data).tanh()[..., :-1].square().mean() + model(*data, src_key_padding_mask=mask)[..., 0].mean()


class BatchNorm(Case):
    """Running statistics are rank 0's, as in DDP."""

    reference = "ddp"

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.BatchNorm1d(16, affine=False)
        )


class BatchNormInEval(BatchNorm, Watching):
    """In eval mode as well: all ranks look at the same model."""


class Dropout(Watching):
    """Every rank draws for itself, and the engine draws nothing."""

    reference = "ddp"

    def model(self) -> nn.Module:
        return nn.Sequential(Block(), nn.Dropout(0.4), Block(), nn.Dropout(0.2))

    def train(self, model: nn.Module, optimizer: Optimizer) -> None:
        torch.manual_seed(1000 + self.rank)
        super().train(model, optimizer)
        self.seen.append(torch.rand(3))


CASES = [
    Containers, InPlace, ReturnsWeight, ParentReads, SiblingReads, HeldElsewhere, ViewLeftBehind, MambaConv, NestedUnits,
    Recurrent, Attention, Transformer, BatchNorm, BatchNormInEval, Dropout,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_training_matches_ddp_at_every_stage(world: World, case: type[Case]) -> None:
    assert_same_at_all_stages(world, case)


@pytest.mark.parametrize("case", [ParentReads, NestedUnits, Recurrent, BatchNorm], ids=lambda case: case.__name__)
def test_three_ranks_agree_at_every_stage(world: World, case: type[Case]) -> None:
    assert_same_at_all_stages(world, case, ranks=3)
