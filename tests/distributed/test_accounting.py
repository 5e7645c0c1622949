"""What is recorded is what happened: phases against the clock, held bytes against the ledger, a slow rank by its name."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.core.ledger import Kind
from shardwise.core.records import Header, Phase, StepRecord
from shardwise.report.figures import stragglers
from shardwise.report.runs import load_run
from shardwise.telemetry.sink import Callback
from shardwise.testing import World

pytestmark = pytest.mark.dist
WIDTH, DEPTH, BATCH = 256, 6, 64
NUM_STEPS = 12
DATA_SECONDS = 0.004


class Sleepy(nn.Module):
    """A tower whose forward takes a rest on one rank."""

    def __init__(self, rest_seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.rest_seconds = rest_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        if self.rest_seconds:
            time.sleep(self.rest_seconds)
        return x.square().mean()


class Kept(Callback):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


def new_run(stage: int, rest_seconds: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer, shardwise.Sharded]:
    torch.manual_seed(0)
    model = Sleepy(rest_seconds)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, shardwise.shard(model, optimizer, stage=stage, units=[nn.Linear])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    time.sleep(DATA_SECONDS)
    loss: torch.Tensor = model(torch.ones(BATCH, WIDTH))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


# ---------------------------------------------------------------- time


def timed_steps(stage: int) -> list[tuple[float, dict[str, float], float]]:
    """Of each step but the first: seconds by a clock outside, the recorded phases, and the recorded seconds."""
    model, optimizer, _ = new_run(stage)
    kept, seconds = Kept(), []
    with shardwise.record(model, sinks=[kept]):
        end = time.perf_counter()
        for _ in range(NUM_STEPS):
            step(model, optimizer)
            begin, end = end, time.perf_counter()
            seconds.append(end - begin)
            optimizer.zero_grad()
    assert [record.step for record in kept.records] == list(range(1, NUM_STEPS + 1))
    return [(wall, dict(record.phases), record.seconds) for wall, record in zip(seconds[1:], kept.records[1:], strict=True)]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_a_step_add_up(world: World, ranks: int, stage: int) -> None:
    for rank, steps in enumerate(world.run(timed_steps, stage, ranks=ranks)):
        wall = sum(seconds for seconds, _, _ in steps)
        parts = {phase.value: sum(phases[phase.value] for _, phases, _ in steps) for phase in Phase}
        assert sum(parts.values()) == pytest.approx(wall, rel=0.02), f"rank {rank}: {parts} of {wall}"
        assert sum(parts.values()) == pytest.approx(sum(seconds for _, _, seconds in steps), rel=1e-9)
        assert parts["other"] <= 0.05 * wall
        assert parts["data"] >= DATA_SECONDS * len(steps)
        assert all(parts[phase] > 0 for phase in ("forward", "backward", "optimizer"))
        if ranks > 1:
            assert parts["exposed communication"] > 0
        else:
            assert parts["exposed communication"] < 0.01 * wall


def places() -> list[dict[str, float]]:
    """Phases of steps with accumulation, an evaluation in between, and two optimizers."""
    torch.manual_seed(0)
    model = Sleepy(0.0)
    first = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model.layers[1:].parameters(), lr=0.1)
    shardwise.shard(model, [first, second], stage=3, units=[nn.Linear])
    kept = Kept()
    with shardwise.record(model, sinks=[kept]):
        for _ in range(2):
            with shardwise.no_sync(model):
                model(torch.ones(BATCH, WIDTH)).backward()
            time.sleep(0.05)  # The next batch.
            model(torch.ones(BATCH, WIDTH)).backward()
            time.sleep(0.03)  # Clipping.
            first.step()
            second.step()
            model.zero_grad()
            with torch.no_grad():
                time.sleep(0.02)  # The batch of an evaluation.
                model(torch.ones(BATCH, WIDTH))
                time.sleep(0.01)
                model(torch.ones(BATCH, WIDTH))
    return [dict(record.phases) for record in kept.records]


def test_what_happens_between_calls_belongs_to_what_comes_next(world: World) -> None:
    for steps in world.run(places, ranks=2):
        assert len(steps) == 2  # Two optimizers, one step.
        assert all(phases["data"] >= 0.05 and phases["optimizer"] >= 0.03 for phases in steps)
        assert steps[0]["other"] == 0 and steps[1]["other"] >= 0.03


def test_accounting_can_be_turned_off() -> None:
    model = Sleepy(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = shardwise.shard(model, optimizer, stage=3, accounting=False)
    step(model, optimizer)
    step(model, optimizer)
    assert handle.engine.meter.last is None and handle.engine.meter.num_steps == 0
    with pytest.raises(shardwise.UsageError, match="accounting=False"):
        shardwise.record(model)


def test_steps_to_trace_are_checked() -> None:
    model = Sleepy(0.0)
    shardwise.shard(model, stage=3)
    with pytest.raises(shardwise.UsageError, match="from 1 on"):
        shardwise.record(model, trace=[0])
    with pytest.raises(shardwise.UsageError, match="not sharded"):
        shardwise.record(nn.Linear(2, 2))
    with shardwise.record(model), pytest.raises(shardwise.UsageError, match="being recorded already"):
        shardwise.record(model)
    shardwise.record(model).close()


def failing_steps() -> tuple[int, float]:
    """Steps recorded, and the time of the last, where a forward has failed in between."""
    model, optimizer, _ = new_run(3)
    kept = Kept()
    with shardwise.record(model, sinks=[kept]):
        step(model, optimizer)
        with pytest.raises(RuntimeError):
            model(torch.ones(BATCH, WIDTH + 1))
        step(model, optimizer)
    return len(kept.records), sum(kept.records[-1].phases.values()) - kept.records[-1].seconds


def test_a_failed_forward_does_not_end_the_measuring(world: World) -> None:
    for num_steps, difference in world.run(failing_steps, ranks=2):
        assert num_steps == 2 and abs(difference) < 1e-9


# ---------------------------------------------------------------- stragglers


def run_with_a_slow_rank(folder: str, rest_seconds: float) -> None:
    model, optimizer, _ = new_run(3, rest_seconds if dist.get_rank() == 1 else 0.0)
    with shardwise.record(model, folder):
        for _ in range(NUM_STEPS):
            step(model, optimizer)
            optimizer.zero_grad()


@pytest.mark.parametrize("rest_seconds", [0.15])
def test_slow_rank_is_named_with_the_time_it_loses(world: World, tmp_path: Path, rest_seconds: float) -> None:
    world.run(run_with_a_slow_rank, str(tmp_path), rest_seconds, ranks=2)
    worst = stragglers(load_run(tmp_path))[0]
    assert worst.rank == 1 and worst.num_steps == NUM_STEPS - 2 and worst.num_last > worst.num_steps / 2
    assert worst.typical_seconds == pytest.approx(rest_seconds, rel=0.1)
    assert worst.phase == "forward" and worst.phase_seconds == pytest.approx(rest_seconds, rel=0.1)


# ---------------------------------------------------------------- bytes


def recorded_bytes(stage: int) -> list[tuple[Any, ...]]:
    """By step: what the record and the ledger say is held, what the record and the totals say was sent."""
    model, optimizer, handle = new_run(stage)
    found = []

    class Compare(Callback):
        def step(self, record: StepRecord) -> None:
            held = {each.kind: each.live_bytes for each in record.held if each.live_bytes}
            ledger = {kind.value: handle.ledger.live(kind) for kind in Kind if handle.ledger.live(kind)}
            found.append((held, ledger, record.wire_bytes, sum(handle.totals.wire_bytes.values())))
            handle.totals.reset()

    handle.totals.reset()
    with shardwise.record(model, sinks=[Compare()]):
        for _ in range(4):
            step(model, optimizer)
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_recorded_bytes_are_those_of_the_ledger_and_of_the_collectives(world: World, stage: int) -> None:
    for found in world.run(recorded_bytes, stage, ranks=2):
        assert len(found) == 4
        for held, ledger, sent, counted in found:
            assert held == ledger
            assert sent == counted > 0


def peaks() -> list[tuple[int, int]]:
    """Of each step: the most gathered bytes that the record tells, and whether more was ever booked."""
    model, optimizer, handle = new_run(3)
    kept = Kept()
    with shardwise.record(model, sinks=[kept]):
        for _ in range(3):
            step(model, optimizer)
            optimizer.zero_grad()
    gathered = [next(each.peak_bytes for each in record.held if each.kind == "gathered parameters") for record in kept.records]
    return [(peak, handle.ledger.peak(Kind.GATHERED)) for peak in gathered]


def test_peaks_are_those_of_the_step(world: World) -> None:
    for found in world.run(peaks, ranks=2):
        per_layer = (WIDTH * WIDTH + WIDTH) * 4
        assert all(per_layer <= peak <= ever for peak, ever in found)
        assert max(peak for peak, _ in found) == found[0][1]


# ---------------------------------------------------------------- leaks


def leaking_steps(stage: int, way: str, num_steps: int, every: int = 1) -> tuple[list[Any], list[int]]:
    """What was found, and the bytes held beside the ledger by step."""
    model, optimizer, handle = new_run(stage)
    model.register_buffer("history", torch.zeros(1, WIDTH))
    kept_things: list[Any] = []
    kept = Kept()
    with shardwise.record(model, sinks=[kept]) as recording:
        for number in range(num_steps):
            loss = step(model, optimizer)
            if way == "losses" and number >= 10:
                kept_things.append(loss)
            if way == "gradients" and number >= 10:
                kept_things.append(model.layers[2].weight.grad)
            if way == "pool" and number >= 10:
                kept_things.append(handle.engine.pool.take(WIDTH, torch.float32, torch.device("cpu"), Kind.GATHERED))
            if way == "buffer" and number >= 10:
                model.history = torch.cat([model.history, torch.ones(1, WIDTH)])
            optimizer.zero_grad()
            if way == "evaluation" and number % every == every - 1:
                model.eval()
                with torch.no_grad():
                    outputs = [model.layers[0](torch.ones(4 * BATCH, WIDTH)) for _ in range(8)]
                    kept_things = [model(torch.ones(4 * BATCH, WIDTH)), *outputs]
                model.train()
    allocated = [record.process.allocated_bytes for record in kept.records if record.process is not None]
    return recording.leaks, allocated


@pytest.mark.parametrize(("way", "kind", "owner"), [
    ("losses", "memory beside the ledger", "'kept_things' in leaking_steps"),
    ("gradients", "gradient shards (device)", "unit 'layers.2'"),
    ("pool", "gathered parameters (device)", "'kept_things' in leaking_steps"),
])  # fmt: skip
def test_planted_leak_is_found_once_with_kind_owner_and_step(world: World, way: str, kind: str, owner: str) -> None:
    for leaks, _ in world.run(leaking_steps, 2, way, 75, ranks=2):
        found = [leak for leak in leaks if leak.kind == kind]
        assert len(found) == 1, leaks
        assert owner in found[0].owner and "'kept_things' in leaking_steps" in found[0].owner
        assert 8 <= found[0].first_step <= found[0].found_step <= 10 + 50


def test_buffer_that_grows_is_found_by_its_name(world: World) -> None:
    for leaks, _ in world.run(leaking_steps, 2, "buffer", 75, ranks=2):
        (leak,) = leaks
        assert leak.kind == "buffers (device)" and "'history' of the model" in leak.owner
        assert 8 <= leak.first_step <= leak.found_step <= 10 + 50
        assert leak.bytes_per_step == pytest.approx(4 * WIDTH, rel=0.4)


@pytest.mark.parametrize("every", [7, 12, 20])
def test_evaluations_between_steps_are_no_leak(world: World, every: int) -> None:
    for leaks, _ in world.run(leaking_steps, 3, "evaluation", 100, every, ranks=2):
        assert leaks == []


def test_run_without_a_leak_stays_silent_and_flat(world: World) -> None:
    for leaks, allocated in world.run(leaking_steps, 3, "none", 300, ranks=2):
        assert leaks == []
        settled = allocated[len(allocated) // 10 :]
        assert max(settled) - min(settled) <= 0.01 * min(settled)


# ---------------------------------------------------------------- what the machine can do, and does


class Notes(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.header: Header | None = None
        self.notes: list[Any] = []

    def start(self, header: Header) -> None:
        self.header = header

    def note(self, values: Any) -> None:
        self.notes.append(values)


def counted_flops(stage: int) -> tuple[list[Any], dict[str, Any], list[bytes]]:
    """Notes, what the header says of the host, and the weights after some steps."""
    model, optimizer, _ = new_run(stage)
    kept = Notes()
    with shardwise.record(model, sinks=[kept]):
        for _ in range(3):
            step(model, optimizer)
            optimizer.zero_grad()
    assert kept.header is not None
    with shardwise.gathered(model):
        weights = [param.detach().numpy().tobytes() for param in model.parameters()]
    return kept.notes, dict(kept.header.host), weights


def unrecorded_weights(stage: int) -> list[bytes]:
    model, optimizer, _ = new_run(stage)
    for _ in range(3):
        step(model, optimizer)
        optimizer.zero_grad()
    with shardwise.gathered(model):
        return [param.detach().numpy().tobytes() for param in model.parameters()]


@pytest.mark.parametrize("stage", [0, 3])
def test_operations_are_counted_once_and_change_no_bit(world: World, stage: int) -> None:
    plain = world.run(unrecorded_weights, stage, ranks=2)
    for (notes, host, weights), expected in zip(world.run(counted_flops, stage, ranks=2), plain, strict=True):
        counted = [note for note in notes if "forward_flops" in note]
        assert counted == [{"forward_flops": 2 * BATCH * WIDTH * WIDTH * DEPTH}]
        assert host["peak_flops"] > 1e8 and host["link_bytes_per_second"] > 1e7 and host["link"] == "host memory"
        assert weights == expected


def counting_after_failure() -> bool:
    """Whether a forward that fails while it is counted leaves nothing behind."""
    model, optimizer, _ = new_run(3)
    with shardwise.record(model):
        with pytest.raises(RuntimeError):
            model(torch.ones(BATCH, WIDTH + 1))
        is_clean = torch.utils._python_dispatch._get_current_dispatch_mode() is None
        step(model, optimizer)
    return is_clean


def test_a_failed_forward_ends_the_counting(world: World) -> None:
    assert world.run(counting_after_failure, ranks=2) == [True, True]
