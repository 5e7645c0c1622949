"""What scenarios share: one loop that runs at every stage and, as `PLAIN`, with torch alone; and how results are compared.

`PLAIN` is the reference: an ordinary model on every rank, whose gradients are averaged by hand after each backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.devices.pool import Poison
from shardwise.testing import World

PLAIN = -1
STAGES = (0, 1, 2, 3)
WIDTH = 12
VARIANTS: dict[str, dict[str, Any]] = {
    "3, no prefetch": {"stage": 3, "prefetch": 0},
    "3, prefetch 3": {"stage": 3, "prefetch": 3},
    "3, kept after forward": {"stage": 3, "reshard_after_forward": False},
    "3, small units": {"stage": 3, "units": [nn.Linear]},
}
"""Settings of stage 3 that change when units are gathered, and no number."""

Stage: TypeAlias = int | str
"""`PLAIN`, a ZeRO stage, or a key of `VARIANTS`."""


def train_at(train: Callable[..., Any], stages: Iterable[Stage], args: Sequence[Any]) -> dict[Stage, Any]:
    """Inside a rank: what a scenario gives at each stage. Memory that nobody holds is NaN meanwhile."""
    Poison.enabled = True
    results = {}
    for stage in stages:
        torch.manual_seed(0)
        results[stage] = train(stage, *args)
    return results


def check_stages(
    world: World, train: Callable[..., Any], *args: Any, ranks: int = 2, stages: Sequence[Stage] = STAGES, rtol: float = 0.0
) -> list[Any]:
    """Run a scenario at `PLAIN` and at every stage: all results have the same bits. Returns those of `PLAIN` by rank.

    With `rtol`, only stages have the bits of each other; those of `PLAIN` may differ by rounding.
    """
    results = world.run(train_at, train, (PLAIN, *stages), args, ranks=ranks, timeout_seconds=60)
    for rank, by_stage in enumerate(results):
        for stage in stages:
            expected = by_stage[stages[0] if rtol and stage != stages[0] else PLAIN]
            assert_same(by_stage[stage], expected, f"rank {rank}, stage {stage}", rtol if stage == stages[0] else 0.0)
    return [by_stage[PLAIN] for by_stage in results]


def assert_same(found: Any, expected: Any, place: str = "", rtol: float = 0.0) -> None:
    """Compare tensors in nested containers, to the bit unless told otherwise, and name the first that differs."""
    assert type(found) is type(expected), f"{place}: {type(found).__name__} where {type(expected).__name__} was expected"
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, f"{place}: {found.dtype}, {tuple(found.shape)}"
        assert not bool(torch.isnan(expected).any()), f"{place}: nan in what is expected"
        if not (torch.allclose(found, expected, rtol=rtol, atol=rtol) if rtol else torch.equal(found, expected)):
            gap = (found.double() - expected.double()).abs().max().item()
            raise AssertionError(
                f"{place}: {int((found != expected).sum())} of {found.numel()} elements differ, by up to {gap}"
            )
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{place}: {list(found)} where {list(expected)} was expected"
        for key, item in expected.items():
            assert_same(found[key], item, f"{place}, {key}", rtol)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{place}: {len(found)} items where {len(expected)} were expected"
        for number, item in enumerate(expected):
            assert_same(found[number], item, f"{place}, {number}", rtol)
    else:
        assert found == expected, f"{place}: {found!r} where {expected!r} was expected"


def shard(stage: Stage, model: nn.Module, optimizer: Any = None, **options: Any) -> shardwise.Sharded | None:
    """`shardwise.shard`, or nothing at `PLAIN`."""
    settings = VARIANTS[stage] if isinstance(stage, str) else {"stage": stage}
    return None if stage == PLAIN else shardwise.shard(model, optimizer, **settings, **options)


def batch(step: int, *shape: int, high: int | None = None) -> torch.Tensor:
    """Inputs that depend on rank and step: normal numbers, or whole ones below `high`."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(shape, generator=generator) if high is None else torch.randint(high, shape, generator=generator)


def backward(stage: Stage, loss: torch.Tensor, *models: nn.Module, is_synced: bool = True) -> None:
    """`loss.backward()`, inside `no_sync` if not synced. `PLAIN` averages over the ranks what has come since it last did."""
    if stage != PLAIN:
        with contextlib.ExitStack() as stack:
            for model in () if is_synced else models:
                stack.enter_context(shardwise.no_sync(model))
            loss.backward()
        return
    params = [param for model in models for param in model.parameters()]
    before = [param.grad for param in params]
    for param in params:
        param.grad = None
    loss.backward()
    for param, held in zip(params, before, strict=True):
        _take_grad(param, held, is_synced)


def _take_grad(param: Any, held: torch.Tensor | None, is_synced: bool) -> None:
    """Weight the new gradient, add it to the local ones, and add their sum over the ranks to what was averaged before."""
    size, local = dist.get_world_size(), getattr(param, "local_grad", None)
    if param.grad is not None:
        mine = param.grad * (1.0 / size)
        local = mine if local is None else local + mine
    param.local_grad, param.grad = None if is_synced else local, held
    if is_synced and local is not None:
        parts = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(parts, local.contiguous())
        param.grad = _add_up(parts) if held is None else _add_up(parts) + held


def _add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    middle = (len(parts) + 1) // 2
    return parts[0] if len(parts) == 1 else _add_up(parts[:middle]) + _add_up(parts[middle:])


def weights(stage: Stage, model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, full."""
    if stage == PLAIN:
        return {name: param.detach().clone() for name, param in model.named_parameters()}
    with shardwise.gathered(model):
        return weights(PLAIN, model)


def gradients(stage: Stage, model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of all gradients, full; None where there is none."""
    if stage == PLAIN:
        grads = {name: param.grad for name, param in model.named_parameters()}
        return {name: None if grad is None else grad.detach().clone() for name, grad in grads.items()}
    with shardwise.gathered(model):
        return gradients(PLAIN, model)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks and a head, with a parameter of its own."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def train_steps(stage: Stage, model: nn.Module, loss_at: Callable[[int], torch.Tensor], num_steps: int = 3) -> Any:
    """The loop of most scenarios: losses by step, gradients of the first step, and the weights at the end."""
    optimizer = adamw(model)
    handle = shard(stage, model, optimizer)
    before = weights(stage, model)
    losses, first_grads = [], None
    for step in range(num_steps):
        if handle is not None:
            handle.engine.executor.totals.reset()
        loss = loss_at(step)
        losses.append(loss.detach().clone())
        backward(stage, loss, model)
        first_grads = gradients(stage, model) if step == 0 else first_grads
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        # When the same step is seen again, every unit is reduced at most once.
        num_reductions = handle.engine.executor.totals.num_collectives["reduce"]
        assert num_reductions <= len(handle.units), f"stage {stage}: {num_reductions} reductions of {len(handle.units)} units"
    after = weights(stage, model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return {"losses": losses, "first_grads": first_grads, "weights": after}
