"""Measures what a link can carry, before it carries anything else."""

from __future__ import annotations

import torch

from shardwise.wire.comm import Lanes

_NUM_BYTES = 8 * 2**20
_NUM_TRIES = 3


def link_bytes_per_second(lanes: Lanes, device: torch.device) -> float:
    """Bytes a second that reach this rank in a gather of a few MiB, the best of some tries; 0 alone. A collective."""
    if lanes.size == 1:
        return 0.0
    own = _NUM_BYTES // lanes.size
    cuts = [own * rank for rank in range(lanes.size + 1)]
    buffer = torch.zeros(cuts[-1], dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(_NUM_TRIES):
        handle = lanes.gather.all_gather(buffer, cuts, label="the measure of a link")
        handle.wait()
        handle.receipt.wait()
        best = max(best, handle.wire_bytes / max(handle.moving_seconds, 1e-9))
    return best
