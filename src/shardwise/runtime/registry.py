"""Finds the engine of a model or of one of its modules. The only table of engines; it keeps nothing alive."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

from shardwise.core.errors import UsageError
from shardwise.runtime.engine import Engine

_ENGINES: WeakKeyDictionary[nn.Module, Engine] = WeakKeyDictionary()


def register(engine: Engine) -> None:
    """Note a sharded model and all of its modules."""
    for module in engine.modules.values():
        _ENGINES[module] = engine


def unregister(engine: Engine) -> None:
    """Forget a model."""
    for module in engine.modules.values():
        _ENGINES.pop(module, None)


def find_engine(module: nn.Module) -> Engine | None:
    """The engine of a sharded model, asked by the model or one of its modules."""
    return _ENGINES.get(module)


def engine_of(module: nn.Module) -> Engine:
    """The same, but it must be there."""
    engine = _ENGINES.get(module)
    if engine is None:
        raise UsageError(f"This {type(module).__name__} is not sharded. Call shardwise.shard(model, optimizer) first.")
    return engine
