"""Optimizers of users: their groups come to hold this rank's segments, and their own ``step`` runs on them unchanged.

One pair of torch's global step hooks finds every optimizer that holds parameters of a sharded model, also one that was made
after ``shard``, or a group that was added in mid-run. Optimizers keep their class, hyper-parameters, hooks and schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.core.errors import PlanError
from shardwise.core.plan import Plan, StateKind
from shardwise.runtime.engine import Engine, slice_of
from shardwise.runtime.flat import ParamState, state_of
from shardwise.runtime.grads import GradFace

_WHOLE = tuple(cls for cls in (getattr(torch.optim, name, None) for name in ("Muon", "Adafactor")) if cls is not None)
_REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)


class Binding:
    """One optimizer that trains sharded parameters: what is put into its segments while it steps."""

    def __init__(self) -> None:
        self.faces: list[tuple[ParamState, GradFace]] = []
        self.is_stepping = False


_BINDINGS: WeakKeyDictionary[Optimizer, Binding] = WeakKeyDictionary()


def needs_whole_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer's arithmetic mixes elements of a parameter, so that segments would change it."""
    return isinstance(optimizer, _WHOLE)


def check_optimizer(optimizer: Optimizer, plan: Plan, layout: str) -> None:
    """Refuse optimizers that cannot train shards."""
    name = type(optimizer).__name__
    if isinstance(optimizer, _REFUSED) and StateKind.OPTIM in plan.sharded:
        raise PlanError(f"{name} cannot be sharded: its state is not per element. Use stage=0 with it, or another optimizer.")
    if needs_whole_parameters(optimizer) and StateKind.OPTIM in plan.sharded and layout != "whole":
        raise PlanError(
            f"{name} works on whole matrices, but the plan cuts them (layout '{layout}'). Use layout='whole', or pass the "
            "optimizer to shardwise.shard, which then chooses it by itself."
        )


def adopt(optimizer: Optimizer) -> Binding | None:
    """Put segments into an optimizer's groups wherever they hold parameters of a sharded model."""
    found = False
    for group in optimizer.param_groups:
        for position, param in enumerate(group["params"]):
            state = state_of(param)
            if state is None:
                continue
            found = True
            if param is not state.segment:
                check_optimizer(optimizer, state.host.plan, state.host.layout_kind)
                group["params"][position] = state.segment
                if param in optimizer.state:
                    optimizer.state[state.segment] = _cut_state(optimizer.state.pop(param), state)
    if not found:
        return None
    return _BINDINGS.setdefault(optimizer, Binding())


def _cut_state(values: dict[str, Any], state: ParamState) -> dict[str, Any]:
    """This rank's part of optimizer state that was built on the full parameter."""
    if state.piece.is_whole:
        return values
    if state.piece.numel == 0:
        return {}
    cut = {}
    for key, value in values.items():
        is_per_element = isinstance(value, torch.Tensor) and tuple(value.shape) == state.spec.shape and value.dim() > 0
        cut[key] = slice_of(value, state, state.segment).clone() if is_per_element else value
    return cut


def states_of(optimizer: Optimizer) -> list[ParamState]:
    """The sharded parameters that an optimizer trains, in its order."""
    found = (state_of(param) for group in optimizer.param_groups for param in group["params"])
    return [state for state in found if state is not None]


def engines_of(states: Iterable[ParamState]) -> list[Engine]:
    """The engines of the models that parameters belong to."""
    hosts = {id(state.host): state.host for state in states}
    return [host for host in hosts.values() if isinstance(host, Engine)]


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    binding = adopt(optimizer)
    if binding is None:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _prepare(optimizer, binding)
        return None
    wrapped = _wrap_closure(optimizer, binding, closure)
    if len(args) > 1:
        return (args[0], wrapped, *args[2:]), kwargs
    return args, {**kwargs, "closure": wrapped}


def _wrap_closure(optimizer: Optimizer, binding: Binding, closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure runs with the gradients as users see them; what follows it sees plain ones."""

    def run() -> Any:
        _restore(binding)
        for engine in engines_of(states_of(optimizer)):
            engine.executor.refresh(engine.executor.units)
        loss = closure()
        _prepare(optimizer, binding)
        return loss

    return run


def _prepare(optimizer: Optimizer, binding: Binding) -> None:
    """Give each segment its plain gradient, or none if the ranks agree to skip the step."""
    _restore(binding)
    states = states_of(optimizer)
    may_step = all([engine.before_update() for engine in engines_of(states)])
    binding.is_stepping = may_step
    for state in states:
        held = state.segment.grad
        if not isinstance(held, GradFace):
            continue
        binding.faces.append((state, held))
        # A parameter without elements is updated everywhere, as by plain torch; one whose elements others own is not.
        is_here = state.piece.numel > 0 or state.spec.numel == 0
        plain = held.usable() if may_step and is_here else None
        state.segment.grad = None if plain is None else plain.view_as(state.segment)


def _restore(binding: Binding) -> None:
    for state, face in binding.faces:
        if state.segment.grad is not None or state.piece.numel == 0 or not binding.is_stepping:
            state.segment.grad = face
    binding.faces.clear()


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    binding = _BINDINGS.get(optimizer)
    if binding is None:
        return
    touched = [state for state, _ in binding.faces] if binding.is_stepping else []
    _restore(binding)
    optim_bytes = state_bytes(optimizer)
    for engine in engines_of(states_of(optimizer)):
        units = {state.flat.spec.unit for state in touched if state.host is engine}
        engine.after_update([name for name in engine.executor.units if name in units], optim_bytes)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state tensors on this rank."""
    tensors: Iterable[Any] = (value for values in optimizer.state.values() for value in values.values())
    return sum(value.numel() * value.element_size() for value in tensors if isinstance(value, torch.Tensor))


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
