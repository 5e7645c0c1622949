"""Loops of every odd kind train to the same bits at every stage: hooks, closures, schedules, freezing, copies, generation."""

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from shardwise.testing import World
from tests.distributed.odd import Block, Case, assert_same_at_all_stages, copies

pytestmark = pytest.mark.dist


class Blocks(Case):
    def model(self) -> nn.Module:
        return nn.Sequential(Block(), nn.Tanh(), Block(), nn.Linear(16, 16))


# ---------------------------------------------------------------- between steps


class Generation(Blocks):
    """Loops of calls without gradients between the steps, in train and eval mode, under no_grad and inference_mode."""

    reference = "plain"

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        model.train(step % 2 == 0)
        for context in (torch.inference_mode(), torch.no_grad()):
            with context:
                x = self.batch(1000)[:1]
                for _ in range(3 + step):
                    x = torch.cat([x, model(x)[-1:]])
            self.seen.append(x.clone())
        model.train()
        super().step(model, optimizer, step)


class ForwardOnly(Blocks):
    """Forwards with gradients whose backward never comes."""

    reference = "plain"

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        unused = [model(self.batch(1000 + number)) for number in range(2)]
        super().step(model, optimizer, step)
        self.seen.extend(y.detach() for y in unused)
        model(self.batch(2000))


class Ema(Blocks):
    """A moving average, by torch's own class and by hand, made by copying the model while its values are there."""

    reference = "plain"

    def train(self, model: nn.Module, optimizer: Optimizer) -> None:
        model.register_buffer("count", torch.zeros(3))
        with self.full(model):
            averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
            own = copy.deepcopy(model)
        for step in range(self.num_steps):
            self.step(model, optimizer, step)
            with self.full(model), torch.no_grad():
                averaged.update_parameters(model)
                for mine, theirs in zip(own.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        self.seen.extend([*copies(own.named_parameters()).values(), *copies(averaged.named_parameters()).values()])


class CopyAlone(Blocks):
    """A copy is a plain model: it works on one rank alone, trains, pickles, can be sharded, and does not hold the engine."""

    reference = None

    def train(self, model: nn.Module, optimizer: Optimizer) -> None:
        for step in range(2):
            self.step(model, optimizer, step)
        with self.full(model) if self.leg == 3 else contextlib.nullcontext():
            twin = copy.deepcopy(model)
        assert all(type(param) is nn.Parameter and param.grad is None for param in twin.parameters())
        with pytest.raises(shardwise.UsageError, match="not sharded"), shardwise.gathered(twin):
            pass
        with self.full(model):
            before = copies(model.named_parameters())
            assert list(before) == [name for name, _ in twin.named_parameters()]
            assert all(torch.equal(before[name], param) for name, param in twin.named_parameters())
        if self.rank == 0:  # A collective would wait for rank 1.
            own = self.optimizer(twin.parameters())
            self.loss(twin, self.batch(7)).backward()
            own.step()
            assert not any(torch.equal(before[name], param) for name, param in twin.named_parameters())
            pickle.loads(pickle.dumps(twin))(self.batch(7))
        with self.full(model):
            assert all(torch.equal(before[name], param) for name, param in model.named_parameters())
        shardwise.shard(twin, stage=self.leg)
        twin(self.batch(8)).sum().backward()
        shardwise.unshard(twin)
        self.step(model, optimizer, 5)


def copy_outlives_model(stage: int) -> None:
    model = nn.Sequential(Block(), Block())
    engine = weakref.ref(shardwise.shard(model, stage=stage).engine)
    with shardwise.gathered(model):
        twin = copy.deepcopy(model)
    model(torch.ones(2, 16)).sum().backward()
    assert engine() is not None
    del model
    for _ in range(10):  # Graphs are held by chains of cycles.
        gc.collect()
    assert engine() is None, "the engine outlives its model"
    twin(torch.ones(2, 16)).sum().backward()


# ---------------------------------------------------------------- hooks and closures


class Hooks(Blocks):
    """Hooks that users set on parameters before sharding act on the rank's own gradient, as under DDP."""

    def model(self) -> nn.Module:
        model = super().model()
        self.add_hooks(model)
        return model

    def add_hooks(self, model: nn.Module) -> None:
        self.calls: list[str] = []
        model[0].up.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        model[2].up.weight.register_post_accumulate_grad_hook(self.halve)
        model[3].weight.register_hook(lambda grad: self.calls.append("weight"))

    def halve(self, param: torch.Tensor) -> None:
        self.calls.append("halve")
        param.grad.copy_(param.grad.sign() * self.rank)

    def check(self, model: nn.Module) -> None:
        assert sorted(self.calls) == ["halve"] * self.num_steps + ["weight"] * self.num_steps


class LateHooks(Hooks):
    """The same, set on `model.parameters()` after sharding."""

    def model(self) -> nn.Module:
        return Blocks.model(self)

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        called, optimizer = super().prepare(model)
        self.add_hooks(model)
        return called, optimizer


class HooksInMidRun(LateHooks):
    """The same, set after some steps."""

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        return Blocks.prepare(self, model)

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if step == 2:
            self.add_hooks(getattr(model, "module", model))
        super().step(model, optimizer, step)

    def check(self, model: nn.Module) -> None:
        assert sorted(self.calls) == ["halve"] * 2 + ["weight"] * 2


class Closure(Blocks):
    """The update computes the gradients itself, and hooks of the step run once."""

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        calls: list[str] = []
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
            optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        ]

        def closure() -> torch.Tensor:
            calls.append("closure")
            optimizer.zero_grad()
            loss = self.loss(model, self.batch(step))
            loss.backward()
            return loss

        loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        assert calls == ["before", "closure", "after"]
        self.seen.append(loss.detach())
        for hook in hooks:
            hook.remove()


