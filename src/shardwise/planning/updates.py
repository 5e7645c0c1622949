"""What an optimizer keeps for each parameter, and what its step takes besides: found by a step of it on tensors without memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import UsageError
from shardwise.devices import torch_private
from shardwise.devices.live import Live
from shardwise.planning.states import NUM_STATES
from shardwise.runtime.optimizer import num_states_of

_META = torch.device("meta")
_NUMEL = 4096
_BY_NAME: dict[str, tuple[type[Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "nadam": (torch.optim.NAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
}


@dataclass(frozen=True)
class Scratch:
    """Temporary numbers of an update: for each element of all parameters that are updated together, and of the largest of them."""

    of_all: float = 0.0
    of_largest: float = 0.0

    def num_elements(self, sizes: Sequence[int]) -> int:
        """For parameters of these sizes."""
        return round(self.of_all * sum(sizes) + self.of_largest * max(sizes, default=0))


@dataclass(frozen=True)
class UpdateCost:
    """Numbers of a parameter's dtype: kept for each element, and temporary ones on an accelerator and on the host.

    Torch updates all parameters at once on accelerators (``foreach``), and one after the other on the host.
    """

    num_states: float
    on_device: Scratch
    on_host: Scratch
    counter_bytes: int = 0
    """For each parameter, where its state is: fused kernels count steps on the device, others on the host."""


def update_cost(optimizer: Optimizer | str | int = "adamw") -> UpdateCost:
    """What the step of an optimizer takes.

    Args:
        optimizer: One with any parameters; a name of ``NUM_STATES``; or how many numbers it keeps for each element, of one that needs
            no temporary numbers.

    Raises:
        UsageError: The name is unknown, or the number is below 0.

    >>> cost = update_cost("adamw")
    >>> cost.num_states, cost.on_device, cost.on_host
    (2.0, Scratch(of_all=1.0, of_largest=0.0), Scratch(of_all=0.0, of_largest=3.0))
    """
    if isinstance(optimizer, str):
        return _of_name(optimizer.lower())
    if isinstance(optimizer, Optimizer):
        return _measured(optimizer)
    if isinstance(optimizer, bool) or not isinstance(optimizer, int) or optimizer < 0:
        raise UsageError(f"optimizer must be an optimizer, a name, or a whole number of 0 or more, but is {optimizer!r}.")
    return UpdateCost(float(optimizer), Scratch(), Scratch())


@cache
def _of_name(name: str) -> UpdateCost:
    if name not in NUM_STATES:
        raise UsageError(f"optimizer must be one of {', '.join(NUM_STATES)}, or an optimizer, but is {name!r}.")
    if name not in _BY_NAME:
        return UpdateCost(float(NUM_STATES[name]), Scratch(of_all=1.0), Scratch(of_largest=1.0))
    kind, options = _BY_NAME[name]
    make: type = kind
    return _measured(make([nn.Parameter(torch.empty(1, device=_META))], lr=0.1, **options))


def _measured(optimizer: Optimizer) -> UpdateCost:
    if any(group.get("fused") for group in optimizer.param_groups):
        return UpdateCost(float(num_states_of([optimizer])), Scratch(), Scratch(), torch.float32.itemsize)  # All in one kernel.
    try:
        (kept, on_device), (_, on_host) = (_scratch(optimizer, is_foreach=is_foreach) for is_foreach in (True, False))
    except Exception:  # Whatever an optimizer of a user's does with tensors that have no values.
        # It is taken for one that works on a copy of gradients and on one of what it makes of them.
        return UpdateCost(float(num_states_of([optimizer])), Scratch(of_all=2.0), Scratch(of_largest=2.0))
    return UpdateCost(kept, on_device, on_host)


def _scratch(optimizer: Optimizer, *, is_foreach: bool) -> tuple[float, Scratch]:
    """Numbers that are kept for each element, and temporary ones: by steps on two parameters, and on three alike.

    One would not do: what was made for it is still there while the next one is updated.
    """
    two, three = (_step(optimizer, num_params, is_foreach=is_foreach) for num_params in (2, 3))
    of_all = (three[1] - two[1]) / _NUMEL
    return (three[0] - two[0]) / _NUMEL, Scratch(of_all, two[1] / _NUMEL - 2 * of_all)


def _step(optimizer: Optimizer, num_params: int, *, is_foreach: bool) -> tuple[float, float]:
    """Numbers that are kept, and temporary ones at most, in a second step on parameters of one size."""
    width = round(_NUMEL**0.5)  # Matrices: some optimizers take no others.
    params = [nn.Parameter(torch.empty(width, width, device=_META)) for _ in range(num_params)]
    double = torch_private.double_of(optimizer)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    if "foreach" in options:
        options["foreach"] = is_foreach if options["foreach"] is None else options["foreach"]
    double.param_groups = [{**options, "params": params}]
    double.state = defaultdict(dict)
    for param in params:
        param.grad = torch.empty_like(param)
    live = Live(_META)
    live.ignore([tensor for param in params for tensor in (param, param.grad) if tensor is not None])
    with live:
        torch_private.step_without_hooks(double)
        kept_bytes = live.live_bytes
        live.cut()
        torch_private.step_without_hooks(double)
        _, peak_bytes = live.cut()
    item_bytes = params[0].element_size()
    return kept_bytes / item_bytes, (peak_bytes - kept_bytes) / item_bytes
