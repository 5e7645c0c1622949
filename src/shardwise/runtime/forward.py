"""Calls of modules: entries into the model, frames of nested calls, units opened and closed around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.core.plan import Plan
from shardwise.core.trace import Moment, Point
from shardwise.devices import torch_private
from shardwise.devices.flops import FlopCounter
from shardwise.runtime.activations import Saved
from shardwise.runtime.flat import FlatState
from shardwise.runtime.script import Script
from shardwise.runtime.tensors import cast, tensors_in
from shardwise.telemetry.meter import Place

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine


@dataclass(eq=False)
class Frame:
    """One call of a hooked module that has not returned."""

    name: str
    is_entry: bool
    is_recompute: bool
    opened: list[str] = field(default_factory=list)
    num_pushed: int = 0


class Packed(NamedTuple):
    """A view of a gathered buffer that autograd saved: where it lies, not what it holds."""

    flat: FlatState
    unit: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    version: int


class Forward:
    """The stack of open calls of one model on one rank.

    An *entry* is a call from outside: of the model, or of one of its modules alone. A call inside a backward pass is a
    recomputation of activation checkpointing, and no entry.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._executor = engine.executor
        self.use_plan(engine.plan)
        self._compute_dtype = engine.plan.dtype("param_dtype")
        self._output_dtype = engine.plan.dtype("output_dtype")
        self._frames: list[Frame] = []
        self._script = Script(())
        self._kept: frozenset[str] = frozenset()
        self._came_from = Place.OUTSIDE
        self.flop_counter: FlopCounter | None = None
        """Set to count the operations of the next call with gradients from outside."""
        self._counting: FlopCounter | None = None
        self._moments: list[Moment] = []
        self.recorded: dict[str, tuple[Moment, ...]] = {}
        self.strays: tuple[str, ...] = ()
        self.last_entry = ""

    def use_plan(self, plan: Plan) -> None:
        """What calls go by from now on."""
        self._plan = plan
        self._is_sharded = plan.fetches_params
        self.watches_saved = self._is_sharded or self._engine.activations is not None
        """Whether what autograd saves is looked at."""

    @property
    def is_open(self) -> bool:
        """Whether a call of the model has not returned."""
        return bool(self._frames)

    @property
    def is_outside(self) -> bool:
        """Whether a call that begins now comes from outside."""
        return not self._frames and torch_private.graph_task() == -1

    def is_entered_at(self, name: str) -> bool:
        """Whether the innermost open call is an entry at a module."""
        return bool(self._frames) and self._frames[-1].is_entry and self._frames[-1].name == name

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module's forward: open the units that are gathered there, watch what autograd saves, cast inputs."""
        is_recompute = torch_private.graph_task() != -1
        is_entry = not self._frames and not is_recompute
        if is_entry:
            with torch_private.outside_transforms():
                self._begin_entry(name, module)
        frame = Frame(name, is_entry, is_recompute)
        self._frames.append(frame)
        with torch_private.outside_transforms():
            for unit in self._engine.opened_at(name):
                self.open(unit, frame)
        if self.watches_saved and torch.is_grad_enabled():
            self._watch_saved_tensors(frame)
            if self._is_sharded:
                self._watch_inputs(frame, args, kwargs)
        if self._compute_dtype is not None and self._plan.cast_forward_inputs and (is_entry or frame.opened):
            return cast(args, self._compute_dtype), cast(kwargs, self._compute_dtype)
        return None

    def leave(self, name: str, output: Any) -> Any:
        """After a module's forward, also a failed one: watch for its backward, close its units, cast outputs."""
        while self._frames:
            frame = self._frames.pop()
            for _ in range(frame.num_pushed):
                torch_private.pop_saved_tensor_hooks()
            if frame.name == name:
                break
            self._close(frame, None)
        else:
            return None
        self._close(frame, output)
        if frame.is_entry:
            with torch_private.outside_transforms():
                self._end_entry(name)
                if output is not None and not torch.is_grad_enabled():
                    self._engine.end_inference()
            if self._output_dtype is not None and output is not None:
                return cast(output, self._output_dtype)
        return None

    def open(self, unit: str, frame: Frame | None = None) -> None:
        """Hold a unit gathered until a call returns; by default, the innermost open one."""
        frame = frame or self._frames[-1]
        if frame.is_recompute:
            self._engine.backward.recompute(unit)
        else:
            passed, arrived = self._script.arrive(unit)
            self._executor.visit(passed, arrived, self._kept)
            if self._script.is_finished:
                self._executor.keep(self._kept)
            self._moments.append(Moment(Point.PRE_FORWARD, unit))
        self._executor.acquire(unit)
        frame.opened.append(unit)
        self._engine.meter.tracer.open("forward", unit)

    def read_on_demand(self, unit: str) -> None:
        """Weights are read without a call of their module: gather them for the innermost call, also in later steps."""
        frame = self._frames[-1]
        self.open(unit, frame)
        self._engine.open_also_at(frame.name, unit)

    def reset(self) -> None:
        """After a failure: no call is open."""
        self._stop_counting()
        for frame in self._frames:
            for _ in range(frame.num_pushed):
                torch_private.pop_saved_tensor_hooks()
        self._frames.clear()

    def _begin_entry(self, name: str, module: nn.Module) -> None:
        meter = self._engine.meter
        self._came_from = meter.place
        meter.move(Place.FORWARD if torch.is_grad_enabled() else Place.ASIDE)
        self._engine.begin_entry(module)
        schedule = self._engine.schedule_of(name)
        self._script = Script(schedule.phase(Point.PRE_FORWARD) if self._is_sharded else ())
        self._kept = schedule.kept_units if self._is_sharded and torch.is_grad_enabled() else frozenset()
        self._executor.keep(frozenset())
        self._moments = []
        self.last_entry = name
        if self.flop_counter is not None and torch.is_grad_enabled():
            self._counting, self.flop_counter = self.flop_counter, None
            self._counting.start()

    def _end_entry(self, name: str) -> None:
        self._stop_counting()
        if self._is_sharded:
            self._executor.visit(self._script.finish(), None, self._kept)
            self._executor.keep(self._kept)
            self._executor.drop_idle()
        self.strays = tuple(self._script.strays)
        self.recorded[name] = tuple(self._moments)
        meter = self._engine.meter
        meter.move(Place.AFTER_FORWARD if meter.place is Place.FORWARD else self._came_from)

    def _stop_counting(self) -> None:
        counter, self._counting = self._counting, None
        if counter is not None:
            counter.stop()

    def _close(self, frame: Frame, output: Any) -> None:
        """Watch for the backward of a call, and give its leases back, or hand them on to the backward."""
        differentiable = []
        if torch.is_grad_enabled() and output is not None:
            differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        backward = self._engine.backward
        if differentiable and frame.is_entry:
            self._engine.updates.after_call()
            OnGrads(differentiable, backward.note_begin, needs_all=False)
        if differentiable and frame.opened and self._is_sharded:
            units = tuple(frame.opened)
            OnGrads(differentiable, lambda: backward.expect(units), needs_all=False)
        escaped = self._escaped_units(frame, output)
        keeps = (frame.is_recompute or not self._plan.reshard_after_forward) and torch.is_grad_enabled() and self._is_sharded
        with torch_private.outside_transforms():
            for unit in reversed(frame.opened):
                self._engine.meter.tracer.close("forward", unit)
                self._moments.append(Moment(Point.POST_FORWARD, unit))
                if unit in escaped:
                    self._engine.pin(unit)
                if keeps:
                    backward.adopt(unit)
                else:
                    self._executor.release(unit)

    def _escaped_units(self, frame: Frame, output: Any) -> set[str]:
        """Units whose memory a call returns, for example its own weight: they must stay until the step has ended."""
        if not self._is_sharded or not frame.opened or output is None:
            return set()
        found = (self._executor.find(tensor) for tensor in tensors_in(output) if tensor.layout is torch.strided)
        return {hit[0].unit.name for hit in found if hit is not None}

    def _watch_saved_tensors(self, frame: Frame) -> None:
        """Let autograd save places instead of views, chained to hooks that are in force (only the topmost is called)."""
        top = torch_private.top_saved_tensor_hooks()
        owner = None if top is None else getattr(top[0], "__self__", None)
        is_ours = isinstance(owner, Chain) and owner.engine is self._engine
        if is_ours:
            return
        if not torch_private.saved_tensor_hooks_allowed():
            for unit in frame.opened:  # What is saved now are views: their memory must stay.
                self._engine.pin(unit)
            return
        chain = Chain(self._engine, top)
        torch_private.push_saved_tensor_hooks(chain.pack, chain.unpack)
        frame.num_pushed += 1

    def _watch_inputs(self, frame: Frame, args: Any, kwargs: Any) -> None:
        """When the gradients of all inputs of a call are there, its units are not needed any more."""
        if not frame.opened or frame.is_recompute:
            return
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad and not tensor.is_leaf]
        if inputs:
            units = tuple(frame.opened)
            OnGrads(inputs, lambda: self._engine.backward.close(units), needs_all=True)


