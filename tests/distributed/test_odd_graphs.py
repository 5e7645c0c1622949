"""Graphs of every odd kind train to the same bits at every stage: double backward, recomputation, custom functions."""

import gc
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.testing import World
from tests.distributed.odd import Block, Case, assert_same_at_all_stages

pytestmark = pytest.mark.dist


class GradientPenalty(Case):
    """A loss on the gradient with respect to the input: backward through a backward."""

    reference = "plain"

    def model(self) -> nn.Module:
        return nn.Sequential(Block(), nn.Tanh(), Block(), nn.Linear(16, 1))

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        data.requires_grad_()
        out = model(data)
        (slope,) = torch.autograd.grad(out.sum(), data, create_graph=True)
        return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


class ParameterPenalty(GradientPenalty):
    """The same with respect to the parameters."""

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        loss = model(data).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(grad.square().sum() for grad in grads)


class FunctionalGradients(Case):
    """`torch.autograd.grad` over all parameters gives this rank's own gradients, which the user brings together."""

    reference = "plain"

    def model(self) -> nn.Module:
        return nn.Sequential(Block(), nn.Tanh(), Block())

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        params = list(model.parameters())
        own = torch.autograd.grad(self.loss(model, self.batch(step)), params)
        self.seen.extend(own)
        for param, grad in zip(params, own, strict=True):
            torch.distributed.all_reduce(grad)
            param.grad = grad / 2
        optimizer.step()
        optimizer.zero_grad()


class BackwardInto(Case):
    """A backward that is told into which parameters it leads."""

    reference = "plain"
    resting: ClassVar[set[str]] = {"1.up.weight", "1.up.bias"}

    def model(self) -> nn.Module:
        return nn.Sequential(Block(), Block(), nn.Linear(16, 16))

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        loss = self.loss(model, self.batch(step))
        loss.backward(inputs=[*model[0].parameters(), *model[1].down.parameters(), *model[2].parameters()])
        optimizer.step()
        optimizer.zero_grad()


class OtherWeights(Case):
    """`functional_call` runs a sharded model with tensors that are not its own, and leaves its own alone."""

    reference = "plain"

    def model(self) -> nn.Module:
        return nn.Sequential(Block(), nn.Tanh(), Block())

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        others = {name: torch.full(param.shape, 0.01) for name, param in model.named_parameters() if name.startswith("0")}
        with torch.no_grad():
            own = model(data)
            for tensors in (others, {name: nn.Parameter(tensor) for name, tensor in others.items()}):
                self.seen.append(torch.func.functional_call(model, tensors, data))
                assert torch.equal(model(data), own)
        return torch.func.functional_call(model, dict(model.named_parameters()), data).square().mean()


class Transforms(Case):
    """Transforms of torch.func over the input of a model, with and without gradients, before it is trained."""

    reference = "plain"

    def model(self) -> nn.Module:
        return nn.Sequential(Block(), nn.Tanh(), Block())

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.append(torch.func.vmap(model)(data))
            self.seen.append(torch.func.jvp(model, (data,), (torch.ones_like(data),))[1])
        slope = torch.func.jacrev(model)(data[0])
        return model(data).square().mean() + slope.square().mean()


class Checkpointed(nn.Module):
    """Blocks under activation checkpointing, nested, with keyword arguments where that kind takes them."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.gate = nn.Linear(16, 16)
        self.use_reentrant = use_reentrant

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[1], x, use_reentrant=self.use_reentrant)
        return self.blocks[2](x)

    def gated(self, x: torch.Tensor, *, gain: float, gate: torch.Tensor | None = None) -> torch.Tensor:
        return self.blocks[3](x) * gain * torch.sigmoid(self.gate(x if gate is None else gate))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[0], self.gate(x), use_reentrant=self.use_reentrant)
        x = checkpoint(self.pair, x, use_reentrant=self.use_reentrant)
        if self.use_reentrant:
            return self.blocks[3](x)
        return checkpoint(self.gated, x, use_reentrant=False, gain=2.0, gate=x)


class CheckpointReentrant(Case):
    def model(self) -> nn.Module:
        return Checkpointed(use_reentrant=True)


class CheckpointNonReentrant(Case):
    def model(self) -> nn.Module:
        return Checkpointed(use_reentrant=False)


class CheckpointWhole(Case):
    """The whole model is checkpointed from outside, twice, with dropout whose draws must repeat."""

    reference = "plain"

    def model(self) -> nn.Module:
        return nn.Sequential(Block(), nn.Dropout(0.3), Block())

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(self.rank)
        inner = checkpoint(model, data, use_reentrant=False)
        return checkpoint(model, inner, use_reentrant=False).square().mean()


class CheckpointWholeReentrant(CheckpointWhole):
    """The same with the reentrant kind, which runs a backward inside the backward."""

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(self.rank)
        return checkpoint(model, data.requires_grad_(), use_reentrant=True).square().mean()


class Placed(nn.Module):
    """Places that are drawn up once and read by every checkpointed block: their gradient comes block by block, the others' once."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.gain = nn.Parameter(torch.randn(16)), nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places.view(1, 16)
        for block in self.blocks:
            # Not an argument: the backward inside the backward goes on through them.
            x = checkpoint(lambda x, block=block: block(x + places), x, use_reentrant=True)
        return x * self.gain


