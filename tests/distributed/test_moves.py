"""Moves of state at run time: the same bits, exact books, memory that goes, and one refusal on all ranks."""

import gc
import itertools
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.core.ledger import Kind, Tier
from shardwise.core.rest import rests_of
from shardwise.devices import sim
from shardwise.runtime.registry import engine_of
from shardwise.testing import World
from shardwise.wire import host_comm
from tests.distributed.matrix import FACTORS, Case, Group, Outcome, covering, difference, train
from tests.unit.stores import children

pytestmark = pytest.mark.dist
NUM_STEPS = 5
KINDS = (shardwise.OPTIM, shardwise.GRAD, shardwise.PARAM)
SUBSETS = [(kind,) for kind in KINDS] + [(shardwise.OPTIM, shardwise.PARAM), KINDS]
STARTS = {
    "sim": [
        ("device", "device", "device"),
        ("host", "host", "host"),
        ("disk", "disk", "disk"),
        ("host", "device", "disk"),
        ("disk", "host", "device"),
    ],
    "cpu": [("device", "device", "device"), ("disk", "device", "device"), ("disk", "disk", "disk")],
}


@dataclass(frozen=True, order=True)
class Moving(Case):
    """A case of the matrix, where its state rests first, and what is moved when and where to."""

    start: tuple[str, ...]
    kinds: int
    to: str
    fraction: float
    after: str

    @property
    def case(self) -> Case:
        return Case(*astuple(self)[: len(fields(Case))])

    @property
    def tiers(self) -> dict[str, str]:
        return dict(zip(("optim", "grad", "param"), self.start, strict=True))


def _cases(device: str) -> list[Moving]:
    """Few cases in which every pair of choices occurs."""
    tiers = ("device", "host", "disk") if device == "sim" else ("device", "disk")
    factors = {
        **FACTORS,
        "ranks": (2,),
        "prefetch": (0, 2),
        "layout": ("even", "auto"),
        "optimizer": ("AdamW", "SGD", "Muon"),
        "start": STARTS[device],
        "kinds": range(len(SUBSETS)),
        "to": tiers,
        "fraction": (1.0, 0.4),
        "after": ("backward", "update"),
    }
    product = itertools.starmap(Moving, itertools.product(*(factors[field.name] for field in fields(Moving))))
    return covering([case for case in itertools.islice(product, 0, None, 7) if case.is_legal])


CASES = {device: _cases(device) for device in STARTS}


def _check_plan(model: nn.Module) -> None:
    """State rests where the plan says."""
    engine = engine_of(model)
    rests = rests_of(engine.units, engine.plan, is_on_host=engine.device.type == "cpu")
    for flat in engine.executor.flats:
        assert flat.rest == rests[flat.spec.name]
    assert (engine.disk is not None) == engine.plan.uses_disk


def _move_twice(case: Moving, model: nn.Module, step: int, after: str) -> None:
    """What the case says in the third step; and after the fourth, all of it to the device."""
    if (step, after) == (2, case.after):
        fraction = 1.0 if case.to == "device" else case.fraction
        shardwise.move(model, SUBSETS[case.kinds], case.to, fraction)
        _check_plan(model)
    elif (step, after) == (3, "update"):
        shardwise.move(model, KINDS, "device")
        _check_plan(model)


def _train_moving(cases: list[Moving], device: str, folder: str) -> list[Outcome | str]:
    return [_try(case.case, device, partial(_move_twice, case), tiers=case.tiers, folder=folder) for case in cases]


def _train_still(groups: list[Group], device: str) -> list[Outcome | str]:
    layouts = ["whole" if group.optimizer in ("Adafactor", "Muon") else "even" for group in groups]
    return [_try(Case(*astuple(group), 0, 1, layout), device, None) for group, layout in zip(groups, layouts, strict=True)]


