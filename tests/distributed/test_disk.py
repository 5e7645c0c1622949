"""State on disk on the CPU: the same bits, exact bytes, memory within bounds, files that go, and faults that stop all ranks."""

import itertools
import os
import re
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.core.ledger import Kind, Tier
from shardwise.testing import World
from tests.distributed.matrix import FACTORS, Case, Group, Outcome, covering, difference, train
from tests.unit.stores import children

pytestmark = pytest.mark.dist
NUM_STEPS = 6
KINDS = ("optim", "grad", "param")
ALL = dict.fromkeys(KINDS, "disk")


@dataclass(frozen=True, order=True)
class OnDisk(Case):
    """A case of the matrix, and which kinds of state rest on disk."""

    kinds: tuple[bool, ...]
    fraction: float

    @property
    def tiers(self) -> dict[str, str]:
        return {kind: "disk" for kind, is_there in zip(KINDS, self.kinds, strict=True) if is_there}

    @property
    def case(self) -> Case:
        return Case(*astuple(self)[: len(fields(Case))])


def _cases() -> list[OnDisk]:
    """Few cases in which every pair of choices occurs."""
    kinds = [kinds for kinds in itertools.product((False, True), repeat=3) if any(kinds)]
    factors = {**FACTORS, "ranks": (2, 3), "prefetch": (0, 2), "kinds": kinds, "fraction": (1.0, 0.4)}
    product = itertools.product(*(factors[field.name] for field in fields(OnDisk)))
    return covering([case for case in itertools.islice(itertools.starmap(OnDisk, product), 0, None, 11) if case.is_legal])


CASES = _cases()


def _train_on_disk(cases: list[OnDisk], folder: str) -> list[Outcome | str]:
    return [_try(case.case, tiers=case.tiers, fraction=case.fraction, folder=folder) for case in cases]


def _train_in_memory(groups: list[Group]) -> list[Outcome | str]:
    layouts = ["whole" if group.optimizer in ("Adafactor", "Muon") else "even" for group in groups]
    return [_try(Case(*astuple(group), 0, 1, layout)) for group, layout in zip(groups, layouts, strict=True)]