class OnGrads:
    """Calls back once a backward pass, when one or all of some tensors have got their gradients.

    torch's own ``register_multi_grad_hook`` holds the tensors' graph in a cycle, so that activations live until garbage is
    collected; this holds nothing.
    """

    def __init__(self, tensors: list[torch.Tensor], callback: Callable[[], None], *, needs_all: bool) -> None:
        unique = {id(tensor): tensor for tensor in tensors}
        self._callback = callback
        self._num_needed = len(unique) if needs_all else 1
        self._task = -1
        self._num_seen = 0
        for tensor in unique.values():
            tensor.register_hook(self._on_grad)

    def _on_grad(self, grad: torch.Tensor) -> None:
        task = torch_private.graph_task()
        if task != self._task:
            self._task, self._num_seen = task, 0
        self._num_seen += 1
        if self._num_seen == self._num_needed:
            self._callback()


class Chain:
    """Saved-tensor hooks of one engine over those that were in force before."""

    def __init__(self, engine: Engine, covered: tuple[Any, Any] | None) -> None:
        self.engine = engine
        self.covered = covered
        self._memory = engine.executor.memory
        self._room = engine.activations

    def pack(self, tensor: torch.Tensor) -> Any:
        """Save a place for a view of a gathered buffer; anything else as before."""
        hit = self._memory.get(torch_private.storage_key(tensor)) if self._memory else None
        if hit is not None:
            unit, flat = hit
            if flat.full is not None and tensor.dtype == flat.full.dtype:
                return Packed(
                    flat, unit.unit.name, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor._version
                )
            self.engine.pin(unit.unit.name)
        if self.covered is not None:
            return (self.covered[0](tensor),)
        if self._room is not None and hit is None:
            away = self._room.put(tensor)
            if away is not None:
                return away
        # Detached, since an operation's output that it saves itself would hold the operation; with its version, since autograd
        # leaves the check for later writes to those who pack.
        return tensor.detach(), tensor._version

    def unpack(self, saved: Any) -> torch.Tensor:
        """The view again, of wherever the unit is gathered now."""
        if type(saved) is Packed:
            return self.engine.backward.restore(saved)
        if self._room is not None and isinstance(saved, Saved):
            return self._room.bring(saved)
        if self.covered is not None:
            return self.covered[1](saved[0])  # type: ignore[no-any-return]
        values, version = saved
        if values._version != version:
            raise RuntimeError(
                "One of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
                f"{tuple(values.shape)} is at version {values._version}; expected version {version} instead."
            )
        return values  # type: ignore[no-any-return]
