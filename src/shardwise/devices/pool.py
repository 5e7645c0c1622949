"""Buffers that units take in turn. A buffer that was given back may serve another unit, and is freed when the step has ended."""

from __future__ import annotations

import torch

from shardwise.core.ledger import Kind, Ledger


class Poison:
    """Whether memory that nobody holds is filled with NaN, so that a late read cannot go unnoticed. Tests turn it on."""

    enabled = False


class Pool:
    """Free buffers by size, dtype and device, and the ledger's account of those in use."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, kind: Kind) -> torch.Tensor:
        """A buffer of a size, with whatever values."""
        free = self._free.get((numel, dtype, device))
        with torch.inference_mode(False):  # A buffer that is first used in inference must serve training as well.
            buffer = free.pop() if free else torch.empty(numel, dtype=dtype, device=device)
        if Poison.enabled:
            poison(buffer)
        self._ledger.add(kind, numel * dtype.itemsize)
        return buffer

    def give(self, buffer: torch.Tensor, kind: Kind) -> None:
        """Hand a buffer back. Its values are nobody's from here on."""
        if Poison.enabled:
            poison(buffer)
        self._ledger.add(kind, -buffer.numel() * buffer.element_size())
        self._free.setdefault((buffer.numel(), buffer.dtype, buffer.device), []).append(buffer)

    def trim(self) -> None:
        """Free what nobody holds."""
        self._free.clear()


def poison(buffer: torch.Tensor) -> None:
    """Overwrite a buffer with values that no sum survives."""
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.fill_(float("nan"))
    else:
        buffer.fill_(1)
