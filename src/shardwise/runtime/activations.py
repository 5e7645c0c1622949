"""What the forward leaves for the backward, in the host's memory meanwhile."""

from __future__ import annotations

import sys

import torch

from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.devices import torch_private
from shardwise.devices.host import empty_on_host
from shardwise.runtime.executor import Executor

_LEAST_BYTES = 4096
"""What is smaller stays: it would take longer to send than it is worth."""


_MOST_STRETCH = 2
"""How much more memory than elements a tensor may span, to be taken with all that lies between."""


class OnHost:
    """One saved tensor on the host, for as long as autograd may ask for it."""

    def __init__(self, tensor: torch.Tensor, ledger: Ledger) -> None:
        self._device = tensor.device
        self._ledger = ledger
        self._size, self._stride = tuple(tensor.shape), tuple(tensor.stride())
        stretch = 1 + sum((size - 1) * stride for size, stride in zip(self._size, self._stride, strict=True))
        # The stretch of memory that it shows, so that it comes back in the same form and kernels add in the same order; unless it
        # shows but little of it.
        self._has_form = stretch <= _MOST_STRETCH * tensor.numel()
        self._values = empty_on_host(stretch if self._has_form else tensor.numel(), tensor.dtype, "activations")
        if self._has_form:
            self._values.copy_(tensor.as_strided((stretch,), (1,)))
        else:
            self._values.view(self._size).copy_(tensor)
        ledger.add(Kind.ACTIVATION, self._values.nbytes, Tier.HOST)

    def bring(self) -> torch.Tensor:
        """The tensor on its device again."""
        values = self._values.to(self._device)
        return values.as_strided(self._size, self._stride) if self._has_form else values.view(self._size)

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_values"):
            self._ledger.add(Kind.ACTIVATION, -self._values.nbytes, Tier.HOST)


class HostRoom:
    """Decides which saved tensors go to the host, and takes them in."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def takes(self, tensor: torch.Tensor) -> bool:
        """Activations of some size on the device: not parameters, which stay anyway, nor tensors of other libraries' kinds."""
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if (
            not is_plain
            or tensor.device.type == "cpu"
            or tensor.nbytes < _LEAST_BYTES
            or (tensor.is_leaf and tensor.requires_grad)
        ):
            return False
        key = torch_private.storage_key(tensor)
        return not any(flat.full is not None and torch_private.storage_key(flat.full) == key for flat in self._executor.flats)

    def put(self, tensor: torch.Tensor) -> OnHost:
        """Take a tensor in."""
        return OnHost(tensor.detach(), self._executor.ledger)
