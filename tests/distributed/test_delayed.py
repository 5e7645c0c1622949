"""Updates beside the next step: exactly one step late, at every stage and tier, whatever the threads do."""

import itertools
import os
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.devices.pool import Poison
from shardwise.testing import World
from tests.distributed.helpers import WIDTH, Net, assert_same, batch, weights
from tests.distributed.matrix import FACTORS, Case, Outcome, covering, difference, train
from tests.distributed.reference import reference

pytestmark = pytest.mark.dist
WARMUP = 4
PLAN = {"sync": "delayed", "delay_warmup": WARMUP}
TIERS: list[dict[str, str]] = [
    {},
    {"optim": "host"},
    {"optim": "host", "grad": "host"},
    {"optim": "host", "grad": "host", "param": "host"},
    {"param": "host"},
    {"optim": "disk"},
]
FOLDER = str(Path(tempfile.gettempdir()) / "shardwise-test-delayed")


def _cases() -> list[Case]:
    """Few cases in which every pair of choices occurs."""
    factors = {
        **FACTORS,
        "ranks": (1, 2),
        "compute": ("fp32", "bf16", "fp16"),
        "optimizer": ("AdamW", "SGD", "Muon"),
        "prefetch": (1,),
    }
    factors["layout"] = ("even", "whole")
    product = itertools.starmap(Case, itertools.product(*(factors[name] for name in FACTORS)))
    return covering([case for case in product if case.is_legal])


CASES = _cases()


