"""Activations that rest elsewhere, in a run on fake tensors: the engine's own choice of them, and what they take there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import OffloadError
from shardwise.devices import torch_private
from shardwise.runtime.activations import Room, Saved
from shardwise.runtime.flat import FlatState


class _Line:
    """Numbers that rest elsewhere."""

    def __init__(self, place: _Elsewhere, line: torch.Tensor) -> None:
        self._place = place
        self._form = line.numel(), line.dtype, line.device
        self._num_bytes = line.nbytes
        place.add(self._num_bytes)

    def bring(self) -> torch.Tensor:
        """Memory for them on their device."""
        numel, dtype, device = self._form
        return torch.empty(numel, dtype=dtype, device=device)

    def __del__(self) -> None:
        self._place.add(-self._num_bytes)


class _Elsewhere:
    """A place without memory, which counts what it would take."""

    is_open = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.live_bytes = self.peak_bytes = 0

    def suits(self, device: torch.device) -> bool:
        """What is on the device that computes."""
        return device == self._device

    def keep(self, line: torch.Tensor) -> _Line:
        """Take a line in."""
        return _Line(self, line)

    def fail(self, error: OffloadError) -> None:
        """Nothing fails here."""
        raise error

    def add(self, num_bytes: int) -> None:
        """So much came, or went."""
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class _Nobody:
    """Keeps no watch: the run itself counts what is held."""

    flats: Sequence[FlatState] = ()

    def note_activations(self) -> None:
        """There is nothing to look at."""


class Away(Room):
    """Saved tensors of a run that rest off the device."""

    _kinds = (torch.Tensor, nn.Parameter, *torch_private.FAKES)

    def __init__(self, device: torch.device) -> None:
        self._elsewhere = _Elsewhere(device)
        super().__init__(_Nobody(), (), self._elsewhere)

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """These stay in any case: parameters and buffers."""
        self._resident = {torch_private.storage_key(tensor) for tensor in tensors}

    def hooks(self) -> Any:
        """Context in which autograd's saved tensors are taken."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def peak_bytes(self) -> int:
        """The most that rested there since the last cut."""
        return self._elsewhere.peak_bytes

    def cut(self) -> int:
        """What rests there now. The peak begins anew."""
        self._elsewhere.peak_bytes = self._elsewhere.live_bytes
        return self._elsewhere.live_bytes

    def _pack(self, tensor: torch.Tensor) -> Any:
        away = self.put(tensor)
        return tensor.detach() if away is None else away

    def _unpack(self, saved: Any) -> torch.Tensor:
        return self.bring(saved) if isinstance(saved, Saved) else saved
