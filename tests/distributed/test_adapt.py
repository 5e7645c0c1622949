"""Plans that adapt: a run that grows does not run out of memory, one that waits brings more ahead; with the same bits, and told."""

import gc
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.core.adapt import WAIT_LOOKS
from shardwise.devices import sim
from shardwise.report.page import run_body
from shardwise.report.runs import load_run
from shardwise.runtime.adapt import LOOK_STEPS
from shardwise.testing import World

pytestmark = pytest.mark.dist
WIDTH, DEPTH, NUM_STEPS = 128, 6, 24
BLOCK_WIDTH, NUM_BLOCKS, SLEEP_SECONDS = 1024, 6, 0.01


def _grow(capacity_bytes: int, folder: str, run: str = "", early_bytes: int = 0, **plan: Any) -> dict[str, Any]:
    """Train on batches that grow each step. The error, if the device was full, the weights, and what was changed.

    Args:
        early_bytes: What the device once held, before the first step.
    """
    gc.collect()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH))).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = shardwise.shard(model, optimizer, units=[nn.Linear], folder=folder, **plan)
    recording = shardwise.record(model, run) if run else None
    base = sim.memory(rank).live_bytes
    sim.configure(rank, capacity_bytes=base + capacity_bytes if capacity_bytes else 0)
    sim.reset_peak(rank)
    torch.empty(early_bytes, dtype=torch.uint8, device="sim")
    losses = []
    try:
        for step in range(NUM_STEPS):
            torch.manual_seed(10 * step + rank)
            loss = model(torch.randn(8 * (1 + step), WIDTH).to("sim")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
    except (torch.OutOfMemoryError, shardwise.RankLostError) as error:  # Of this rank's device, or of the other's.
        return {"error": str(error), "step": len(losses)}
    finally:
        sim.configure(rank, capacity_bytes=0)
        if recording is not None:
            recording.close()
    peak = sim.memory(rank).peak_bytes - base
    with shardwise.gathered(model):
        weights = [param.detach().cpu().clone() for param in model.parameters()]
    told = [str(each) for each in handle.adaptations]
    return {"losses": losses, "weights": weights, "peak": peak, "told": told}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_whose_batches_grow_adapts_before_the_device_is_full(sim_world: World, tmp_path: Path, stage: int) -> None:
    # With nothing gathered ahead, there is nothing but state to let go of.
    plan = {"stage": stage, "folder": str(tmp_path), "deadline_seconds": 5, "prefetch": 0}
    free = sim_world.run(_grow, 0, **plan, ranks=2)
    capacity_bytes = round(0.86 * min(found["peak"] for found in free))
    run = tmp_path / "run"
    adapted = sim_world.run(_grow, capacity_bytes, **plan, run=str(run), adapt=True, ranks=2)
    for found, reference in zip(adapted, free, strict=True):
        assert "error" not in found, found
        assert found["losses"] == reference["losses"]
        assert all(map(torch.equal, found["weights"], reference["weights"]))
        assert any("to the host" in each for each in found["told"])  # Where there is room again by the end, some has come back.
    assert adapted[0]["told"] == adapted[1]["told"]
    log = load_run(run)
    assert [str(each) for each in log.adaptations] == adapted[0]["told"]
    page = run_body(log)
    assert "Changes of the plan" in page
    assert "optimizer state to the host" in page
    # Last, since what a run that failed has left on the device goes at some later time.
    failed = sim_world.run(_grow, capacity_bytes, **plan, ranks=2)
    assert any("is out of memory" in found["error"] for found in failed)
    assert all(found["step"] > NUM_STEPS // 2 for found in failed)


def test_what_a_device_held_once_does_not_hide_what_steps_hold(sim_world: World, tmp_path: Path) -> None:
    """The allocator's peak of all time tells nothing of steps that stay below it, until they are above it: too late."""
    plan = {"stage": 1, "folder": str(tmp_path), "deadline_seconds": 5}
    free = sim_world.run(_grow, 0, **plan, ranks=2)
    capacity_bytes = round(0.86 * min(found["peak"] for found in free))
    early_bytes = round(0.95 * capacity_bytes)
    adapted = sim_world.run(_grow, capacity_bytes, **plan, early_bytes=early_bytes, adapt=True, ranks=2)
    again = sim_world.run(_grow, capacity_bytes, **plan, adapt=True, ranks=2)
    for found, reference in zip(adapted, free, strict=True):
        assert "error" not in found, found
        assert all(map(torch.equal, found["weights"], reference["weights"]))
    moved = [[each.split(" (")[0] for each in found["told"] if "to the host" in each] for found in (*adapted, *again)]
    assert moved[0]
    assert moved == [moved[0]] * 4  # What was held before the first step has no say; nor has how fast ranks are.


class _Away(torch.autograd.Function):
    """Takes a while and no processor, like a device that computes."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_SECONDS)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_SECONDS)
        return grad


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(BLOCK_WIDTH, BLOCK_WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Away.apply(self.inner(values))  # type: ignore[no-untyped-call]
        return result


def _wait(folder: str, **plan: Any) -> dict[str, Any]:
    """Train blocks that take their time on a device with ample room."""
    gc.collect()
    rank = dist.get_rank()
    torch.manual_seed(0)
    sim.configure(rank, capacity_bytes=2**32)
    try:
        model = nn.Sequential(*(_Block() for _ in range(NUM_BLOCKS))).to("sim")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        handle = shardwise.shard(model, optimizer, stage=3, units=[nn.Linear], folder=folder, **plan)
        waited = []
        for step in range(2 * LOOK_STEPS * WAIT_LOOKS):
            torch.manual_seed(10 * step + rank)
            model(torch.randn(8, BLOCK_WIDTH).to("sim")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            glance = handle.engine.meter.glance()
            waited.append((glance.gather_seconds, glance.disk_seconds))
        with shardwise.gathered(model):
            weights = [param.detach().cpu().clone() for param in model.parameters()]
        return {"told": [str(each) for each in handle.adaptations], "weights": weights, "waited": waited, "plan": handle.plan}
    finally:
        sim.configure(rank, capacity_bytes=0)


def _check_waits(found: list[dict[str, Any]], plain: list[dict[str, Any]], column: int) -> None:
    """All ranks have done the same, the weights are the same, and less is waited for than before."""
    assert found[0]["told"] == found[1]["told"]
    for adapted, reference in zip(found, plain, strict=True):
        assert all(map(torch.equal, adapted["weights"], reference["weights"]))
        before, after = (
            median(row[column] for row in rows)
            for rows in (adapted["waited"][: LOOK_STEPS * WAIT_LOOKS], adapted["waited"][LOOK_STEPS * WAIT_LOOKS :])
        )
        assert after < before, adapted["waited"]


def test_more_is_gathered_ahead_where_gathers_are_waited_for(sim_world: World, tmp_path: Path) -> None:
    plain, found = (sim_world.run(_wait, str(tmp_path), prefetch=0, adapt=adapt, ranks=2) for adapt in (False, True))
    assert "prefetch=1, since gathers are waited for" in found[0]["told"][0]
    assert found[0]["plan"].prefetch >= 1
    _check_waits(found, plain, 0)


def test_more_is_read_ahead_where_the_disk_is_waited_for(sim_world: World, tmp_path: Path) -> None:
    tiers = {shardwise.OPTIM: "disk"}
    plain, found = (sim_world.run(_wait, str(tmp_path), tiers=tiers, adapt=adapt, ranks=2) for adapt in (False, True))
    assert any("since the disk is waited for" in each for each in found[0]["told"])
    assert found[0]["plan"].staging_bytes > 0
    _check_waits(found, plain, 1)
    limited = sim_world.run(_wait, str(tmp_path), tiers=tiers, staging_bytes=2**23, adapt=True, ranks=2)
    assert all(each["plan"].staging_bytes == 2**23 for each in limited)  # A limit of the user's is one.
    assert not any("staging_bytes" in told for each in limited for told in each["told"])
