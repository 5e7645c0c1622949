"""Weights go to other tools and come back: Hugging Face, torch's state dicts and distributed checkpoints. Nothing is run by reading."""

import io
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise
from shardwise.checkpoint.convert import export_checkpoint, import_checkpoint
from shardwise.checkpoint.folders import place_of, read_manifest
from shardwise.checkpoint.hugging_face import write_hugging_face
from shardwise.checkpoint.local_place import LocalPlace
from shardwise.checkpoint.reader import Reader

pytestmark = pytest.mark.filterwarnings("ignore")


class Tied(nn.Module):
    """A table that is used twice, weights of other strides, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x))).square().mean() + self.conv(torch.ones(1, 3, 4, 4)).sum()


def new_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    shardwise.shard(model, optimizer, stage=3)
    model(torch.arange(10)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with shardwise.gathered(model):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def export(folder: Path, form: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Path:
    shardwise.save(folder / "checkpoint", model, optimizer)
    num_bytes: list[int] = []
    export_checkpoint(place_of(folder / "checkpoint"), folder / form, form, num_bytes.append)
    assert sum(num_bytes) > 0
    return folder / form


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


def test_hugging_face_folder_holds_the_weights(tmp_path: Path) -> None:
    model, optimizer = new_training(1)
    expected = weights_of(model)
    found = load_file(export(tmp_path, "hf", model, optimizer) / "model.safetensors")
    assert "head.weight" not in found  # Tied: once, under its first name.
    assert_same({name: tensor for name, tensor in expected.items() if name != "head.weight"}, found)
    other, _ = new_training(2)
    loaded = shardwise.load(tmp_path / "hf", other)
    assert not loaded.missing and not loaded.unexpected
    assert_same(expected, weights_of(other))


def test_large_weights_are_split_with_an_index(tmp_path: Path) -> None:
    model, _ = new_training(1)
    shardwise.save(tmp_path / "checkpoint", model)
    place = place_of(tmp_path / "checkpoint")
    with Reader(place, read_manifest(place)) as reader:
        write_hugging_face(reader, LocalPlace(tmp_path / "hf"), lambda num_bytes: None, max_shard_bytes=500)
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert "model.safetensors.index.json" in names and len(names) > 2
    # As in the caches of that tool: files are links.
    (tmp_path / "cache").mkdir()
    for name in names:
        (tmp_path / "cache" / name).symlink_to(tmp_path / "hf" / name)
    other, _ = new_training(2)
    shardwise.load(tmp_path / "cache", other)
    assert_same(weights_of(model), weights_of(other))
    assert import_checkpoint(tmp_path / "cache", place_of(tmp_path / "back"), lambda num_bytes: None, {}) > 3
    other, _ = new_training(3)
    shardwise.load(tmp_path / "back", other)
    assert_same(weights_of(model), weights_of(other))


def test_transformers_read_an_export_and_are_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "config")
    shardwise.shard(model, stage=3)
    shardwise.save(tmp_path / "checkpoint", model)
    export_checkpoint(place_of(tmp_path / "checkpoint"), tmp_path / "hf", "hf", lambda num_bytes: None, tmp_path / "config")
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    assert_same(weights_of(model), plain.state_dict())
    with torch.no_grad():
        plain.model.layers[0].self_attn.q_proj.weight.mul_(2)
    plain.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    loaded = shardwise.load(tmp_path / "theirs", model)
    assert not loaded.missing
    assert_same(plain.state_dict(), weights_of(model))


def test_torch_reads_a_full_state_dict(tmp_path: Path) -> None:
    model, optimizer = new_training(1)
    found = torch.load(export(tmp_path, "torch", model, optimizer), weights_only=True)
    assert_same(weights_of(model), found)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


def test_dcp_reads_an_export_with_its_optimizer_and_is_read(tmp_path: Path) -> None:
    model, optimizer = new_training(1)
    path = export(tmp_path, "dcp", model, optimizer)
    expected = weights_of(model)
    state: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in expected.items() if name != "head.weight"}
    }
    state["optim"] = {"state": {"embed.weight": {"exp_avg": torch.zeros(50, 16), "step": torch.zeros(())}}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert_same({name: tensor for name, tensor in expected.items() if name != "head.weight"}, state["model"])
    segment = optimizer.param_groups[0]["params"][0]
    assert torch.equal(state["optim"]["state"]["embed.weight"]["exp_avg"], optimizer.state[segment]["exp_avg"].view(50, 16))
    assert state["optim"]["state"]["embed.weight"]["step"] == 1

    import_checkpoint(path, place_of(tmp_path / "back"), lambda num_bytes: None, {})
    other, _ = new_training(2)
    shardwise.load(tmp_path / "back", other)
    assert_same(expected, weights_of(other))


class Bomb:
    def __reduce__(self) -> Any:
        return (open, ("exploded", "w"))


def test_metadata_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(shardwise.CheckpointError, match="for the sake of safety"):
        import_checkpoint(tmp_path / "bad", place_of(tmp_path / "x"), lambda num_bytes: None, {})
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "x").exists()


def test_data_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "bad", no_dist=True)
    (data,) = (tmp_path / "bad").glob("*.distcp")
    size = data.stat().st_size
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer)
    data.write_bytes(buffer.getvalue()[:size].ljust(size, b"\0"))
    with pytest.raises(shardwise.CheckpointError):
        import_checkpoint(tmp_path / "bad", place_of(tmp_path / "x"), lambda num_bytes: None, {})
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "x").exists()


@pytest.mark.parametrize("damage", ["header", "offsets", "index", "outside"])
def test_damaged_safetensors_are_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    path = folder / "model.safetensors"
    save_file({"embed.weight": torch.zeros(50, 16)}, path)
    data = path.read_bytes()
    if damage == "header":
        path.write_bytes(b"\xff" * 8 + data[8:])
    elif damage == "offsets":
        path.write_bytes(data.replace(b"[0,3200]", b"[8,3208]"))
    elif damage == "index":
        (folder / "model.safetensors.index.json").write_text("[]")
    else:
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../outside.safetensors"}}')
        save_file({"a": torch.zeros(3)}, tmp_path / "outside.safetensors")
    model, _ = new_training(2)
    before = weights_of(model)
    with pytest.raises(shardwise.CheckpointError):
        shardwise.load(folder, model, strict=False)
    assert_same(before, weights_of(model))


def test_commands_convert_and_say_so(tmp_path: Path) -> None:
    model, optimizer = new_training(1)
    shardwise.save(tmp_path / "run" / "first", model, optimizer)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shardwise", "checkpoint", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    for arguments, text in [
        (["inspect", "run"], "weights and buffers"),
        (["inspect", "run/first", "--tensors"], "tied: head.weight"),
        (["verify", "run"], "whole"),
        (["export", "run", "hf"], "run/first was exported to hf"),
        (["import", "hf", "run/second"], "are now in run/second"),
        (["prune", "run", "--keep-last", "1"], "removed run/first"),
    ]:
        answer = run(*arguments)
        assert answer.returncode == 0 and text in answer.stdout and answer.stderr == "", (arguments, answer)
    for arguments, text, code in [
        (["verify", "nowhere"], "is not there", 1),
        (["export", "run", "hf"], "there already", 2),
        (["import", "nowhere", "x"], "There is no folder", 2),
        (["prune", "run"], "Say what stays", 2),
    ]:
        answer = run(*arguments)
        assert answer.returncode == code and text in answer.stderr and answer.stderr.count("\n") == 1, (arguments, answer)
    shard = tmp_path / "run" / "second" / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    answer = run("verify", "run")
    assert answer.returncode == 1 and "rank-00000.safetensors is damaged" in answer.stderr
