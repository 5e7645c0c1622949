"""Optimizers of users: their groups come to hold this rank's segments, and their own ``step`` runs on them unchanged.

One pair of torch's global step hooks finds every optimizer that holds parameters of a sharded model, also one that was made
after ``shard``, or a group that was added in mid-run. Optimizers keep their class, hyper-parameters, hooks and schedulers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.core.errors import PlanError
from shardwise.core.footprint import ADAM_STATES
from shardwise.core.ledger import Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.devices import torch_private
from shardwise.runtime.double import Update, is_double
from shardwise.runtime.engine import Engine
from shardwise.runtime.flat import FlatState, ParamState, slice_of, state_of
from shardwise.runtime.grads import GradFace
from shardwise.runtime.state_lines import StateLines, is_form
from shardwise.runtime.turns import GroupsByTurn, OptimizerState, is_apart, is_at_hand, turns_of

_WHOLE = tuple(cls for cls in (getattr(torch.optim, name, None) for name in ("Muon", "Adafactor")) if cls is not None)
_ONE_STATE = (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Muon)
_REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)


class Binding:
    """One optimizer that trains sharded parameters: what is put into its segments while it steps."""

    def __init__(self) -> None:
        self.faces: list[tuple[ParamState, GradFace]] = []
        self.is_stepping = False
        self.groups: list[dict[str, Any]] | None = None
        """The optimizer's own groups, while it goes through them by turns."""
        self.touched: list[ParamState] = []
        self.is_delayed = False
        """Whether the step that runs leaves its update to a thread."""
        self.update: Update | None = None
        self.is_watched = False
        """Whether reads and writes of the optimizer's state wait for updates."""
        self.hooks: list[Any] = []
        self.lines = StateLines()


_BINDINGS: WeakKeyDictionary[Optimizer, Binding] = WeakKeyDictionary()


def needs_whole_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer's arithmetic mixes elements of a parameter, so that segments would change it."""
    return isinstance(optimizer, _WHOLE)


def num_states_of(optimizers: Sequence[Optimizer]) -> int:
    """Numbers that optimizers will keep for each element of a parameter, as far as it is known of their class."""

    def count(optimizer: Optimizer) -> int:
        if isinstance(optimizer, torch.optim.SGD):
            return int(any(group["momentum"] for group in optimizer.param_groups))
        return 1 if isinstance(optimizer, _ONE_STATE) else ADAM_STATES

    return max((count(optimizer) for optimizer in optimizers), default=ADAM_STATES)


def check_optimizer(optimizer: Optimizer, plan: Plan, layout: str) -> None:
    """Refuse optimizers that cannot train shards."""
    name = type(optimizer).__name__
    if isinstance(optimizer, _REFUSED) and StateKind.OPTIM in plan.sharded:
        raise PlanError(f"{name} cannot be sharded: its state is not per element. Use stage=0 with it, or another optimizer.")
    if isinstance(optimizer, _REFUSED) and plan.tiers:
        raise PlanError(f"{name} does not go through its groups one by one, so its state cannot rest elsewhere. Drop tiers.")
    if isinstance(optimizer, _REFUSED) and plan.is_delayed:
        raise PlanError(f"{name} cannot be updated beside the next step: it goes through no groups. Use sync='exact' with it.")
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
    binding = _BINDINGS.setdefault(optimizer, Binding())
    if not binding.is_watched and any(engine.plan.is_delayed for engine in engines_of(states_of(optimizer))):
        binding.is_watched = True
        optimizer.register_state_dict_pre_hook(_finish_updates)
        optimizer.register_load_state_dict_pre_hook(_finish_updates)
    return binding


def _finish_updates(optimizer: Optimizer, *_: Any) -> None:
    """State is about to be read or replaced: no update may be under way."""
    for engine in engines_of(states_of(optimizer)):
        engine.updates.finish()


