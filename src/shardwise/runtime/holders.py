"""Names who holds an object: the variable or attribute above it, by what Python's collector knows. Slow."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

_MOST_CLIMBS = 8
_MOST_AT_ONCE = 50
"""Holders on one level that are followed: what so many hold has no one owner."""
_OWN_REFERENCES = 3
"""To the variables of a frame: its own, the one that looks at them, and that of the count."""
_PLAIN = (list, tuple, dict, set, frozenset, CellType, FunctionType)


@dataclass(frozen=True)
class Holder:
    """Who holds something, in words, and whether it is a part of Shardwise, which somebody else holds in turn."""

    name: str
    is_shardwise: bool = False


NOBODY = Holder("something that has no name in Python")


class Variables:
    """The variables of all running functions, as they are now. The collector does not know of these."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """By the identity of what they are bound to. Nothing is kept alive."""
        self.frames: set[int] = set()
        for frame, values in running():
            self.frames.add(id(frame))
            for name, value in values.items():
                if not name.isidentifier():
                    continue  # Of a comprehension, or of what rewrites the code.
                where = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
                self.names.setdefault(id(value), f"'{name}' in {where}")


def running() -> Iterator[tuple[FrameType, dict[str, Any]]]:
    """Functions that run, in any thread, and their variables; the innermost first. Those of this package's search are left out."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if not frame.f_globals.get("__name__", "").startswith(("shardwise.runtime.holders", "shardwise.runtime.suspects")):
                yield frame, _locals_of(frame)
            frame = frame.f_back


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """A copy of a function's variables. Python may keep its own with the frame: what is in it would live until the function ends."""
    values = frame.f_locals
    copied = dict(values)
    is_kept = frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(values, dict)
    if is_kept and sys.getrefcount(values) <= _OWN_REFERENCES:  # Not where somebody else has called locals().
        values.clear()
    return copied


def holder_of(item: Any, variables: Variables, hidden: Iterable[Any]) -> Holder:
    """The attribute that holds an object and the variable through which that is reached, as far as there are any.

    Args:
        item: What is held, maybe behind lists, dictionaries and other objects.
        variables: Those of running functions.
        hidden: The searcher's own containers, which hold it as well.
    """
    seen = {id(each) for each in hidden} | {id(hidden), id(item)} | variables.frames
    attribute: Holder | None = None
    level = [item]
    for _ in range(_MOST_CLIMBS):
        name = next((variables.names[id(held)] for held in level if id(held) in variables.names), "")
        if name:
            return _joined(attribute, name)
        seen.add(id(level))
        above = [each for each in gc.get_referrers(*level) if id(each) not in seen and not isinstance(each, FrameType)]
        seen |= {id(above), *map(id, above)}
        held_ids = {id(held) for held in level}
        for each in above:
            name = _variable(each, held_ids, seen)
            if name:
                return _joined(attribute, name)
        attribute = attribute or next(filter(None, (_attribute(each, held_ids) for each in above)), None)
        level = [each for each in above if _can_be_followed(each)][:_MOST_AT_ONCE]
        if not level:
            break
    return attribute or NOBODY


def _joined(attribute: Holder | None, variable: str) -> Holder:
    if attribute is None:
        return Holder(variable)
    return Holder(f"{attribute.name}, reached through {variable}", attribute.is_shardwise)


def _can_be_followed(item: Any) -> bool:
    """Containers, and objects that are somebody's: not the modules and types that all of a program is reached from."""
    if isinstance(item, _PLAIN):
        return True
    return not isinstance(item, ModuleType | type) and type(item).__module__ not in ("gc", "weakref")


def _variable(holder: Any, held_ids: set[int], seen: set[int]) -> str:
    """The variable of a module, of a function that will be called again, or of one that is interrupted."""
    if isinstance(holder, dict):
        names = _keys(holder, held_ids)
        module = sys.modules.get(holder.get("__name__", "")) if names else None
        return f"'{names[0]}' of module {module.__name__}" if module is not None and vars(module) is holder else ""
    if isinstance(holder, FunctionType):
        return _variable_of_function(holder, held_ids, seen)
    if isinstance(holder, GeneratorType) and holder.gi_frame is not None:
        names = _keys(holder.gi_frame.f_locals, held_ids)
        return f"'{names[0]}' in {holder.__qualname__}" if names else ""
    return ""


def _variable_of_function(function: FunctionType, held_ids: set[int], seen: set[int]) -> str:
    if id(function.__closure__) in held_ids:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        names = [name for name, cell in cells if id(cell) in seen]  # On the way to here.
        return f"'{names[0]}', which {function.__qualname__} closes over" if names else ""
    if id(function.__defaults__) in held_ids or id(function.__kwdefaults__) in held_ids:
        return f"a default argument of {function.__qualname__}"
    return ""


def _attribute(holder: Any, held_ids: set[int]) -> Holder | None:
    """The attribute of an object or class; the holder is either, or its dictionary."""
    if isinstance(holder, dict):
        names = _keys(holder, held_ids)
        if not names:
            return None
        for above in gc.get_referrers(holder):
            if isinstance(above, type) and id(vars(above).get(names[0])) in held_ids:
                return Holder(f"attribute '{names[0]}' of the class {above.__qualname__}", _is_shardwise(above))
            if not isinstance(above, FrameType | ModuleType) and getattr(above, "__dict__", None) is holder:
                return _attribute_of(names[0], above)
        return None
    if isinstance(holder, (*_PLAIN, ModuleType, type)) and type(holder).__module__ == "builtins":
        return None
    names = _keys(getattr(holder, "__dict__", {}), held_ids) or [
        name
        for kind in type(holder).__mro__
        for name in _slots(kind)
        if id(getattr(holder, name, None)) in held_ids
    ]  # fmt: skip
    return _attribute_of(names[0], holder) if names else None


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _keys(values: Any, held_ids: set[int]) -> list[str]:
    return [key for key, value in list(values.items()) if id(value) in held_ids and isinstance(key, str)]


def _attribute_of(name: str, owner: Any) -> Holder:
    return Holder(f"attribute '{name}' of a {type(owner).__qualname__}", _is_shardwise(type(owner)))


def _is_shardwise(kind: type) -> bool:
    return kind.__module__.startswith("shardwise.")
