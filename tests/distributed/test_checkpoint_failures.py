"""Saves that fail do so on all ranks, with one reason; training goes on, and older checkpoints are as they were."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.testing import World
from tests.distributed.training import Training, differences

pytestmark = pytest.mark.dist


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of little room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=384k", "none", folder], capture_output=True, check=False)
    if mounted.returncode:
        if os.environ.get("SHARDWISE_NEEDS_HOSTS"):
            pytest.fail("No small disk can be mounted, and SHARDWISE_NEEDS_HOSTS says that this test must run.")
        pytest.skip("no small disk can be mounted")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill_disk(folder: str, wait: bool) -> Any:
    """Save until the disk is full, and go on."""
    training = Training(2)
    training.steps(1)
    training.save(f"{folder}/first")
    training.steps(1)
    if torch.distributed.get_rank() == 0:
        facts = os.statvfs(folder)
        Path(folder, "filler").write_bytes(bytes(facts.f_bavail * facts.f_bsize - 40_000))
    with pytest.raises(shardwise.CheckpointError) as error:
        saving = training.save(f"{folder}/second", wait=wait)
        training.steps(1)
        saving.wait()
    training.steps(1 if wait else 0)
    return str(error.value), sorted(os.listdir(folder)), training.everything()


def undisturbed(num_steps: int) -> Any:
    training = Training(2)
    training.steps(num_steps)
    return training.everything()


def loaded_from(path: str) -> Any:
    training = Training(1, seed=4)
    assert training.load(path).step == 1
    return training.everything()


@pytest.mark.parametrize("wait", [True, False])
def test_full_disk_is_told_on_all_ranks_and_training_goes_on(world: World, small_disk: Path, wait: bool) -> None:
    found = world.run(fill_disk, str(small_disk), wait, ranks=2)
    expected = world.run(undisturbed, 3, ranks=2)
    for (message, names, state), plain in zip(found, expected, strict=True):
        assert "The disk is full" in message and "was not saved" in message and "Older checkpoints are as they were" in message
        assert names == ["filler", "first"]
        assert differences(plain, state) == []
    first = world.run(undisturbed, 1, ranks=2)
    for state, plain in zip(world.run(loaded_from, str(small_disk / "first"), ranks=2), first, strict=True):
        assert differences(plain, state) == []


def disagree(folder: str) -> list[str]:
    """Saves that one rank cannot do."""
    training, rank = Training(1), torch.distributed.get_rank()
    training.steps(1)
    messages = []
    for path, extra in ((f"{folder}/{rank}", {}), (f"{folder}/same", {"hook": len} if rank == 1 else {"hook": 1})):
        with pytest.raises((shardwise.UsageError, TypeError)) as error:
            shardwise.save(path, training.model, training.optimizer, extra=extra)
        messages.append(str(error.value))
    training.steps(1)
    training.save(f"{folder}/good")
    return [*messages, *sorted(os.listdir(folder))]


def test_ranks_that_disagree_save_nothing(world: World, tmp_path: Path) -> None:
    for paths, extra, *names in world.run(disagree, str(tmp_path), ranks=2):
        assert "same path on every rank" in paths and "rank 1" in paths
        assert "without pickle" in extra and "extra['hook']" in extra
        assert names == ["good"]


def refuse_in_motion(folder: str) -> list[str]:
    training = Training(3)
    messages = []
    with shardwise.gathered(training.model):
        for call in (training.save, training.load):
            with pytest.raises(shardwise.UsageError) as error:
                call(f"{folder}/a")
            messages.append(str(error.value))

    def hook(*_: Any) -> None:
        with pytest.raises(shardwise.UsageError) as error:
            training.save(f"{folder}/a")
        messages.append(str(error.value))

    handle = training.model.head.register_forward_hook(hook)
    training.backward()
    handle.remove()
    training.update()
    return messages


def test_state_in_motion_is_not_saved(world: World, tmp_path: Path) -> None:
    for in_save, in_load, in_call in world.run(refuse_in_motion, str(tmp_path), ranks=2):
        assert "save cannot run inside `with shardwise.gathered" in in_save and "load cannot" in in_load
        assert "inside a call of the model" in in_call
    assert list(tmp_path.iterdir()) == []


def load_damaged(folder: str) -> tuple[str, list[str]]:
    training = Training(3, seed=6)
    before = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    with shardwise.gathered(training.model):
        weights = [param.detach().clone() for param in training.model.parameters()]
    with pytest.raises(shardwise.CheckpointError) as error:
        training.load(f"{folder}/stage-1")
    changed = [name for name, buffer in training.model.named_buffers() if not torch.equal(buffer, before[name])]
    with shardwise.gathered(training.model):
        for (name, param), weight in zip(training.model.named_parameters(), weights, strict=True):
            if not torch.equal(param, weight):
                changed.append(name)
    return str(error.value), changed


def save_once(folder: str) -> None:
    training = Training(1)
    training.steps(1)
    training.save(f"{folder}/stage-1")


def test_damage_that_one_rank_finds_is_told_on_all(world: World, tmp_path: Path) -> None:
    world.run(save_once, str(tmp_path), ranks=2)
    shard = tmp_path / "stage-1" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for message, changed in world.run(load_damaged, str(tmp_path), ranks=3):
        assert "rank-00001.safetensors is damaged" in message
        assert changed == []


_ENDING = """
import sys, torch, shardwise
torch.manual_seed(0)
model = torch.nn.Linear(2000, 2000)
optimizer = torch.optim.AdamW(model.parameters())
shardwise.shard(model, optimizer, stage=3)
model(torch.ones(1, 2000)).sum().backward()
optimizer.step()
shardwise.save(sys.argv[1], model, optimizer, wait=False)
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("way", ["end", "raise"])
def test_process_that_ends_brings_its_save_to_its_end(tmp_path: Path, way: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _ENDING, str(tmp_path / "last"), way], capture_output=True, timeout=120, check=False
    )
    assert answer.returncode == (3 if way == "raise" else 0), answer.stderr
    model = torch.nn.Linear(2000, 2000)
    optimizer = torch.optim.AdamW(model.parameters())
    shardwise.shard(model, optimizer, stage=2)
    assert shardwise.load(tmp_path / "last", model, optimizer).step == 1