def _cut_state(values: dict[str, Any], state: ParamState) -> dict[str, Any]:
    """This rank's part of optimizer state that was built on the full parameter."""
    if state.piece.is_whole and state.segment.device == state.flat.device:
        return values
    if state.piece.numel == 0 and state.spec.numel:
        return {}
    cut = {}
    for key, value in values.items():
        is_per_element = isinstance(value, torch.Tensor) and tuple(value.shape) == state.spec.shape and key != "step"
        cut[key] = slice_of(value, state, state.segment).to(state.segment.device, copy=True) if is_per_element else value
    return cut


def lines_of(optimizer: Optimizer) -> StateLines:
    """What of an optimizer's state rests on disk."""
    return _BINDINGS.setdefault(optimizer, Binding()).lines


def states_of(optimizer: Optimizer) -> list[ParamState]:
    """The sharded parameters that an optimizer trains, in its order."""
    found = (state_of(param) for group in optimizer.param_groups for param in group["params"])
    return [state for state in found if state is not None]


def optimizers_of(engine: Engine) -> list[Optimizer]:
    """All optimizers that are known to train parameters of a model, with segments in their groups."""
    found = [each for each in list(_BINDINGS) if any(state.host is engine for state in states_of(each))]
    for optimizer in found:
        _give_groups_back(optimizer, _BINDINGS[optimizer])  # A step that failed has left them.
        adopt(optimizer)  # Groups may have been added since the last step.
    return found


def engines_of(states: Iterable[ParamState]) -> list[Engine]:
    """The engines of the models that parameters belong to."""
    hosts = {id(state.host): state.host for state in states}
    return [host for host in hosts.values() if isinstance(host, Engine)]


def _flats_of(states: Iterable[ParamState]) -> list[FlatState]:
    return list({id(state.flat): state.flat for state in states}.values())


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if is_double(optimizer):
        return None
    known = _BINDINGS.get(optimizer)
    if known is not None:
        _give_groups_back(optimizer, known)  # A step that failed has left them.
    binding = adopt(optimizer)
    if binding is None:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _prepare(optimizer, binding)
        if _away(states_of(optimizer), binding):
            _hook_around(optimizer, binding)
        return None
    binding.is_stepping = False  # Until the closure has made gradients.
    wrapped = _wrap_closure(optimizer, binding, closure)
    if len(args) > 1:
        return (args[0], wrapped, *args[2:]), kwargs
    return args, {**kwargs, "closure": wrapped}


