"""Saves beside the steps are copied beside them as well: who changes what is copied waits for it, or is found to have not."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise
from shardwise.checkpoint.snapshot import Snapshot
from shardwise.runtime.copying import Copying
from shardwise.runtime.registry import engine_of
from shardwise.testing import World
from tests.distributed.training import Training

pytestmark = pytest.mark.dist
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
DELAYED = {"sync": "delayed", "delay_warmup": 0}


@contextmanager
def late_copies() -> Iterator[threading.Event]:
    """A copy that does not begin before the loop waits for it: whatever does not wait has changed the state by then."""
    let_go, finish, wait = threading.Event(), Snapshot.finish, Copying.wait

    def finish_late(snapshot: Snapshot) -> Any:
        let_go.wait()
        return finish(snapshot)

    def let_go_and_wait(copying: Copying) -> float:
        let_go.set()
        return wait(copying)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "finish", finish_late)
        patch.setattr(Copying, "wait", let_go_and_wait)
        try:
            yield let_go
        finally:
            let_go.set()


def contents(path: str) -> dict[str, Any]:
    """All that this rank has written, as bytes."""
    tensors = load_file(f"{path}/rank-{dist.get_rank():05}.safetensors")
    return {name: (tensor.dtype, tensor.view(-1).view(torch.uint8).numpy().tobytes()) for name, tensor in tensors.items()}


def differ(folder: str) -> list[str]:
    """What two checkpoints of one moment have not in common."""
    waited, beside = contents(f"{folder}/waited"), contents(f"{folder}/beside")
    return sorted(name for name in waited.keys() | beside.keys() if waited.get(name) != beside.get(name))


def save_before_steps(folder: str, stage: int, plan: dict[str, Any]) -> Any:
    """Save one moment in both ways, and go on."""
    training = Training(stage, **plan)
    training.steps(2)
    training.save(f"{folder}/waited")
    with late_copies() as let_go:
        saving = training.save(f"{folder}/beside", wait=False)
        of_the_call = saving.stall_seconds
        training.backward()
        is_beside = not let_go.is_set()
        training.update()
        let_go.set()
        saving.wait()
    waited = saving.stall_seconds - of_the_call
    meter = engine_of(training.model).meter
    meter.flush()
    assert meter.last is not None
    is_all = sum(meter.last.phases.values()) == pytest.approx(meter.last.seconds)
    return differ(folder), is_beside, is_all, 0.0 < waited <= meter.last.phases["other"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", range(4))
def test_copy_beside_a_step_is_the_state_of_the_call(world: World, tmp_path: Path, stage: int, precision: str) -> None:
    plan = {} if precision == "float32" else BF16
    for found, is_beside, is_all, is_booked in world.run(save_before_steps, str(tmp_path), stage, plan, ranks=2):
        assert found == []
        assert is_beside  # Forward and backward did not wait for it,
        assert is_all and is_booked  # and that the update did is part of the stall and of the step's record.


# ---------------------------------------------------------------- all who change values at rest


class Writes(nn.Linear):
    """A layer that may write to its own weight in its forward."""

    is_writing = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_writing:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(x)


class Small:
    """A training of which fused updates leave no trace in autograd's counts of writes."""

    def __init__(self, stage: int, device: str = "cpu", **plan: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(Writes(24, 24), nn.Linear(24, 24)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=device == "cpu")
        shardwise.shard(self.model, self.optimizer, stage=stage, **plan)
        self.step()

    def backward(self) -> Tensor:
        loss: Tensor = self.model(torch.ones(2, 24, device=self.device)).square().sum()
        loss.backward()
        return loss

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weight(self) -> Tensor:
        return self.model[0].weight  # type: ignore[no-any-return, union-attr]


def update(training: Small, folder: str) -> None:
    training.step()


def update_beside(training: Small, folder: str) -> None:
    training.step()
    engine_of(training.model).updates.wait()


def update_with_closure(training: Small, folder: str) -> None:
    training.optimizer.step(lambda: training.backward().item())


@torch.no_grad()
def copy_into_parameter(training: Small, folder: str) -> None:
    training.weight.copy_(torch.zeros(24, 24))


@torch.no_grad()
def write_in_place(training: Small, folder: str) -> None:
    training.weight.mul_(0.5)


@torch.no_grad()
def write_to_data(training: Small, folder: str) -> None:
    training.weight.data.mul_(0.5)


@torch.no_grad()
def write_gathered(training: Small, folder: str) -> None:
    with shardwise.gathered(training.model):
        training.weight.mul_(0.5)


def write_in_forward(training: Small, folder: str) -> None:
    training.model[0].is_writing = True  # type: ignore[assignment]
    training.backward()


def cast(training: Small, folder: str) -> None:
    training.model.double()
    training.model(torch.ones(2, 24).double())


def load(training: Small, folder: str) -> None:
    shardwise.load(f"{folder}/first", training.model, training.optimizer)


def take_off(training: Small, folder: str) -> None:
    shardwise.unshard(training.model, training.optimizer)
    training.step()


Write = tuple[Callable[["Small", str], None], int, dict[str, Any]]
WRITERS: list[Write] = [
    (update, 0, {}),
    (update, 3, BF16),
    (update_beside, 0, DELAYED),
    (update_beside, 3, DELAYED),
    (update_with_closure, 1, {}),
    (update_with_closure, 1, {"path": "network"}),
    (copy_into_parameter, 3, {}),
    (write_in_place, 0, BF16),
    (write_to_data, 0, {}),
    (write_to_data, 1, {}),
    (write_gathered, 0, {}),
    (write_gathered, 2, {}),
    (write_gathered, 0, BF16),
    (write_gathered, 3, {}),
    (write_in_forward, 3, {}),
    (cast, 0, {}),
    (cast, 3, {}),
    (load, 0, {}),
    (load, 3, {}),
    (take_off, 0, {}),
]


ON_DEVICES: list[Write] = [
    (update, 1, {}),
    (update, 3, BF16),
    (update, 2, {"tiers": {"optim": "host"}}),
    (update_beside, 2, {"tiers": {"optim": "host"}, **DELAYED}),
    (update, 3, {"tiers": {"optim": "host", "grad": "host", "param": "host"}}),
    (update_with_closure, 1, {}),
    (take_off, 0, {"tiers": {"optim": "host"}}),
]


def write_beside(folder: str, writers: list[Write]) -> dict[str, Any]:
    found = {}
    for number, (write, stage, plan) in enumerate(writers):
        training, own = Small(stage, **plan), f"{folder}/{number}"
        shardwise.save(f"{own}/first", training.model, training.optimizer)
        training.step()
        shardwise.save(f"{own}/waited", training.model, training.optimizer)
        with late_copies() as let_go:
            saving = shardwise.save(f"{own}/beside", training.model, training.optimizer, wait=False)
            write(training, own)
            let_go.set()
            saving._ended.wait()
        found[f"{write.__name__} {stage} {plan}"] = saving.error or differ(own)
    return found


def test_all_who_change_values_at_rest_wait_for_the_copy(world: World, tmp_path: Path) -> None:
    for found in world.run(write_beside, str(tmp_path), WRITERS, ranks=2):
        assert {name: what for name, what in found.items() if what} == {} and len(found) == len(WRITERS)


def test_updates_on_devices_wait_for_copies_from_them(sim_world: World, tmp_path: Path) -> None:
    cases = [(write, stage, {**plan, "device": "sim"}) for write, stage, plan in ON_DEVICES]
    for found in sim_world.run(write_beside, str(tmp_path), cases, ranks=2):
        assert {name: what for name, what in found.items() if what} == {} and len(found) == len(ON_DEVICES)


def save_in_a_hook(folder: str) -> Any:
    """A save between the user's own step and the update that is made beside the next one."""
    training, savings = Small(3, **DELAYED), []

    def save(*_: Any) -> None:
        shardwise.save(f"{folder}/waited", training.model, training.optimizer)
        savings.append(shardwise.save(f"{folder}/beside", training.model, training.optimizer, wait=False))

    training.optimizer.register_step_post_hook(save)
    with late_copies() as let_go:
        update_beside(training, folder)
        let_go.set()
        savings[0]._ended.wait()
    return savings[0].error or differ(folder)


def test_an_update_beside_the_next_step_waits_for_a_copy_that_a_hook_has_begun(world: World, tmp_path: Path) -> None:
    assert world.run(save_in_a_hook, str(tmp_path), ranks=2) == [[], []]


# ---------------------------------------------------------------- writes that nobody sees in time


def change_by_hand(folder: str) -> Any:
    """One rank changes the optimizer's state without waiting; then all do, in the way that they should."""
    training = Small(1)
    shardwise.save(f"{folder}/waited", training.model, training.optimizer)
    states = [state["exp_avg"] for state in training.optimizer.state.values() if state["exp_avg"].numel()]
    with late_copies() as let_go:
        saving = shardwise.save(f"{folder}/lost", training.model, training.optimizer, wait=False)
        if dist.get_rank() == 1:
            states[0].mul_(2.0)
            states[0].mul_(0.5)
        let_go.set()
        with pytest.raises(shardwise.CheckpointError) as error:
            saving.wait()
    names = sorted(os.listdir(folder))
    dist.barrier()  # All have looked before the next save begins there.
    with late_copies():
        saving = shardwise.save(f"{folder}/beside", training.model, training.optimizer, wait=False)
        saving.wait_copied()
        states[0].mul_(2.0)
        saving.wait()
    return str(error.value), names, differ(folder)


def test_change_of_optimizer_state_by_hand_is_found_and_nothing_is_published(world: World, tmp_path: Path) -> None:
    for message, names, found in world.run(change_by_hand, str(tmp_path), ranks=2):
        assert "rank 1: " in message and "exp_avg" in message and "changed while being copied" in message
        assert "after saving.wait_copied()" in message and "wait=True" in message
        assert "Older checkpoints are as they were" in message
        assert names == ["waited"]
        assert found == []


def write_again_and_again(folder: str) -> Any:
    """A model that writes to its own weights in its forward, where these are the values at rest."""
    training, errors = Small(0), []
    training.model[0].is_writing = True  # type: ignore[assignment]
    for number in range(2):
        with late_copies() as let_go:
            saving = shardwise.save(f"{folder}/{number}", training.model, training.optimizer, wait=False)
            training.backward()
            let_go.set()
            saving._ended.wait()
            errors.append(saving.error)
        training.optimizer.step()
    return errors


def test_weights_that_forwards_write_to_are_copied_at_once_when_that_is_known(world: World, tmp_path: Path) -> None:
    for first, second in world.run(write_again_and_again, str(tmp_path), ranks=2):
        assert "model/0.weight changed while being copied" in first
        assert second is None


def fail_to_copy(folder: str) -> Any:
    training = Small(2)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(torch, "empty", lambda *args, **kwargs: torch.zeros(2**60))
        saving = shardwise.save(f"{folder}/lost", training.model, training.optimizer, wait=False)
    training.step()
    with pytest.raises(shardwise.CheckpointError) as error:
        saving.wait()
    training.step()
    names = os.listdir(folder)
    shardwise.save(f"{folder}/kept", training.model, training.optimizer, wait=False).wait()
    return str(error.value), names


def test_copy_without_memory_fails_on_all_ranks_and_training_goes_on(world: World, tmp_path: Path) -> None:
    for message, names in world.run(fail_to_copy, str(tmp_path), ranks=2):
        assert "rank 1: There is no host memory for a copy of" in message and "wait=True" in message
        assert names == []
    assert os.listdir(tmp_path) == ["kept"]


def test_save_for_which_there_is_no_thread_leaves_nothing_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, start = Small(3), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("shardwise save"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", refuse)
        shardwise.save(tmp_path / "lost", training.model, training.optimizer, wait=False)
    training.step()
    shardwise.save(tmp_path / "kept", training.model, training.optimizer, wait=False).wait()
    assert os.listdir(tmp_path) == ["kept"]
