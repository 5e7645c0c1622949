"""What a forward writes to its own weights is kept, at every stage and precision; what ranks would not agree on is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.testing import World
from tests.distributed.helpers import STAGES, VARIANTS, WIDTH, Stage, adamw, batch, check_stages, shard, train_steps

pytestmark = pytest.mark.dist


def clamp(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.05, 0.05)


def scale_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.75)


def replace_data(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.75


def write_rows(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.detach()[1:3] = 0.25


WRITES: dict[str, Callable[[nn.Parameter], None]] = {
    "in place": clamp,
    "through data": scale_data,
    "new data": replace_data,
    "a part": write_rows,
}


class Writing(nn.Module):
    """Layers that change their weights before they use them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.write = WRITES[how]
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda module, args: self.write(module.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def train_writing(stage: Stage, how: str, num_extra: int) -> Any:
    model = Writing(how)

    def loss_at(step: int) -> torch.Tensor:
        for _ in range(num_extra):
            with torch.no_grad():
                model(batch(step, 4, WIDTH))
        return model(batch(step, 4, WIDTH)).square().mean()

    return train_steps(stage, model, loss_at)


@pytest.mark.parametrize("num_extra", [0, 2], ids=["training", "and-evaluation"])
@pytest.mark.parametrize("how", WRITES)
def test_writes_to_weights_in_a_forward_stay(world: World, how: str, num_extra: int) -> None:
    stages = (*STAGES, *VARIANTS)
    check_stages(world, train_writing, how, num_extra, ranks=3, stages=stages)


def write_in_bf16(stage: int, how: str) -> dict[str, torch.Tensor]:
    """Weights after steps in bf16, whose masters are of 32 bits."""
    model = Writing(how)
    optimizer = adamw(model)
    shardwise.shard(model, optimizer, stage=stage, param_dtype="bfloat16", reduce_dtype="float32")
    for step in range(3):
        model(batch(step, 4, WIDTH)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(batch(0, 4, WIDTH))
    with shardwise.gathered(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def write_in_bf16_at_stages(how: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in STAGES:
        torch.manual_seed(0)
        found.append(write_in_bf16(stage, how))
    return found


@pytest.mark.parametrize("how", ["in place", "through data", "a part"])
def test_writes_in_narrow_compute_reach_the_masters(world: World, how: str) -> None:
    for by_stage in world.run(write_in_bf16_at_stages, how, ranks=2):
        weight = by_stage[0]["layers.0.weight"]
        if how == "in place":
            assert weight.abs().max() <= 0.0501
            # What was not written keeps the bits that bf16 does not have.
            assert not torch.equal(weight, weight.bfloat16().float())
        for found in by_stage[1:]:
            for name, expected in by_stage[0].items():
                assert torch.equal(found[name], expected), name


class WritesTooLate(nn.Module):
    """Changes a weight after autograd has saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        with torch.no_grad():
            self.second.weight.mul_(0.5)
        return y


def write_too_late(stage: Stage) -> str:
    model = WritesTooLate()
    shard(stage, model, units=["first"])  # The second layer travels with the root, and is there when the model writes to it.
    loss = model(batch(0, 4, WIDTH)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return "refused"


def test_a_write_after_autograd_has_saved_a_weight_is_refused(world: World) -> None:
    check_stages(world, write_too_late)


def backward_in_gathered(stage: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardwise.shard(model, optimizer, stage=stage)
    with shardwise.gathered(model):
        loss = model(torch.ones(2, 4)).sum()
        with pytest.raises(shardwise.ShardwiseError, match=r"loss\.backward\(\) cannot run inside"):
            loss.backward()
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()
    return "done"


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_inside_gathered_is_refused(world: World, stage: int) -> None:
    assert world.run(backward_in_gathered, stage) == ["done", "done"]


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, max_norm=1.0)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(items))


def train_with_limit(stage: Stage) -> Any:
    model = Recommender()
    with torch.no_grad():
        model.table.weight.mul_(3.0)
    return train_steps(stage, model, lambda step: model(batch(step, 6, high=11)).square().mean())


def test_embeddings_with_a_norm_limit_train_on_one_rank(world: World) -> None:
    check_stages(world, train_with_limit, ranks=1)


def shard_with_limit() -> str:
    model = Recommender()
    before = model.table.weight.clone()
    with pytest.raises(shardwise.ShardwiseError, match=r"'table' has max_norm=1\.0"):
        shardwise.shard(model, stage=3)
    assert torch.equal(model.table.weight, before)
    shardwise.shard(model, stage=3, ignored_params={model.table.weight})
    return "refused"


def test_embeddings_with_a_norm_limit_are_refused_on_several_ranks(world: World) -> None:
    assert world.run(shard_with_limit) == ["refused", "refused"]


def differ(what: str) -> str:
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params = list(model.parameters())
    optimizers: dict[str, Callable[[], Any]] = {
        "lr": lambda: torch.optim.AdamW(params, lr=0.1 + rank),
        "kind": lambda: torch.optim.SGD(params, lr=0.1) if rank else torch.optim.AdamW(params, lr=0.1),
        "params": lambda: torch.optim.AdamW(params[rank:], lr=0.1),
        "groups": lambda: torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}][: 2 - rank], lr=0.1),
    }
    with pytest.raises(shardwise.ShardwiseError, match="Ranks disagree, so nothing was sharded: rank 0 has ") as caught:
        shardwise.shard(model, optimizers[what](), stage=2)
    assert type(model[0].weight) is nn.Parameter
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("lr", "rank 0 has 'AdamW, group 0: lr = 0.1', rank 1 has 'AdamW, group 0: lr = 1.1'"),
        ("kind", "rank 1 has 'SGD, group 0"),
        ("params", "rank 0 has 'AdamW, group 0: holds 0.weight', rank 1 has 'AdamW, group 0: holds 0.bias'"),
        ("groups", "rank 0 has 'AdamW, group 1"),
    ],
)
def test_optimizers_that_differ_between_ranks_are_refused(world: World, what: str, said: str) -> None:
    for text in world.run(differ, what):
        assert said in text


class Asking(nn.Module):
    """Casts its input to the dtype of a weight that it does not call yet, as many models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [self.second.weight.dtype, next(self.first.parameters()).dtype]
        return self.second(self.first(x.float().to(self.first.weight.dtype)))


def ask(stage: int) -> list[torch.dtype]:
    model = Asking()
    shardwise.shard(model, stage=stage, param_dtype="bfloat16", units=[nn.Linear])
    assert model.second.weight.dtype == torch.float32
    model(torch.ones(2, WIDTH)).sum().backward()
    return model.seen


@pytest.mark.parametrize("stage", STAGES)
def test_inside_a_call_weights_have_the_dtype_of_compute(world: World, stage: int) -> None:
    assert world.run(ask, stage) == [[torch.bfloat16] * 2] * 2


class Convolutional(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(norm(3, affine=True, track_running_stats=True) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return x


def train_norms(norm: type[nn.Module], dtype: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in STAGES:
        torch.manual_seed(0)
        model = Convolutional(norm)
        optimizer = adamw(model)
        handle = shardwise.shard(model, optimizer, stage=stage, param_dtype=dtype, reduce_dtype="float32")
        assert {unit.name for unit in handle.units}
        for step in range(3):
            output = model(batch(step, 2, 3, 5, 5))
            assert output.dtype == getattr(torch, dtype)
            output.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(batch(9, 2, 3, 5, 5))
        with shardwise.gathered(model):
            found.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_norms_with_running_statistics_compute_with_wide_weights(world: World, norm: type[nn.Module], dtype: str) -> None:
    for by_stage in world.run(train_norms, norm, dtype):
        assert by_stage[0]["norms.0.running_mean"].dtype == torch.float32
        assert by_stage[0]["norms.0.running_mean"].abs().sum() > 0
        for found in by_stage[1:]:
            for name, expected in by_stage[0].items():
                assert torch.equal(found[name], expected), name
