"""A thousand ranks on a fake process group, whose collectives send nothing: a unit costs O(1) collectives, log N messages.

Agreements between ranks are read as numbers, so tensors are real: fake ones have no values. Gradients mean nothing here.
"""

from __future__ import annotations

import cProfile
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.testing import World

pytestmark = pytest.mark.dist
NUM_LAYERS = 5


@contextmanager
def fake_group(rank: int, num_ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    yield
    dist.destroy_process_group()


def new_run(stage: int, **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer, shardwise.Sharded]:
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    # What a fake group "receives" is whatever was in memory, so the step goes on whatever it is.
    return model, optimizer, shardwise.shard(model, optimizer, stage=stage, nonfinite="keep", **changes)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def counts_of(num_ranks: int, places: list[int]) -> dict[tuple[int, int], tuple[int, dict[str, int], dict[str, int]]]:
    """Units, collectives and messages by op of a step, by stage and rank."""
    found = {}
    for rank in places:
        with fake_group(rank, num_ranks):
            for stage in range(4):
                model, optimizer, handle = new_run(stage)
                train_step(model, optimizer)
                totals = handle.engine.executor.totals
                totals.reset()
                train_step(model, optimizer)
                found[stage, rank] = len(handle.units), dict(totals.num_collectives), dict(totals.num_messages)
                del model, optimizer, handle
    return found


GATHERS = {
    0: {"gather gradients": NUM_LAYERS},
    1: {"gather": NUM_LAYERS},
    2: {"gather": NUM_LAYERS},
    3: {"gather": 2 * NUM_LAYERS - 1},
}
"""Collectives besides reductions, of which every unit has one. At stage 3 the last unit stays from forward to backward."""


@pytest.mark.parametrize("num_ranks", [64, 1000, 1024])
def test_unit_costs_few_collectives_and_messages(world: World, num_ranks: int) -> None:
    places = [0, num_ranks // 2 + 1, num_ranks - 1]
    (found,) = world.run(counts_of, num_ranks, places, ranks=1, process_group=False)
    assert len(found) == 4 * len(places)
    for (stage, rank), (num_units, num_collectives, num_messages) in found.items():
        place = f"stage {stage}, rank {rank} of {num_ranks}: {num_collectives}, {num_messages}"
        assert num_units == NUM_LAYERS, place
        for_units = {"reduce": num_units, **GATHERS[stage]}
        assert {op: count for op, count in num_collectives.items() if op in for_units} == for_units, place
        # What is left is not for a unit but for a step: the use of parameters, the order of collectives, the digest.
        others = {op: count for op, count in num_collectives.items() if op not in for_units}
        assert sum(others.values()) <= 4, place
        depth = math.ceil(math.log2(num_ranks))
        assert num_messages["reduce"] <= num_units * (depth if 2**depth == num_ranks else 2 * depth), place


def calls_in_a_step(stage: int, num_ranks: int) -> int:
    with fake_group(1, num_ranks):
        model, optimizer, handle = new_run(stage)
        train_step(model, optimizer)
        profile = cProfile.Profile()
        profile.runcall(train_step, model, optimizer)
        del model, optimizer, handle
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("stage", range(4))
def test_work_grows_with_ranks_no_faster_than_they_do(world: World, stage: int) -> None:
    few, many = (world.run(calls_in_a_step, stage, n, ranks=1, process_group=False)[0] for n in (64, 1024))
    assert many <= 1024 / 64 * few, f"{few} calls at 64 ranks, {many} at 1024: {many / few:.1f} times as many"