def _try(case: Case, **plan: Any) -> Outcome | str:
    try:
        return train(case, num_steps=NUM_STEPS, **plan)
    except (shardwise.ShardwiseError, AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_disk_changes_no_bit(world: World, tmp_path: Path, ranks: int) -> None:
    cases = [case for case in CASES if case.ranks == ranks]
    groups = sorted({case.group for case in cases})
    on_disk = world.run(_train_on_disk, cases, str(tmp_path / "offload"), ranks=ranks, timeout_seconds=600)
    in_memory = world.run(_train_in_memory, groups, ranks=ranks, timeout_seconds=600)
    wrong = []
    for rank in range(ranks):
        expected = dict(zip(groups, in_memory[rank], strict=True))
        for case, found in zip(cases, on_disk[rank], strict=True):
            reference = expected[case.group]
            assert not isinstance(reference, str), reference
            differs = found if isinstance(found, str) else difference(found, reference)
            if differs:
                wrong.append(f"rank {rank}, {case}: {differs}")
    assert not wrong, "\n".join([f"{len(wrong)} of {ranks * len(cases)}", *wrong[:10]])
    assert not list((tmp_path / "offload").iterdir())  # What unshard has let go.


def test_the_cases_cover_every_kind_at_every_stage() -> None:
    kinds = {kinds for kinds in itertools.product((False, True), repeat=3) if any(kinds)}
    assert {(case.stage, case.kinds) for case in CASES} == set(itertools.product(range(4), kinds))


# ---------------------------------------------------------------- memory and bytes

WIDTH, DEPTH = 64, 4
LAYER_BYTES = 4 * WIDTH * WIDTH


def _make(folder: str, seed: int = 0, **plan: Any) -> tuple[nn.Module, torch.optim.Optimizer, shardwise.Sharded]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, shardwise.shard(model, optimizer, units=[nn.Linear], folder=folder, **plan)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(10 * number + dist.get_rank())
    model(torch.randn(3, WIDTH)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def _weights(model: nn.Module) -> list[torch.Tensor]:
    with shardwise.gathered(model):
        return [param.detach().clone() for param in model.parameters()]


def _count_bytes(folder: str, stage: int, tiers: dict[str, str]) -> dict[str, int]:
    """What one step reads and writes, and what the ledger says of the disk."""
    model, optimizer, handle = _make(folder, stage=stage, tiers=tiers)
    disk = handle.engine.disk
    assert disk is not None
    for number in range(3):
        before = disk.read_bytes, disk.written_bytes
        _step(model, optimizer, number)
    disk.settle()
    found = {kind.name: handle.ledger.live(kind, Tier.DISK) for kind in Kind if handle.ledger.live(kind, Tier.DISK)}
    return {**found, "read": disk.read_bytes - before[0], "written": disk.written_bytes - before[1]}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_read_once_and_written_once(world: World, tmp_path: Path, stage: int) -> None:
    share = DEPTH * LAYER_BYTES // (2 if stage else 1)
    for found in world.run(_count_bytes, str(tmp_path), stage, {"optim": "disk"}, ranks=2):
        assert found == {"OPTIM": 2 * share, "read": 2 * share, "written": 2 * share}
    for found in world.run(_count_bytes, str(tmp_path), stage, {"grad": "disk"}, ranks=2):
        assert found == {"read": share, "written": share}


def _read_beside_the_backward(folder: str) -> tuple[int, int, int]:
    model, optimizer, handle = _make(folder, stage=3, tiers={"optim": "disk"})
    _step(model, optimizer, 0)
    disk = handle.engine.disk
    assert disk is not None
    before = disk.read_bytes
    model(torch.ones(2, WIDTH)).square().mean().backward()
    ahead = disk.read_bytes - before
    optimizer.step()
    return ahead, disk.read_bytes - before, disk.staging.budget_bytes


def test_what_an_update_needs_is_read_beside_the_backward(world: World, tmp_path: Path) -> None:
    for ahead, whole, budget in world.run(_read_beside_the_backward, str(tmp_path), ranks=2):
        assert 0 < ahead <= whole, (ahead, whole, budget)
        assert ahead > whole / 4, "Staging has room for more than one turn, and reads no more than that."


def test_all_of_it_on_disk_is_read_for_each_use(world: World, tmp_path: Path) -> None:
    share = DEPTH * LAYER_BYTES // 2
    kept = LAYER_BYTES // 2  # The layer at the turn stays gathered from the forward to the backward.
    for found in world.run(_count_bytes, str(tmp_path), 3, ALL, ranks=2):
        assert found["PARAM"] == share
        assert found["OPTIM"] == 2 * share
        assert found["written"] == (1 + 1 + 2) * share
        assert found["read"] == (2 + 1 + 1 + 2) * share - kept


def _train_within(folder: str, staging_bytes: int | None) -> tuple[list[torch.Tensor], int, int] | str:
    try:
        model, optimizer, handle = _make(folder, stage=3, tiers=ALL, staging_bytes=staging_bytes)
    except shardwise.PlanError as error:
        return str(error)
    for number in range(4):
        _step(model, optimizer, number)
    disk = handle.engine.disk
    assert disk is not None
    return _weights(model), disk.report.peak_bytes, disk.report.budget_bytes


def test_the_budget_of_staging_is_refused_or_kept(world: World, tmp_path: Path) -> None:
    refused = world.run(_train_within, str(tmp_path), 4096, ranks=2)
    assert refused[0] == refused[1]
    needed = re.search(r"brings (\d+) bytes from disk", refused[0])
    assert needed is not None
    least = int(needed[1])
    assert least == 4 * LAYER_BYTES // 2
    reference, _, budget = world.run(_train_within, str(tmp_path), None, ranks=2)[0]
    assert budget == 3 * least
    for budget in (least, least + 4096, 2 * least):
        for weights, peak, found in world.run(_train_within, str(tmp_path), budget, ranks=2):
            assert peak <= found == budget
            assert all(map(torch.equal, weights, reference))


_SCRIPT = """
import gc, sys, torch
from torch import nn
import shardwise
from shardwise.devices.memory import peak_resident_bytes
width, depth, batch = 1024, 96, 2
torch.set_num_threads(1)
x = torch.randn(batch, width)
nn.Linear(width, width)(x).sum().backward()
torch.optim.AdamW([nn.Parameter(torch.zeros(8))], fused=True)
before = peak_resident_bytes()
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
tiers = dict.fromkeys(("optim", "grad", "param"), "disk")
shardwise.shard(model, optimizer, stage=3, units=[nn.Linear], tiers=tiers, folder=sys.argv[1])
for _ in range(2):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(peak_resident_bytes() - before, 16 * depth * width * (width + 1))
"""


def test_memory_stays_below_a_quarter_of_the_states(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "offload")]
    grown, states = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert grown < states / 4


# ---------------------------------------------------------------- what else touches state


def _save_and_load(folder: str, first: dict[str, str], second: dict[str, str], wait: bool) -> bool:
    one, other = _make(f"{folder}/a", 0, stage=3, tiers=first)[:2], _make(f"{folder}/b", 1, stage=1, tiers=second)[:2]
    for number in range(3):
        _step(*one, number)
    shardwise.save(f"{folder}/saved", *one, wait=wait).wait()
    shardwise.load(f"{folder}/saved", *other)
    for number in range(3, 6):
        _step(*one, number)
        _step(*other, number)
    return all(map(torch.equal, _weights(one[0]), _weights(other[0])))


@pytest.mark.parametrize(("first", "second"), [({}, ALL), (ALL, {}), (ALL, {"optim": "disk"})], ids=["out", "in", "across"])
@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "beside"])
def test_checkpoints_fit_wherever_state_rests(
    world: World, tmp_path: Path, first: dict[str, str], second: dict[str, str], wait: bool
) -> None:
    assert world.run(_save_and_load, str(tmp_path), first, second, wait, ranks=2) == [True, True]


