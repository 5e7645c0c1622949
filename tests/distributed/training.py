"""A small training with everything that a checkpoint must carry: odd shapes, tied and frozen weights, buffers, groups, dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise


class Odd(nn.Module):
    """Shapes that no number of ranks divides, other strides, a scalar, an empty parameter, tied and frozen ones, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, 12)
        self.conv = nn.Conv2d(3, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6, affine=False)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 31), nn.GELU(), nn.Dropout(0.2), nn.Linear(31, 12)) for _ in range(3)
        )
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.head = nn.Linear(12, 53, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.arange(5.0), persistent=False)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        self.seen += 1
        seen = self.norm(self.conv(image).float()).mean((0, 2, 3)).repeat(2).to(self.scale.dtype)
        x = self.embed(tokens) + seen * self.scale + self.nothing.sum()
        for layer in self.body:
            x = x + layer(x)
        return self.head(self.frozen(x))


class Data:
    """Batches in an order of its own, which it can go on with: a stand-in for a data loader with a state."""

    def __init__(self, rank: int, num_batches: int = 7) -> None:
        self._rank = rank
        self._num_batches = num_batches
        self.epoch = self.position = 0

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.position == self._num_batches:
            self.epoch, self.position = self.epoch + 1, 0
        draw = torch.Generator().manual_seed(1000 * self.epoch + 10 * self.position + self._rank)
        self.position += 1
        tokens = torch.randint(53, (5, 8), generator=draw)
        return tokens, torch.randn(2, 3, 6, 6, generator=draw), tokens.roll(1)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class Training:
    """A model, its optimizer, a scheduler and data, sharded at a stage."""

    def __init__(self, stage: int, *, seed: int = 0, optimizer: str = "AdamW", num_steps: int = 40, **plan: Any) -> None:
        torch.manual_seed(seed)
        self.model = Odd()
        decayed = [param for param in self.model.parameters() if param.dim() > 1]
        others = [param for param in self.model.parameters() if param.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        self.optimizer = getattr(torch.optim, optimizer)(groups, lr=0.01, **options)
        self.sharded = shardwise.shard(self.model, self.optimizer, stage=stage, **plan)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 0.05, total_steps=num_steps, cycle_momentum=optimizer != "Adagrad"
        )
        self.scaler = shardwise.GradScaler(init_scale=64.0, growth_interval=3)
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed + 100 + rank)
        self.data = Data(rank)
        self.losses: list[float] = []

    @property
    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler, "data": self.data}

    def backward(self) -> None:
        tokens, image, targets = self.data.draw()
        loss = F.cross_entropy(self.model(tokens, image).flatten(0, 1), targets.flatten())
        self.losses.append(loss.item())
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.backward()
            self.update()

    def save(self, path: str, **options: Any) -> shardwise.Saving:
        return shardwise.save(path, self.model, self.optimizer, extra=self.extra, **options)

    def load(self, path: str, **options: Any) -> shardwise.Loaded:
        return shardwise.load(path, self.model, self.optimizer, extra=self.extra, **options)

    def everything(self) -> dict[str, Any]:
        """All of the state, full and plain, as bytes. A collective."""
        found: dict[str, Any] = {}
        with shardwise.gathered(self.model):
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                found[f"weight {name}"] = as_bytes(tensor)
        named = {id(param): name for name, param in self.model.named_parameters()}
        shardwise.unshard(self.model, self.optimizer)
        named |= {id(param): name for name, param in self.model.named_parameters()}
        for param, state in self.optimizer.state.items():
            for key, value in state.items():
                found[f"{key} of {named[id(param)]}"] = as_bytes(value)
        found["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        found["scheduler"], found["scaler"] = self.scheduler.state_dict(), self.scaler.state_dict()
        found["data"], found["random"] = self.data.state_dict(), torch.get_rng_state().numpy().tobytes()
        return found


def as_bytes(value: Any) -> Any:
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, Tensor) else value


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
