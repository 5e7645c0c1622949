"""Updates beside the next step, together with activations elsewhere, moves, casts and what the disk is waited for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.core.footprint import advice, footprint
from shardwise.core.plan import Plan
from tests.unit.runtime.test_delayed import OPTIMIZERS, WIDTH, Held, assert_same, loss_of, make_delayed, train_step, weights_of


def _train_blocks(stage: int, **plan: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    optimizer = OPTIMIZERS["shaken"](model.parameters())
    units = ["0", "1", "2"]
    shardwise.shard(model, optimizer, stage=stage, units=units, sync="delayed", delay_warmup=1, **plan)
    for step in range(5):
        train_step(model, optimizer, step)
    return weights_of(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_where_activations_are_changes_no_bit(stage: int, tmp_path: Path) -> None:
    expected = _train_blocks(stage)
    for activations in ("recompute", "disk"):
        assert_same(_train_blocks(stage, activations=activations, folder=str(tmp_path)), expected)


def test_a_disk_that_loses_activations_takes_nothing_from_the_update_beside(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"stage": 3, "delay_warmup": 0, "activations": "disk", "folder": str(tmp_path)}
    model, optimizer, handle = make_delayed(lambda params: Held(params, lr=0.1), **plan)
    untouched, other, _ = make_delayed(lambda params: Held(params, lr=0.1), stage=3, delay_warmup=0)
    other.gate.set()
    train_step(model, optimizer, 0)
    train_step(untouched, other, 0)
    loss = loss_of(model, 1)
    assert handle.engine.disk is not None
    handle.engine.disk.fail("a disk that is full")
    optimizer.gate.set()
    handle.engine.updates.wait()
    with pytest.raises(shardwise.OffloadError, match="a disk that is full"):
        loss.backward()
    assert_same(weights_of(model), weights_of(untouched))


def test_a_move_is_refused_between_a_call_and_its_backward(tmp_path: Path) -> None:
    model, optimizer, handle = make_delayed(OPTIMIZERS["fused"], stage=3, delay_warmup=0, folder=str(tmp_path))
    train_step(model, optimizer, 0)
    loss = loss_of(model, 1)
    with pytest.raises(shardwise.UsageError, match=r"shardwise\.move .*Call backward first"):
        shardwise.move(model, shardwise.OPTIM, "disk")
    loss.backward()
    shardwise.move(model, shardwise.OPTIM, "disk")
    assert handle.num_pending_updates == 0 and handle.plan.tiers == (("optim", "disk"),)
    with pytest.raises(shardwise.PlanError, match="sync='delayed'"):
        shardwise.move(model, shardwise.GRAD, "disk")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_whole_step_is_computed_beside_the_update_after_a_cast(stage: int) -> None:
    model, optimizer, handle = make_delayed(lambda params: Held(params, lr=0.1), stage=stage, delay_warmup=0)
    model.double()
    inputs = torch.ones(2, WIDTH, dtype=torch.float64)
    before = model(inputs).square().mean()
    before.backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.gate.set()
    handle.engine.updates.wait()
    assert model(inputs).square().mean().item() == before.item(), "the update is seen before its time"


def test_what_an_update_beside_a_step_waits_for_is_not_waited_for_by_the_loop(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"stage": 3, "delay_warmup": 1, "tiers": {"optim": "disk"}, "folder": str(tmp_path)}
    model, optimizer, handle = make_delayed(OPTIMIZERS["fused"], **plan)
    disk = handle.engine.disk
    assert disk is not None
    waited = []
    for step in range(4):
        train_step(model, optimizer, step)
        handle.engine.updates.wait()
        waited.append(disk.waited_seconds)
        assert not disk._aheads
    assert waited[0] > 0 and disk.read_bytes > 0
    assert waited[1:] == pytest.approx([waited[0]] * 3, abs=1e-9)


def test_nothing_is_advised_that_would_be_refused() -> None:
    _, _, handle = make_delayed(OPTIMIZERS["fused"], stage=3)
    plan = Plan(stage=3, tiers={"optim": "disk"}, sync="delayed")
    text = advice(handle.engine.units, plan, 1, capacity_bytes=2**30)
    assert "activations='recompute'" in text and "activations='disk'" not in text
    text = advice(handle.engine.units, plan.replace(tiers={}), 1, capacity_bytes=2**10, free_host_bytes=0)
    assert "No other stage or tier would fit" in text


def test_copies_are_counted_where_they_are() -> None:
    _, _, handle = make_delayed(OPTIMIZERS["fused"], stage=3)
    units, exact = handle.engine.units, Plan(stage=3, tiers={"optim": "host", "param": "host"})
    one, other = (footprint(units, plan, 2) for plan in (exact, exact.replace(sync="delayed")))
    weights = sum(unit.num_bytes for unit in units) // 2
    assert other.host_bytes - one.host_bytes == weights and other.rest_bytes - one.rest_bytes == weights