def _save_in_mid_step(folder: str) -> bool:
    """Gradients that were clipped and not yet used are saved and loaded as they are."""
    models = [_make(f"{folder}/{seed}", seed, stage=2, tiers=ALL if seed else {})[:2] for seed in (1, 0, 2)]
    for model, _ in models[:2]:
        torch.manual_seed(dist.get_rank())
        model(torch.randn(3, WIDTH)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    shardwise.save(f"{folder}/saved", *models[0])
    shardwise.load(f"{folder}/saved", *models[1])
    shardwise.load(f"{folder}/saved", *models[2])
    for _, optimizer in models:
        optimizer.step()
    found = [_weights(model) for model, _ in models]
    return all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))


def test_gradients_on_disk_are_saved_and_loaded(world: World, tmp_path: Path) -> None:
    assert world.run(_save_in_mid_step, str(tmp_path), ranks=2) == [True, True]


def _write(folder: str, stage: int, tiers: dict[str, str]) -> list[float]:
    """What users write to parameters is what the next forward computes with; also after a cast."""
    model, optimizer, _ = _make(folder, stage=stage, tiers=tiers)
    _step(model, optimizer, 0)
    with shardwise.gathered(model), torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    x = torch.ones(1, WIDTH)
    found = [float(model(x).sum())]
    model.load_state_dict({f"{layer}.weight": torch.full((WIDTH, WIDTH), 0.25) for layer in range(DEPTH)})
    with torch.no_grad():
        found.append(float(model(x).sum()))
    model.double()
    with torch.no_grad():
        return [*found, float(model(x.double()).sum())]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_written_reaches_the_disk(world: World, tmp_path: Path, stage: int) -> None:
    expected = world.run(_write, str(tmp_path), stage, {}, ranks=2)
    for tiers in ({"optim": "disk"}, {"param": "disk"}, ALL):
        assert world.run(_write, str(tmp_path), stage, tiers, ranks=2) == expected


# ---------------------------------------------------------------- files


def _look_at_files(folder: str) -> list[str]:
    _make(folder, stage=1, tiers={"optim": "disk"})
    dist.barrier()
    return sorted(f"{path.name} {stat.S_IMODE(path.stat().st_mode):o}" for path in Path(folder).iterdir())


def test_files_are_private(world: World, tmp_path: Path) -> None:
    files = world.run(_look_at_files, str(tmp_path / "offload"), ranks=2)[0]
    assert [re.sub(r"-\d+-[0-9a-f]{16}", "", file) for file in files] == [
        f"shardwise-offload-rank-{rank}.bin 600" for rank in (0, 1)
    ]
    assert stat.S_IMODE((tmp_path / "offload").stat().st_mode) == 0o700


