"""What is refused before a model is sharded: nothing has been changed yet, and every rank says the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import UsageError, UsageTypeError
from shardwise.core.plan import Plan
from shardwise.core.unit import Unit
from shardwise.runtime.flat import state_of
from shardwise.runtime.registry import find_engine
from shardwise.wire.comm import Lanes, gather_bytes


def check_model(model: nn.Module) -> None:
    """Refuse what is no model, is sharded already, or has no shapes yet."""
    if not isinstance(model, nn.Module):
        raise UsageTypeError(f"model must be an nn.Module but is a {type(model).__name__}.")
    engine = find_engine(model)
    if engine is not None or any(state_of(param) is not None for param in model.parameters()):
        raise UsageError(
            "The model, or a part of it, is sharded already. Call shardwise.unshard(model) first to change the plan."
        )
    lazy = [name for name, param in model.named_parameters() if isinstance(param, nn.UninitializedParameter)]
    if lazy:
        raise UsageError(f"Parameter '{lazy[0]}' has no shape yet. Run one batch through the model before shardwise.shard.")


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer of another model."""
    own = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        held = [param for group in optimizer.param_groups for param in group["params"]]
        if held and not any(id(param) in own for param in held):
            raise UsageError(
                f"The {type(optimizer).__name__} holds {len(held)} parameters, but none of this model's. Build it over "
                "model.parameters(), after the model has its final dtype and device."
            )


def check_tables(model: nn.Module, ignored: set[nn.Parameter], lanes: Lanes) -> None:
    """Refuse embeddings that every rank would rescale by its own data."""
    for name, module in model.named_modules():
        has_limit = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        if has_limit and lanes.size > 1 and module.weight not in ignored:
            raise UsageError(
                f"The embedding '{name}' has max_norm={module.max_norm}: its forward rescales the rows that this rank's batch "
                "reads, so ranks would come to have different weights. Use max_norm=None and rescale after optimizer.step(), inside "
                "`with shardwise.gathered(model):`."
            )


def _facts_of(optimizer: Optimizer, names: dict[int, str]) -> Iterator[str]:
    """What must be the same of an optimizer on all ranks: its kind, the numbers of its groups, and what they hold."""
    for number, group in enumerate(optimizer.param_groups):
        place = f"{type(optimizer).__name__}, group {number}"
        for key, value in sorted(group.items()):
            plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if isinstance(plain, bool | int | float | str | tuple | None):
                yield f"{place}: {key} = {plain!r}"
        for param in group["params"]:
            yield f"{place}: holds {names.get(id(param), 'a parameter of another model')}"


def compare_ranks(model: nn.Module, units: Sequence[Unit], plan: Plan, optimizers: Sequence[Optimizer], lanes: Lanes) -> None:
    """Refuse to start if ranks have different plans, models or optimizers: name the first rank and the first difference."""
    if lanes.size == 1:
        return
    facts = [f"{key} = {value!r}" for key, value in plan.to_dict().items()]
    for unit in units:
        for param in unit.params:
            kind = "trained" if param.trainable else "frozen"
            facts.append(f"parameter {'/'.join(param.names)}: shape {param.shape}, {param.dtype}, {kind}, unit '{unit.label}'")
    names = {id(param): name for name, param in model.named_parameters()}
    for optimizer in optimizers:
        facts.extend(_facts_of(optimizer, names))
    texts = gather_bytes(lanes.gather, json.dumps(facts).encode(), label="plans and models")
    theirs = [json.loads(text) for text in texts]
    for rank, other in enumerate(theirs):
        if other != theirs[0]:
            place = next((at for at, (a, b) in enumerate(zip(theirs[0], other, strict=False)) if a != b), None)
            place = min(len(theirs[0]), len(other)) if place is None else place
            first, second = (facts[place] if place < len(facts) else "nothing more" for facts in (theirs[0], other))
            raise UsageError(
                f"Ranks disagree, so nothing was sharded: rank 0 has '{first}', rank {rank} has '{second}'. "
                "Build the same model and optimizer with the same plan on every rank."
            )
