"""Updates beside the next step, in one process: against a loop by hand, with threads held up and shaken."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.devices.pool import Poison

WIDTH, NUM_STEPS, WARMUP = 24, 9, 2
STAGES = [0, 1, 2, 3]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    before, Poison.enabled = Poison.enabled, True
    yield
    Poison.enabled = before


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


class Shaken(torch.optim.AdamW):
    """Takes its time, now more and now less, in whichever thread it runs."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(random.random() * 0.004)
        found = super().step(closure)
        time.sleep(random.random() * 0.004)
        return found


class Held(torch.optim.SGD):
    """Beside a step, goes on when it is told to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()
        self.num_beside = 0
        self.error: Exception | None = None

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(60), "nobody has let the update go on"
            self.num_beside += 1
            if self.error is not None:
                raise self.error
        return super().step(closure)


def by_hand(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[torch.Tensor], list[float], dict[int, Any]]:
    """Gradients at the weights from before the last update, then the update; the learning rate falls after it."""
    model, master = make_model(), make_model()
    optimizer = make(master.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    losses = []
    for step in range(NUM_STEPS):
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        before = [param.detach().clone() for param in master.parameters()]
        for param, mine in zip(model.parameters(), master.parameters(), strict=True):
            mine.grad, param.grad = param.grad, None
        optimizer.step()
        schedule.step()
        seen = before if step >= WARMUP else [param.detach().clone() for param in master.parameters()]
        with torch.no_grad():
            for param, values in zip(model.parameters(), seen, strict=True):
                param.copy_(values)
    return [param.detach().clone() for param in master.parameters()], losses, optimizer.state_dict()["state"]


def make_delayed(make: Callable[[Any], Any], **plan: Any) -> tuple[nn.Sequential, Any, shardwise.Sharded]:
    model = make_model()
    optimizer = make(model.parameters())
    return model, optimizer, shardwise.shard(model, optimizer, **{"sync": "delayed", "delay_warmup": WARMUP, **plan})


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = loss_of(model, step)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    with shardwise.gathered(model):
        return [param.detach().clone() for param in model.parameters()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, found, expected))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "rate in a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), foreach=False),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "shaken": lambda params: Shaken(params, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_bits_are_those_of_a_loop_by_hand(stage: int, kind: str) -> None:
    weights, losses, state = by_hand(OPTIMIZERS[kind])
    for _ in range(3 if kind == "shaken" else 1):
        model, optimizer, handle = make_delayed(OPTIMIZERS[kind], stage=stage)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        found = []
        for step in range(NUM_STEPS):
            found.append(train_step(model, optimizer, step))
            schedule.step()
            assert handle.num_pending_updates == (step >= WARMUP)
        assert found == losses
        assert_same(weights_of(model), weights)
        shardwise.unshard(model, optimizer)
        for index, values in optimizer.state_dict()["state"].items():
            assert set(values) == set(state[index])
            assert all(torch.equal(values[key], state[index][key]) for key in values if isinstance(values[key], torch.Tensor))


@pytest.mark.parametrize("stage", STAGES)
def test_a_whole_step_is_computed_while_the_update_is_under_way(stage: int) -> None:
    model, optimizer, handle = make_delayed(lambda params: Held(params, lr=0.1), stage=stage, delay_warmup=0)
    before = weights_of(model)
    train_step(model, optimizer, 0)
    first = loss_of(model, 1)
    first.backward()
    assert optimizer.num_beside == 0 and handle.num_pending_updates == 1
    optimizer.gate.set()
    optimizer.step()
    assert optimizer.num_beside >= 1
    optimizer.zero_grad()
    with shardwise.gathered(model), torch.no_grad():
        for param, values in zip(model.parameters(), before, strict=True):
            param.copy_(values)
    assert loss_of(model, 1).item() == first.item()


def test_a_call_for_its_outputs_alone_sees_all_updates_and_one_for_training_does_not() -> None:
    model, optimizer, handle = make_delayed(OPTIMIZERS["fused"], stage=3, delay_warmup=0)
    stale = loss_of(model, 7).item()
    optimizer.zero_grad()
    for mode, is_training in ((torch.no_grad(), True), (torch.enable_grad(), False)):
        train_step(model, optimizer, 0)
        assert loss_of(model, 7).item() == stale
        with torch.no_grad():
            assert loss_of(model, 7).item() == stale, "inside a step, all calls see the same weights"
        train_step(model, optimizer, 1)
        model.train(is_training)
        with mode:
            found = loss_of(model, 7).item()
        assert found != stale and handle.num_pending_updates == 0
        model.train()
        assert loss_of(model, 7).item() == found
        stale = found


def test_reads_wait_for_the_update_but_do_not_show_it_to_the_step() -> None:
    weights, losses, _ = by_hand(OPTIMIZERS["shaken"])
    model, optimizer, handle = make_delayed(OPTIMIZERS["shaken"], stage=0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    found = []
    for step in range(NUM_STEPS):
        found.append(train_step(model, optimizer, step))
        schedule.step()
        state = optimizer.state_dict()["state"]
        assert {float(values["step"]) for values in state.values()} == {step + 1.0}
        last = [value.clone() for value in model.state_dict().values()]
        assert handle.num_pending_updates == (step >= WARMUP)
        optimizer.load_state_dict(optimizer.state_dict())
    assert_same(last, weights)
    assert found == losses


@pytest.mark.parametrize("way", ["zeroed in place", "never cleared", "scaled after the step"])
def test_gradients_that_are_written_while_they_are_used_wait(way: str) -> None:
    def train(**plan: Any) -> list[torch.Tensor]:
        model, optimizer, _ = make_delayed(OPTIMIZERS["shaken"], **plan)
        for step in range(NUM_STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            if way == "zeroed in place":
                optimizer.zero_grad(set_to_none=False)
            elif way == "scaled after the step":
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.mul_(0.5)
        return weights_of(model)

    expected = train(stage=0)
    for stage in (1, 3):
        assert_same(train(stage=stage), expected)


def test_hooks_run_once_and_see_whole_groups_and_later_groups_are_trained() -> None:
    model, optimizer, _ = make_delayed(OPTIMIZERS["foreach"], stage=3, delay_warmup=0)
    other = nn.Linear(2, 2)
    calls: list[str] = []

    def note(name: str) -> Any:
        def hook(held: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            calls.append(f"{name}: {len(held.param_groups)} groups, {len(held.param_groups[0]['params'])} parameters")

        return hook

    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    optimizer.add_param_group({"params": other.parameters(), "lr": 0.5})
    before = [param.detach().clone() for param in other.parameters()]
    for step in range(2):
        other(torch.ones(1, 2)).sum().backward()
        train_step(model, optimizer, step)
    assert calls == ["before: 2 groups, 6 parameters", "after: 2 groups, 6 parameters"] * 2
    assert not any(map(torch.equal, before, other.parameters()))
    model.eval()
    assert {float(values["step"]) for values in optimizer.state_dict()["state"].values()} == {2.0}


class Counting(torch.optim.SGD):
    """Counts in its groups and in itself, as some do."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps = self.num_steps + 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_what_an_optimizer_counts_is_counted_once() -> None:
    model, optimizer, _ = make_delayed(lambda params: Counting(params, lr=0.1), stage=2, delay_warmup=0)
    for step in range(4):
        train_step(model, optimizer, step)
    weights_of(model)
    assert optimizer.param_groups[0]["k"] == 4


