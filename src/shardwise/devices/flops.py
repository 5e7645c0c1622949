"""Floating-point operations: those that a piece of code does, and those that a device can do in a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_SIZE = 384
_SECONDS = 0.03


class FlopCounter(TorchDispatchMode):
    """Counts the operations of matrix products, convolutions and attention inside it, by torch's own formulas.

    torch's counter takes operations apart to count them, which may change their bits; this one lets them run as they are.

    Args:
        report: Told of the count when it stops.
    """

    def __init__(self, report: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report
        self.num_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            with suppress(RuntimeError, ValueError, TypeError, AssertionError):  # Forms that a formula does not know.
                self.num_flops += int(formula(*args, **(kwargs or {}), out_val=result))
        return result

    def start(self) -> None:
        """Count from here on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Count no more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._report(self.num_flops)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second that a device reaches in a product of two matrices; the best of a few tries."""
    a, b = (torch.ones(_SIZE, _SIZE, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    best, end = 0.0, time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = max(best, 2 * _SIZE**3 / (time.perf_counter() - begin))
    return best
