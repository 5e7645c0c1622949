"""State on disk on the CPU: the same bits, exact bytes, memory within bounds, files that go, and faults that stop all ranks."""

import itertools
import os
import re
import signal
import stat
import subprocess
import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.core.ledger import Kind, Tier
from shardwise.core.records import StepRecord
from shardwise.telemetry.sink import Callback
from shardwise.testing import World
from tests.distributed.matrix import FACTORS, Case, Outcome, covering
from tests.distributed.offloaded import DEPTH, KINDS, ON_DISK, WIDTH, check_bits, make, step, try_case, weights

pytestmark = pytest.mark.dist
NUM_STEPS = 6


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
    plans = [{"tiers": case.tiers, "fraction": case.fraction, "folder": folder} for case in cases]
    return [try_case(case.case, num_steps=NUM_STEPS, **plan) for case, plan in zip(cases, plans, strict=True)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_disk_changes_no_bit(world: World, tmp_path: Path, ranks: int) -> None:
    cases = [case for case in CASES if case.ranks == ranks]
    on_disk = world.run(_train_on_disk, cases, str(tmp_path / "offload"), ranks=ranks, timeout_seconds=600)
    check_bits(world, ranks, cases, on_disk, num_steps=NUM_STEPS)
    assert not list((tmp_path / "offload").iterdir())  # What unshard has let go.


def test_the_cases_cover_every_kind_at_every_stage() -> None:
    kinds = {kinds for kinds in itertools.product((False, True), repeat=3) if any(kinds)}
    assert {(case.stage, case.kinds) for case in CASES} == set(itertools.product(range(4), kinds))


# ---------------------------------------------------------------- memory and bytes

LAYER_BYTES = 4 * WIDTH * WIDTH


def _count_bytes(folder: str, stage: int, tiers: dict[str, str]) -> dict[str, int]:
    """What one step reads and writes, and what the ledger says of the disk."""
    model, optimizer, handle = make(folder, stage=stage, tiers=tiers)
    disk = handle.engine.disk
    assert disk is not None
    for number in range(3):
        before = disk.read_bytes, disk.written_bytes
        step(model, optimizer, number)
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
    model, optimizer, handle = make(folder, stage=3, tiers={"optim": "disk"})
    step(model, optimizer, 0)
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
    for found in world.run(_count_bytes, str(tmp_path), 3, ON_DISK, ranks=2):
        assert found["PARAM"] == share
        assert found["OPTIM"] == 2 * share
        assert found["written"] == (1 + 1 + 2) * share
        assert found["read"] == (2 + 1 + 1 + 2) * share - kept


class Kept(Callback):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


def _record_steps(folder: str, stage: int) -> tuple[dict[str, float], dict[str, float]]:
    """What the records of some steps say of the disk, and what the tier has counted meanwhile."""
    model, optimizer, handle = make(folder, stage=stage, tiers=ON_DISK)
    disk, kept = handle.engine.disk, Kept()
    assert disk is not None
    with shardwise.record(model, sinks=[kept]):
        before = disk.read_bytes, disk.written_bytes, disk.waited_seconds
        for number in range(4):
            step(model, optimizer, number)
        counted = (disk.read_bytes, disk.written_bytes, disk.waited_seconds)
    told = {"read": 0.0, "written": 0.0, "waited": 0.0}
    report = handle.pool_report
    assert report.staging is not None and report.staging.touched_bytes > 0
    assert "largest free" in str(report) and "disk staging" in str(report)
    for record in kept.records:
        assert record.disk is not None
        assert sum(record.phases.values()) == pytest.approx(record.seconds, rel=1e-9)
        assert min(record.phases.values()) >= 0, record.phases
        told["read"] += record.disk.read_bytes
        told["written"] += record.disk.written_bytes
        told["waited"] += record.disk_seconds
    return told, {key: now - then for key, now, then in zip(told, counted, before, strict=True)}


@pytest.mark.parametrize("stage", [1, 3])
def test_records_tell_of_the_disk_what_it_counts(world: World, tmp_path: Path, stage: int) -> None:
    for told, counted in world.run(_record_steps, str(tmp_path), stage, ranks=2):
        assert (told["read"], told["written"]) == (counted["read"], counted["written"])
        assert told["read"] > 0
        assert told["waited"] == pytest.approx(counted["waited"], rel=1e-6)


def _train_within(folder: str, staging_bytes: int | None) -> tuple[list[torch.Tensor], int, int] | str:
    try:
        model, optimizer, handle = make(folder, stage=3, tiers=ON_DISK, staging_bytes=staging_bytes)
    except shardwise.PlanError as error:
        return str(error)
    for number in range(4):
        step(model, optimizer, number)
    disk = handle.engine.disk
    assert disk is not None
    return weights(model), disk.report.peak_bytes, disk.report.budget_bytes


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
        for values, peak, found in world.run(_train_within, str(tmp_path), budget, ranks=2):
            assert peak <= found == budget
            assert all(map(torch.equal, values, reference))


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
    one, other = make(f"{folder}/a", 0, stage=3, tiers=first)[:2], make(f"{folder}/b", 1, stage=1, tiers=second)[:2]
    for number in range(3):
        step(*one, number)
    shardwise.save(f"{folder}/saved", *one, wait=wait).wait()
    shardwise.load(f"{folder}/saved", *other)
    for number in range(3, 6):
        step(*one, number)
        step(*other, number)
    return all(map(torch.equal, weights(one[0]), weights(other[0])))


@pytest.mark.parametrize(
    ("first", "second"), [({}, ON_DISK), (ON_DISK, {}), (ON_DISK, {"optim": "disk"})], ids=["out", "in", "across"]
)
@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "beside"])
def test_checkpoints_fit_wherever_state_rests(
    world: World, tmp_path: Path, first: dict[str, str], second: dict[str, str], wait: bool
) -> None:
    assert world.run(_save_and_load, str(tmp_path), first, second, wait, ranks=2) == [True, True]


def _save_in_mid_step(folder: str) -> bool:
    """Gradients that were clipped and not yet used are saved and loaded as they are."""
    models = [make(f"{folder}/{seed}", seed, stage=2, tiers=ON_DISK if seed else {})[:2] for seed in (1, 0, 2)]
    for model, _ in models[:2]:
        torch.manual_seed(dist.get_rank())
        model(torch.randn(3, WIDTH)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    shardwise.save(f"{folder}/saved", *models[0])
    shardwise.load(f"{folder}/saved", *models[1])
    shardwise.load(f"{folder}/saved", *models[2])
    for _, optimizer in models:
        optimizer.step()
    found = [weights(model) for model, _ in models]
    return all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))


def test_gradients_on_disk_are_saved_and_loaded(world: World, tmp_path: Path) -> None:
    assert world.run(_save_in_mid_step, str(tmp_path), ranks=2) == [True, True]


def _write(folder: str, stage: int, tiers: dict[str, str]) -> list[float]:
    """What users write to parameters is what the next forward computes with; also after a cast."""
    model, optimizer, _ = make(folder, stage=stage, tiers=tiers)
    step(model, optimizer, 0)
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
    for tiers in ({"optim": "disk"}, {"param": "disk"}, ON_DISK):
        assert world.run(_write, str(tmp_path), stage, tiers, ranks=2) == expected


# ---------------------------------------------------------------- files


def _look_at_files(folder: str) -> list[str]:
    make(folder, stage=1, tiers={"optim": "disk"})
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
