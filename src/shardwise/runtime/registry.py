"""Finds the engine of a model or of one of its modules. The only table of engines; it keeps nothing alive."""

from __future__ import annotations

import weakref
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardwise.core.errors import UsageError
from shardwise.runtime.engine import Engine

_ENGINES: WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = WeakKeyDictionary()


def register(engine: Engine) -> None:
    """Note a sharded model and all of its modules."""
    for module in engine.modules.values():
        _ENGINES[module] = weakref.ref(engine)
    engine.closer = weakref.finalize(engine, engine.lanes.release)


def unregister(engine: Engine) -> None:
    """Forget a model."""
    for module in engine.modules.values():
        _ENGINES.pop(module, None)
    engine.closer()


def find_engine(module: nn.Module) -> Engine | None:
    """The engine of a sharded model, asked by the model or one of its modules."""
    reference = _ENGINES.get(module)
    return None if reference is None else reference()


def engine_of(module: nn.Module) -> Engine:
    """The same, but it must be there."""
    engine = find_engine(module)
    if engine is None:
        raise UsageError(f"This {type(module).__name__} is not sharded. Call shardwise.shard(model, optimizer) first.")
    return engine


def _on_registration(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
    """``module.weight = nn.Parameter(...)`` in a sharded model. ``functional_call`` does not come by here."""
    engine = find_engine(module)
    return None if engine is None else engine.replace(module, name, param)


register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]
