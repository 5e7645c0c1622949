"""Whole numbers are no weights, and the state of one optimizer is none of another: both are refused by name, and nothing changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardwise
from shardwise.checkpoint.kinds import can_hold, kind_of
from tests.unit.checkpoint.test_damage import state_of

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {}, "Adam": {}, "SGD": {"momentum": 0.9}, "Adagrad": {}, "RMSprop": {}, "NAdam": {}, "Adamax": {}, "RAdam": {},
    "Adadelta": {}, "Rprop": {}, "ASGD": {}, "Adafactor": {}, "Muon": {},
}  # fmt: skip


class Noted(optim.AdamW):
    """A class of a user's own."""


def new_training(kind: Any, seed: int, **options: Any) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(70, 20, bias=False), nn.Linear(20, 5, bias=False))
    optimizer: optim.Optimizer = kind(model.parameters(), lr=0.01, **options)
    shardwise.shard(model, optimizer, stage=2)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model(torch.ones(3, 70)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("there", KINDS)
def test_state_of_another_optimizer_is_refused_with_both_names(tmp_path: Path, there: str) -> None:
    shardwise.save(tmp_path / "a", *new_training(getattr(optim, there), 1, **KINDS[there]))
    for here in ["AdamW", "SGD", "Adam", "Adagrad"]:
        model, optimizer = new_training(getattr(optim, here), 2, **KINDS[here])
        if here == there:
            shardwise.load(tmp_path / "a", model, optimizer)
            continue
        before, options = state_of(model, optimizer), [dict(group, params=None) for group in optimizer.param_groups]
        with pytest.raises(shardwise.CheckpointError, match=rf"here of {here}, there of {there}\)") as error:
            shardwise.load(tmp_path / "a", model, optimizer)
        assert "strict=False" in str(error.value) and "weights_only=True" in str(error.value)
        assert state_of(model, optimizer) == before
        loaded = shardwise.load(tmp_path / "a", model, optimizer, strict=False)
        assert loaded.misshapen == (f"the optimizer's state (here of {here}, there of {there})",)
        after = state_of(model, optimizer)
        assert after[:2] != before[:2] and after[2:] == before[2:], "the weights alone"
        assert [dict(group, params=None) for group in optimizer.param_groups] == options
        step(model, optimizer)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"eps": 1e-6, "amsgrad": True}])
def test_same_optimizer_loads_whatever_its_options(tmp_path: Path, options: dict[str, Any]) -> None:
    saved = new_training(optim.AdamW, 1)
    shardwise.save(tmp_path / "plain", *saved)
    other = new_training(Noted, 2, **options)
    shardwise.save(tmp_path / "other", *other)
    before = state_of(*saved), state_of(*other)
    shardwise.load(tmp_path / "plain", *other)
    shardwise.load(tmp_path / "other", *saved)
    assert (state_of(*other), state_of(*saved)) == before
    for each in (saved, other):
        step(*each)


def test_exchanged_optimizers_are_refused(tmp_path: Path) -> None:
    def new() -> tuple[nn.Module, list[optim.Optimizer]]:
        model = nn.Sequential(nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False))
        optimizers = [optim.AdamW(model[0].parameters()), optim.SGD(model[1].parameters(), momentum=0.9)]
        shardwise.shard(model, optimizers, stage=1)
        return model, optimizers

    model, optimizers = new()
    shardwise.save(tmp_path / "a", model, optimizers)
    shardwise.load(tmp_path / "a", model, optimizers)
    with pytest.raises(shardwise.CheckpointError, match=r"optimizer 0 \(here of SGD, there of AdamW\)"):
        shardwise.load(tmp_path / "a", model, optimizers[::-1])


def test_classes_of_users_have_their_own_name_or_that_of_torch() -> None:
    class Own(optim.Optimizer):
        """From nothing."""

    params = [nn.Parameter(torch.ones(2))]
    assert kind_of(Noted(params)) == "AdamW" and kind_of(Own(params, {})) == "Own"


class Numbers(nn.Module):
    """Weights, a frozen parameter and a buffer of some dtypes."""

    def __init__(self, frozen: torch.dtype, buffer: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(70, 3)
        self.frozen = nn.Parameter(torch.arange(130).to(frozen), requires_grad=False)
        self.register_buffer("buffer", torch.arange(5).to(buffer))


WRONG = [
    (torch.float32, torch.int64), (torch.int64, torch.float32), (torch.bfloat16, torch.uint8), (torch.int32, torch.int64),
    (torch.bool, torch.uint8), (torch.float32, torch.bool), (torch.float32, torch.complex64), (torch.complex64, torch.float32),
]  # fmt: skip
RIGHT = [
    (torch.float32, torch.bfloat16), (torch.float16, torch.float64), (torch.int64, torch.int32), (torch.int16, torch.uint8),
    (torch.bool, torch.bool), (torch.complex128, torch.complex64),
]  # fmt: skip


@pytest.mark.parametrize(("here", "there"), WRONG)
@pytest.mark.parametrize("which", ["frozen", "buffer"])
def test_numbers_of_another_kind_are_refused_by_name(tmp_path: Path, which: str, here: torch.dtype, there: torch.dtype) -> None:
    def new(dtype: torch.dtype) -> Numbers:
        model = Numbers(**{"frozen": torch.float32, "buffer": torch.float32, which: dtype})
        shardwise.shard(model, stage=0)
        return model

    shardwise.save(tmp_path / "a", new(there))
    model = new(here)
    with shardwise.gathered(model):
        before = [tensor.detach().clone() for tensor in model.state_dict().values()]
    names = [str(dtype).removeprefix("torch.") for dtype in (here, there)]
    with pytest.raises(shardwise.CheckpointError, match=rf"{which} \(here {names[0]}, there {names[1]}\)"):
        shardwise.load(tmp_path / "a", model)
    with shardwise.gathered(model):
        assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    loaded = shardwise.load(tmp_path / "a", model, strict=False)
    assert loaded.misshapen == (f"{which} (here {names[0]}, there {names[1]})",)
    with shardwise.gathered(model):
        assert torch.equal(model.state_dict()[which], before[1 if which == "buffer" else 0])


@pytest.mark.parametrize(("here", "there"), RIGHT)
def test_numbers_of_another_precision_are_taken(tmp_path: Path, here: torch.dtype, there: torch.dtype) -> None:
    model, other = Numbers(torch.float32, there), Numbers(torch.bfloat16, here)
    for each in (model, other):
        shardwise.shard(each, stage=2)
    model.buffer.add_(1) if there != torch.bool else model.buffer.logical_not_()
    shardwise.save(tmp_path / "a", model)
    shardwise.load(tmp_path / "a", other)
    assert torch.equal(other.buffer, model.buffer.to(here))


def test_dtypes_that_can_hold_others_hold_themselves() -> None:
    dtypes = {dtype for pair in WRONG + RIGHT for dtype in pair}
    assert all(can_hold(dtype, dtype) for dtype in dtypes)
    assert all(can_hold(*pair) for pair in RIGHT) and not any(can_hold(*pair) for pair in WRONG)
