"""What the forward leaves for the backward: on the device, on the host, on disk or computed again, with the same bits everywhere."""

import copy
import gc
import pickle
import resource
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.core.ledger import Kind, Tier
from shardwise.devices import sim
from shardwise.runtime.saved_places import PIECE_BYTES
from shardwise.testing import World

pytestmark = pytest.mark.dist
WIDTH = 32
SETTINGS = ("device", "host", "disk", "recompute")


class Block(nn.Module):
    """Draws random numbers, counts statistics, takes keywords."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, *, gain: float = 1.0, other: torch.Tensor | None = None) -> torch.Tensor:
        y = self.drop(self.down(torch.tanh(self.up(self.norm(x))))) * gain
        return x + (y if other is None else y * other)


class Tower(nn.Module):
    """Blocks that are called in several ways; one of them twice."""

    def __init__(self, width: int = WIDTH, *, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 8)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.blocks[1](self.blocks[0](x), gain=0.5, other=x)
        if self.use_reentrant is None:
            x = self.blocks[2](x)
        else:
            x = checkpoint(self.blocks[2], x, use_reentrant=self.use_reentrant)
        return self.head(self.blocks[3](self.blocks[0](x)))


def _train(device: str, casts: bool, use_reentrant: bool | None = None, **plan: Any) -> dict[str, torch.Tensor]:
    """State after some steps, each of two backward passes, with evaluations between; under autocast, where the device has that."""
    torch.manual_seed(0)
    model = Tower(use_reentrant=use_reentrant).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keys = list(model.state_dict())
    shardwise.shard(model, optimizer, param_dtype="bfloat16" if casts else None, **plan)
    assert list(model.state_dict(keep_vars=True)) == keys
    has_autocast = device == "cpu" and not casts and use_reentrant is None
    cast = torch.autocast(device, torch.bfloat16) if has_autocast else nullcontext()
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        for _ in range(2):
            with cast:
                loss = model(torch.randn(64, WIDTH).to(device)).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, WIDTH).to(device))
        model.train()
    shardwise.unshard(model, optimizer)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return {name: values.cpu() for name, values in model.state_dict().items()}


def _compare(device: str, folder: str, casts: bool, use_reentrant: bool | None) -> list[str]:
    """Stages and settings whose state differs from that of plain data parallelism."""
    expected = _train(device, casts, use_reentrant, stage=0)
    wrong = []
    for stage in range(4):
        for activations in SETTINGS:
            found = _train(device, casts, use_reentrant, stage=stage, activations=activations, folder=folder)
            wrong += [f"{stage} {activations} {key}" for key in expected if not torch.equal(found[key], expected[key])]
    return wrong


@pytest.mark.parametrize(
    ("device", "casts", "use_reentrant"),
    [
        ("cpu", False, None),
        ("cpu", True, None),
        ("cpu", False, True),
        ("cpu", False, False),
        ("sim", False, None),
        ("sim", True, False),
    ],
)
def test_where_activations_rest_changes_no_bit(
    request: pytest.FixtureRequest, tmp_path: Any, device: str, casts: bool, use_reentrant: bool | None
) -> None:
    world: World = request.getfixturevalue("world" if device == "cpu" else "sim_world")
    assert world.run(_compare, device, str(tmp_path), casts, use_reentrant, ranks=2) == [[], []]


# ---------------------------------------------------------------- memory and bytes


def _measure(stage: int, activations: str, folder: str, **plan: Any) -> dict[str, Any]:
    """Losses of some steps; what the device held at most, by itself and by the ledger; what went through the disk in the last step."""
    gc.collect()
    rank = dist.get_rank()
    torch.manual_seed(rank)
    batches = torch.randn(3, 2048, 64).to("sim")  # The users' own: of these the ledger knows nothing.
    base = sim.memory(rank).live_bytes
    torch.manual_seed(0)
    model = Tower(64).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = shardwise.shard(model, optimizer, stage=stage, activations=activations, folder=folder, **plan)
    gc.collect()
    sim.reset_peak(rank)
    disk, losses = handle.engine.disk, []
    for batch in batches:
        before = (0, 0) if disk is None else (disk.read_bytes, disk.written_bytes)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    found = {
        "losses": losses,
        "peak": sim.memory(rank).peak_bytes - base,
        "ledger": handle.ledger.peak_on(Tier.DEVICE),
        "held": [handle.ledger.live(Kind.ACTIVATION, tier) for tier in Tier],
    }
    if disk is not None:
        report = disk.report
        found["read"], found["written"] = disk.read_bytes - before[0], disk.written_bytes - before[1]
        found["staged"], found["budget"] = report.peak_bytes, report.budget_bytes
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_the_device_is_freed(sim_world: World, tmp_path: Any, stage: int) -> None:
    runs = {name: sim_world.run(_measure, stage, name, str(tmp_path), ranks=2) for name in SETTINGS}
    for ranks in runs.values():
        for plain, found in zip(runs["device"], ranks, strict=True):
            assert found["losses"] == plain["losses"]
            assert found["held"] == [0, 0, 0]
    for rank, plain in enumerate(runs["device"]):
        told = {name: ranks[rank]["ledger"] / ranks[rank]["peak"] for name, ranks in runs.items()}
        assert all(0.95 <= ratio <= 1.05 for ratio in told.values()), told
        left = {name: runs[name][rank]["peak"] / plain["peak"] for name in SETTINGS[1:]}
        assert all(ratio < 0.6 for ratio in left.values()), left
    for found in runs["disk"]:
        assert found["read"] == found["written"] > 2**20
        assert found["staged"] <= found["budget"] == 3 * PIECE_BYTES


@pytest.mark.parametrize("tiers", [{}, {"param": "disk", "grad": "disk", "optim": "disk"}], ids=["alone", "all"])
def test_the_budget_of_staging_is_kept(sim_world: World, tmp_path: Any, tiers: dict[str, str]) -> None:
    plain = sim_world.run(_measure, 3, "device", str(tmp_path), ranks=2)
    budget = 150_000  # Far less than one saved tensor: 1 MiB.
    tight = sim_world.run(_measure, 3, "disk", str(tmp_path), tiers=tiers, staging_bytes=budget, ranks=2)
    for here, found in zip(plain, tight, strict=True):
        assert found["losses"] == here["losses"]
        assert found["staged"] <= found["budget"] == budget


def _drop_graphs(folder: str) -> tuple[int, int]:
    """Bytes on disk while a graph is there, and when it was dropped without a backward, or after one that keeps it."""
    model = Tower()
    handle = shardwise.shard(model, stage=3, activations="disk", folder=folder)
    disk = handle.engine.disk
    assert disk is not None
    gc.collect()
    gc.disable()
    try:
        loss = model(torch.randn(64, WIDTH)).sum()
        held = handle.ledger.live(Kind.ACTIVATION, Tier.DISK)
        loss.backward(retain_graph=True)
        loss.backward()
        loss = model(torch.randn(64, WIDTH)).sum()
        del loss
        disk.settle()
        return held, handle.ledger.live(Kind.ACTIVATION, Tier.DISK)
    finally:
        gc.enable()


def test_the_disk_is_freed_with_the_graph(world: World, tmp_path: Any) -> None:
    for held, left in world.run(_drop_graphs, str(tmp_path), ranks=2):
        assert held > 0
        assert left == 0


# ---------------------------------------------------------------- the users' modules


def _hook(activations: str, folder: str) -> tuple[list[str], list[torch.Tensor]]:
    """What users' hooks on a block have seen, and gradients; they are set before and after the model is sharded, and change values."""
    torch.manual_seed(0)
    model, seen = Tower(), []
    block = model.blocks[1]

    def before(module: nn.Module, args: Any) -> Any:
        seen.append("before")
        return (args[0].sin(),)

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append("after")
        return output.cos() * args[0]

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)
    modules = list(model.modules())
    shardwise.shard(model, stage=0, activations=activations, folder=folder)
    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)
    block.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
    model(torch.randn(64, WIDTH)).square().mean().backward()
    assert list(map(id, model.modules())) == list(map(id, modules))
    for twin in (copy.deepcopy(model.blocks[0]), pickle.loads(pickle.dumps(model.blocks[0]))):
        twin(torch.randn(64, WIDTH)).sum().backward()
    return seen, [param.grad.clone() for param in model.parameters() if param.grad is not None]


