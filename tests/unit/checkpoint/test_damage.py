"""Damaged, foreign and hostile checkpoints are refused by the name of the file, and nothing is changed by the attempt."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import shardwise
from shardwise.checkpoint.manifest import SCHEMA, _checksum

SHARD = "rank-00000.safetensors"


def new_training(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    shardwise.shard(model, optimizer, stage=3)
    for _ in range(2):
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    with shardwise.gathered(model):
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints: a first, and a second."""
    for seed, name in enumerate(("first", "second")):
        shardwise.save(tmp_path / name, *new_training(seed), extra={"name": name})
    return tmp_path


def flip(path: Path, at: int, bit: int = 5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def data_of(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def flip_in_data(folder: Path) -> None:
    flip(folder / SHARD, data_of(folder / SHARD) + 12345)


def flip_last_bit(folder: Path) -> None:
    flip(folder / SHARD, (folder / SHARD).stat().st_size - 1, 7)


def flip_in_header(folder: Path) -> None:
    flip(folder / SHARD, 200)


def truncate(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 100)


def lengthen(folder: Path) -> None:
    with (folder / SHARD).open("ab") as file:
        file.write(b"more")


def remove_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def foreign_shard(folder: Path) -> None:
    shutil.copy(folder.parent / "first" / SHARD, folder / SHARD)


def link_outside(folder: Path) -> None:
    (folder / SHARD).rename(folder.parent / "elsewhere")
    (folder / SHARD).symlink_to(folder.parent / "elsewhere")


def pipe(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and sign it anew."""
    values = json.loads((folder / "manifest.json").read_text())
    values.pop("checksum")
    change(values)
    (folder / "manifest.json").write_text(json.dumps({**values, "checksum": _checksum(values)}))


def newer_schema(folder: Path) -> None:
    rewrite(folder, lambda values: values.update(schema=SCHEMA + 1))


def flip_in_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"stage":3', '"stage":2'))


def shard_outside(folder: Path) -> None:
    shutil.copy(folder / SHARD, folder.parent / "outside")
    rewrite(folder, lambda values: values["files"][0].update(name="../outside"))


def huge_shape(folder: Path) -> None:
    rewrite(folder, lambda values: values["tensors"]["model/0.weight"].update(shape=[2**30, 2**29]))


def wrong_value(*path: Any, value: Any) -> Callable[[Path], None]:
    """A value that no save has written, in a manifest that has a right checksum."""

    def change(values: dict[str, Any]) -> None:
        at = values["values"]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    def damage(folder: Path) -> None:
        rewrite(folder, change)

    damage.__name__ = f"wrong_value_of_{'_'.join(map(str, path))}"
    return damage


DAMAGES: list[tuple[Callable[[Path], None], str, str]] = [
    (flip_in_data, SHARD, "damaged"),
    (flip_last_bit, SHARD, "damaged"),
    (flip_in_header, SHARD, "header is damaged"),
    (truncate, SHARD, "cut off"),
    (lengthen, SHARD, "another file"),
    (remove_shard, SHARD, "cannot be read"),
    (foreign_shard, SHARD, "belongs to the checkpoint"),
    (link_outside, SHARD, "link"),
    (pipe, SHARD, "no plain file"),
    (newer_schema, "manifest.json", "Update Shardwise"),
    (flip_in_manifest, "manifest.json", "checksum is wrong"),
    (shard_outside, "manifest.json", "no name of a file"),
    (huge_shape, "manifest.json", "leave elements out"),
    (wrong_value("random", "python", "is", 1, "is", 3, value=-1), "manifest.json", "cannot be used"),
    (wrong_value("random", "numpy", "is", 0, value="other"), "manifest.json", "cannot be used"),
    (wrong_value("random", "torch", value=7), "manifest.json", "cannot be used"),
    (wrong_value("engine", "num_updates", value={}), "manifest.json", "cannot be used"),
    (wrong_value("optimizer.0/groups", 0, "options", "params", value=[]), "manifest.json", "cannot be used"),
    (wrong_value("optimizer.0/groups", 0, "options", value=[]), "manifest.json", "cannot be used"),
]


@pytest.mark.parametrize(("damage", "file", "why"), DAMAGES, ids=[damage.__name__ for damage, _, _ in DAMAGES])
def test_damage_is_refused_by_file_and_nothing_is_changed(
    folder: Path, damage: Callable[[Path], None], file: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder / "second")
    model, optimizer = new_training(5)
    before = state_of(model, optimizer)
    with pytest.raises(shardwise.CheckpointError, match=why) as error:
        shardwise.load(folder / "second", model, optimizer)
    assert f"second/{file}" in str(error.value)
    assert state_of(model, optimizer) == before
    with caplog.at_level(logging.WARNING, "shardwise"):
        loaded = shardwise.load(folder / "second", model, optimizer, fallback=True)
    assert loaded.path == str(folder / "first") and loaded.is_fallback and loaded.extra == {"name": "first"}
    assert "Falling back" in caplog.text and file in caplog.text


def test_newest_complete_checkpoint_is_taken(folder: Path) -> None:
    model, optimizer = new_training(5)
    assert shardwise.load(folder, model, optimizer).extra == {"name": "second"}
    (folder / "second" / "manifest.json").unlink()
    assert shardwise.load(folder, model, optimizer).extra == {"name": "first"}
    shutil.rmtree(folder / "first")
    with pytest.raises(shardwise.CheckpointError, match="no complete checkpoint"):
        shardwise.load(folder, model, optimizer)
    with pytest.raises(shardwise.CheckpointError, match="is not there"):
        shardwise.load(folder / "third", model, optimizer)


def test_manifest_that_cannot_be_read_is_not_passed_over(folder: Path) -> None:
    (folder / "second" / "manifest.json").write_bytes(b"\0" * 5000)
    model, optimizer = new_training(5)
    with pytest.raises(shardwise.CheckpointError, match=r"second/manifest\.json"):
        shardwise.load(folder, model, optimizer)
    assert shardwise.load(folder, model, optimizer, fallback=True).extra == {"name": "first"}
    shardwise.save(folder / "third", model, optimizer, keep_last=1)
    assert sorted(path.name for path in folder.iterdir()) == ["second", "third"]


def test_links_are_no_checkpoints_of_their_own(folder: Path) -> None:
    model, optimizer = new_training(5)
    (folder / "latest").symlink_to(folder / "second")
    with pytest.raises(shardwise.UsageError, match="is a link"):
        shardwise.save(folder / "latest", model, optimizer, overwrite=True)
    shardwise.save(folder / "third", model, optimizer, keep_last=2)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "second", "third"]
    assert shardwise.load(folder / "latest", model, optimizer).extra == {"name": "second"}


def test_partly_loaded_optimizers_can_step(folder: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 7))
    optimizer = torch.optim.AdamW(model.parameters())
    shardwise.shard(model, optimizer, stage=3)
    loaded = shardwise.load(folder / "second", model, optimizer, strict=False)
    assert len(loaded.misshapen) >= 3
    model(torch.randn(8, 300)).square().mean().backward()
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("is_ignored", [True, False])
def test_parameters_may_be_sharded_on_one_side_only(tmp_path: Path, is_ignored: bool) -> None:
    """Saved while one of them was not sharded and loaded where it is, and the other way round."""

    def new(seed: int, is_ignored: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        shardwise.shard(model, optimizer, stage=3, ignored_params={model[1].weight} if is_ignored else ())
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    saved, other = new(1, is_ignored), new(2, not is_ignored)
    shardwise.save(tmp_path / "first", *saved)
    shardwise.load(tmp_path / "first", *other)
    params = (optimizer.param_groups[0]["params"] for _, optimizer in (saved, other))
    for mine, theirs in zip(*params, strict=True):
        a, b = saved[1].state[mine], other[1].state[theirs]
        assert a.keys() == b.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_gradients_that_were_cleared_stay_so(tmp_path: Path) -> None:
    model, optimizer = new_training(1)
    with shardwise.no_sync(model):
        model(torch.ones(8, 300)).sum().backward()
    optimizer.zero_grad()
    shardwise.save(tmp_path / "first", model, optimizer)
    shardwise.load(tmp_path / "first", model, optimizer)
    assert all(param.grad is None for param in model.parameters())


def test_gradients_of_one_optimizer_wait_for_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in model]
    shardwise.shard(model, optimizers, stage=2)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizers[0].step()
    shardwise.save(tmp_path / "first", model, optimizers)
    optimizers[1].step()
    with shardwise.gathered(model):
        expected = [param.detach().clone() for param in model.parameters()]
    shardwise.load(tmp_path / "first", model, optimizers)
    assert model[0].weight.grad is None and model[1].weight.grad is not None
    optimizers[1].step()
    with shardwise.gathered(model):
        assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


def test_fallback_to_nothing_tells_of_the_damage(folder: Path) -> None:
    model, optimizer = new_training(5)
    flip_in_data(folder / "first")
    flip_in_data(folder / "second")
    with pytest.raises(shardwise.CheckpointError, match="damaged"):
        shardwise.load(folder, model, optimizer, fallback=True)


def test_weights_alone_do_not_need_the_rest(folder: Path) -> None:
    flip_last_bit(folder / "second")  # In a value, behind all weights.
    model, _ = new_training(5)
    shardwise.load(folder / "second", model, weights_only=True)
    with pytest.raises(shardwise.UsageError, match="weights_only"):
        shardwise.load(folder / "second", model, weights_only=True, extra={"name": None})


def test_other_models_are_refused_with_their_differences(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 301), nn.BatchNorm1d(301), nn.Linear(301, 5, bias=False), nn.Linear(5, 5))
    shardwise.shard(model, stage=3)
    with pytest.raises(shardwise.CheckpointError) as error:
        shardwise.load(folder / "second", model)
    text = str(error.value)
    assert "3.weight" in text and "2.bias" in text and "0.weight (here [301, 300], there [300, 300])" in text
    loaded = shardwise.load(folder / "second", model, strict=False)
    assert {"3.weight", "3.bias"} <= set(loaded.missing) and "2.bias" in loaded.unexpected and len(loaded.misshapen) >= 3


def test_other_optimizers_are_refused(folder: Path) -> None:
    model, _ = new_training(5)
    optimizer = torch.optim.AdamW([{"params": [param]} for param in model.parameters()])
    with pytest.raises(shardwise.CheckpointError, match="the optimizer's state for"):
        shardwise.load(folder / "second", model, optimizer)
    shardwise.save(folder / "weights", model)
    with pytest.raises(shardwise.CheckpointError, match="the optimizer's state"):
        shardwise.load(folder / "weights", model, optimizer)


def test_files_are_safetensors(folder: Path) -> None:
    model, _ = new_training(1)
    with safe_open(folder / "second" / SHARD, "pt") as file, shardwise.gathered(model):
        assert torch.equal(file.get_tensor("model/0.weight"), model[0].weight)
        assert file.metadata()["shardwise"]
    for path in folder.rglob("*"):
        assert path.is_dir() or not path.read_bytes().startswith((b"PK", b"\x80")), "pickle, or a zip of it"


def test_paths_that_are_taken_stay_as_they_are(folder: Path) -> None:
    model, optimizer = new_training(5)
    (folder / "notes").mkdir()
    (folder / "notes" / "text").write_text("mine")
    (folder / "file").write_text("mine")
    for name in ("first", "notes", "file"):
        with pytest.raises(shardwise.UsageError, match="there already"):
            shardwise.save(folder / name, model, optimizer)
    with pytest.raises(shardwise.UsageError, match="checkpoints only"):
        shardwise.save(folder / "notes", model, optimizer, overwrite=True)
    assert (folder / "notes" / "text").read_text() == "mine"
    shardwise.save(folder / "first", model, optimizer, overwrite=True)
    assert shardwise.load(folder, model, optimizer).path == str(folder / "first")
    assert sorted(path.name for path in folder.iterdir()) == ["file", "first", "notes", "second"]


@pytest.mark.parametrize(("options", "kept"), [
    ({"keep_last": 2}, [5, 6]),
    ({"keep_last": 1, "keep_every": 3}, [3, 6]),
    ({"keep_every": 2}, [2, 4, 6]),
    ({}, [1, 2, 3, 4, 5, 6]),
])  # fmt: skip
def test_old_checkpoints_go(tmp_path: Path, options: dict[str, int], kept: list[int]) -> None:
    model, optimizer = new_training()
    (tmp_path / "notes").mkdir()
    for step in range(1, 7):
        shardwise.save(tmp_path / f"step-{step}", model, optimizer, step=step, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", *(f"step-{step}" for step in kept)]
    for bad in (0, -1, True, 1.5):
        with pytest.raises(shardwise.UsageError, match="keep_last"):
            shardwise.save(tmp_path / "x", model, keep_last=bad)


def test_left_overs_are_cleaned_but_not_what_others_write(folder: Path) -> None:
    model, optimizer = new_training(5)
    left = folder / ".third.partial-0123"
    left.mkdir()
    (left / "lock").write_text("")
    (left / SHARD).write_text("half")
    at_work = shardwise.checkpoint.local_place.LocalPlace(folder / "other")
    at_work.begin("beef")
    shardwise.save(folder / "fourth", model, optimizer)
    assert not left.exists() and (folder / ".other.partial-beef").exists()
    at_work.abandon("beef")
    assert not (folder / ".other.partial-beef").exists()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_one_that_is_replaced_is_never_gone(folder: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    """The process dies in the middle of publishing; what the next save finds is the old one or the new one, whole."""
    model, optimizer = new_training(5)
    renames = [0]
    real = os.rename

    def dying(a: Any, b: Any) -> None:
        renames[0] += 1
        if renames[0] == 2 - can_exchange:
            raise KeyboardInterrupt
        real(a, b)

    if not can_exchange:
        monkeypatch.setattr("shardwise.checkpoint.local_place.exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", dying)
    # What is left when a process dies stays: nothing cleans up.
    monkeypatch.setattr("shardwise.checkpoint.local_place.LocalPlace.abandon", lambda self, id: self._unlock())
    with pytest.raises(KeyboardInterrupt):
        shardwise.save(folder / "second", model, optimizer, extra={"name": "third"}, overwrite=True)
    monkeypatch.undo()
    if can_exchange:
        assert shardwise.load(folder / "second", model, optimizer).extra == {"name": "third"}
    shardwise.save(folder / "fourth", model, optimizer)
    assert shardwise.load(folder / "second", model, optimizer).extra["name"] == ("third" if can_exchange else "second")
    assert sorted(path.name for path in folder.iterdir()) == ["first", "fourth", "second"]


def test_extra_that_needs_pickle_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = new_training()
    with pytest.raises(TypeError, match=r"extra\['hook'\]\['f'\]"):
        shardwise.save(tmp_path / "first", model, optimizer, extra={"hook": {"f": len}})
    assert list(tmp_path.iterdir()) == []


def test_memory_behind_fsspec_holds_checkpoints(tmp_path: Path) -> None:
    model, optimizer = new_training(1)
    shardwise.save("memory://run/step-1", model, optimizer, step=1)
    shardwise.save("memory://run/step-2", model, optimizer, step=2, extra={"a": 1}, keep_last=1)
    before = state_of(model, optimizer)
    other = new_training(2)
    loaded = shardwise.load("memory://run", *other)
    assert loaded.step == 2 and loaded.extra == {"a": 1} and state_of(*other) == before
    with pytest.raises(shardwise.CheckpointError):
        shardwise.load("memory://run/step-1", *other)
    with pytest.raises(shardwise.UsageError, match="cannot be reached"):
        shardwise.save("nowhere://run/step-1", model, optimizer)
    shardwise.save(f"file://{tmp_path}/step-3", model, optimizer)
    assert shardwise.load(tmp_path / "step-3", *other).step == 2
