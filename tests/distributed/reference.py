"""What plain torch makes of the training of a case, and the comparison with it.

Written against the documented rules alone, in one process and without Shardwise: the ranks' gradients one after another, added
along the tree.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise.testing import World
from tests.distributed.matrix import (
    MAX_NORM,
    NUM_STEPS,
    PRECISION,
    Case,
    Group,
    Outcome,
    bits_of,
    difference,
    loss_factor,
    make_batch,
    make_model,
    make_optimizers,
    num_micro_steps,
    scaler_options,
    states_in,
    train_all,
)


def reference(group: Group, delay_warmup: int | None = None) -> Outcome:
    """The same training in one process, by plain torch and the documented order of sums.

    Args:
        delay_warmup: After so many updates, each is seen one step late. All are seen at once, if None.
    """
    model, compute_model = make_model(seed=0), make_model(seed=0)
    param_dtype, reduce_dtype = PRECISION[group.compute]
    compute_model.to(getattr(torch, param_dtype or "float32"))
    masters, copies = list(model.parameters()), list(compute_model.parameters())
    optimizers = make_optimizers(model, group.optimizer)
    scale = Scale(is_used=group.compute == "fp16")
    facts: Outcome = {}
    seen, num_updates = values_of(masters), 0
    for step in range(NUM_STEPS):
        with torch.no_grad():
            for copy, values in zip(copies, seen, strict=True):
                copy.copy_(values)
        rounds = []
        for micro in range(num_micro_steps(group)):
            parts = []
            for rank in range(group.ranks):
                loss = compute_model(make_batch(step, micro, rank)) * loss_factor(group, step, micro, rank)
                (loss * scale.value).backward()
                facts[f"loss {step}.{micro} on rank {rank}"] = loss.item().hex()
                parts.append(
                    [weighted(copy, group.ranks, getattr(torch, reduce_dtype or str(copy.dtype)[6:])) for copy in copies]
                )
                compute_model.zero_grad()
            rounds.append(parts)
        # Reduced in few bits, but unscaled, clipped and used in those of the parameters.
        grads = [None if grad is None else grad.float() for grad in reduced(rounds, group)]
        is_finite = all(bool(grad.isfinite().all()) for grad in grads if grad is not None)
        norm, grads = clip(grads, 1.0 / scale.value)
        facts[f"norm {step}"] = norm.hex()
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
        if is_finite:
            before = values_of(masters)
            for optimizer in optimizers:
                optimizer.step()
            seen = before if delay_warmup is not None and num_updates >= delay_warmup else values_of(masters)
            num_updates += len(optimizers)
        scale.update(is_finite)
    facts["scale"] = scale.value.hex()
    facts.update({f"weight {name}": bits_of(param) for name, param in model.named_parameters()})
    facts.update(states_in(model, optimizers))
    return facts


def values_of(params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [param.detach().clone() for param in params]


class Scale:
    """Dynamic loss scaling, as torch documents it."""

    def __init__(self, *, is_used: bool) -> None:
        self.value = scaler_options()["init_scale"] if is_used else 1.0
        self._is_used = is_used
        self._num_good = 0

    def update(self, is_finite: bool) -> None:
        self._num_good = self._num_good + 1 if is_finite else 0
        if self._is_used and not is_finite:
            self.value *= 0.5
        elif self._is_used and self._num_good == scaler_options()["growth_interval"]:
            self.value *= 2.0
            self._num_good = 0


def clip(grads: Sequence[Any], factor: float) -> tuple[float, list[Any]]:
    """Scale and clip. Gradients of 16 bits are not multiplied before they have 32, and then with one factor."""
    is_narrow = any(grad is not None and grad.itemsize < 4 for grad in grads)
    if not is_narrow:
        grads = [None if grad is None else grad * factor for grad in grads]
    norms = [exact_norm(grad) * (factor if is_narrow else 1.0) for grad in grads if grad is not None]
    total = torch.linalg.vector_norm(torch.tensor(norms))
    coefficient = (MAX_NORM / (total + 1e-6)).clamp(max=1.0) * (factor if is_narrow else 1.0)
    return total.item(), [None if grad is None else grad.float() * coefficient for grad in grads]


def exact_norm(grad: torch.Tensor) -> float:
    """The root of the exact sum of the sums of blocks of 64."""
    flat = grad.flatten().float()
    if not flat.isfinite().all():
        return math.nan if flat.isnan().any() else math.inf
    blocks = F.pad(flat, (0, -flat.numel() % 64)).view(-1, 64).square()
    return math.sqrt(math.fsum(blocks.sum(1).tolist()))


def weighted(copy: nn.Parameter, num_ranks: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if copy.grad is None else copy.grad.to(dtype) * (1.0 / num_ranks)


def reduced(rounds: list[list[list[Any]]], group: Group) -> list[Any]:
    """Inside no_sync, gradients are added on each rank and then over the ranks; else over the ranks and then to earlier ones."""
    if group.accumulation == "no_sync":
        rounds = [[[add(a, b) for a, b in zip(*micros, strict=True)] for micros in zip(*rounds, strict=True)]]
    sums = [[tree_sum(parts) for parts in zip(*ranks, strict=True)] for ranks in rounds]
    return sums[0] if len(sums) == 1 else [add(b, a) for a, b in zip(*sums, strict=True)]


def add(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return None if a is None or b is None else a + b


def tree_sum(parts: Sequence[Any]) -> Any:
    half = (len(parts) + 1) // 2
    return parts[0] if len(parts) == 1 else add(tree_sum(parts[:half]), tree_sum(parts[half:]))


def references(groups: Sequence[Group]) -> dict[Group, Outcome]:
    """This rank's share of the groups."""
    return {group: reference(group) for group in groups[dist.get_rank() :: dist.get_world_size()]}


def compare(world: World, cases: Sequence[Case], timeout_seconds: float = 280.0, **ways: Any) -> list[str]:
    """Train cases of one number of ranks; returns what differs from plain torch, on any rank."""
    groups = list(dict.fromkeys(case.group for case in cases))
    expected = {
        group: facts
        for part in world.run(references, groups, ranks=2, timeout_seconds=timeout_seconds)
        for group, facts in part.items()
    }
    wrong = []
    for chunk in (cases[at : at + 12] for at in range(0, len(cases), 12)):
        by_rank = world.run(train_all, chunk, ranks=chunk[0].ranks, timeout_seconds=timeout_seconds, **ways)
        for rank, outcomes in enumerate(by_rank):
            for case, found in zip(chunk, outcomes, strict=True):
                facts = expected[case.group].items()
                mine = {name: value for name, value in facts if not name.startswith("loss") or name.endswith(f"rank {rank}")}
                fact = found if isinstance(found, str) else difference(found, mine)
                if fact is not None:
                    wrong.append(f"{case} on rank {rank}: {fact}")
    return wrong
