"""Parameters of every odd kind train to the same bits at every stage, and look the same from outside."""

import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Optimizer

from shardwise.testing import World
from tests.distributed.odd import Case, assert_same_at_all_stages, same_bits

pytestmark = pytest.mark.dist


# ---------------------------------------------------------------- tied


class LanguageModel(nn.Module):
    """Embedding and head share one weight, of an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


class TiedEmbedding(Case):
    def model(self) -> nn.Module:
        return LanguageModel()

    def data(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(17, (4, 7), generator=generator)

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())

    def check(self, model: nn.Module) -> None:
        assert model.head.weight is model.embedding.weight
        with self.full(model):
            assert model.head.weight is model.embedding.weight
            assert (model.head.weight.detach().std(dim=1) > 0).all()
        assert [name for name, _ in model.named_parameters()].count("embedding.weight") == 1


class SameModuleTwice(Case):
    """One module under two names, called under both."""

    def model(self) -> nn.Module:
        shared = nn.Linear(16, 16)
        return nn.Sequential(shared, nn.Tanh(), nn.Linear(16, 16), shared)

    def check(self, model: nn.Module) -> None:
        assert model[0] is model[3]
        assert model[0].weight is model[3].weight


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
        self.second[0].weight = self.first[0].weight
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.scale)


class TiedAcrossUnits(Case):
    shard_options: ClassVar[dict[str, Any]] = {"units": ["first", "second"]}

    def model(self) -> nn.Module:
        return Twins()

    def check(self, model: nn.Module) -> None:
        assert model.second[0].weight is model.first[0].weight
        assert model.second[0].bias is not model.first[0].bias


# ---------------------------------------------------------------- frozen


class Adapted(nn.Module):
    """A frozen matrix and the small trained ones beside it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(3, 16) / 4)
        self.up = nn.Parameter(torch.randn(16, 3) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Frozen(Case):
    """A frozen unit in front, mixed units, a frozen bias, and a frozen unit at the end."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 16), Adapted(), nn.Tanh(), Adapted(), nn.Linear(16, 16), nn.Linear(16, 16))
        model[0].requires_grad_(False)
        model[4].bias.requires_grad_(False)
        model[5].requires_grad_(False)
        return model

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        self.before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        trained = self.optimizer(p for p in model.parameters() if p.requires_grad)
        return self.wrap(model, trained), trained

    def check(self, model: nn.Module) -> None:
        flags = {name: param.requires_grad for name, param in model.named_parameters()}
        assert {name for name, flag in flags.items() if not flag} == set(self.before)
        with self.full(model):
            frozen = {name: p.detach().clone() for name, p in model.named_parameters() if name in self.before}
        assert self.rank or all(same_bits(tensor, self.before[name]) for name, tensor in frozen.items())


# ---------------------------------------------------------------- shapes


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.block = nn.Linear(16, 16)
        self.block.gain = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * self.temperature) * self.block.gain + self.one


class ScalarParameters(Case):
    def model(self) -> nn.Module:
        return Scalars()

    def check(self, model: nn.Module) -> None:
        assert model.temperature.shape == torch.Size([])
        assert model.block.gain.dim() == 0


class Strided(nn.Module):
    """Weights that are transposed, and in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(16, 24).T / 4)
        self.permuted = nn.Parameter(torch.randn(4, 6, 5).permute(2, 0, 1) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels = self.conv(x.view(5, 3, 4, 4)).flatten(1)
        return pixels.view(-1, 24) @ self.turned @ self.permuted.flatten(1).T[:16]


class NonContiguous(Case):
    def model(self) -> nn.Module:
        return Strided()

    def data(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(5, 48, generator=generator)

    def check(self, model: nn.Module) -> None:
        assert model.turned.stride() == (1, 24)
        assert model.permuted.stride() == (1, 30, 5)
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


class Expanded(Case):
    """A parameter whose elements share memory: torch's optimizers refuse it, so the reference gets a plain copy."""

    reference = "plain"

    def model(self) -> nn.Module:
        model = nn.Linear(16, 20)
        values = torch.randn(20, 1).expand(20, 16)
        model.weight = nn.Parameter(values if self.is_sharded else values.contiguous())
        return model

    def check(self, model: nn.Module) -> None:
        assert model.weight.stride() == (16, 1)


class Flat(nn.Module):
    """First dimensions smaller than the number of ranks, on large parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, 200))
        self.pair = nn.Parameter(torch.randn(2, 150))
        self.layer = nn.Linear(200, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mean() * self.row) + (x[:2, :1] * self.pair).sum()


class FewRows(Case):
    def model(self) -> nn.Module:
        return Flat()


class MoreRanksThanParameters(Case):
    def model(self) -> nn.Module:
        model = nn.Linear(16, 1, bias=False)
        model.weight = nn.Parameter(torch.randn(1, 16))
        return model


class Hollow(nn.Module):
    """Parameters without elements: beside others, and alone in a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0))
        self.layer = nn.Linear(16, 16)
        self.layer.extra = nn.Parameter(torch.empty(0, 16))
        self.wide = nn.Linear(16, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = torch.cat([self.layer.weight, self.layer.extra])
        return F.linear(self.layer(x), more) + self.none.sum() + self.wide(x).sum()


class Empty(Case):
    def model(self) -> nn.Module:
        return Hollow()

    def check(self, model: nn.Module) -> None:
        assert model.none.shape == (0,)
        assert model.wide.weight.shape == (0, 16)


class EmptyUnit(Empty):
    """A unit that has parameters but no elements."""

    shard_options: ClassVar[dict[str, Any]] = {"units": ["wide", "layer"]}


class SparseGradients(TiedEmbedding):
    """Sparse gradients of an embedding are reduced as dense ones."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(17, 16, sparse=True), nn.Linear(16, 17))

    def optimizer(self, params: Iterable[Any]) -> Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def check(self, model: nn.Module) -> None:
        assert model[0].weight.grad is None


# ---------------------------------------------------------------- dtypes


class Mixed(nn.Module):
    """Three floating-point dtypes in one module, and integers and flags that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w32 = nn.Parameter(torch.randn(16, 16) / 4)
        self.w16 = nn.Parameter(torch.randn(16, 16, dtype=torch.bfloat16) / 4)
        self.w64 = nn.Parameter(torch.randn(16, 16, dtype=torch.float64) / 4)
        self.frozen = nn.Parameter(torch.randn(16, dtype=torch.bfloat16), requires_grad=False)
        self.index = nn.Parameter(torch.randperm(16), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(16) > 0.3, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ((x @ self.w32).bfloat16() @ self.w16 + self.frozen).double() @ self.w64
        return (y[:, self.index] * self.mask).float()


class MixedDtypes(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(Mixed(), nn.Tanh(), Mixed())

    def check(self, model: nn.Module) -> None:
        dtypes = [str(p.dtype).removeprefix("torch.") for p in model[0].parameters()]
        assert dtypes == ["float32", "bfloat16", "float64", "bfloat16", "int64", "bool"]


class Phases(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, dtype=dtype) / 4)
        self.bias = nn.Parameter(torch.randn(16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs().float() + self.bias


class Complex(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(Phases(torch.complex64), nn.Tanh(), Phases(torch.complex128))

    def optimizer(self, params: Iterable[Any]) -> Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, foreach=False)


# ---------------------------------------------------------------- containers and parametrizations


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList([nn.Parameter(torch.randn(16, 16) / 4) for _ in range(3)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(16)), "scale": nn.Parameter(torch.ones(16))})
        self.inner = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.steps:
            x = torch.tanh(x @ weight)
        return self.inner["b"](self.inner["a"](x)) * self.named["scale"] + self.named["shift"]


class Containers(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(Boxes(), Boxes())

    def check(self, model: nn.Module) -> None:
        assert len(model[0].steps) == 3
        assert list(model[0].named.keys()) == ["scale", "shift"]


class WeightNorm(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 16))


class OldWeightNorm(Case):
    """The hook-based weight norm of older models: the weight is recomputed before each forward."""

    def model(self) -> nn.Module:
        with warnings.catch_warnings(action="ignore"):
            return nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 16)), nn.Tanh(), nn.utils.weight_norm(nn.Linear(16, 16)))


