"""Names who holds tensors that should have gone: by what Python's collector knows of them. Slow; used when memory grows."""

from __future__ import annotations

import gc
import inspect
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from shardwise.devices import torch_private
from shardwise.runtime.flat import Standing

_LEAST_NEW = 3
_MOST_CLIMBS = 4
_MOST_ASKED = 8
_MOST_GROUPS = 4


class Suspects:
    """Tensors that have come since a look, and those who hold them."""

    def __init__(self) -> None:
        self._looks: deque[set[int]] = deque(maxlen=2)

    def look(self) -> None:
        """Note the tensors that are alive. They are not kept: what goes and comes again at its place is taken for the same."""
        self._looks.append({id(tensor) for tensor in _tensors()})

    def owner(self) -> str | None:
        """Who holds the largest group of like tensors that have come since the last look, or the one before if that was just now."""
        many: list[list[torch.Tensor]] = []
        while self._looks and not many:
            many = _gathered_since(self._looks.pop())
        self._looks.clear()
        if not many:
            return None
        # A tensor with a graph holds all that its backward needs, whatever its own size.
        many.sort(key=lambda group: (group[0].grad_fn is not None, len(group), _num_bytes(group[0])), reverse=True)
        holders = [(_most_named(group), group) for group in many[:_MOST_GROUPS]]
        # Held by a part of Shardwise: the part itself is held by somebody, who is to be found through another tensor.
        holder, worst = next((each for each in holders if not each[0].is_shardwise), holders[0])
        return f"{len(worst)} tensors have gathered: {_describe(worst[0])}, held by {holder.name}."


@dataclass(frozen=True)
class _Holder:
    name: str
    is_shardwise: bool = False


def _most_named(group: list[torch.Tensor]) -> _Holder:
    """Who holds most of the first few: the latest may be held by a variable of the loop as well."""
    asked = group[:_MOST_ASKED]
    return Counter([_holder(tensor, asked, group) for tensor in asked]).most_common(1)[0][0]


def _gathered_since(known: set[int]) -> list[list[torch.Tensor]]:
    """Groups of like tensors that were not known."""
    groups: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for tensor in _tensors():
        if id(tensor) not in known:
            groups.setdefault(_form(tensor), []).append(tensor)
    return [group for group in groups.values() if len(group) >= _LEAST_NEW]


def _tensors() -> Iterator[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Looking at torch's modules warns of names that are going out of use.
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter):
                yield item


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    with torch_private.without_torch_function():
        return tuple(tensor.shape), tensor.dtype, type(tensor), type(tensor.grad_fn)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _describe(tensor: torch.Tensor) -> str:
    with torch_private.without_torch_function():
        text = f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
        if isinstance(tensor, Standing):
            text += f", of unit '{tensor.state.flat.spec.unit or '(root)'}'"
        if tensor.grad_fn is not None:
            text += f", with the graph of {type(tensor.grad_fn).__name__} behind it"
        return text


def _holder(tensor: torch.Tensor, *ours: Any) -> _Holder:
    """The first named thing above a tensor: a variable, an attribute, or the innermost container."""
    hidden = {id(each) for each in ours} | {id(ours)}
    held: Any = tensor
    for _ in range(_MOST_CLIMBS):
        name = _name_in_frames(held, hidden)
        if name:
            return _Holder(name)
        found = [each for each in gc.get_referrers(held) if id(each) not in hidden and not isinstance(each, FrameType)]
        hidden.add(id(found))
        for each in found:
            holder = _named(each, held)
            if holder is not None:
                return holder
        containers = [each for each in found if isinstance(each, list | tuple | dict | set)]
        if not containers:
            break
        held = containers[0]
    return _Holder("something that has no name in Python")


def _name_in_frames(held: Any, hidden: set[int]) -> str:
    """The variable of a running function, in any thread, that is bound to something. The collector does not know of these."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_filename != __file__:
                values = frame.f_globals if frame.f_locals is frame.f_globals else frame.f_locals
                names = [name for name, value in values.items() if value is held]
                if names:
                    return (
                        f"'{names[0]}' in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
                    )
            hidden.add(id(frame))
            frame = frame.f_back
    return ""


def _named(holder: Any, held: Any) -> _Holder | None:
    """The attribute of an object or the variable of a module that is bound to something; the holder is either, or its dictionary."""
    if isinstance(holder, dict):
        keys = [key for key, value in holder.items() if value is held and isinstance(key, str)]
        if not keys:
            return None
        for above in gc.get_referrers(holder):
            if isinstance(above, ModuleType) and vars(above) is holder:
                return _Holder(f"'{keys[0]}' of module {above.__name__}")
            if not inspect.isframe(above) and getattr(above, "__dict__", None) is holder:
                return _attribute(keys[0], above)
        return None
    if not isinstance(holder, list | tuple | set | ModuleType) and hasattr(holder, "__dict__"):
        keys = [key for key, value in vars(holder).items() if value is held]
        return _attribute(keys[0], holder) if keys else None
    return None


def _attribute(name: str, owner: Any) -> _Holder:
    is_shardwise = type(owner).__module__.startswith("shardwise.")
    return _Holder(f"attribute '{name}' of a {type(owner).__qualname__}", is_shardwise)
