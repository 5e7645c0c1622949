"""A forward on fake tensors: the order of a step's moments, before anything is allocated or sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.core.trace import Moment, Point, Trace, mirror
from shardwise.core.unit import Unit
from shardwise.devices import torch_private

_log = logging.getLogger("shardwise")

Fake = Callable[[str, torch.Tensor], torch.Tensor]
"""Makes a fake tensor of a parameter, given its name, or of a buffer, which is given none."""


@dataclass
class Rehearsal:
    """What a forward on fake tensors showed: the trace, and units that are read in calls of modules that do not hold them."""

    trace: Trace
    also_opened: list[tuple[str, str]]


@dataclass
class Recorder:
    """Open calls, and the moments they bring."""

    units: set[str]
    open_calls: list[str] = field(default_factory=list)
    open_units: list[list[str]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    also_opened: list[tuple[str, str]] = field(default_factory=list)

    def enter(self, name: str) -> None:
        """A call of a module begins."""
        self.open_calls.append(name)
        self.open_units.append([])
        if name in self.units:
            self._open(name)
        for unit in [unit for module, unit in self.also_opened if module == name]:
            self._open(unit)

    def _open(self, unit: str) -> None:
        self.note(Moment(Point.PRE_FORWARD, unit))
        self.open_units[-1].append(unit)

    def note(self, moment: Moment) -> None:
        """A moment has come."""
        self.moments.append(moment)

    def leave(self) -> None:
        """The innermost call has returned."""
        self.open_calls.pop()
        for unit in reversed(self.open_units.pop()):
            self.note(Moment(Point.POST_FORWARD, unit))

    def read(self, unit: str) -> None:
        """A parameter of a unit is read: the innermost call opens it, unless it is open."""
        if self.open_calls and not any(unit in opened for opened in self.open_units):
            self.also_opened.append((self.open_calls[-1], unit))
            self._open(unit)


class Reads(TorchFunctionMode):
    """Sees which parameters operations read."""

    def __init__(self, recorder: Recorder, unit_of: dict[int, str]) -> None:
        super().__init__()
        self._recorder = recorder
        self._unit_of = unit_of

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        def look(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in self._unit_of:
                self._recorder.read(self._unit_of[id(tensor)])
            return tensor

        torch_private.map_tensors(torch.Tensor, look, (tuple(args), kwargs or {}))
        return func(*args, **(kwargs or {}))


def rehearse(model: nn.Module, units: Sequence[Unit], example: Any) -> Rehearsal | None:
    """Run a plain model once on fake tensors. Returns None where that cannot work: then the first step is recorded."""
    args, kwargs = as_call(example)
    recorder = Recorder({unit.name for unit in units})
    mode = torch_private.fake_tensor_mode()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            unit_of = stack.enter_context(fake_values(model, units, lambda name, tensor: mode.from_tensor(tensor)))
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(lambda *_, name=name: recorder.enter(name)).remove)
                stack.callback(module.register_forward_hook(lambda *_: recorder.leave(), always_call=True).remove)
            fake_args, fake_kwargs = torch_private.map_tensors(torch.Tensor, mode.from_tensor, (args, kwargs))
            stack.enter_context(mode)
            stack.enter_context(Reads(recorder, unit_of))
            model(*fake_args, **fake_kwargs)
    except Exception as error:  # Whatever user code does with values that are not there.
        _log.info("The model cannot run on fake tensors (%s); its first step is recorded instead.", error)
        return None
    return Rehearsal(Trace(tuple(recorder.moments), mirror(recorder.moments), "fake"), recorder.also_opened)


def as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call with a batch: a tensor, a tuple of arguments or a dict of keywords."""
    if isinstance(example, dict):
        return (), example
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


@contextmanager
def fake_values(model: nn.Module, units: Sequence[Unit], fake: Fake) -> Iterator[dict[int, str]]:
    """Put fake tensors in the places of parameters and buffers, and everything that a forward may set back afterwards.

    Args:
        fake: Makes one of a tensor. It is kept at all places that share that.

    Returns:
        The unit of each fake parameter, by its identity.
    """
    unit_of: dict[int, str] = {}
    unit_by_name = {name: unit.name for unit in units for param in unit.params for name in param.names}
    fakes: dict[int, Any] = {}

    def once(name: str, tensor: torch.Tensor) -> Any:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = fake(name, tensor)
        return fakes[id(tensor)]

    with _set_back(model):
        for prefix, module in model.named_modules():
            for key, param in [(key, param) for key, param in module._parameters.items() if param is not None]:
                name = f"{prefix}.{key}" if prefix else key
                module._parameters[key] = made = once(name, param)
                if name in unit_by_name:
                    unit_of[id(made)] = unit_by_name[name]
            for key, buffer in [(key, buffer) for key, buffer in module._buffers.items() if buffer is not None]:
                module._buffers[key] = once("", buffer)
        yield unit_of


@contextmanager
def _set_back(model: nn.Module) -> Iterator[None]:
    """Let modules have the attributes afterwards that they have before."""
    modules = list(model.modules())
    before = [{key: dict(value) if isinstance(value, dict) else value for key, value in vars(m).items()} for m in modules]
    try:
        yield
    finally:
        for module, state in zip(modules, before, strict=True):
            for key in set(vars(module)) - set(state):
                del module.__dict__[key]
            for key, value in state.items():
                if isinstance(value, dict) and isinstance(vars(module).get(key), dict):
                    module.__dict__[key].clear()
                    module.__dict__[key].update(value)
                else:
                    module.__dict__[key] = value