class SpectralNorm(Case):
    """Its power iteration keeps buffers."""

    def model(self) -> nn.Module:
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 16))


class Orthogonal(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 16))

    def check(self, model: nn.Module) -> None:
        with self.full(model), torch.no_grad():
            weight = model[0].weight
            torch.testing.assert_close(weight @ weight.T, torch.eye(16), atol=1e-5, rtol=0)


class CachedParametrization(WeightNorm):
    """The parametrized weight is computed once and used by two calls."""

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return (model(data) + model(2 * data)).square().mean()

    reference = "plain"


CASES = [
    TiedEmbedding, SameModuleTwice, TiedAcrossUnits, Frozen, ScalarParameters, NonContiguous, Expanded, FewRows,
    MoreRanksThanParameters, Empty, EmptyUnit, SparseGradients, MixedDtypes, Complex, Containers, WeightNorm, OldWeightNorm,
    SpectralNorm, Orthogonal, CachedParametrization,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_training_matches_ddp_at_every_stage(world: World, case: type[Case]) -> None:
    assert_same_at_all_stages(world, case)


@pytest.mark.parametrize(
    "case", [TiedEmbedding, Frozen, ScalarParameters, NonContiguous, FewRows, MoreRanksThanParameters, MixedDtypes, Complex],
    ids=lambda case: case.__name__,
)  # fmt: skip
def test_three_ranks_agree_at_every_stage(world: World, case: type[Case]) -> None:
    assert_same_at_all_stages(world, case, ranks=3)