# ---------------------------------------------------------------- groups, schedules, freezing


class Groups(Blocks):
    """Two groups and a schedule for each, made before sharding."""

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"params": [p for name, p in named if name.endswith("weight")], "lr": 2e-2, "weight_decay": 0.3},
            {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ]

    def schedule(self, optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 1 + step])

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        optimizer = self.optimizer(self.groups(model))
        self.scheduler = self.schedule(optimizer)
        return self.wrap(model, optimizer), optimizer

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        super().step(model, optimizer, step)
        self.scheduler.step()
        self.seen.append(torch.tensor([group["lr"] for group in optimizer.param_groups]))


class LateGroups(Groups):
    """The same, made after sharding over the model's parameters; nobody tells the engine of the optimizer."""

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        called = self.wrap(model)
        optimizer = self.optimizer(self.groups(model))
        self.scheduler = self.schedule(optimizer)
        return called, optimizer


class CyclingMomentum(Groups):
    """A schedule that changes momentum as well, on top of one that is made after the first step."""

    def schedule(self, optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=12, cycle_momentum=True)


class LateOptimizer(Blocks):
    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        called = self.wrap(model)
        return called, self.optimizer(model.parameters())


class Freezing(Blocks):
    """Parameters are frozen and thawed in mid-run, some within a unit and some a whole unit."""

    reference = "plain"
    num_steps = 8

    def model(self) -> nn.Module:
        model = super().model()
        model[0].requires_grad_(False)
        return model

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if step == 2:
            model[0].requires_grad_(True)
        if step == 4:
            model[2].up.weight.requires_grad_(False)
            model[3].requires_grad_(False)
        if step == 6:
            model[3].weight.requires_grad_(True)
        flags = [param.requires_grad for param in model.parameters()]
        loss = self.loss(model, self.batch(step))
        loss.backward()
        assert [param.requires_grad for param in model.parameters()] == flags
        assert [param.grad is not None for param in model.parameters()] == flags
        optimizer.step()
        optimizer.zero_grad()
        self.seen.append(loss.detach())


class SeveralModels(Blocks):
    """Two models with one loss: an encoder and a decoder, a shared optimizer and one of its own."""

    reference = "plain"

    def prepare(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        self.decoder = nn.Sequential(nn.Linear(16, 16), Block())
        shared = self.optimizer([*model.parameters(), *self.decoder[0].parameters()])
        self.own = torch.optim.SGD(self.decoder[1].parameters(), lr=0.1, momentum=0.9)
        self.wrap(model, shared)
        self.wrap(self.decoder, *([shared, self.own] if self.is_sharded else [self.own]))
        return model, shared

    def loss(self, model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        inner = model(data)
        return (self.decoder(inner) - data).square().mean() + model(self.decoder(data)).square().mean()

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        super().step(model, optimizer, step)
        self.own.step()
        self.own.zero_grad()

    def finish(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().finish(model, optimizer)
        if self.is_sharded:
            shardwise.unshard(self.decoder, [optimizer, self.own])

    def check(self, model: nn.Module) -> None:
        with self.full(self.decoder):
            self.seen.extend(copies(self.decoder.named_parameters()).values())


CASES = [
    Generation, ForwardOnly, Ema, Hooks, LateHooks, HooksInMidRun, Closure, Groups, LateGroups, CyclingMomentum, LateOptimizer,
    Freezing, SeveralModels,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_training_matches_ddp_at_every_stage(world: World, case: type[Case]) -> None:
    assert_same_at_all_stages(world, case)


@pytest.mark.parametrize("case", [Hooks, Groups, Freezing, SeveralModels], ids=lambda case: case.__name__)
def test_three_ranks_agree_at_every_stage(world: World, case: type[Case]) -> None:
    assert_same_at_all_stages(world, case, ranks=3)


def test_copy_is_a_plain_model(world: World) -> None:
    assert_same_at_all_stages(world, CopyAlone)


@pytest.mark.parametrize("stage", [0, 3])
def test_copy_does_not_hold_the_engine(world: World, stage: int) -> None:
    world.run(copy_outlives_model, stage)
