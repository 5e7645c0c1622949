"""Trains one case at every stage on one set of ranks, and compares what comes out bit for bit.

A `Case` is a model and a loop; subclasses change what is odd about them. Its *legs* are the four stages and a reference:
`"ddp"` (torch's own), or `"plain"` (an unsharded model whose gradients are averaged before the update) where DDP cannot run it.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import shardwise
from shardwise.testing import World

Leg = int | str
STAGES: tuple[Leg, ...] = (0, 1, 2, 3)


class Block(nn.Module):
    """A small residual block, to build models of."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 20)
        self.down = nn.Linear(20, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@dataclass
class Outcome:
    """What one leg gave on one rank."""

    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    """The optimizer's, under torch's own indices."""
    seen: list[torch.Tensor]
    resting: set[str]


class Case:
    """A model and the loop that trains it."""

    reference: ClassVar[Leg | None] = "ddp"
    ddp_options: ClassVar[dict[str, Any]] = {}
    shard_options: ClassVar[dict[str, Any]] = {}
    num_steps: ClassVar[int] = 4
    resting: ClassVar[set[str]] = set()
    """Trained parameters that the loop does not move."""

    def __init__(self, leg: Leg, *options: Any) -> None:
        self.leg = leg
        self.options = options
        self.rank = dist.get_rank()
        self.seen: list[torch.Tensor] = []
        """Further results to compare: losses, outputs in eval mode, gradients."""

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.leg, int)

    def model(self) -> nn.Module:
        raise NotImplementedError

    def data(self, generator: torch.Generator) -> Any:
        return torch.randn(5, 16, generator=generator)

    def loss(self, model: nn.Module, data: Any) -> torch.Tensor:
        return model(data).square().mean()

    def optimizer(self, params: Iterable[Any]) -> Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        """What to call in the loop, and the optimizer."""
        return self.wrap(model, optimizer := self.optimizer(model.parameters())), optimizer

    def wrap(self, model: nn.Module, *optimizers: Optimizer) -> nn.Module:
        """Shard the model, or do what the reference does."""
        if self.is_sharded:
            shardwise.shard(model, optimizers or None, stage=self.leg, **self.shard_options)
            return model
        if self.leg == "ddp":
            return DistributedDataParallel(model, **self.ddp_options)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, 0)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(average_grads)
        return model

    def train(self, model: nn.Module, optimizer: Optimizer) -> None:
        for step in range(self.num_steps):
            self.step(model, optimizer, step)

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        loss = self.loss(model, self.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.seen.append(loss.detach())

    def batch(self, step: int) -> Any:
        """This rank's data of a step: other data on every rank."""
        return self.data(torch.Generator().manual_seed(100 * step + self.rank))

    def finish(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Bring plain objects back."""
        if self.is_sharded:
            shardwise.unshard(model, optimizer)

    def full(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context in which the model's values are present, sharded or not."""
        return shardwise.gathered(model) if self.is_sharded else contextlib.nullcontext()

    def check(self, model: nn.Module) -> None:
        """Facts that must hold after training, with parameters at rest."""


def average_grads(optimizer: Optimizer, *_: Any) -> None:
    """Replace gradients by their averages over all ranks, in the order of the ranks."""
    size = dist.get_world_size()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.grad is not None:
            parts = [torch.empty(param.shape, dtype=param.dtype) for _ in range(size)]
            dist.all_gather(parts, param.grad.contiguous())
            param.grad.copy_(sum(part * (1 / size) for part in parts))


def copies(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def run_case(case_type: type[Case], legs: tuple[Leg, ...], *options: Any) -> dict[Leg, Outcome]:
    """Train a case on each leg. In workers, memory that the engine has released holds NaN."""
    return {leg: run_leg(case_type(leg, *options)) for leg in legs}


def run_leg(case: Case) -> Outcome:
    torch.manual_seed(case.rank)  # All must begin with rank 0's weights.
    model = case.model()
    initial = copies(model.named_parameters())
    trained = {name for name, param in model.named_parameters() if param.requires_grad and param.numel()}
    called, optimizer = case.prepare(model)
    case.train(called, optimizer)
    case.check(model)
    with case.full(model):
        weights = copies(model.named_parameters())
    case.finish(model, optimizer)
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter, f"{name} is a {type(param)} after unshard"
        assert same_bits(param.detach(), weights[name]), f"{name} is not the same gathered and unsharded"
    resting = {name for name in trained if case.rank == 0 and same_bits(initial[name], weights[name])}
    return Outcome(weights, copies(model.named_buffers()), state_of(optimizer), case.seen, resting - case.resting)


def state_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Tensors and numbers of an optimizer's state."""
    state = optimizer.state_dict()["state"]
    found = ((f"{number} {key}", value) for number in sorted(state) for key, value in state[number].items())
    return {name: torch.as_tensor(value) for name, value in found if isinstance(value, (torch.Tensor, int, float))}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool((one.reshape(-1).view(torch.uint8) == other.reshape(-1).view(torch.uint8)).all())


def difference(one: Outcome, other: Outcome) -> str | None:
    """The first thing in which two outcomes differ, by name."""
    for kind in ("weights", "buffers", "state"):
        first, second = getattr(one, kind), getattr(other, kind)
        if first.keys() != second.keys():
            return f"names of {kind}: {list(first)} and {list(second)}"
        for name, tensor in first.items():
            if not same_bits(tensor, second[name]):
                return f"{kind} {name}: {describe(tensor, second[name])}"
    if len(one.seen) != len(other.seen):
        return f"{len(one.seen)} and {len(other.seen)} results"
    for place, (first, second) in enumerate(zip(one.seen, other.seen, strict=True)):
        if not same_bits(first, second):
            return f"result {place}: {describe(first, second)}"
    return None


def describe(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{tuple(one.shape)} {one.dtype} and {tuple(other.shape)} {other.dtype}"
    far = (one.to(torch.complex128) - other.to(torch.complex128)).abs()
    return f"{int((far != 0).sum())} of {far.numel()} elements differ, by up to {float(far.max()):.3g}"


def assert_same_at_all_stages(world: World, case_type: type[Case], *options: Any, ranks: int = 2) -> None:
    """Train on all legs: every stage must give the reference's bits, on every rank, and the training must be real."""
    has_reference = case_type.reference is not None and ranks == 2  # Sums of more ranks depend on their order.
    legs = ((case_type.reference,) if has_reference else ()) + STAGES
    for rank, outcomes in enumerate(world.run(run_case, case_type, legs, *options, ranks=ranks)):
        expected = outcomes[legs[0]]
        assert not expected.resting, f"training did not move {sorted(expected.resting)}"
        for name, tensor in expected.weights.items():
            assert tensor.isfinite().all(), f"{name} is not finite"
        for leg in legs[1:]:
            found = difference(expected, outcomes[leg])
            assert found is None, f"rank {rank}, stage {leg} against {legs[0]}: {found}"
