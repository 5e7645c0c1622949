"""State that rests off the device: the same bits, exact bytes, and the memory that it was meant to free."""

import ast
import gc
import itertools
import re
import tempfile
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise
from shardwise.core.ledger import Kind, Tier
from shardwise.core.unit import find_units
from shardwise.devices import sim
from shardwise.testing import World
from tests.distributed.matrix import FACTORS, Case, Outcome, covering
from tests.distributed.offloaded import ON_DISK, check_bits, try_case

pytestmark = pytest.mark.dist
NUM_STEPS = 9
FOLDER = str(Path(tempfile.gettempdir()) / "shardwise-test-offload")
"""Where these tests' files of the disk tier are, each for as long as its model."""
TIERS = ("device", "host", "disk")


@dataclass(frozen=True, order=True)
class Away(Case):
    """A case of the matrix, and where its state rests."""

    tiers: tuple[str, ...]
    fraction: float

    @property
    def plan(self) -> dict[str, Any]:
        tiers = dict(zip(("optim", "grad", "param"), self.tiers, strict=True))
        return {"tiers": tiers, "fraction": self.fraction, "folder": FOLDER}

    @property
    def case(self) -> Case:
        return Case(*astuple(self)[: len(fields(Case))])


def _cases() -> list[Away]:
    """Few cases in which every pair of choices occurs: the whole product has tens of thousands."""
    away = [tiers for tiers in itertools.product(TIERS, repeat=3) if set(tiers) != {"device"}]
    factors = {**FACTORS, "ranks": (1, 2, 3), "prefetch": (0, 1, 3), "tiers": away, "fraction": (1.0, 0.4)}
    product = itertools.product(*(factors[field.name] for field in fields(Away)))
    step = 11  # A part of the product is enough to find every pair in, and much quicker to search.
    return covering([case for case in itertools.islice(itertools.starmap(Away, product), 0, None, step) if case.is_legal])


CASES = _cases()


def _train_away(cases: list[Away]) -> list[Outcome | str]:
    return [try_case(case.case, device="sim", num_steps=NUM_STEPS, **case.plan) for case in cases]


def test_the_cases_cover_every_choice_at_every_stage() -> None:
    away = {tiers for tiers in itertools.product(TIERS, repeat=3) if set(tiers) != {"device"}}
    assert {(case.stage, case.tiers) for case in CASES} == set(itertools.product(range(4), away))
    assert {(case.optimizer, case.tiers) for case in CASES} == set(itertools.product(FACTORS["optimizer"], away))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_where_state_rests_changes_no_bit(sim_world: World, ranks: int) -> None:
    cases = [case for case in CASES if case.ranks == ranks]
    away = sim_world.run(_train_away, cases, ranks=ranks, timeout_seconds=600)
    check_bits(sim_world, ranks, cases, away, device="sim", num_steps=NUM_STEPS)


