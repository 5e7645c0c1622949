"""Hooks on users' modules. A copy of a sharded model keeps none of them: copies of hooks do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine


class _Hook:
    """A hook of one engine on one module."""

    def __init__(self, engine: Engine | None, name: str) -> None:
        self._engine = engine
        self._name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)(None, self._name)

    def __reduce__(self) -> Any:
        return type(self), (None, self._name)


class PreForward(_Hook):
    """Before a module's forward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open what the module needs; may change its inputs."""
        if self._engine is None:
            return None
        return self._engine.forward.enter(self._name, module, args, kwargs)


class PostForward(_Hook):
    """After a module's forward, also when it raised."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Close what the module needed; may change its output."""
        if self._engine is None:
            return None
        return self._engine.forward.leave(self._name, output)


def attach_hooks(engine: Engine, name: str, module: nn.Module) -> list[Any]:
    """Hook a module: first before its forward, last after it."""
    return [
        module.register_forward_pre_hook(PreForward(engine, name), prepend=True, with_kwargs=True),
        module.register_forward_hook(PostForward(engine, name), always_call=True),
    ]
