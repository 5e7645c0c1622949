"""What tests of state off the device share: how cases are compared with the device alone, and a small model on disk."""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.testing import World
from tests.distributed.matrix import Case, Group, Outcome, difference, train

KINDS = ("optim", "grad", "param")
ON_DISK = dict.fromkeys(KINDS, "disk")
WIDTH, DEPTH = 64, 4


# ---------------------------------------------------------------- cases of the matrix


def try_case(case: Case, **how: Any) -> Outcome | str:
    """Train a case on this rank; if it fails alike on all ranks, the error."""
    try:
        return train(case, **how)
    except (shardwise.ShardwiseError, AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def train_groups(groups: Sequence[Group], **how: Any) -> list[Outcome | str]:
    """Train one case of each group, with all state on the device."""
    layouts = ["whole" if group.optimizer in ("Adafactor", "Muon") else "even" for group in groups]
    return [try_case(Case(*astuple(group), 0, 1, layout), **how) for group, layout in zip(groups, layouts, strict=True)]


def check_bits(world: World, ranks: int, cases: Sequence[Case], found: Sequence[Sequence[Outcome | str]], **how: Any) -> None:
    """All outcomes, by rank and case, are those of their group with all state on the device."""
    groups = sorted({case.group for case in cases})
    references = world.run(train_groups, groups, ranks=ranks, timeout_seconds=600, **how)
    wrong = []
    for rank in range(ranks):
        expected = dict(zip(groups, references[rank], strict=True))
        for case, outcome in zip(cases, found[rank], strict=True):
            reference = expected[case.group]
            assert not isinstance(reference, str), reference
            differs = outcome if isinstance(outcome, str) else difference(outcome, reference)
            if differs:
                wrong.append(f"rank {rank}, {case}: {differs}")
    assert not wrong, "\n".join([f"{len(wrong)} of {ranks * len(cases)}", *wrong[:10]])


# ---------------------------------------------------------------- a small model


def make(folder: str, seed: int = 0, **plan: Any) -> tuple[nn.Module, torch.optim.Optimizer, shardwise.Sharded]:
    """A few layers, an optimizer and a handle."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, shardwise.shard(model, optimizer, units=[nn.Linear], folder=folder, **plan)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step; its batch is this rank's own."""
    torch.manual_seed(10 * number + dist.get_rank())
    model(torch.randn(3, WIDTH)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters."""
    with shardwise.gathered(model):
        return [param.detach().clone() for param in model.parameters()]


def refusal(function: Callable[[], object]) -> str:
    """What the disk tier says when something is done; nothing, if it can be done."""
    try:
        function()
    except shardwise.OffloadError as error:
        return str(error)
    return ""
