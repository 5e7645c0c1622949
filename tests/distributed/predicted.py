"""Cases of predicted memory: models, plans and loops, trained for a few steps on simulated devices, whose own count is the truth."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.core.ledger import Tier
from shardwise.core.plan import Plan
from shardwise.devices import sim
from shardwise.planning.fake_run import Example, profile_model
from shardwise.planning.held import Place
from shardwise.planning.memory import Loop, predict_memory
from shardwise.planning.profile import Profile
from shardwise.recipes.config import GPTConfig
from shardwise.recipes.models import GPT

NUM_WARM, NUM_STEPS = 2, 1
"""Steps before the peak is looked for: there is no optimizer state in the first, and its order of moments is assumed."""


def gpt() -> tuple[nn.Module, Example]:
    tokens = torch.zeros(4, 48, dtype=torch.long)
    return GPT(GPTConfig(context=48, width=64, num_blocks=3, num_heads=4)), Example((tokens, tokens))


class CheckpointedGPT(GPT):
    """Its user runs the blocks again."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def checkpointed_gpt() -> tuple[nn.Module, Example]:
    tokens = torch.zeros(4, 48, dtype=torch.long)
    return CheckpointedGPT(GPTConfig(context=48, width=64, num_blocks=3, num_heads=4)), Example((tokens,))


class ViT(nn.Module):
    """Patches, torch's own encoder, a token for the class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.places = nn.Parameter(torch.zeros(1, 17, 64))
        self.token = nn.Parameter(torch.zeros(1, 1, 64))
        layer = [nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True, norm_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(layer)
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


def vit() -> tuple[nn.Module, Example]:
    return ViT(), Example((torch.zeros(8, 3, 16, 16),), F.cross_entropy, (torch.zeros(8, dtype=torch.long),))


class Residual(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(x + y)


def conv() -> tuple[nn.Module, Example]:
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model = nn.Sequential(stem, *(Residual(32) for _ in range(4)), head)
    return model, Example((torch.zeros(4, 3, 16, 16),), F.cross_entropy, (torch.zeros(4, dtype=torch.long),))


SIZES = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}


def _of_tokens(model: nn.Module, **more: torch.Tensor) -> tuple[nn.Module, Example]:
    tokens = torch.ones(4, 40, dtype=torch.long)
    return model, Example({"input_ids": tokens, "labels": tokens, **more})


def llama() -> tuple[nn.Module, Example]:
    transformers = pytest.importorskip("transformers")
    return _of_tokens(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)))


def gpt2() -> tuple[nn.Module, Example]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=160, n_embd=64, n_layer=3, n_head=4, n_positions=64)
    return _of_tokens(transformers.GPT2LMHeadModel(config))


def bert() -> tuple[nn.Module, Example]:
    transformers = pytest.importorskip("transformers")
    return _of_tokens(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)))


MODELS: dict[str, Callable[[], tuple[nn.Module, Example]]] = {
    "gpt": gpt,
    "checkpointed gpt": checkpointed_gpt,
    "vit": vit,
    "conv": conv,
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
}


@dataclass(frozen=True)
class Case:
    """One way to train one model."""

    model: str
    plan: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    is_synced: bool = False
    is_fused: bool = False

    @property
    def name(self) -> str:
        said = [f"{key}={value}" for key, value in self.plan.items()]
        said += [f"accumulation={self.accumulation}{' synced' if self.is_synced else ''}"] * (self.accumulation > 1)
        return " ".join([self.model, *said, *["fused"] * self.is_fused])


HALF = {"param_dtype": "bfloat16"}
WIDE = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
ALL_ON_HOST = {"optim": "host", "grad": "host", "param": "host"}
ALL_ON_DISK = {"optim": "disk", "grad": "disk", "param": "disk"}


def _cases(*rows: tuple[str, dict[str, Any]], **more: Any) -> list[Case]:
    return [Case(model, plan, **more) for model, plan in rows]


CASES: dict[int, list[Case]] = {
    1: [
        *_cases(
            ("gpt", {"stage": 0}), ("gpt", {"stage": 3}), ("vit", {"stage": 1}), ("conv", {"stage": 2}), ("llama", {"stage": 0})
        ),
        *_cases(("gpt2", {"stage": 3}), ("bert", {"stage": 2}), ("gpt", {"stage": 0, **HALF}), ("conv", {"stage": 3, **WIDE})),
        *_cases(("gpt", {"stage": 0, "activations": "recompute"}), ("llama", {"stage": 0, "tiers": {"optim": "host"}})),
        *_cases(("gpt", {"stage": 0, **HALF}), ("vit", {"stage": 3}), accumulation=3),
    ],
    2: [
        *_cases(*(("gpt", {"stage": stage}) for stage in range(4))),
        *_cases(("gpt", {"stage": 3, **HALF}), ("gpt", {"stage": 1, **WIDE}), ("vit", {"stage": 2, **HALF})),
        *_cases(("gpt", {"stage": 2}), ("gpt", {"stage": 3, **WIDE}), ("conv", {"stage": 1}), accumulation=2),
        *_cases(("gpt", {"stage": 2}), ("vit", {"stage": 0}), accumulation=2, is_synced=True),
        *_cases(("checkpointed gpt", {"stage": 1}), ("checkpointed gpt", {"stage": 3}), ("llama", {"stage": 3, **HALF})),
        *_cases(*(("gpt", {"stage": 3, "activations": where}) for where in ("recompute", "host", "disk"))),
        *_cases(("gpt", {"stage": 2, "tiers": {"optim": "host"}}), ("gpt", {"stage": 3, "tiers": ALL_ON_HOST})),
        *_cases(("gpt", {"stage": 3, "tiers": {"optim": "disk"}}), ("gpt", {"stage": 3, "tiers": ALL_ON_DISK})),
        *_cases(
            ("gpt", {"stage": 1, "tiers": {"optim": "host"}, "fraction": 0.5}), ("bert", {"stage": 2, "tiers": ALL_ON_HOST})
        ),
        *_cases(("gpt", {"stage": 3, "prefetch": 0}), ("gpt", {"stage": 3, "prefetch": 2})),
        *_cases(("gpt", {"stage": 3, "reshard_after_forward": False}), ("gpt2", {"stage": 2, "activations": "recompute"})),
        *_cases(("gpt", {"stage": 1}), ("bert", {"stage": 3}), is_fused=True),
    ],
    3: [
        *_cases(("vit", {"stage": 3}), ("conv", {"stage": 3}), ("llama", {"stage": 2, **HALF}), ("gpt2", {"stage": 1})),
        *_cases(*(("gpt", {"stage": stage, "weights": (1, 2, 3)}) for stage in (0, 1, 3))),
        *_cases(("bert", {"stage": 3, "activations": "recompute"})),
    ],
    4: [
        *_cases(("gpt", {"stage": 3}), ("vit", {"stage": 2}), ("conv", {"stage": 0}), ("llama", {"stage": 3})),
        *_cases(("gpt2", {"stage": 3}), ("bert", {"stage": 1}), ("gpt", {"stage": 3, **WIDE, "activations": "recompute"})),
    ],
}
"""By number of ranks."""


@dataclass(frozen=True)
class Outcome:
    """What one rank has held at most on its device, and what was predicted; and both by the ledger in the host's memory, by kind."""

    measured_bytes: int
    predicted_bytes: int
    late_bytes: int
    moment: str
    host: dict[str, tuple[int, int]]

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def measure(cases: list[Case], folder: str) -> list[Outcome]:
    """Train every case, on one rank of a world on simulated devices."""
    profiles: dict[tuple[object, ...], Profile] = {}
    return [_measure(case, folder, profiles) for case in cases]


