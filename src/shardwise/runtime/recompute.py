"""Blocks whose forward is run again in the backward, instead of leaving anything for it: ``activations="recompute"``.

A block is a unit that has modules inside, but no other unit. Its forward is a checkpoint of torch, not reentrant, which hooks begin and
end: nothing else is put on the users' modules. What is run again is the forward alone, without the users' hooks around it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.core.unit import ROOT, Unit
from shardwise.devices import torch_private
from shardwise.runtime.forward import Chain
from shardwise.runtime.hooks import Hook

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine

RECOMPUTE = "recompute"
"""The plan's word for it."""


def find_blocks(units: Sequence[Unit], modules: dict[str, nn.Module]) -> list[str]:
    """Names of the modules that are run again."""
    names = [unit.name for unit in units]
    return [
        name
        for name in names
        if name != ROOT
        and any(True for _ in modules[name].children())
        and not any(other.startswith(f"{name}.") for other in names)
    ]


@dataclass(frozen=True)
class _Written:
    """A buffer of a module: which tensor it was, and its values."""

    module: nn.Module
    name: str
    tensor: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, module: nn.Module, name: str) -> _Written | None:
        """As it is now."""
        tensor = torch_private.named_buffers_of(module).get(name)
        return None if tensor is None else cls(module, name, tensor, tensor.detach().clone())

    @property
    def is_changed(self) -> bool:
        """Whether the module has another tensor by now, or other values. Kernels write without a trace: values are compared."""
        now = torch_private.named_buffers_of(self.module).get(self.name)
        return now is not self.tensor or not torch.equal(now, self.values)

    def put(self) -> None:
        """Let it be as it was, without a trace: autograd may have saved it."""
        self.tensor.data.copy_(self.values)
        torch_private.named_buffers_of(self.module)[self.name] = self.tensor


@dataclass(frozen=True)
class _Call:
    """A call of a block whose forward has not ended, with its checkpoint, if it has one."""

    name: str
    buffers: list[_Written]
    checkpoint: Generator[None] | None = None
    is_watched: bool = False


class Recompute:
    """The checkpoints of one model's blocks on one rank."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: list[_Call] = []
        self._hooks: list[tuple[nn.Module, int, int]] = []
        self._written: dict[tuple[str, bool], list[tuple[nn.Module, str]]] = {}
        """Buffers that the forward of a block writes, in training or not: what its first call was seen to change."""

    def attach(self) -> None:
        """Hook all blocks."""
        for name in find_blocks(self._engine.units, self._engine.modules):
            module = self._engine.modules[name]
            before = module.register_forward_pre_hook(_Begin(self._engine, name), with_kwargs=True)
            after = module.register_forward_hook(_End(self._engine, name), always_call=True)
            self._engine.handles += [before, after]
            self._hooks.append((module, before.id, after.id))

    def arrange(self) -> None:
        """A call from outside begins: hooks that users have set since the last one stay outside of what is run again."""
        self.reset()
        for module, before, after in self._hooks:
            torch_private.put_around_forward(module, before, after)

    def begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Just before a block's forward."""
        if not self._is_wanted():
            self._calls.append(_Call(name, []))
            return
        buffers = self._look_at_buffers(name, module)
        again = self._make_again(name, module, len(args), tuple(kwargs), buffers)
        # One after the other: torch looks at those without names alone, to know which generators of random numbers to keep.
        checkpoint = torch_private.checkpointed(again, *args, *kwargs.values())
        next(checkpoint)
        is_watched = self._engine.forward.watches_saved
        if is_watched:
            chain = Chain(self._engine, torch_private.top_saved_tensor_hooks())
            torch_private.push_saved_tensor_hooks(chain.pack, chain.unpack)
        self._calls.append(_Call(name, buffers, checkpoint, is_watched))

    def end(self, name: str, output: Any) -> None:
        """Just after it, also if it has failed."""
        if not any(call.name == name for call in self._calls):
            return
        while (call := self._calls.pop()).name != name:
            self._leave(call)
        self._leave(call)
        key = name, self._engine.modules[name].training
        if output is not None and call.checkpoint is not None and key not in self._written:
            call.buffers[:] = [each for each in call.buffers if each.is_changed]
            self._written[key] = [(each.module, each.name) for each in call.buffers]

    def reset(self) -> None:
        """After a failure: no call is open."""
        while self._calls:
            self._leave(self._calls.pop())

    def _leave(self, call: _Call) -> None:
        if call.is_watched:
            torch_private.pop_saved_tensor_hooks()
        if call.checkpoint is not None:
            call.checkpoint.close()

    def _is_wanted(self) -> bool:
        """Not where nothing is saved, nor inside a checkpoint of the users' own or of a block around this one."""
        if not torch.is_grad_enabled() or torch_private.graph_task() != -1:
            return False
        if torch.compiler.is_compiling() or not torch_private.saved_tensor_hooks_allowed():
            return False
        top = torch_private.top_saved_tensor_hooks()
        while top is not None and isinstance(chain := getattr(top[0], "__self__", None), Chain):
            top = chain.covered
        return top is None or not torch_private.is_of_checkpoint(top[0])

    def _look_at_buffers(self, name: str, module: nn.Module) -> list[_Written]:
        """What the forward may write, as it is before: statistics must be counted once, and be those that it has seen."""
        known = self._written.get((name, module.training))
        if known is None:
            known = [(part, buffer) for part in module.modules() for buffer in torch_private.named_buffers_of(part)]
        found = (_Written.of(part, buffer) for part, buffer in known)
        return [each for each in found if each is not None]

    def _make_again(
        self, name: str, module: nn.Module, num_args: int, keys: tuple[str, ...], buffers: list[_Written]
    ) -> Callable[..., None]:
        engine = self._engine

        def again(*inputs: Any) -> None:
            args, kwargs = inputs[:num_args], dict(zip(keys, inputs[num_args:], strict=True))
            cast = engine.forward.enter(name, module, args, kwargs)
            args, kwargs = (args, kwargs) if cast is None else cast
            output = None
            try:
                with _as_before(buffers):
                    output = module.forward(*args, **kwargs)
            finally:  # torch stops it with an exception as soon as it has all that it needs.
                engine.forward.leave(name, output)
                engine.executor.note_activations()

        return again


@contextmanager
def _as_before(buffers: Sequence[_Written]) -> Iterator[None]:
    """Let buffers be as they were, and afterwards as they are."""
    found = [now for each in buffers if (now := _Written.of(each.module, each.name)) is not None]
    for each in buffers:
        each.put()
    try:
        yield
    finally:
        for each in found:
            each.put()


class _Begin(Hook):
    """The last hook before a block's forward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._engine is not None and self._engine.recompute is not None:
            self._engine.recompute.begin(self._name, module, args, kwargs)


class _End(Hook):
    """The first hook after it, also when it raised."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._engine is not None and self._engine.recompute is not None:
            self._engine.recompute.end(self._name, output)