def _try(case: Case, device: str, between: Callable[..., None] | None, **plan: Any) -> Outcome | str:
    try:
        return train(case, device=device, num_steps=NUM_STEPS, between=between, **plan)
    except (shardwise.ShardwiseError, AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_moves_change_no_bit(device: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    world: World = request.getfixturevalue("sim_world" if device == "sim" else "world")
    cases = CASES[device]
    groups = sorted({case.group for case in cases})
    moving = world.run(_train_moving, cases, device, str(tmp_path / "offload"), ranks=2, timeout_seconds=600)
    still = world.run(_train_still, groups, device, ranks=2, timeout_seconds=600)
    wrong = []
    for rank in range(2):
        expected = dict(zip(groups, still[rank], strict=True))
        for case, found in zip(cases, moving[rank], strict=True):
            reference = expected[case.group]
            assert not isinstance(reference, str), reference
            differs = found if isinstance(found, str) else difference(found, reference)
            if differs:
                wrong.append(f"rank {rank}, {case}: {differs}")
    assert not wrong, "\n".join([f"{len(wrong)} of {2 * len(cases)}", *wrong[:10]])
    assert not list((tmp_path / "offload").iterdir())  # What was left is gone.


def test_the_cases_cover_every_directed_pair_of_tiers_at_every_stage() -> None:
    for device, cases in CASES.items():
        tiers = {to for case in cases for to in (case.to,)}
        pairs = {(case.start[KINDS.index(kind)], case.to, kind) for case in cases for kind in SUBSETS[case.kinds]}
        assert pairs >= {(*pair, kind) for pair in itertools.permutations(tiers, 2) for kind in KINDS}
        assert {(case.stage, case.to) for case in cases} == set(itertools.product(range(4), tiers)), device


# ---------------------------------------------------------------- books and memory

WIDTH, DEPTH = 64, 4


def _make(device: str, folder: str, **plan: Any) -> tuple[nn.Module, torch.optim.Optimizer, shardwise.Sharded]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, optimizer, shardwise.shard(model, optimizer, units=[nn.Linear], folder=folder, **plan)


def _backward(model: nn.Module, number: int) -> None:
    torch.manual_seed(10 * number + dist.get_rank())
    device = next(model.parameters()).device
    model(torch.randn(3, WIDTH).to(device)).square().mean().backward()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, is_cleared: bool = True) -> None:
    _backward(model, number)
    optimizer.step()
    if is_cleared:
        optimizer.zero_grad()


def _weights(model: nn.Module) -> list[torch.Tensor]:
    with shardwise.gathered(model):
        return [param.detach().cpu().clone() for param in model.parameters()]


def _let_go() -> None:
    """Have nothing left of what is over, also of what peers could still have been reading."""
    dist.barrier()
    for comm in list(host_comm._HOLDING):
        comm.is_all_read()
    gc.collect()


def _books(device: str, folder: str, start: dict[str, str], end: dict[str, str], plan: dict[str, Any]) -> list[Any]:
    """What the ledger and the device say at rest, with gradients, of a run that moved, and of one that began where that ended."""
    found = []
    for tiers in (start, start, end):  # The first leaves tensors of one number behind, which are made once and kept.
        _let_go()
        base = sim.memory(dist.get_rank()).live_bytes if device == "sim" else 0
        model, optimizer, handle = _make(device, folder, tiers=tiers, **plan)
        for number in range(2):
            _step(model, optimizer, number)
        _step(model, optimizer, 2, is_cleared=False)
        for kind in KINDS:
            shardwise.move(model, kind, end.get(kind.key, "device"))
        _step(model, optimizer, 3, is_cleared=False)
        handle.engine.pool.trim()
        if handle.engine.disk is not None:
            handle.engine.disk.settle()
        _let_go()
        held = {f"{t.value} {k.value}": handle.ledger.live(k, t) for t in Tier for k in Kind if k is not Kind.STAGING}
        live = sim.memory(dist.get_rank()).live_bytes - base if device == "sim" else 0
        found.append((held, live, _weights(model)))
        del model, optimizer, handle
    return found[1:]


MOVES = {
    "out": ({}, {"optim": "host", "grad": "host", "param": "host"}),
    "in": ({"optim": "host", "grad": "host", "param": "host"}, {}),
    "optim": ({}, {"optim": "host"}),
    "to-disk": ({"optim": "host"}, {"optim": "disk", "grad": "disk", "param": "disk"}),
    "from-disk": ({"optim": "disk", "grad": "disk", "param": "disk"}, {"param": "host"}),
}


@pytest.mark.parametrize(("name", "stage"), list(zip(MOVES, (0, 1, 2, 3, 2), strict=True)))
@pytest.mark.parametrize("precision", [None, "bfloat16"], ids=["fp32", "bf16"])
def test_the_books_and_the_device_are_as_if_it_had_been_so_from_the_start(
    sim_world: World, tmp_path: Path, name: str, stage: int, precision: str | None
) -> None:
    plan = {"stage": stage, "param_dtype": precision}
    for moved, began in sim_world.run(_books, "sim", str(tmp_path), *MOVES[name], plan, ranks=2):
        assert moved[0] == began[0]
        assert moved[1] == began[1]
        assert all(map(torch.equal, moved[2], began[2]))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_books_on_the_cpu(world: World, tmp_path: Path, stage: int) -> None:
    everything = dict.fromkeys(("optim", "grad", "param"), "disk")
    for start, end in (({}, everything), (everything, {})):
        for moved, began in world.run(_books, "cpu", str(tmp_path), start, end, {"stage": stage}, ranks=2):
            assert moved[0] == began[0]
            assert all(map(torch.equal, moved[2], began[2]))


def _peaks(folder: str) -> list[int]:
    """What the device holds at most in a step: before a move of all state to the host, after it, and back again."""
    rank, found = dist.get_rank(), []
    model, optimizer, _ = _make("sim", folder, stage=3)
    for tier in ("device", "host", "device"):
        shardwise.move(model, KINDS, tier)
        for number in range(2):
            _let_go()
            sim.reset_peak(rank)
            _step(model, optimizer, number)
        found.append(sim.memory(rank).peak_bytes)
    return found


def test_the_device_holds_less_after_a_move(sim_world: World, tmp_path: Path) -> None:
    unit = 4 * (WIDTH * WIDTH + WIDTH)
    share = DEPTH * unit // 2
    for before, away, back in sim_world.run(_peaks, str(tmp_path), ranks=2):
        assert before - away > 3 * share  # Parameters and two numbers of AdamW for each; and most of the gradients.
        # What is under way between ranks at the peak depends on how far they are apart: it is less than a unit.
        assert abs(back - before) < unit


def _save_after(device: str, folder: str, stage: int, start: dict[str, str], to: str) -> bool:
    """A save after a move, in the middle of a step, fits a run without one; and what that saves fits a run that has moved."""
    one, other = (_make(device, f"{folder}/{each}", stage=stage, tiers=start)[:2] for each in "ab")
    plain = _make(device, f"{folder}/c", stage=1)[:2]
    for number in range(2):
        _step(*one, number)
    _backward(one[0], 2)
    shardwise.move(one[0], KINDS, to)
    shardwise.save(f"{folder}/first", *one)
    shardwise.load(f"{folder}/first", *plain)
    for _, optimizer in (one, plain):
        optimizer.step()
        optimizer.zero_grad()
    shardwise.save(f"{folder}/second", *plain)
    shardwise.move(other[0], KINDS, to)
    shardwise.load(f"{folder}/second", *other)
    for pair in (one, plain, other):
        _step(*pair, 3)
    first, *others = (_weights(pair[0]) for pair in (one, plain, other))
    return all(torch.equal(a, b) for each in others for a, b in zip(first, each, strict=True))


def test_checkpoints_fit_after_moves(sim_world: World, tmp_path: Path) -> None:
    for number, (stage, start, to) in enumerate(
        [(3, {}, "disk"), (2, {"param": "disk"}, "host"), (1, {"optim": "host"}, "device")]
    ):
        assert sim_world.run(_save_after, "sim", f"{tmp_path}/{number}", stage, start, to, ranks=2) == [True, True]


# ---------------------------------------------------------------- refusals and faults


def _told(function: Callable[[], object]) -> tuple[str, str]:
    try:
        function()
    except shardwise.ShardwiseError as error:
        return type(error).__name__, str(error)
    return "", ""


class Inside(nn.Module):
    """A model that calls something in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.call: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.call()
        return y


def _ask_badly(folder: str) -> dict[str, tuple[str, str]]:
    """What is told, by what was wrong; afterwards a good move and a step are made."""
    model, optimizer, handle = _make("cpu", folder, stage=2)
    _step(model, optimizer, 0)
    before, rank, found = _weights(model), dist.get_rank(), {}
    kinds = [shardwise.OPTIM, shardwise.GRAD]
    found["kind"] = _told(lambda: shardwise.move(model, "optimum", "disk"))
    found["none"] = _told(lambda: shardwise.move(model, [], "disk"))
    found["type"] = _told(lambda: shardwise.move(model, 3, "disk"))  # type: ignore[arg-type]
    found["tier"] = _told(lambda: shardwise.move(model, kinds, "tape"))
    found["fraction"] = _told(lambda: shardwise.move(model, kinds, "disk", 1.5))
    found["to the device"] = _told(lambda: shardwise.move(model, kinds, "device", 0.5))
    found["one rank's tier"] = _told(lambda: shardwise.move(model, kinds, "disk" if rank else "tape"))
    found["other kinds"] = _told(lambda: shardwise.move(model, kinds[rank], "disk"))
    found["plain"] = _told(lambda: shardwise.move(nn.Linear(2, 2), kinds, "disk"))
    with shardwise.gathered(model):
        found["gathered"] = _told(lambda: shardwise.move(model, kinds, "disk"))
    inside, stubborn = Inside(), nn.Linear(4, 4)
    shardwise.shard(inside, stage=1, folder=folder)
    inside.call = lambda: found.setdefault("forward", _told(lambda: shardwise.move(inside, kinds, "disk")))
    y = inside(torch.ones(2, 4))
    y.register_hook(lambda grad: found.update(backward=_told(lambda: shardwise.move(inside, kinds, "disk"))))
    y.sum().backward()
    minimizer = torch.optim.LBFGS(stubborn.parameters())
    shardwise.shard(stubborn, minimizer, stage=0, folder=folder)
    found["LBFGS"] = _told(lambda: shardwise.move(stubborn, kinds, "disk"))
    assert handle.plan.tiers == ()
    assert not Path(folder).exists()
    assert all(map(torch.equal, before, _weights(model)))
    shardwise.move(model, kinds, "disk")
    _step(model, optimizer, 1)
    return found


def test_what_cannot_be_moved_is_refused_on_all_ranks_before_anything_is_changed(world: World, tmp_path: Path) -> None:
    texts = {
        "kind": ("UsageError", "There is no kind of state 'optimum' to move. Choose from optim, grad, param."),
        "none": ("UsageError", "No kind of state was named to move."),
        "type": ("UsageTypeError", "kind must be shardwise.OPTIM, GRAD or PARAM"),
        "tier": ("PlanError", "rest on 'tape'. Choose from 'device', 'host', 'disk'."),
        "fraction": ("PlanError", "fraction must be from 0 to 1 but is 1.5."),
        "to the device": ("PlanError", "the move is to the device"),
        "one rank's tier": ("PlanError", "rest on 'tape'"),
        "other kinds": ("UsageError", "Ranks disagree, so nothing was moved: with what rank 0 asks for"),
        "plain": ("UsageError", "This Linear is not sharded."),
        "gathered": ("UsageError", "shardwise.move cannot run inside `with shardwise.gathered(...)`"),
        "forward": ("UsageError", "shardwise.move cannot run inside a call of the model"),
        "backward": ("UsageError", "shardwise.move cannot run inside a backward pass"),
        "LBFGS": ("PlanError", "LBFGS does not go through its groups one by one"),
    }
    ranks = world.run(_ask_badly, str(tmp_path / "offload"), ranks=2)
    for found in ranks:
        assert found.keys() == texts.keys()
        for what, (kind, text) in texts.items():
            assert found[what][0] == kind, (what, found[what])
            assert text in found[what][1], (what, found[what])
    assert ranks[1]["one rank's tier"][1].startswith("Rank 0: ")


def _move_alone(folder: str, stage: int) -> tuple[str, str]:
    """Rank 0 moves state, and rank 1 goes on with the next step."""
    model, optimizer, _ = _make("cpu", folder, stage=stage, deadline_seconds=5)
    _step(model, optimizer, 0)
    if dist.get_rank() == 0:
        return _told(lambda: shardwise.move(model, KINDS, "disk"))
    return _told(lambda: _step(model, optimizer, 1))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_move_on_one_rank_alone_is_told(tmp_path: Path, stage: int) -> None:
    with World(num_ranks_max=2) as world:  # Its own: lanes that have failed stay so.
        found = world.run(_move_alone, str(tmp_path / "offload"), stage, ranks=2)
    assert "what is to be moved" in found[0][1]
    assert all(kind for kind, _ in found)


def _run_short(folder: str) -> tuple[list[str], bool]:
    """Rank 1 has pinned memory for some of the buffers: what was moved goes back, and training goes on as if nothing had been."""
    found = []
    for is_short in (False, True):
        model, optimizer, handle = _make("sim", folder, stage=2)
        for number in range(3):
            _step(model, optimizer, number, is_cleared=False)
            if is_short and number == 1:
                before = {account: handle.ledger.live(*reversed(account)) for account in handle.ledger.accounts}
                sim.set_pinned_capacity(5 * WIDTH * WIDTH if dist.get_rank() else 0)
                told = [_told(partial(shardwise.move, model, KINDS, "host"))[1]]
                sim.set_pinned_capacity(0)
                assert handle.plan.tiers == ()
                assert before == {account: handle.ledger.live(*reversed(account)) for account in before}
                _check_plan(model)
            optimizer.zero_grad()
        found.append(_weights(model))
    return told, all(map(torch.equal, *found))


def test_a_move_that_fails_halfway_is_told_on_all_ranks_and_undone(sim_world: World, tmp_path: Path) -> None:
    for told, is_same in sim_world.run(_run_short, str(tmp_path), ranks=2):
        assert "State could not be moved; all of it is where it was. Rank 1: There is no room in the host's memory" in told[0]
        assert is_same


def _lose_file(folder: str, stage: int, tiers: dict[str, str]) -> list[Any]:
    """Somebody deletes the file of rank 1: what a move away from it says, what a save says then, and whether a load helps."""
    model, optimizer, handle = _make("cpu", f"{folder}/a", stage=stage, tiers=tiers)
    _step(model, optimizer, 0)
    shardwise.save(f"{folder}/good", model, optimizer)
    expected = _weights(model)
    if dist.get_rank() == 1:
        assert handle.engine.disk is not None
        handle.engine.disk.store.path.unlink()
    dist.barrier()
    told = [_told(lambda: shardwise.move(model, KINDS, "device"))[1]]
    told.append(_told(lambda: shardwise.save(f"{folder}/bad", model, optimizer))[1])
    told.append(_told(lambda: shardwise.move(model, KINDS, "device"))[1])
    fresh, other, _ = _make("cpu", f"{folder}/b", stage=stage)
    shardwise.load(f"{folder}/good", fresh, other)
    return [*told, all(map(torch.equal, expected, _weights(fresh)))]


@pytest.mark.parametrize(("stage", "tiers"), [(0, {"optim": "disk"}), (3, {"param": "disk", "optim": "disk"})])
def test_a_file_that_is_gone_stops_a_move_on_all_ranks(world: World, tmp_path: Path, stage: int, tiers: dict[str, str]) -> None:
    for told, saved, again, is_good in world.run(_lose_file, str(tmp_path), stage, tiers, ranks=2):
        assert told.startswith("Rank 1: ")
        assert "somebody has deleted it" in told
        assert "The state is not whole. The disk tier has failed: Rank 1: " in saved
        assert "No state can be moved. The disk tier has failed" in again
        assert is_good


def _fill_disk(folder: str) -> tuple[list[str], bool]:
    """Rank 1's disk is too small for what is moved there, at once or after something else."""
    if dist.get_rank() == 1:
        children.mount_small(Path(folder), size="160k")
    model, optimizer, handle = _make("cpu", folder, stage=1)
    _step(model, optimizer, 0)
    before = _weights(model)
    told = [_told(lambda: shardwise.move(model, KINDS, "disk"))[1]]
    assert handle.engine.disk is None
    shardwise.move(model, shardwise.OPTIM, "disk")
    told.append(_told(lambda: shardwise.move(model, KINDS, "disk"))[1])
    assert handle.plan.tiers == (("optim", "disk"),)
    _check_plan(model)
    is_same = all(map(torch.equal, before, _weights(model)))
    _step(model, optimizer, 1)
    return told, is_same


def test_a_disk_that_is_full_is_found_before_anything_is_moved(tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    folder.mkdir()
    with World(num_ranks_max=2) as world:  # Its own: mounts of a process last as long as it does.
        for told, is_same in world.run(_fill_disk, str(folder), ranks=2):
            assert all("Make room" in each for each in told)
            assert is_same
