"""Memory and work of operations on fake tensors: which storages live, for how long, and what kernels compute and move.

Knows no units and no plans. Where torch would write a sum of gradients into memory that nobody else holds, but does not do so for
fake tensors, it is counted as if it did.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwise.devices import torch_private

_NOT_KERNELS = frozenset({"prim", "prims"})
_ALIKE = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: torch.ops.aten._scaled_dot_product_flash_attention_backward,
}
"""Kernels that torch has no formula for, and those that compute the same."""


@dataclass
class Work:
    """What was computed since it was last asked for."""

    flops: float = 0.0
    matmul_flops: float = 0.0
    moved_bytes: float = 0.0
    num_kernels: int = 0
    matmul_bytes: float = 0.0
    """The part of ``moved_bytes`` that kernels with ``matmul_flops`` move."""
    attention_flops: float = 0.0
    """The part of ``matmul_flops`` in fused attention."""


class Live(TorchDispatchMode):
    """Counts the memory that operations inside it take on one device: those live now, and the most since `cut`.

    Args:
        device: Results elsewhere count for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._sole_owners = _owners_in_sum()
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, Any] = {}
        self._ignored: dict[int, Any] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.work = Work()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory that is counted elsewhere: parameters, buffers, inputs."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._ignored[storage._cdata] = storage

    def cut(self) -> tuple[Work, int]:
        """The work and the peak since the last cut; both begin anew."""
        found = self.work, self.peak_bytes
        self.work, self.peak_bytes = Work(), self.live_bytes
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        kwargs = kwargs or {}
        reused = self._reused(func, args)
        result = func(*args, **kwargs)
        if func.namespace in _NOT_KERNELS:
            return result
        made = _tensors(result)
        if reused is not None:
            self._let_go(reused)
        is_new = [self._meet(tensor) for tensor in made]
        if any(is_new) or func._schema.is_mutable:
            self._count(func, args, kwargs, result, made)
        return result

    def _meet(self, tensor: torch.Tensor) -> bool:
        """Note the memory of a result; returns whether it was not known."""
        if tensor.layout is not torch.strided or tensor.device != self._device:
            return tensor.device != self._device
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._ignored:
            return False
        self._sizes[key] = storage.nbytes()
        self._watches[key] = weakref.ref(storage, partial(_forget, weakref.ref(self), key))
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return True

    def _let_go(self, key: int) -> None:
        self._watches.pop(key, None)
        self.live_bytes -= self._sizes.pop(key, 0)

    def _reused(self, func: Any, args: Any) -> int | None:
        """The memory into which autograd adds a gradient, where it holds it alone."""
        if func is not torch.ops.aten.add.Tensor or torch_private.graph_task() == -1 or torch.is_grad_enabled():
            return None
        held, other = args[0], args[1]
        if not isinstance(other, torch.Tensor) or held.shape != other.shape or held.dtype != other.dtype:
            return None
        key = torch_private.storage_key(held)
        owners = torch_private.num_owners(held)
        return key if key in self._sizes and all(a <= b for a, b in zip(owners, self._sole_owners, strict=True)) else None

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, made: list[torch.Tensor]) -> None:
        work = self.work
        given = _tensors((args, kwargs))
        work.num_kernels += 1
        moved_bytes = sum(tensor.nbytes for tensor in (*given, *made) if tensor.layout is torch.strided)
        work.moved_bytes += moved_bytes
        formula = flop_registry.get(_ALIKE.get(func.overloadpacket, func.overloadpacket))
        if formula is None:
            work.flops += sum(tensor.numel() for tensor in made)
            return
        with suppress(RuntimeError, ValueError, TypeError, AssertionError):  # Forms that a formula does not know.
            flops = float(formula(*args, **kwargs, out_val=result)) * _part_computed(func, args, kwargs)
            work.matmul_flops += flops
            work.matmul_bytes += moved_bytes
            work.flops += flops
            work.attention_flops += flops if "attention" in func.__name__ else 0.0


def _part_computed(func: Any, args: Any, kwargs: Any) -> float:
    """Fused attention leaves out what is masked as later; torch's formulas count all pairs."""
    if "attention" not in func.__name__:
        return 1.0
    names = [argument.name for argument in func._schema.arguments]
    is_causal = kwargs.get("is_causal", dict(zip(names, args, strict=False)).get("is_causal"))
    return 0.5 if is_causal else 1.0


def _forget(live: weakref.ref[Live], key: int, _: Any) -> None:
    found = live()
    if found is not None:
        found._let_go(key)


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    torch_private.map_tensors(torch.Tensor, found.append, tree)
    return found


class _Owners(TorchDispatchMode):
    """Looks at how many own the first operand of a sum of gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and torch_private.graph_task() != -1:
            held = args[0]
            self.found = torch_private.num_owners(held)
        return func(*args, **(kwargs or {}))


@cache
def _owners_in_sum() -> tuple[int, int]:
    """How many own a gradient, and its memory, that autograd alone holds while it adds another to it."""
    probe = _Owners()
    with torch_private.fake_tensor_mode(), torch.enable_grad(), probe:
        leaf = torch.zeros(2, requires_grad=True)
        twice = leaf * 2.0
        (twice.sin() + twice.cos()).sum().backward()
    return probe.found or (0, 0)