class CheckpointSharedReentrant(Case):
    reference = "plain"

    def model(self) -> nn.Module:
        return Placed()

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        return super().loss(model, data.requires_grad_())


class KeepsWeight(torch.autograd.Function):
    """Keeps its weights in every way there is: saved, as an attribute, and as a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saved: torch.Tensor, kept: torch.Tensor, viewed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, saved)
        ctx.kept, ctx.turned = kept, viewed.t()
        return x @ saved.t() + x @ kept.t() + x @ viewed.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, saved = ctx.saved_tensors
        by_weight = grad.t() @ x
        return grad @ saved + grad @ ctx.kept + grad @ ctx.turned.t(), by_weight, by_weight, by_weight * ctx.turned.sign().t()


class Custom(nn.Module):
    def __init__(self, views: bool) -> None:
        super().__init__()
        self.saved, self.kept, self.viewed = (nn.Parameter(torch.randn(16, 16) / 8) for _ in range(3))
        self.views = views

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(KeepsWeight.apply(x, self.saved, self.kept, self.viewed if self.views else self.viewed.clone()))


class CustomFunction(Case):
    def model(self) -> nn.Module:
        first, second, third = (Custom(views=False) for _ in range(3))
        return nn.Sequential(Block(), first, second, first, third, Block())


class CustomFunctionWithView(Case):
    """The view must be of the same weight in backward, though other units have used the memory in between."""

    def model(self) -> nn.Module:
        first, second, third = (Custom(views=True) for _ in range(3))
        return nn.Sequential(Block(), first, second, first, third, Block())


class SavedOnCpu(Case):
    """The user's own hooks on saved tensors, around the forward."""

    def model(self) -> nn.Module:
        return nn.Sequential(Block(), nn.Tanh(), Block())

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            first = model(data)
        with saved_tensors_hooks(lambda tensor: tensor.double(), lambda tensor: tensor.float()):
            return (first + model(2 * data)).square().mean()

    reference = "plain"


CASES = [
    GradientPenalty, ParameterPenalty, FunctionalGradients, BackwardInto, OtherWeights, Transforms, CheckpointReentrant,
    CheckpointNonReentrant, CheckpointWhole, CheckpointWholeReentrant, CheckpointSharedReentrant,
    CustomFunction, CustomFunctionWithView, SavedOnCpu,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_training_matches_ddp_at_every_stage(world: World, case: type[Case]) -> None:
    assert_same_at_all_stages(world, case)


@pytest.mark.parametrize("case", [GradientPenalty, CheckpointReentrant], ids=lambda case: case.__name__)
def test_three_ranks_agree_at_every_stage(world: World, case: type[Case]) -> None:
    assert_same_at_all_stages(world, case, ranks=3)


# ---------------------------------------------------------------- graphs that are dropped


class Remembering(Block):
    """Notes the memory of its activations."""

    def __init__(self, noted: list[StorageWeakRef]) -> None:
        super().__init__()
        self.noted = noted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(x))
        self.noted.append(StorageWeakRef(inner.untyped_storage()))
        return x + self.down(inner)


def drop_graphs(stage: int) -> None:
    noted: list[StorageWeakRef] = []
    model = nn.Sequential(Remembering(noted), Remembering(noted), nn.Linear(16, 16))
    shardwise.shard(model, stage=stage)
    model(torch.ones(2, 16)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        for wants_grad in (False, True):
            loss = model(torch.ones(2, 16, requires_grad=wants_grad)).sum()
            del loss
        model(torch.ones(2, 16)).sum().backward()
        assert [ref.expired() for ref in noted] == [True] * 8
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_activations_are_freed_with_the_graph_and_not_by_the_garbage_collector(world: World, stage: int) -> None:
    world.run(drop_graphs, stage)