def _wrap_closure(optimizer: Optimizer, binding: Binding, closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure runs with the gradients as users see them; what follows it sees plain ones."""

    def run() -> Any:
        _give_groups_back(optimizer, binding)
        _restore(binding)
        for engine in engines_of(states_of(optimizer)):
            if not engine.plan.is_delayed:
                engine.executor.refresh(engine.executor.units)
        loss = closure()
        _prepare(optimizer, binding)
        _take_turns(optimizer, binding)
        return loss

    return run


def _prepare(optimizer: Optimizer, binding: Binding) -> None:
    """Give each segment its plain gradient, or none if the ranks agree to skip the step."""
    _restore(binding)
    states = states_of(optimizer)
    engines = engines_of(states)
    may_step = all([engine.before_update() for engine in engines])
    for engine in engines if may_step else ():
        engine.updates.before_update()
    binding.is_stepping = may_step
    binding.is_delayed = may_step and all(engine.updates.is_due for engine in engines)
    binding.update = None
    binding.touched = [state for state in states if may_step and isinstance(state.segment.grad, GradFace)]
    away = _away(states, binding)
    for state in states:
        held = state.segment.grad
        if not isinstance(held, GradFace) or (may_step and state.flat in away):
            continue
        binding.faces.append((state, held))
        # A parameter without elements is updated everywhere, as by plain torch; one whose elements others own is not.
        is_here = state.piece.numel > 0 or state.spec.numel == 0
        plain = held.usable() if may_step and is_here else None
        state.segment.grad = None if plain is None else plain.view_as(state.segment)


def _away(states: Iterable[ParamState], binding: Binding) -> set[FlatState]:
    """Buffers that the optimizer's own step does not update as they are."""
    return {flat for flat in _flats_of(states) if not is_at_hand(flat) or (binding.is_delayed and is_apart(flat))}


def _restore(binding: Binding) -> None:
    for state, face in binding.faces:
        if state.segment.grad is not None or state.piece.numel == 0 or not binding.is_stepping:
            state.segment.grad = face
    binding.faces.clear()


def _hook_around(optimizer: Optimizer, binding: Binding) -> None:
    """Let the groups come by turns after all hooks that users have set before a step, and be whole before those after it."""
    if not binding.hooks:
        before = optimizer.register_step_pre_hook(lambda held, args, kwargs: _take_turns(held, binding))
        after = optimizer.register_step_post_hook(lambda held, args, kwargs: _give_groups_back(held, binding))
        binding.hooks = [before, after]
    before, after = binding.hooks
    torch_private.put_around_step_hooks(optimizer, before.id, after.id)


def _take_turns(optimizer: Optimizer, binding: Binding) -> None:
    states = states_of(optimizer)
    if not binding.is_stepping or binding.groups is not None or not _away(states, binding):
        return
    binding.groups = optimizer.param_groups
    known = {id(state.segment) for state in states}
    held = OptimizerState(optimizer.state, binding.lines)
    delayed = [state for state in states if binding.is_delayed and is_apart(state.flat)]
    if delayed:
        binding.update = Update(optimizer, delayed, binding.lines)
        states = [state for state in states if not is_apart(state.flat)]
    optimizer.param_groups = GroupsByTurn(binding.groups, lambda: iter(turns_of(states, held)), known)


def _give_groups_back(optimizer: Optimizer, binding: Binding) -> None:
    if binding.groups is not None:
        optimizer.param_groups, binding.groups = binding.groups, None


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    binding = _BINDINGS.get(optimizer)
    if binding is None:
        return
    _give_groups_back(optimizer, binding)
    touched, binding.touched = binding.touched, []
    update, binding.update = binding.update, None
    _restore(binding)
    optim_bytes = state_bytes(optimizer)
    engines = engines_of(states_of(optimizer))
    for engine in engines:
        mine = [state for state in touched if state.host is engine]
        units = {state.flat.spec.unit for state in mine if update is None or not is_apart(state.flat)}
        engine.spent_grads.update(id(state) for state in mine)
        is_delayed = update is not None and bool(mine)
        engine.after_update([name for name in engine.executor.units if name in units], optim_bytes, is_delayed=is_delayed)
        _read_ahead_of_next(optimizer, engine)
    if update is not None and update.flats:
        for engine in engines:
            engine.executor.wait_until_copied()  # A hook of the user's may have begun a save since the gradients were looked at.
        for engine in engines:
            engine.updates.begin(update, engines[0].updates)


def _read_ahead_of_next(optimizer: Optimizer, engine: Engine) -> None:
    """Let the next backward have its update's first turns read from disk beside it, as far as there is room.

    Where anything else is on disk as well, the backward needs the room itself.
    """
    if engine.disk is None:
        return
    held = ref(optimizer)

    def read(plan: Plan) -> None:
        optimizer = held()
        places = (plan.tier(StateKind.GRAD).value, plan.tier(StateKind.PARAM).value, plan.activations)
        if optimizer is None or Tier.DISK.value in places:
            return
        for turn in turns_of(states_of(optimizer), OptimizerState(optimizer.state, lines_of(optimizer))):
            if not turn.ahead_of_grads():
                break

    engine.read_ahead = read


def state_bytes(optimizer: Optimizer) -> Counter[str]:
    """Bytes of an optimizer's state tensors on this rank, by the type of the device that they are on."""
    by_device: dict[torch.device, int] = {}
    has_forms = not lines_of(optimizer).is_empty
    for values in optimizer.state.values():
        for value in list(values.values()):  # An update may add to them meanwhile.
            # Counters of steps are on the host wherever the state is. Lines on disk are booked where they are made.
            if isinstance(value, torch.Tensor) and not (has_forms and is_form(value)):
                by_device[value.device] = by_device.get(value.device, 0) + value.nbytes
    found: Counter[str] = Counter()
    for device, num_bytes in by_device.items():
        found[device.type] += num_bytes
    return found


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