# ---------------------------------------------------------------- memory and bytes


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.first_norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Stack(nn.Module):
    """A tower of blocks, used with few tokens: what is held is state, and not activations."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


WIDTH, DEPTH = 128, 6
FLATS = [flat for unit in find_units(Stack(WIDTH, DEPTH)) for flat in unit.flats]
HERE: dict[str, str] = {}
ALL = {"optim": "host", "grad": "host", "param": "host"}


def _peak(system: str, num_steps: int = 3, **plan: Any) -> dict[str, Any]:
    """Bytes on this rank's device while it trains: at most, by the ledger at most, and copied in and out in the last update."""
    gc.collect()
    rank = dist.get_rank()
    base = sim.memory(rank).live_bytes
    torch.manual_seed(0)
    model: Any = Stack(WIDTH, DEPTH).to("sim")
    if system == "fsdp2":
        mesh = init_device_mesh("sim", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **plan)
        fully_shard(model, mesh=mesh, **plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sharded = shardwise.shard(model, optimizer, **plan) if system == "shardwise" else None
    gc.collect()
    sim.reset_peak(rank)
    for _ in range(num_steps):
        batch = torch.randn(2, WIDTH).to("sim")
        F.cross_entropy(model(batch), torch.zeros(2, dtype=torch.int64, device="sim")).backward()
        sim.reset_traffic(rank)
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = {"peak": sim.memory(rank).peak_bytes - base}
    if sharded is not None:
        traffic, ledger = sim.traffic(rank), sharded.ledger
        found["in"], found["out"] = traffic.in_bytes, traffic.out_bytes
        found["ledger"] = ledger.peak_on(Tier.DEVICE)
        found["host"] = {kind.name: ledger.live(kind, Tier.HOST) for kind in Kind if ledger.live(kind, Tier.HOST)}
    return found


@pytest.mark.parametrize("tiers", [HERE, {"optim": "host"}, ALL, ON_DISK], ids=["here", "optim", "all", "disk"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_device_holds_what_the_ledger_says(sim_world: World, stage: int, tiers: dict[str, str]) -> None:
    for found in sim_world.run(_peak, "shardwise", stage=stage, tiers=tiers, folder=FOLDER, ranks=2):
        assert found["peak"] == pytest.approx(found["ledger"], rel=0.05)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("stage", "is_resharded"), [(2, False), (3, True)])
def test_it_holds_less_than_fsdp2(sim_world: World, stage: int, is_resharded: bool, ranks: int) -> None:
    ours = sim_world.run(_peak, "shardwise", stage=stage, ranks=ranks)
    theirs = sim_world.run(_peak, "fsdp2", reshard_after_forward=is_resharded, ranks=ranks)
    assert max(found["peak"] for found in ours) < max(found["peak"] for found in theirs)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_travel_to_the_host_once_and_parameters_back_once(sim_world: World, stage: int) -> None:
    layouts = [flat.layout("even", num_ranks=2, weights=None) for flat in FLATS]
    share = 4 * sum(layout.sizes[0] if stage else layout.numel for layout in layouts)
    for found in sim_world.run(_peak, "shardwise", stage=stage, tiers={"optim": "host"}, ranks=2):
        assert found["out"] == share
        assert found["in"] == share
        assert found["host"]["OPTIM"] == pytest.approx(2 * share, rel=0.01)
        assert found["host"]["MASTER"] == share


def _train_on_little(capacity_bytes: int, host_bytes: int = 0, **plan: Any) -> str:
    """Train a model that was never on the device as a whole; returns the error, if it ran out of memory.

    Args:
        host_bytes: What may be taken of the host's memory; no limit, if 0.
    """
    gc.collect()
    rank = dist.get_rank()
    sim.configure(rank, capacity_bytes=sim.memory(rank).live_bytes + capacity_bytes)
    sim.set_pinned_capacity(host_bytes)
    try:
        with torch.device("meta"):
            model = Stack(WIDTH, 2 * DEPTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        shardwise.shard(model, optimizer, **plan)
        for _ in range(2):
            F.cross_entropy(model(torch.randn(2, WIDTH).to("sim")), torch.zeros(2, dtype=torch.int64, device="sim")).backward()
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError as error:
        return str(error)
    finally:
        sim.configure(rank, capacity_bytes=0)
        sim.set_pinned_capacity(0)
    return ""


def test_a_model_trains_whose_state_is_many_times_what_the_device_holds(sim_world: World) -> None:
    num_params = sum(param.numel() for param in Stack(WIDTH, 2 * DEPTH).parameters())
    capacity_bytes = 16 * num_params // 8  # On one device: states of eight times its memory.
    message = sim_world.run(_train_on_little, capacity_bytes, stage=3, ranks=1)[0]
    assert "is out of memory" in message
    assert "It would fit with tiers={'optim': 'host', 'grad': 'host', 'param': 'host'}" in message
    for tiers in (ALL, ON_DISK):
        assert sim_world.run(_train_on_little, capacity_bytes, stage=3, tiers=tiers, folder=FOLDER, ranks=1) == [""]


def test_advice_for_a_host_of_little_memory_is_the_disk_and_following_it_trains(sim_world: World) -> None:
    num_params = sum(param.numel() for param in Stack(WIDTH, 2 * DEPTH).parameters())
    limits = 16 * num_params // 8, 11 * num_params  # The host has room for parameters, gradients and what passes to disk.
    message = sim_world.run(_train_on_little, *limits, stage=1, ranks=1)[0]
    found = re.search(
        r"It would fit with stage=(\d) and tiers=(\{.*?\}): .* on the device, .* in the host's memory, .* on disk", message
    )
    assert found is not None, message
    tiers = ast.literal_eval(found[2])
    assert tiers == {"optim": "disk", "grad": "host", "param": "host"}
    assert sim_world.run(_train_on_little, *limits, stage=int(found[1]), tiers=tiers, folder=FOLDER, ranks=1) == [""]


# ---------------------------------------------------------------- what else touches state


def _make(stage: int, tiers: dict[str, str], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Stack(24, 3).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardwise.shard(model, optimizer, stage=stage, tiers=tiers, folder=FOLDER)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(10 * number + dist.get_rank())
    model(torch.randn(3, 24).to("sim")).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def _save_and_load(folder: str, first: dict[str, str], second: dict[str, str], stages: tuple[int, int]) -> bool:
    one, other = _make(stages[0], first, 0), _make(stages[1], second, 1)
    for number in range(3):
        _step(*one, number)
    shardwise.save(folder, *one)
    shardwise.load(folder, *other)
    for number in range(3, 6):
        _step(*one, number)
        _step(*other, number)
    with shardwise.gathered(one[0]), shardwise.gathered(other[0]):
        pairs = zip(one[0].parameters(), other[0].parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("first", "second", "stages"),
    [
        (HERE, ALL, (0, 3)),
        (ALL, HERE, (3, 1)),
        ({"optim": "host"}, {"param": "host"}, (2, 0)),
        (HERE, {"optim": "host"}, (1, 3)),
        (HERE, ON_DISK, (0, 3)),
        (ON_DISK, {"optim": "disk"}, (3, 3)),
        ({"optim": "disk"}, ALL, (1, 2)),
    ],
    ids=["out", "in", "across", "copied", "to-disk", "disk-to-copied", "from-disk"],
)
def test_checkpoints_fit_wherever_state_rests(
    sim_world: World, tmp_path: Path, first: dict[str, str], second: dict[str, str], stages: tuple[int, int]
) -> None:
    assert sim_world.run(_save_and_load, str(tmp_path / "saved"), first, second, stages, ranks=2) == [True, True]


def _write(tiers: dict[str, str], stage: int) -> list[float]:
    """What users write to parameters is what the next forward computes with."""
    model, optimizer = _make(stage, tiers, 0)
    _step(model, optimizer, 0)
    with shardwise.gathered(model), torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    x = torch.ones(1, 24, device="sim")
    first = float(model(x).sum())
    state = {name: torch.full(value.shape, 0.25) for name, value in Stack(24, 3).state_dict().items()}
    model.load_state_dict(state)
    second = float(model(x).sum())
    _step(model, optimizer, 1)
    with torch.no_grad():
        return [first, second, float(model(x).sum())]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_written_reaches_all_copies(sim_world: World, stage: int) -> None:
    expected = sim_world.run(_write, HERE, stage, ranks=2)
    for tiers in ({"optim": "host"}, {"param": "host"}, ALL, {"optim": "disk"}, ON_DISK):
        assert sim_world.run(_write, tiers, stage, ranks=2) == expected


class Counting(torch.optim.Optimizer):
    """Plain descent that counts its steps in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-0.1)


def _hook_and_count() -> list[str]:
    """What hooks of users see around a step whose groups come by turns, and what an optimizer counts in its groups."""
    model = Stack(24, 3).to("sim")
    optimizer = Counting(model.parameters())
    seen: list[str] = []

    def look(held: Any, args: Any, kwargs: Any) -> None:
        seen.append(f"{type(held.param_groups).__name__} {sum(len(group['params']) for group in held.param_groups)}")

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    shardwise.shard(model, optimizer, stage=2, tiers={"param": "host"})
    for _ in range(2):
        model(torch.randn(3, 24).to("sim")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, str(optimizer.param_groups[0]["count"])]


def test_hooks_see_whole_groups_and_groups_are_counted_once(sim_world: World) -> None:
    num_params = len(list(Stack(24, 3).parameters()))
    assert sim_world.run(_hook_and_count, ranks=1)[0] == [f"list {num_params}"] * 4 + ["2"]


def _on_the_cpu() -> tuple[Any, int]:
    model = Stack(8, 2)
    sharded = shardwise.shard(model, torch.optim.AdamW(model.parameters()), stage=1, tiers={shardwise.OPTIM: "host"})
    return sharded.plan.tiers, sharded.ledger.live_on(Tier.HOST)


def test_on_the_cpu_the_memory_of_the_host_is_the_devices(world: World) -> None:
    assert world.run(_on_the_cpu, ranks=2) == [((), 0)] * 2


def _pin_too_much() -> str:
    sim.set_pinned_capacity(1000)
    try:
        shardwise.shard(Stack(24, 3).to("sim"), stage=3, tiers={"param": "host"})
    except shardwise.ShardwiseError as error:
        return str(error)
    finally:
        sim.set_pinned_capacity(0)
    return ""


def test_without_pinned_memory_the_state_is_named(sim_world: World) -> None:
    message = sim_world.run(_pin_too_much, ranks=1)[0]
    assert "There is no room in the host's memory for parameters of " in message
    assert "No pinned memory is left" in message


# ---------------------------------------------------------------- activations


def _save_odd_views() -> bool:
    """Saved tensors of odd forms come back as they were: transposed, cut, expanded, of other dtypes."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x @ self.weight).t()
            z = y[3:50].exp() * y[4:51].sin()
            wide = z[:1].expand(40, -1)
            return (wide * wide.cos()).sum() + (z.clamp(-9, 9).half().float() ** 2).sum() + y.max(dim=0).values.sum()

    grads = []
    for activations in ("device", "host", "disk"):
        torch.manual_seed(0)
        model = Odd().to("sim")
        shardwise.shard(model, stage=0, activations=activations, folder=FOLDER)
        x = torch.randn(64, 64, dtype=torch.float64).to("sim").requires_grad_()
        model(x).backward()
        assert x.grad is not None
        grads.append(x.grad.cpu())
    return all(torch.equal(grad, grads[0]) for grad in grads)


def test_saved_tensors_of_any_form_come_back_as_they_were(sim_world: World) -> None:
    assert sim_world.run(_save_odd_views, ranks=1) == [True]
