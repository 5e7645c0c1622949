"""Wrong use is refused before anything is changed, on every rank, with what to do; what goes wrong in mid-run is named."""

from __future__ import annotations

import copy
import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.testing import RankError, World

pytestmark = [pytest.mark.dist, pytest.mark.fault]
STAGES = (0, 1, 2, 3)


class Branches(nn.Module):
    """Two branches of equal size, which ranks may use or not, in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, order: str = "ab") -> torch.Tensor:
        for letter in order:
            x = (self.first if letter == "a" else self.second)(x).relu()
        return self.head(x).sum()


def make(stage: int, **options: Any) -> tuple[Branches, torch.optim.Optimizer, shardwise.Sharded]:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, shardwise.shard(model, optimizer, stage=stage, **options)


def values(model: nn.Module) -> list[torch.Tensor]:
    with shardwise.gathered(model):
        return [param.detach().clone() for param in model.parameters()]


def batch() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))


def raised(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_wrong_arguments_are_refused_before_anything_changes() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(shardwise.UsageError, match="none of this model's"):
        shardwise.shard(model, foreign, stage=3)
    with pytest.raises(shardwise.PlanError, match=r"stage must be 0, 1, 2 or 3 but is 4"):
        shardwise.shard(model, stage=4)
    with pytest.raises(shardwise.PlanError, match=r"'prefetsch'\. Did you mean 'prefetch'"):
        shardwise.shard(model, stage=3, prefetsch=1)
    with pytest.raises(shardwise.PlanError, match="has none of that name"):
        shardwise.shard(model, stage=3, units=["blocks.7"])
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        shardwise.shard([model], stage=3)
    assert type(model.weight) is nn.Parameter
    shardwise.shard(model, stage=3)
    with pytest.raises(shardwise.UsageError, match="sharded already"):
        shardwise.shard(model, stage=2)
    with pytest.raises(shardwise.UsageError, match="sharded already"):
        shardwise.shard(nn.Sequential(model), stage=2)
    with pytest.raises(shardwise.UsageError, match="is not sharded"), shardwise.gathered(other):
        pass


def disagree(kind: str) -> tuple[str, str, bool]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5 if kind == "model" and rank == 1 else 4), nn.ReLU())
    prefetch = 2 if kind == "plan" and rank == 1 else 1
    error = raised(lambda: shardwise.shard(model, stage=3, prefetch=prefetch))
    return *error, type(model[0].weight) is nn.Parameter


@pytest.mark.parametrize(("kind", "text"), [("model", r"parameter 0.weight: shape \(5, 4\)"), ("plan", "prefetch = 2")])
def test_ranks_that_disagree_all_raise_with_the_first_difference(world: World, kind: str, text: str) -> None:
    for name, message, is_plain in world.run(disagree, kind, ranks=3):
        assert name == "UsageError"
        assert is_plain
        assert re.search(f"rank 1 has '.*{text}", message), message


def used_on_some_ranks(stage: int, option: str, late: bool) -> tuple[str, str, list[torch.Tensor], bool]:
    model, optimizer, _ = make(stage, unused=option)
    rank = dist.get_rank()
    if late:
        model(batch(), "ab").backward()
        optimizer.step()
        optimizer.zero_grad()
    before = values(model)
    error = raised(lambda: model(batch(), "ab" if rank == 0 else "a").backward())
    if error[0]:
        unchanged = all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
        optimizer.zero_grad()
        model(batch(), "ab").backward()  # The model is usable.
        optimizer.step()
        return *error, values(model), unchanged
    optimizer.step()
    return *error, values(model), False


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_used_on_some_ranks_only_is_named_or_legal(world: World, stage: int, late: bool) -> None:
    for name, message, _, unchanged in world.run(used_on_some_ranks, stage, "raise", late, ranks=3):
        assert name == "UsageError"
        assert "'second.weight' got a gradient on ranks [0] but not on ranks [1, 2]" in message
        assert unchanged
    outcomes = world.run(used_on_some_ranks, stage, "zero", late, ranks=3)
    reference = world.run(used_on_some_ranks, 0, "zero", late, ranks=3)
    for name, message, weights, _ in outcomes:
        assert not name, message
        for found, wanted in zip(weights, reference[0][2], strict=True):
            assert torch.equal(found, wanted)


def out_of_order() -> tuple[str, str, bool]:
    model, optimizer, _ = make(3, prefetch=0)
    model(batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = values(model)

    def step() -> None:
        model(batch(), "ab" if dist.get_rank() == 0 else "ba").backward()
        optimizer.step()

    error = raised(step)
    return *error, all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))


def test_collectives_out_of_order_are_found_before_the_update(world: World) -> None:
    for name, message, unchanged in world.run(out_of_order, ranks=2, timeout_seconds=60):
        assert name == "DesyncError", message
        assert "rank 1 came to 'first' later than the others" in message
        assert unchanged


def nonfinite(stage: int, option: str) -> tuple[list[str], list[torch.Tensor], int, float]:
    model, optimizer, handle = make(stage, nonfinite=option)
    names = []
    for step in range(12):
        x = batch()
        if dist.get_rank() == 1 and step >= 1:
            x[0, 0] = float("inf")
        model(x).backward()
        names.append(raised(optimizer.step)[0])
        optimizer.zero_grad()
    states = [value for values_ in optimizer.state.values() for value in values_.values()]
    steps = max((float(state) for state in states if state.dim() == 0), default=0.0)
    return names, values(model), handle.engine.num_nonfinite_steps, steps


@pytest.mark.parametrize("stage", STAGES)
def test_nonfinite_gradients_have_one_verdict_on_all_ranks(world: World, stage: int) -> None:
    for names, weights, num_skipped, steps in world.run(nonfinite, stage, "skip", ranks=2):
        assert names == [""] * 10 + ["NonFiniteError"] * 2
        assert num_skipped == 11
        assert steps == 1.0
        assert all(torch.isfinite(weight).all() for weight in weights)
    for names, weights, _, steps in world.run(nonfinite, stage, "raise", ranks=2):
        assert names == [""] + ["NonFiniteError"] * 11
        assert steps == 1.0
        assert all(torch.isfinite(weight).all() for weight in weights)
    for names, weights, _, _ in world.run(nonfinite, stage, "keep", ranks=2):
        assert names == [""] * 12
        assert not all(torch.isfinite(weight).all() for weight in weights)


def read_released() -> list[tuple[str, str]]:
    model, _, _ = make(3)
    found = [raised(model.first.weight.sum), raised(model.first.weight.tolist)]
    if dist.get_rank() == 0:
        found.append(raised(model.state_dict))
    found.append(raised(lambda: copy.deepcopy(model)))
    with shardwise.gathered(model):
        found.append(("", str(sorted(model.state_dict()))))
    return found


def test_reading_released_values_names_the_parameter_and_the_remedy(world: World) -> None:
    for found in world.run(read_released, ranks=2):
        for name, message in found[:-1]:
            assert name == "NotGatheredError"
            assert "'first.weight'" in message
            assert "shardwise.gathered(model)" in message
        assert "first.weight" in found[-1][1]


def lose_a_rank(stage: int, how: str) -> tuple[str, str, float]:
    model, optimizer, _ = make(stage, deadline_seconds=4.0)
    model(batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), 9)
        time.sleep(25)
        return "", "", 0.0
    begin = time.monotonic()

    def step() -> None:
        model(batch()).backward()
        optimizer.step()

    return *raised(step), time.monotonic() - begin


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", ["kill", "stall"])
def test_survivors_name_the_lost_rank_the_unit_and_the_op(world: World, stage: int, how: str) -> None:
    deaths = {1} if how == "kill" else set()
    outcomes = world.run(lose_a_rank, stage, how, ranks=3, timeout_seconds=90, expect_deaths=deaths)
    for rank in (0, 2):
        name, message, seconds = outcomes[rank]
        assert name == "RankLostError", message
        assert "Rank 1 did not take part in" in message
        assert " for " in message
        assert seconds < 30


def fail_in_mid_step(stage: int, where: str) -> list[torch.Tensor]:
    model, optimizer, _ = make(stage)
    for step in range(3):
        x = batch()
        if step == 1:
            handle = (
                model.second.register_forward_pre_hook(lambda *_: 1 / 0)
                if where == "forward"
                else model.first.register_full_backward_hook(lambda *_: 1 / 0)
            )
            name, message = raised(lambda x=x: model(x).backward())
            assert name == "ZeroDivisionError", message
            handle.remove()
            optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def train_plainly(stage: int) -> list[torch.Tensor]:
    model, optimizer, _ = make(stage)
    for _ in range(3):
        model(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_mid_step_leaves_the_model_usable(world: World, stage: int, where: str) -> None:
    wanted = world.run(train_plainly, stage, ranks=2)[0]
    for weights in world.run(fail_in_mid_step, stage, where, ranks=2):
        for found, expected in zip(weights, wanted, strict=True):
            assert torch.equal(found, expected)


def test_an_error_of_one_rank_is_raised_in_the_parent(world: World) -> None:
    with pytest.raises(RankError, match="1"):
        world.run(fail_on_rank_one, ranks=2)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one has failed")
