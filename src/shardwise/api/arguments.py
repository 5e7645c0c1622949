"""What several calls of the public face take or tell alike."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

import shardwise
from shardwise.core.errors import UsageTypeError


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """The optimizers that were given.

    Raises:
        UsageTypeError: One of them is none.
    """
    optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise UsageTypeError(f"optimizer must be a torch.optim.Optimizer or a list of them but is a {type(each).__name__}.")
    return optimizers


def versions() -> dict[str, str]:
    """Of what is running, to be kept with what it writes."""
    return {"shardwise": shardwise.__version__, "torch": torch.__version__, "python": platform.python_version()}
