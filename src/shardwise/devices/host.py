"""Memory of the host for what rests there: such that the device can reach it by itself, where the device has that."""

from __future__ import annotations

import torch

from shardwise.core.errors import ShardwiseError
from shardwise.core.sizes import format_bytes


def on_host(values: torch.Tensor, label: str) -> torch.Tensor:
    """A copy of values of a device in the host's memory.

    Args:
        label: What it is, for an error.
    """
    copy = empty_on_host(values.numel(), values.dtype, label)
    return copy.copy_(values.view(-1))


def empty_on_host(numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
    """Memory that stays: pinned, if there is an accelerator."""
    is_pinned = torch.accelerator.is_available() and numel > 0
    try:
        return torch.empty(numel, dtype=dtype, pin_memory=is_pinned)
    except RuntimeError as error:
        raise ShardwiseError(
            f"There is no room in the host's memory for {label}, {format_bytes(numel * dtype.itemsize)}: "
            f"{str(error).splitlines()[0]} Let less rest there (fraction), raise the limit of locked memory, or use more ranks."
        ) from error