def test_hooks_of_users_run_once_and_stay_outside(world: World, tmp_path: Any) -> None:
    expected = world.run(_hook, "device", str(tmp_path), ranks=2)
    found = world.run(_hook, "recompute", str(tmp_path), ranks=2)
    for (seen, grads), (others, values) in zip(expected, found, strict=True):
        assert seen == others == ["before", "before", "after", "after", "backward"]
        assert all(map(torch.equal, grads, values))
        assert len(grads) == len(values) == 28


# ---------------------------------------------------------------- faults


def _told(function: Callable[[], object]) -> str:
    try:
        function()
    except shardwise.OffloadError as error:
        return str(error)
    return ""


def _fail(folder: str, stage: int, fault: str) -> list[str]:
    """The disk fails rank 1. What is told then, by a save, and by a step without the fault."""
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = shardwise.shard(model, optimizer, stage=stage, activations="disk", folder=folder)
    disk = handle.engine.disk
    assert disk is not None

    def step(is_bad: bool) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if is_bad and fault == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        if is_bad and fault == "deleted before":
            disk.store.path.unlink()
        try:
            loss = model(torch.randn(64, WIDTH)).square().mean()
            if is_bad and fault == "deleted after":
                disk.settle()
                disk.store.path.unlink()
            loss.backward()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        optimizer.step()
        optimizer.zero_grad()

    told = [_told(lambda: step(is_bad=dist.get_rank() == 1))]
    told.append(_told(lambda: shardwise.save(f"{folder}/saved", model, optimizer)))
    told.append(_told(lambda: step(is_bad=False)))
    return told


@pytest.mark.parametrize("fault", ["full", "deleted before", "deleted after"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_disk_that_fails_stops_all_ranks(world: World, tmp_path: Any, stage: int, fault: str) -> None:
    for told, saved, again in world.run(_fail, str(tmp_path / "offload"), stage, fault, ranks=2):
        assert told.startswith("Rank 1: ")
        for text in (str(tmp_path / "offload"), "activations", "Files may not grow" if fault == "full" else "deleted"):
            assert text in told
        assert saved == ""  # Weights are where they were.
        assert again == "" if fault == "full" else "deleted" in again
