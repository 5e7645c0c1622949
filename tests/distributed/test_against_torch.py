"""What torch itself makes of the same training: DDP to the bit at 2 ranks, one process with the whole batch in fp64 to 1e-12."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.devices.pool import Poison
from shardwise.testing import World
from tests.distributed.matrix import LENGTH, VOCABULARY, bits_of, make_model, states_in

pytestmark = pytest.mark.dist
NUM_STEPS = 20
DDP = -1


class Normed(nn.Module):
    """Convolutions with batch norms, whose buffers are rank 0's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 7, 3, bias=False), nn.BatchNorm2d(7), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(7, 9, 3), nn.BatchNorm2d(9), nn.ReLU())
        self.head = nn.Linear(9, 5)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.head(self.second(self.first(images)).mean((2, 3))), labels)


def new_model(kind: str, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Normed() if kind == "normed" else make_model(seed)


def new_batch(kind: str, seed: int, num_samples: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    if kind == "normed":
        images = torch.randn(num_samples, 3, 6, 6, generator=generator)
        return images, torch.randint(5, (num_samples,), generator=generator)
    return torch.randint(VOCABULARY, (num_samples, LENGTH + 1), generator=generator)


def new_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    return torch.optim.SGD(params, lr=5e-2, momentum=0.9, weight_decay=0.01, nesterov=True)


# ---------------------------------------------------------------- DDP


def train_as(stage: int, kind: str, optimizer_name: str, num_micro: int) -> dict[str, str]:
    """Train under DDP or at a stage; returns bits of losses, gradients, weights, buffers and optimizer state."""
    rank = dist.get_rank()
    model = new_model(kind, seed=rank)
    optimizer = new_optimizer(optimizer_name, model.parameters())
    if stage == DDP:
        called: nn.Module = DistributedDataParallel(model)
        quiet = called.no_sync
    else:
        shardwise.shard(model, optimizer, stage=stage)
        called, quiet = model, lambda: shardwise.no_sync(model)
    facts: dict[str, str] = {}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for micro in range(num_micro):
            with quiet() if micro < num_micro - 1 else nullcontext():
                loss = called(new_batch(kind, 1000 * step + 100 * micro + rank)) / num_micro
                loss.backward()
            facts[f"loss {step}.{micro}"] = loss.item().hex()
        if step == NUM_STEPS - 1:
            with shardwise.gathered(model) if stage != DDP else nullcontext():
                facts.update({f"grad {name}": bits_of(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    if stage != DDP:
        shardwise.unshard(model, optimizer)
    facts.update({f"weight {name}": bits_of(param) for name, param in model.named_parameters()})
    # DDP leaves buffers alone in the forward after one inside no_sync, Shardwise does not: rank 0's are the same anyway.
    facts.update({f"buffer {name}": bits_of(b) for name, b in model.named_buffers() if num_micro == 1 or rank == 0})
    facts.update(states_in(model, [optimizer]))
    return facts


def compare_with_ddp(kind: str, optimizer_name: str, num_micro: int) -> list[str]:
    Poison.enabled = True
    expected = train_as(DDP, kind, optimizer_name, num_micro)
    wrong = []
    for stage in range(4):
        found = train_as(stage, kind, optimizer_name, num_micro)
        names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        wrong += [f"stage {stage} on rank {dist.get_rank()}: {name}" for name in names]
    assert len(expected) > NUM_STEPS + 3 * 10
    return wrong


@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("optimizer_name", ["AdamW", "SGD"])
@pytest.mark.parametrize("kind", ["gpt", "normed"])
def test_every_stage_has_the_bits_of_ddp(world: World, kind: str, optimizer_name: str, num_micro: int) -> None:
    wrong = [fact for facts in world.run(compare_with_ddp, kind, optimizer_name, num_micro, ranks=2) for fact in facts]
    assert not wrong, "\n" + "\n".join(wrong)


# ---------------------------------------------------------------- one process, the whole batch, fp64


def whole_batch(optimizer_name: str, counts: Sequence[int]) -> list[torch.Tensor]:
    """Weights after training on all ranks' samples together."""
    model = make_model(seed=0).double()
    optimizer = new_optimizer(optimizer_name, model.parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        parts = [new_batch("gpt", 1000 * step + rank, count) for rank, count in enumerate(counts) if count]
        model(torch.cat(parts)).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def distances(optimizer_name: str, counts: Sequence[int], is_shared: bool) -> list[tuple[int, float, float]]:
    """By stage: relative distance of the whole model, and the largest of any element, from training in one process."""
    Poison.enabled = True
    expected = whole_batch(optimizer_name, counts)
    rank, found = dist.get_rank(), []
    for stage in range(4):
        model = make_model(seed=rank).double()
        optimizer = new_optimizer(optimizer_name, model.parameters())
        shardwise.shard(model, optimizer, stage=stage)
        for step in range(NUM_STEPS):
            if is_shared:
                shardwise.share(model, tokens=counts[rank] * LENGTH)
            optimizer.zero_grad()
            # A rank without samples runs the model all the same, on anything: its gradients have no weight.
            model(new_batch("gpt", 1000 * step + rank, counts[rank] or 1)).backward()
            optimizer.step()
        with shardwise.gathered(model):
            gaps = [param.detach() - other for param, other in zip(model.parameters(), expected, strict=True)]
        norms = [torch.stack([part.norm() for part in parts]).norm().item() for parts in (gaps, expected)]
        found.append((stage, norms[0] / norms[1], max(gap.abs().max().item() for gap in gaps)))
    return found


UNEVEN = {2: (5, 2), 3: (4, 0, 3), 4: (1, 6, 2, 3)}


@pytest.mark.parametrize("is_shared", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("optimizer_name", ["AdamW", "SGD"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fp64_is_training_on_the_whole_batch(world: World, ranks: int, optimizer_name: str, is_shared: bool) -> None:
    counts = UNEVEN[ranks] if is_shared else (3,) * ranks
    for rank, found in enumerate(world.run(distances, optimizer_name, counts, is_shared, ranks=ranks)):
        for stage, relative, largest in found:
            place = f"stage {stage}, rank {rank}: relative distance {relative:.2e}, largest gap {largest:.2e}"
            assert relative <= 1e-12, place
            if optimizer_name == "SGD":
                assert largest <= 1e-12, place


def weights_without_share(counts: Sequence[int]) -> float:
    """The distance from the whole batch if uneven counts are not told to Shardwise."""
    return distances("SGD", counts, is_shared=False)[0][1]


def test_uneven_counts_matter(world: World) -> None:
    assert min(world.run(weights_without_share, UNEVEN[2], ranks=2)) > 1e-6


# ---------------------------------------------------------------- half precision


def small_gradients(reduce_dtype: str | None, is_clipped: bool) -> list[float]:
    """Gradients of 2 ** -22 in half precision, through a loss scaler that lifts them to 2 ** -6 and back."""
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shardwise.shard(model, optimizer, stage=2, param_dtype="float16", reduce_dtype=reduce_dtype)
    scaler = shardwise.GradScaler("cpu", init_scale=2.0**16)
    out = model(torch.full((1, 8), 2.0**-4)).float()
    scaler.scale(out.sum() * 2.0**-18 * 1.125).backward()
    scaler.unscale_(optimizer)
    if is_clipped:
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    with shardwise.gathered(model):
        return model.weight.grad.unique().tolist()


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("reduce_dtype", [None, "float32", "float16"])
def test_loss_scaling_keeps_small_gradients(world: World, reduce_dtype: str | None, is_clipped: bool) -> None:
    # In half precision the unscaled gradient would be 5e-07 or 0: what the scaler lifts above the rounding must stay there.
    assert world.run(small_gradients, reduce_dtype, is_clipped, ranks=2) == [[1.125 * 2.0**-22]] * 2


def scaled_then_changed(change: str) -> list[float]:
    """Gradients of 3 that a scaler has lifted to 768, unscaled, and then changed by hand or cleared after an overflow."""
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shardwise.shard(model, optimizer, stage=2, param_dtype="float16", nonfinite="keep")
    scaler = shardwise.GradScaler("cpu", init_scale=256.0)

    def backward(factor: float) -> None:
        scaler.scale(model(torch.ones(1, 8)).float().sum() * factor).backward()
        scaler.unscale_(optimizer)

    if change == "zeros":
        backward(float("nan"))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    backward(3.0)
    if change == "clip":
        nn.utils.clip_grad_value_(model.parameters(), 2.0)
    elif change == "add":
        for param in model.parameters():
            param.grad.add_(1.0)
    with shardwise.gathered(model):
        return model.weight.grad.unique().tolist()


@pytest.mark.parametrize(("change", "expected"), [("none", 3.0), ("clip", 2.0), ("add", 4.0), ("zeros", 3.0)])
def test_unscaled_gradients_can_be_changed(world: World, change: str, expected: float) -> None:
    assert world.run(scaled_then_changed, change, ranks=2) == [[expected]] * 2
