"""Activations that rest elsewhere, in a run on fake tensors: which are taken, and what they take there. By the rules of the engine."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from shardwise.devices import torch_private
from shardwise.devices.live import Live
from shardwise.runtime.activations import LEAST_BYTES, MOST_STRETCH


class _Line:
    """Numbers that rest elsewhere, which one or more saved tensors show."""

    def __init__(self, away: Away, num_bytes: int) -> None:
        self._away = away
        self._num_bytes = num_bytes
        self._back: torch.Tensor | None = None
        self.num_waiting = 0
        away.add(num_bytes)

    def bring(self, device: torch.device) -> torch.Tensor:
        """Memory for them on the device, until all that show them have had it."""
        back = torch.empty(self._num_bytes, dtype=torch.uint8, device=device) if self._back is None else self._back
        self.num_waiting -= 1
        self._back = back if self.num_waiting > 0 else None
        return back

    def __del__(self) -> None:
        self._away.add(-self._num_bytes)


class _Saved:
    """One saved tensor."""

    def __init__(self, line: _Line, tensor: torch.Tensor) -> None:
        self.line = line
        self.dtype = tensor.dtype
        self.size = tuple(tensor.shape)
        self.stride = tuple(tensor.stride())
        line.num_waiting += 1


class Away:
    """Saved tensors that rest off the device."""

    def __init__(self, live: Live, device: torch.device) -> None:
        self._live = live
        self._device = device
        self._lines: WeakValueDictionary[tuple[object, ...], _Line] = WeakValueDictionary()
        self.live_bytes = self.peak_bytes = 0

    def hooks(self) -> Any:
        """Context in which autograd's saved tensors are taken."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def add(self, num_bytes: int) -> None:
        """So much came, or went."""
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def cut(self) -> int:
        """What rests there now. The peak begins anew."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def _pack(self, tensor: torch.Tensor) -> Any:
        is_leaf = tensor.is_leaf and tensor.requires_grad
        if tensor.layout is not torch.strided or tensor.nbytes < LEAST_BYTES or is_leaf or self._live.ignores(tensor):
            return tensor.detach()
        with torch.no_grad():
            values = tensor.detach()
            if _stretch(values) > MOST_STRETCH * tensor.numel():
                values = values.contiguous()
            key = (torch_private.storage_key(values), values.storage_offset(), _stretch(values), values.dtype, tensor._version)
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = _Line(self, _stretch(values) * values.element_size())
            return _Saved(line, values)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved  # type: ignore[no-any-return]
        with torch.no_grad():
            return saved.line.bring(self._device).view(saved.dtype).as_strided(saved.size, saved.stride)


def _stretch(tensor: torch.Tensor) -> int:
    """Elements of the memory that a tensor spans."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