def test_full_values_are_refused_between_a_call_and_its_backward() -> None:
    model, optimizer, handle = make_delayed(OPTIMIZERS["fused"], stage=1, delay_warmup=0)
    train_step(model, optimizer, 0)
    loss = loss_of(model, 1)
    with pytest.raises(shardwise.UsageError, match="Call backward first"), shardwise.gathered(model):
        pass
    loss.backward()
    with shardwise.gathered(model):
        assert handle.num_pending_updates == 0


class Writing(nn.Module):
    """Writes to its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0.5)
        return x * self.weight


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_that_writes_to_its_weights_is_refused_by_name(stage: int) -> None:
    model = Writing()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    shardwise.shard(model, optimizer, stage=stage, sync="delayed", delay_warmup=0)

    def train() -> None:
        for _ in range(3):
            (-model(torch.ones(8)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(shardwise.UsageError, match=r"'weight'.*sync='exact'"):
        train()


def test_optimizers_that_go_through_no_groups_are_refused() -> None:
    model = make_model()
    with pytest.raises(shardwise.PlanError, match=r"LBFGS.*sync='exact'"):
        shardwise.shard(model, torch.optim.LBFGS(model.parameters()), sync="delayed")
    assert type(model[0].weight) is nn.Parameter


def test_an_update_that_fails_is_told_and_nothing_is_saved_before_a_load(tmp_path: Path) -> None:
    model, optimizer, _ = make_delayed(lambda params: Held(params, lr=0.1, momentum=0.9), stage=3, delay_warmup=0)
    optimizer.gate.set()
    train_step(model, optimizer, 0)
    shardwise.save(tmp_path / "first", model, optimizer)
    kept = weights_of(model)
    optimizer.error = ArithmeticError("of the optimizer")
    train_step(model, optimizer, 1)
    with pytest.raises(shardwise.UpdateError, match=r"Rank 0: .*ArithmeticError: of the optimizer") as caught:
        train_step(model, optimizer, 2)
    assert caught.value.__cause__ is optimizer.error
    with pytest.raises(shardwise.UpdateError, match="Load a checkpoint"):
        shardwise.save(tmp_path / "second", model, optimizer)
    with pytest.raises(shardwise.UpdateError, match="Load a checkpoint"):
        train_step(model, optimizer, 2)
    optimizer.error = None
    shardwise.load(tmp_path / "first", model, optimizer)
    assert_same(weights_of(model), kept)
    for step in range(1, 4):
        train_step(model, optimizer, step)
    assert not any(map(torch.equal, weights_of(model), kept))


SCRIPT = """
import signal, sys, time, threading
from tests.unit.runtime.test_delayed import make_delayed, train_step, Held

signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored where a shell runs the tests in the background.

class Late(Held):
    def step(self, closure=None):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
        return super().step(closure)

begun = threading.Event()
model, optimizer, handle = make_delayed(lambda params: Late(params, lr=0.1), stage=3, delay_warmup=0)
train_step(model, optimizer, 0)
begun.wait()
threading.Timer(0.3, optimizer.gate.set).start()
print("under way", handle.num_pending_updates, flush=True)
if sys.argv[1] == "interrupt":
    signal.raise_signal(signal.SIGINT)
"""


def test_processes_that_end_with_an_update_under_way_end_cleanly() -> None:
    ways = ("leave", "interrupt")
    command, pipe = [sys.executable, "-c", SCRIPT], subprocess.PIPE
    processes = [subprocess.Popen([*command, way], stdout=pipe, stderr=pipe, text=True) for way in ways]
    for process, code in zip(processes, (0, -signal.SIGINT), strict=True):
        told, errors = process.communicate(timeout=100)
        assert told.split() == ["under", "way", "1"], errors
        assert process.returncode == code, errors
        assert errors.strip().splitlines()[-1:] == ([] if code == 0 else ["KeyboardInterrupt"]), errors
