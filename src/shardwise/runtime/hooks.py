"""Hooks on users' modules. A copy of a sharded model keeps none of them: copies of hooks do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine


class Hook:
    """A hook of one engine on one module."""

    def __init__(self, engine: Engine | None, name: str) -> None:
        self._engine = engine
        self._name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return type(self)(None, self._name)

    def __reduce__(self) -> Any:
        return type(self), (None, self._name)


class PreForward(Hook):
    """Before a module's forward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open what the module needs; may change its inputs."""
        if self._engine is None:
            return None
        return self._engine.forward.enter(self._name, module, args, kwargs)


class PostForward(Hook):
    """After a module's forward, also when it raised."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Close what the module needed; may change its output."""
        if self._engine is None:
            return None
        return self._engine.forward.leave(self._name, output)


class PreForwardAlone(PreForward):
    """Before the forward of a module whose weights travel with a module above it: only a call from outside is noticed."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin an entry, unless a call of the model is open."""
        if self._engine is None or not self._engine.forward.is_outside:
            return None
        return super().__call__(module, args, kwargs)


class PostForwardAlone(PostForward):
    """After the forward of such a module."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """End the entry that the call began."""
        if self._engine is None or not self._engine.forward.is_entered_at(self._name):
            return None
        return super().__call__(module, args, output)


def attach_hooks(engine: Engine, name: str, module: nn.Module, *, has_units: bool = True) -> list[Any]:
    """Hook a module: first before its forward, last after it."""
    before, after = (PreForward, PostForward) if has_units else (PreForwardAlone, PostForwardAlone)
    return [
        module.register_forward_pre_hook(before(engine, name), prepend=True, with_kwargs=True),
        module.register_forward_hook(after(engine, name), always_call=True),
    ]
