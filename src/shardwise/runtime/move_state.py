"""An optimizer's state of one segment on its way to another tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.ledger import Tier
from shardwise.core.rest import Rest
from shardwise.runtime.flat import HOST, ParamState
from shardwise.runtime.optimizer import lines_of
from shardwise.runtime.state_lines import is_form, is_per_element


class StateMove:
    """What one optimizer holds of one segment, and what it will hold."""

    def __init__(self, optimizer: Optimizer, state: ParamState, rest: Rest) -> None:
        self.lines = lines_of(optimizer)
        self._optimizer = optimizer
        self._state = state
        self._rest = rest
        self._found: dict[str, Any] = {}

    def prepare(self) -> None:
        """Bring the state to where it will rest.

        Raises:
            OffloadError: A disk cannot be read or written.
        """
        state = self._state
        held = self._optimizer.state.get(state.segment) or {}
        device = state.flat.device if self._rest.optim is Tier.DEVICE else HOST
        goes_along = _keeps_counts_on_device(self._optimizer, state)
        for key, value in self.lines.whole(held, state).items():
            if not isinstance(value, torch.Tensor):
                continue
            has_elements = is_per_element(key, value, state)
            if has_elements and self._rest.optim is Tier.DISK and state.piece.numel:
                if not is_form(held[key]):
                    self._found[key] = self.lines.write(key, value, state)
            elif has_elements or value.dim() or goes_along or device == HOST:
                # Counts of steps and the like stay on the host, unless the optimizer's kernels want them beside the parameter.
                self._found[key] = value.to(device)

    def undo(self) -> None:
        """Let go of what was prepared."""
        self._found.clear()
        if self._rest.optim is Tier.DISK:
            self.lines.drop(self._state.flat)

    def commit(self) -> None:
        """Let the optimizer hold it."""
        if self._found:
            self._optimizer.state[self._state.segment].update(self._found)


def _keeps_counts_on_device(optimizer: Optimizer, state: ParamState) -> bool:
    groups = (group for group in optimizer.param_groups if any(param is state.segment for param in group["params"]))
    return any(group.get("fused") or group.get("capturable") for group in groups)


def put_in_place_of(optimizer: Optimizer, replaced: Mapping[int, nn.Parameter]) -> None:
    """Let an optimizer have other segments, by the identity of those that it has."""
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(id(param), param) for param in group["params"]]
    held = [(replaced.get(id(param), param), values) for param, values in optimizer.state.items()]
    optimizer.state.clear()
    for param, values in held:
        optimizer.state[param] = values