def _measure(case: Case, folder: str, profiles: dict[tuple[object, ...], Profile]) -> Outcome:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    base_bytes = _settled_bytes(rank)
    torch.manual_seed(0)
    model, example = MODELS[case.model]()
    plan = Plan(**case.plan, folder=folder)
    key = (case.model, plan.param_dtype, plan.activations)
    if key not in profiles:
        profiles[key] = profile_model(model, example, plan=plan, device=f"sim:{rank}")
    model.to("sim")
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # A move to a device of another kind makes parameters anew.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=case.is_fused or None)
    loop = Loop(case.accumulation, case.is_synced, optimizer)
    place = Place(num_ranks, rank, layout_kind="even" if plan.weights is None else "weighted")
    predicted = predict_memory(profiles[key], plan, place, loop)
    sharded = shardwise.shard(model, optimizer, plan=plan, nonfinite="keep")
    for step in range(NUM_WARM + NUM_STEPS):
        if step == NUM_WARM:
            gc.collect()
            dist.barrier()
            sim.reset_peak(rank)
        _step(model, example, case)
        optimizer.step()
        optimizer.zero_grad()
    measured_bytes = sim.memory(rank).peak_bytes - base_bytes
    kinds = [kind for tier, kind in predicted.by_account if tier is Tier.HOST]
    host = {kind.name: (sharded.ledger.peak(kind, Tier.HOST), predicted.by_account[Tier.HOST, kind]) for kind in kinds}
    moment = predicted.peak_moment[Tier.DEVICE]
    return Outcome(measured_bytes, predicted.device_bytes, predicted.late_bytes, moment, host)


def _settled_bytes(rank: int) -> int:
    """What the device holds when all that is gone is freed: the last case's engine goes with its cycles, and its last collectives."""
    dist.barrier()
    found = [-1]
    while len(found) < 4 or len(set(found[-3:])) > 1:
        gc.collect()
        time.sleep(0.01)
        found.append(sim.memory(rank).live_bytes)
    return found[-1]


def _step(model: nn.Module, example: Example, case: Case) -> None:
    for number in range(case.accumulation):
        is_held = number < case.accumulation - 1 and not case.is_synced
        inputs, targets = _on_device(example.inputs), _on_device(example.targets)
        with shardwise.no_sync(model) if is_held else nullcontext():
            _loss(model, example, inputs, targets).backward()
        del inputs, targets


def _loss(model: nn.Module, example: Example, inputs: Any, targets: Any) -> torch.Tensor:
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    if example.loss is not None:
        return example.loss(output, *targets)
    return output if isinstance(output, torch.Tensor) else output.loss


def _on_device(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: value.to("sim") for key, value in tree.items()}
    return tuple(tensor.to("sim") for tensor in tree)
