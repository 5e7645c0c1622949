"""Tells which tensors have gathered or grown, and who holds them: asked when memory grows, since it is slow."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardwise.core.sizes import format_bytes
from shardwise.devices import torch_private
from shardwise.runtime.flat import Standing
from shardwise.runtime.holders import Holder, Variables, holder_of, running

_LEAST_NEW = 3
_MOST_ASKED = 8
_MOST_GROUPS = 4
_LEAST_PART = 0.5
"""Of what has come: a single tensor that has grown by less is not the one."""
_LEAST_PART_OF_GROUP = 0.25
"""The same for like tensors, as one step may leave several kinds of them."""


@dataclass(frozen=True)
class _Look:
    """What was there: tensors by identity, how many there were of each form, and the bytes of those with names."""

    ids: set[int]
    num_like: Counter[object]
    bytes_by_name: dict[str, int]


class Suspects:
    """Tensors that have come since a look, and those who hold them.

    Args:
        model: Its buffers are looked at by name.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._looks: deque[_Look] = deque(maxlen=2)
        self._later: list[weakref.ref[torch.Tensor]] | None = None

    def look(self) -> None:
        """Note the tensors that are alive. They are not kept: what goes and comes again at its place is taken for the same."""
        tensors = list(_tensors())
        forms = Counter(form for tensor in tensors for form in _forms(tensor))
        self._looks.append(_Look({id(tensor) for tensor in tensors}, forms, dict(self._named_bytes())))

    def look_again(self) -> None:
        """Note the tensors that are alive now: those that are gone when the owner is asked for were a step's own."""
        self._later = [weakref.ref(tensor) for tensor in _tensors()]

    def owner(self, num_bytes: int) -> str | None:
        """Who holds what has come since the last look, or the one before if that was just now, and has stayed since the second.

        Args:
            num_bytes: How much has come since the last look.
        """
        looks = list(self._looks)[::-1]
        self._looks.clear()
        found = (self._gathered(look, num_bytes) or self._grown(look, num_bytes) for look in looks)
        owner = next(filter(None, found), None)
        self._later = None
        return owner

    def _gathered(self, look: _Look, num_bytes: int) -> str | None:
        """The largest group of like tensors of which there are more and more, and which may be what has come."""
        least_bytes = _LEAST_PART_OF_GROUP * num_bytes
        many = [
            group
            for group in self._gathered_since(look)
            if _holds_more_than_itself(group[0]) or _all_bytes(group) >= least_bytes
        ]
        # A tensor with a graph holds all that its backward needs, whatever its own size.
        many.sort(key=lambda group: (group[0].grad_fn is not None, len(group), _num_bytes(group[0])), reverse=True)
        variables = Variables()
        holders = [(_most_named(group, variables), group) for group in many[:_MOST_GROUPS]]
        if not holders:
            return None
        # Held by a part of Shardwise: the part itself is held by somebody, who is to be found through another tensor.
        holder, worst = next((each for each in holders if not each[0].is_shardwise), holders[0])
        return f"{len(worst)} tensors have gathered: {_describe(worst[0])}, held by {holder.name}."

    def _gathered_since(self, look: _Look) -> list[list[torch.Tensor]]:
        """Groups of like tensors that were not there, where all of them have become more: some take another's place."""
        stayed = None if self._later is None else {id(each()) for each in self._later}
        groups: dict[object, list[torch.Tensor]] = {}
        num_like: Counter[object] = Counter()
        for tensor in _tensors():
            if stayed is not None and id(tensor) not in stayed:
                continue
            for form in _forms(tensor):
                num_like[form] += 1
                if id(tensor) not in look.ids:
                    groups.setdefault(form, []).append(tensor)
        more = {form: group for form, group in groups.items() if num_like[form] - look.num_like[form] >= _LEAST_NEW}
        return [group for form, group in more.items() if _has_shape(form)] or list(more.values())

    def _grown(self, look: _Look, num_bytes: int) -> str | None:
        """The tensor with a name that has grown by the most, if that is what has come."""
        before = look.bytes_by_name
        grown = {name: count - before[name] for name, count in self._named_bytes() if name in before}
        worst = max(grown, key=lambda name: grown[name], default="")
        if not worst or grown[worst] < max(1.0, _LEAST_PART * num_bytes):
            return None
        return f"A tensor has grown by {format_bytes(grown[worst])}: {worst}."

    def _named_bytes(self) -> Iterator[tuple[str, int]]:
        """Buffers of the model, variables that are tensors, and attributes of what variables are bound to."""
        if self._model is not None:
            for path, module in self._model.named_modules():
                where = f"of the module '{path}'" if path else "of the model"
                for name, held in (*module.named_buffers(recurse=False), *_tensor_attributes(module)):
                    yield f"'{name}' {where}", _num_bytes(held)
        for frame, values in running():
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    yield f"'{name}' in {frame.f_code.co_name}", _num_bytes(value)
                elif value is not self._model:
                    for attribute, held in _tensor_attributes(value):
                        yield f"attribute '{attribute}' of '{name}' in {frame.f_code.co_name}", _num_bytes(held)


def _tensor_attributes(item: Any) -> Iterator[tuple[str, torch.Tensor]]:
    attributes = getattr(item, "__dict__", None)
    # Modules are everybody's, and to look at torch's own warns of what is going out of use.
    if isinstance(attributes, dict) and not isinstance(item, ModuleType):
        yield from ((name, value) for name, value in list(attributes.items()) if isinstance(value, torch.Tensor))


def _most_named(group: list[torch.Tensor], variables: Variables) -> Holder:
    """Who holds most of the first few: the latest may be held by a variable of the loop as well."""
    asked = group[:_MOST_ASKED]
    return Counter([holder_of(tensor, variables, (asked, group)) for tensor in asked]).most_common(1)[0][0]


def _tensors() -> Iterator[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Looking at torch's modules warns of names that are going out of use.
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter):
                yield item


def _forms(tensor: torch.Tensor) -> tuple[object, object]:
    """What like tensors have in common: the shape and all else; or all but the shape, where each is as long as its data."""
    with torch_private.without_torch_function():
        kind = (tensor.dtype, type(tensor), type(tensor.grad_fn))
        return (tuple(tensor.shape), *kind), (None, tensor.dim(), *kind)


def _has_shape(form: object) -> bool:
    return isinstance(form, tuple) and form[0] is not None


def _num_bytes(tensor: torch.Tensor) -> int:
    with torch_private.without_torch_function():
        return tensor.numel() * tensor.element_size()


def _holds_more_than_itself(tensor: torch.Tensor) -> bool:
    """Whether memory hangs on a tensor that is not its own: that of its graph, or of the gradients that it stands for."""
    return isinstance(tensor, Standing) or tensor.grad_fn is not None


def _all_bytes(group: list[torch.Tensor]) -> int:
    """Memory under some tensors, that of views in full."""
    storages = {torch_private.storage_key(tensor): tensor for tensor in group}
    return sum(tensor.untyped_storage().nbytes() for key, tensor in storages.items() if key)


def _describe(tensor: torch.Tensor) -> str:
    with torch_private.without_torch_function():
        text = f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
        if isinstance(tensor, Standing):
            text += f", of unit '{tensor.state.flat.spec.unit or '(root)'}'"
        if tensor.grad_fn is not None:
            text += f", with the graph of {type(tensor.grad_fn).__name__} behind it"
        return text