def _train(cases: list[Case], **plan: Any) -> list[Outcome | str]:
    Poison.enabled = True
    outcomes: list[Outcome | str] = []
    for case in cases:
        try:
            outcomes.append(train(case, **PLAN, **plan))
        except (shardwise.ShardwiseError, AssertionError, ValueError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_are_seen_exactly_one_step_late(world: World, ranks: int) -> None:
    cases = [case for case in CASES if case.ranks == ranks]
    by_rank = world.run(_train, cases, ranks=ranks, timeout_seconds=250)
    expected = {group: reference(group, WARMUP) for group in {case.group for case in cases}}
    wrong = []
    for rank, outcomes in enumerate(by_rank):
        for case, found in zip(cases, outcomes, strict=True):
            facts = expected[case.group].items()
            mine = {name: value for name, value in facts if not name.startswith("loss") or name.endswith(f"rank {rank}")}
            differs = found if isinstance(found, str) else difference(found, mine)
            if differs:
                wrong.append(f"rank {rank}, {case}: {differs}")
    assert not wrong, "\n".join([f"{len(wrong)} of {ranks * len(cases)}", *wrong[:10]])


def _train_away() -> dict[str, Outcome | str]:
    """The last tiers are tried at one stage each, and the first at all."""
    pairs = [(stage, tiers) for stage in range(4) for tiers in (*TIERS[:2], TIERS[2 + stage])]
    found = {}
    for stage, tiers in pairs:
        case = Case(2, "bf16", "AdamW", "none", stage, 1, "even")
        found[f"stage {stage}, {tiers}"] = _train([case], device="sim", num_steps=9, tiers=tiers, folder=FOLDER)[0]
    return found


def test_where_state_rests_changes_no_bit(sim_world: World) -> None:
    for outcomes in sim_world.run(_train_away, ranks=2, timeout_seconds=200):
        expected = outcomes["stage 0, {}"]
        assert not isinstance(expected, str), expected
        for place, found in outcomes.items():
            assert not isinstance(found, str), (place, found)
            assert difference(found, expected) is None, place


# ---------------------------------------------------------------- moves


MOVES: dict[tuple[int, str], tuple[str, ...]] = {
    (4, "update"): ("host", "optim"),
    (5, "backward"): ("host", "grad", "param"),
    (6, "update"): ("disk", "optim"),
    (7, "update"): ("device", "optim", "grad", "param"),
}


def _move_or_catch_up(is_moving: bool, model: torch.nn.Module, step: int, after: str) -> None:
    if (step, after) not in MOVES:
        return
    tier, *kinds = MOVES[step, after]
    if is_moving and tier == "disk":
        shardwise.move(model, "param", "device")
    if is_moving:
        shardwise.move(model, kinds, tier)
    else:
        with shardwise.gathered(model):
            pass


def _train_moving(stage: int) -> list[Outcome | str]:
    case = Case(2, "bf16" if stage % 2 else "fp32", "AdamW", "none", stage, 1, "even")
    betweens = [partial(_move_or_catch_up, is_moving) for is_moving in (True, False)]
    return [_train([case], device="sim", num_steps=9, between=between, folder=FOLDER)[0] for between in betweens]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_move_catches_up_and_changes_no_bit(sim_world: World, stage: int) -> None:
    for moved, still in sim_world.run(_train_moving, stage, ranks=2, timeout_seconds=100):
        assert not isinstance(moved, str), moved
        assert not isinstance(still, str), still
        assert difference(moved, still) is None


# ---------------------------------------------------------------- saves, loads and failures


class Fragile(torch.optim.AdamW):
    """Fails in a thread, if it is to."""

    is_broken = False

    def step(self, closure: Any = None) -> Any:
        if self.is_broken and threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("a broken optimizer")
        return super().step(closure)


def _make(stage: int, seed: int = 0) -> tuple[Net, Fragile]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = Fragile(model.parameters(), lr=0.02)
    shardwise.shard(model, optimizer, stage=stage, sync="delayed", delay_warmup=1)
    return model, optimizer


def _steps(model: Net, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        model(batch(number, 3, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _save_and_go_on(folder: str, stage: int) -> list[dict[str, torch.Tensor]]:
    """Weights after six steps with a save after the third: without a stop, from the save, and after an update that has failed."""
    path, found = f"{folder}/third", []
    model, optimizer = _make(stage)
    _steps(model, optimizer, range(3))
    shardwise.save(path, model, optimizer)
    _steps(model, optimizer, range(3, 6))
    found.append(weights(stage, model))
    model, optimizer = _make(stage, seed=1)
    shardwise.load(path, model, optimizer)
    _steps(model, optimizer, range(3, 6))
    found.append(weights(stage, model))
    optimizer.is_broken = dist.get_rank() == 1
    _steps(model, optimizer, range(6, 7))
    with pytest.raises(shardwise.UpdateError, match=r"Rank 1: .*ArithmeticError: a broken optimizer"):
        _steps(model, optimizer, range(7, 8))
    with pytest.raises(shardwise.UpdateError, match="Rank 1"):
        shardwise.save(f"{folder}/broken", model, optimizer)
    optimizer.is_broken = False
    shardwise.load(path, model, optimizer)
    _steps(model, optimizer, range(3, 6))
    found.append(weights(stage, model))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_goes_on_from_a_save_to_the_bit_also_after_an_update_that_failed(
    world: World, tmp_path: Path, stage: int
) -> None:
    for whole, resumed, mended in world.run(_save_and_go_on, str(tmp_path), stage, ranks=2, timeout_seconds=100):
        assert_same(resumed, whole)
        assert_same(mended, whole)


def _lose_file(folder: str) -> str:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    handle = shardwise.shard(model, optimizer, stage=3, sync="delayed", delay_warmup=1, tiers={"optim": "disk"}, folder=folder)
    _steps(model, optimizer, range(3))
    shardwise.save(f"{folder}/kept", model, optimizer)
    disk = handle.engine.disk
    assert disk is not None
    if dist.get_rank() == 1:
        os.truncate(disk.store.path, 0)
    with pytest.raises(shardwise.OffloadError) as caught:
        _steps(model, optimizer, range(3, 6))
    with pytest.raises(shardwise.OffloadError):
        shardwise.save(f"{folder}/lost", model, optimizer)
    return str(caught.value)


def test_a_disk_that_fails_an_update_stops_all_ranks(world: World, tmp_path: Path) -> None:
    told = world.run(_lose_file, str(tmp_path), ranks=2, timeout_seconds=100)
    assert told[0] == told[1] and told[0].startswith("Rank 1: "), told