_KILLED = """
import os, signal, sys, torch, shardwise
model = torch.nn.Linear(64, 64)
shardwise.shard(model, torch.optim.AdamW(model.parameters()), tiers={"optim": "disk"}, folder=sys.argv[1])
print(len(os.listdir(sys.argv[1])), flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    def start(end: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, str(tmp_path / "offload"), end], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.strip()

    assert start("kill") == (-signal.SIGKILL, "1")
    assert len(os.listdir(tmp_path / "offload")) == 1
    assert start("end") == (0, "1")
    assert os.listdir(tmp_path / "offload") == []


# ---------------------------------------------------------------- faults


def _told(function: Callable[[], object]) -> str:
    try:
        function()
    except shardwise.OffloadError as error:
        return str(error)
    return ""


@contextmanager
def _small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _start_badly(folder: str, fault: str) -> tuple[str, bool]:
    """Rank 1 cannot make its file, or not of that size; says what was told, and whether the model is as it was."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    before = [param.data_ptr() for param in model.parameters()]
    with ExitStack() as stack:
        if dist.get_rank() == 1 and fault == "limit":
            stack.enter_context(_small_files())
        elif dist.get_rank() == 1:
            children.mount_small(Path(folder), size="16k")
            if fault == "read-only":
                children.make_read_only(Path(folder))
        told = _told(lambda: shardwise.shard(model, torch.optim.AdamW(model.parameters()), tiers=ALL, folder=folder))
    return told, [param.data_ptr() for param in model.parameters()] == before


@pytest.mark.parametrize(
    ("fault", "text"),
    [("read-only", "Read-only file system"), ("limit", "Files may not grow so large here"), ("full", "Make room")],
)
def test_a_disk_that_cannot_be_used_is_told_on_all_ranks_before_anything_is_changed(
    tmp_path: Path, fault: str, text: str
) -> None:
    folder = tmp_path / "offload"
    folder.mkdir()
    with World(num_ranks_max=2) as world:  # Its own: mounts of a process last as long as it does.
        found = world.run(_start_badly, str(folder), fault, ranks=2)
    for told, is_plain in found:
        assert is_plain
        assert str(folder) in told
        assert text in told
    assert found[0][0] == f"Rank 1: {found[1][0]}"


def _delete_in_mid_run(folder: str, stage: int, tiers: dict[str, str]) -> list[str]:
    """Somebody deletes the file of rank 1. What is told then, by a save, by a further call, and after a load elsewhere."""
    model, optimizer, handle = _make(f"{folder}/a", stage=stage, tiers=tiers)
    _step(model, optimizer, 0)
    shardwise.save(f"{folder}/good", model, optimizer)
    expected = _weights(model)
    if dist.get_rank() == 1:
        assert handle.engine.disk is not None
        handle.engine.disk.store.path.unlink()
    dist.barrier()
    told = [_told(lambda: [_step(model, optimizer, number) for number in (1, 2)])]
    told.append(_told(lambda: shardwise.save(f"{folder}/bad", model, optimizer)))
    told.append(_told(lambda: model(torch.ones(1, WIDTH))))
    fresh, other, _ = _make(f"{folder}/b", 1, stage=stage, tiers=tiers)
    shardwise.load(f"{folder}/good", fresh, other)
    return [*told, str(all(map(torch.equal, _weights(fresh), expected))), str(Path(f"{folder}/bad").exists())]


@pytest.mark.parametrize("kind", [*KINDS, "all"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_file_deleted_in_mid_run_stops_all_ranks(world: World, tmp_path: Path, stage: int, kind: str) -> None:
    tiers = ALL if kind == "all" else {kind: "disk"}
    for told, saved, called, is_good, is_bad in world.run(_delete_in_mid_run, str(tmp_path), stage, tiers, ranks=2):
        assert told.startswith("Rank 1: ")
        for text in (str(tmp_path / "a"), "somebody has deleted it", _LABELS[kind]):
            assert text in told
        assert "The state is not whole. The disk tier has failed: Rank 1: " in saved
        assert "Load a checkpoint first" in called
        assert (is_good, is_bad) == ("True", "False")


_LABELS = {"optim": "optimizer state 'exp_avg", "grad": "gradients of", "param": "parameters of", "all": " of "}


def _infer_without_file(folder: str, stage: int) -> str:
    model, _, handle = _make(folder, stage=stage, tiers={"param": "disk"})
    if dist.get_rank() == 1:
        assert handle.engine.disk is not None
        handle.engine.disk.store.path.unlink()
    dist.barrier()
    with torch.no_grad():
        return _told(lambda: model(torch.ones(1, WIDTH)))


def test_inference_without_its_file_stops_too(world: World, tmp_path: Path) -> None:
    for told in world.run(_infer_without_file, str(tmp_path), 3, ranks=2):
        assert told.startswith("Rank 1: ")
        assert "somebody has deleted it" in told
    alone = world.run(_infer_without_file, str(tmp_path), 0, ranks=2)
    assert alone[0] == ""
    assert "somebody has deleted it" in alone[1]
