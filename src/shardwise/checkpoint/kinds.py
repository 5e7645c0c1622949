"""What may be loaded into what: which dtypes into which, and whose state into which optimizer. Knows forms, not values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

_OF_TORCH = "torch.optim"
_BY_STATE = {
    frozenset({"exp_avg", "exp_avg_sq"}): ("AdamW", "Adam"),
    frozenset({"sum"}): ("Adagrad",),
    frozenset({"momentum_buffer"}): ("SGD",),
}
"""Which of torch's optimizers hold such tensors, where another tool does not say whose they are."""


def can_hold(here: torch.dtype, there: torch.dtype) -> bool:
    """Whether numbers of a file mean the same in a tensor of another dtype, but for their precision.

    >>> can_hold(torch.bfloat16, torch.float32), can_hold(torch.float32, torch.int64), can_hold(torch.int64, torch.int32)
    (True, False, True)
    """
    if here == there:
        return True
    if here.is_floating_point or here.is_complex:
        return (here.is_floating_point, here.is_complex) == (there.is_floating_point, there.is_complex)
    if there.is_floating_point or there.is_complex or torch.bool in (here, there):
        return False
    ours, theirs = torch.iinfo(here), torch.iinfo(there)
    return bool(ours.min <= theirs.min and theirs.max <= ours.max)


def kind_of(optimizer: Optimizer) -> str:
    """What an optimizer is called in a checkpoint: by torch's own class, if it is one or was made from one."""
    kinds = type(optimizer).__mro__
    found = (
        kind
        for kind in kinds
        if kind.__module__.startswith(_OF_TORCH) and kind is not Optimizer and issubclass(kind, Optimizer)
    )
    return next(found, type(optimizer)).__name__


def kinds_with(keys: Iterable[str]) -> Sequence[str]:
    """The optimizers that hold such tensors for a parameter, as far as it is known."""
    return _BY_STATE.get(frozenset(keys), ())


def is_of_kind(optimizer: Optimizer, saved: Any) -> bool:
    """Whether a state may be this optimizer's, by the kinds that a checkpoint names; whatever it is, if it names none."""
    return not isinstance(saved, list) or not saved or kind_of(optimizer) in saved
