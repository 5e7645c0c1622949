"""What parameters of a sharded model look like from outside, and what becomes of what users write to them."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shardwise
from shardwise.testing import World
from tests.distributed.odd import Case, run_case
from tests.distributed.test_odd_parameters import Hollow, LanguageModel, Mixed, Scalars, Strided

pytestmark = pytest.mark.dist


class Outside(Case):
    """Forms and names before sharding, at rest, after a forward, and after training."""

    reference = None

    def model(self) -> nn.Module:
        return nn.ModuleList([Mixed(), Strided(), Hollow(), Scalars(), LanguageModel()])

    def forms(self, model: nn.Module) -> list[tuple[Any, ...]]:
        named = model.named_parameters(remove_duplicate=False)
        return [
            (name, p.shape, p.size(), p.numel(), p.dtype, p.device, p.requires_grad, p.stride(), p.dim(), p.is_leaf, p.nbytes,
             p.is_contiguous(), p.element_size(), isinstance(p, nn.Parameter), p.grad_fn, len(p) if p.dim() else 0)
            for name, p in named
        ]  # fmt: skip

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        before, keys, text = self.forms(model), list(model.state_dict(keep_vars=True)), repr(model)
        called, optimizer = super().prepare(model)
        assert self.forms(model) == before
        assert list(model.state_dict(keep_vars=True)) == keys
        assert repr(model) == text
        self.before = before
        return called, optimizer

    def train(self, model: nn.Module, optimizer: Optimizer) -> None:
        (model[0](torch.ones(2, 16)).sum() + model[3](torch.ones(2, 16)).sum()).backward()
        assert self.forms(model) == self.before
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert set(grads) == {f"0.{name}" for name in ("w32", "w16", "w64")} | {
            f"3.{name}" for name in ("temperature", "block.weight", "block.bias", "block.gain", "one")
        }
        params = dict(model.named_parameters())
        assert all((g.shape, g.dtype) == (params[name].shape, params[name].dtype) for name, g in grads.items())
        optimizer.step()
        with self.full(model):
            assert self.forms(model) == self.before

    def check(self, model: nn.Module) -> None:
        assert self.forms(model) == self.before


def test_parameters_look_the_same_at_every_stage(world: World) -> None:
    world.run(run_case, Outside, (0, 1, 2, 3))


class Marked(Case):
    """Attributes that users set on parameters, such as those by which they sort them into groups."""

    reference = None
    num_steps = 1

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        for name, param in model.named_parameters():
            param.is_decayed = name.endswith("weight")
        return model

    def check(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            assert param.is_decayed == name.endswith("weight")
        model[0].weight.is_decayed = "changed"
        assert model[0].weight.is_decayed == "changed"
        with self.full(model):
            assert model[0].weight.is_decayed == "changed"
            model[1].weight.is_new = True
        assert model[1].weight.is_new


def test_attributes_on_parameters_stay(world: World) -> None:
    world.run(run_case, Marked, (0, 1, 2, 3))


# ---------------------------------------------------------------- reads and writes


def pair() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def read_outside() -> None:
    model = pair()
    own = model[1].weight
    shardwise.shard(model, stage=3)
    reads: list[Callable[[Any], Any]] = [
        lambda p: p.sum(), lambda p: p + 1, lambda p: p.tolist(), lambda p: p[0], lambda p: torch.stack([p, p]), lambda p: p.data.sum()
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(shardwise.NotGatheredError, match=r"'1\.weight'.*gathered"):
            read(model[1].weight)
        with pytest.raises(shardwise.NotGatheredError, match=r"'1\.weight'.*gathered"):
            read(own)  # The user's own object, from before the model was sharded.


def test_reading_values_outside_names_parameter_and_remedy(world: World) -> None:
    world.run(read_outside)


def by_copy(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name])


def by_data(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        param.data = values[name]


def by_data_copy(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        param.data.copy_(values[name])


def by_vector(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    nn.utils.vector_to_parameters(torch.cat([value.flatten() for value in values.values()]), model.parameters())


def by_new_parameter(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, nn.Parameter(value))


def by_load(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(values)


def by_assignment(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(values, assign=True)


def by_exchange(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """The memory of two parameters of one size is exchanged."""
    by_data_copy(model, {name: values[name.replace("0", "2").replace("1", "0").replace("2", "1")] for name in values})
    for one, other in zip(model[0].parameters(), model[1].parameters(), strict=True):
        one.data, other.data = other.data, one.data


WRITES = [by_copy, by_data, by_data_copy, by_vector, by_new_parameter, by_load, by_assignment, by_exchange]


def write_gathered(stage: int, write: Callable[[nn.Module, dict[str, torch.Tensor]], None]) -> None:
    model = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    shardwise.shard(model, optimizer, stage=stage)
    expected = pair()
    by_copy(expected, values)
    with shardwise.gathered(model):
        write(model, values)
        assert torch.equal(model(torch.ones(2, 16)), expected(torch.ones(2, 16)))
    assert torch.equal(model(torch.ones(2, 16)), expected(torch.ones(2, 16)))
    with shardwise.gathered(model):
        assert all(torch.equal(param, values[name]) for name, param in model.named_parameters())
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    with shardwise.gathered(model):
        assert not any(torch.equal(param, values[name]) for name, param in model.named_parameters() if name != "0.bias")


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_written_in_gathered_is_kept(world: World, write: Callable[..., None]) -> None:
    for stage in (0, 1, 3):
        world.run(write_gathered, stage, write)


def freeze_gathered(stage: int) -> None:
    model = pair()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    shardwise.shard(model, optimizer, stage=stage)
    with shardwise.gathered(model):
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone()
    model[1].requires_grad_(False)
    with shardwise.gathered(model):
        assert not any(param.requires_grad for param in model.parameters())
    model[1].requires_grad_(True)
    assert [param.requires_grad for param in model.parameters()] == [False, False, True, True]
    model(torch.ones(2, 16)).sum().backward()
    assert [param.grad is not None for param in model.parameters()] == [False, False, True, True]
    optimizer.step()
    with shardwise.gathered(model):
        assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_frozen_in_gathered_stays_frozen(world: World, stage: int) -> None:
    world.run(freeze_gathered, stage)


def write_outside(stage: int, write: Callable[[nn.Module, dict[str, torch.Tensor]], None]) -> None:
    """The same values on every rank: written to the full, or refused. Never lost without a word."""
    model = pair()
    values = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    shardwise.shard(model, stage=stage)
    with contextlib.suppress(shardwise.ShardwiseError):
        write(model, values)
        model(torch.ones(2, 16)).sum().backward()
        with shardwise.gathered(model):
            assert all(torch.equal(param, values[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_written_outside_is_kept_or_refused(world: World, write: Callable[..., None]) -> None:
    for stage in (0, 1, 3):
        world.run(write_outside, stage, write)


def write_to_tied(stage: int, is_gathered: bool) -> None:
    """A new parameter at the second place of a tied one: both places take it, or it is refused."""
    model = LanguageModel()
    values = torch.randn(17, 16)
    shardwise.shard(model, stage=stage)
    with contextlib.suppress(shardwise.ShardwiseError):
        with shardwise.gathered(model) if is_gathered else contextlib.nullcontext():
            model.head.weight = nn.Parameter(values.clone())
        model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        with shardwise.gathered(model):
            assert model.head.weight is model.embedding.weight
            assert torch.equal(model.head.weight, values)


@pytest.mark.parametrize("is_gathered", [True, False], ids=["gathered", "outside"])
def test_new_parameter_at_the_second_place_of_a_tied_one_is_not_lost(world: World, is_gathered: bool) -> None:
    for stage in (0, 3):
        world.run(write_to_tied, stage, is_gathered)
