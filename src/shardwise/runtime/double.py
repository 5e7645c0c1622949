"""One update beside a step: an optimizer's double, which holds the same memory through tensors of its own. Knows no collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from threading import Event
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.ledger import Kind
from shardwise.devices import torch_private
from shardwise.runtime.flat import HOST, FlatState, ParamState, carry_attributes
from shardwise.runtime.grads import GradFace
from shardwise.runtime.offload import beside_the_loop
from shardwise.runtime.state_lines import StateLines
from shardwise.runtime.turns import GroupsByTurn, OptimizerState, turns_of

_OWN = ("param_groups", "state")
"""Attributes of an optimizer of which its double has its own."""


_DOUBLES: WeakSet[Optimizer] = WeakSet()


def is_double(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one that makes an update beside a step: whose hooks were called at the user's own step."""
    return optimizer in _DOUBLES


class Update:
    """One update of one optimizer, by a double of it: the optimizer's class, with the numbers of this moment.

    The double holds tensors of its own over the memory of the segments: those of the optimizer get the next gradients meanwhile.
    What is kept for a parameter is the same object in both.

    Args:
        optimizer: Whose step has been called.
        states: Those of its parameters that are updated here, with their gradients.
        lines: What of its state rests on disk.
    """

    def __init__(self, optimizer: Optimizer, states: Sequence[ParamState], lines: StateLines) -> None:
        self.flats = list({id(state.flat): state.flat for state in states if state.segment.grad is not None}.values())
        self.ended = Event()
        self.error: BaseException | None = None
        self._pool = states[0].host.pool
        self._optimizer = optimizer
        self._groups = list(optimizer.param_groups)
        self._segments = {id(state.segment): _twin(state.segment) for state in states}
        self._originals = {id(self._segments[id(state.segment)]): state.segment for state in states}
        self._double = self._make_double(optimizer)
        self._is_back = False
        self._before = [dict(group) for group in self._double.param_groups], dict(vars(self._double))
        self._fresh: dict[int, torch.Tensor] = {}
        """What was updated and has gone to disk since, by the identity of its buffer, for those who compute."""
        twins = [replace(state, segment=self._segments[id(state.segment)]) for state in states]
        held = OptimizerState(self._double.state, lines)
        self._turns = GroupsByTurn(
            self._double.param_groups, lambda: iter(turns_of(twins, held, self._keep)), {id(state.segment) for state in twins}
        )

    def _make_double(self, optimizer: Optimizer) -> Optimizer:
        double = torch_private.double_of(optimizer)
        _DOUBLES.add(double)
        for key, value in vars(optimizer).items():
            if key not in _OWN and isinstance(value, torch.Tensor):
                setattr(double, key, value.clone())  # Loss scalers change theirs in place.
        double.param_groups = [
            {**{key: _own(value) for key, value in group.items()}, "params": self._known(group["params"])}
            for group in self._groups
        ]
        double.state = defaultdict(dict)
        for param, values in optimizer.state.items():
            double.state[self._segments.get(id(param), param)] = values
        return double

    def _known(self, params: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        return [self._segments[id(param)] for param in params if id(param) in self._segments]

    def lend_grads(self) -> None:
        """The gradients are read from now on: whoever changes them waits for the end."""
        for twin in self._segments.values():
            if isinstance(twin.grad, GradFace) and twin.grad.buffer is not None:
                twin.grad.buffer.in_use = self.ended

    def run(self) -> None:
        """Make the update, in a thread. What goes wrong is told at the end."""
        try:
            groups, self._double.param_groups = self._double.param_groups, self._turns
            with torch.no_grad(), beside_the_loop():
                torch_private.step_without_hooks(self._double)
            self._double.param_groups = groups
        except BaseException as error:
            self.error = error
        finally:
            for twin in self._segments.values():
                twin.grad = None
            self.ended.set()

    def _keep(self, flat: FlatState, values: torch.Tensor | None) -> None:
        """A buffer was updated: nobody may see it yet. What goes to disk is copied for those who compute."""
        if values is not None:
            fresh = self._pool.take(values.numel(), flat.precision.compute, HOST, Kind.MASTER)
            self._fresh[id(flat)] = fresh.copy_(values)

    def bring_back(self) -> None:
        """Let the optimizer have what its double has made: state of new parameters, and what it counts by itself."""
        if self._is_back:
            return
        self._is_back = True
        for param, values in self._double.state.items():
            self._optimizer.state[self._originals.get(id(param), param)] = values
        groups, attributes = self._before
        for group, made, before in zip(self._groups, self._double.param_groups, groups, strict=True):
            group.update(_changes(made, before, "params"))
        vars(self._optimizer).update(_changes(vars(self._double), attributes, *_OWN))

    def drop(self) -> None:
        """Nobody is going to see what was updated."""
        while self._fresh:
            self._pool.give(self._fresh.popitem()[1], Kind.MASTER)

    def publish(self, flat: FlatState) -> None:
        """Let those who compute have the updated values of a buffer."""
        fresh = self._fresh.pop(id(flat), None)
        if fresh is None and flat.line is None:
            flat.publish()
        elif fresh is not None:
            flat.publish(fresh)
            self._pool.give(fresh, Kind.MASTER)


def _twin(segment: nn.Parameter) -> nn.Parameter:
    """Another tensor over the same memory, with the same gradient."""
    twin = nn.Parameter(segment.detach(), requires_grad=segment.requires_grad)
    carry_attributes(segment, twin)
    twin.grad = segment.grad
    return twin


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _changes(made: dict[str, Any], before: dict[str, Any], *left_out: str) -> dict[str, Any]:
    """What is another value than before, or was not there."""
    found = {key: value for key, value in made.items() if key not in left_out and value is not before.get(key)}
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor) or value != before.get(key)}
