"""Finds and casts tensors in what modules take and return: nested lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.devices import torch_private

_DEPTH_LIMIT = 8


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """All tensors in a value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > _DEPTH_LIMIT or isinstance(value, (str, bytes, int, float, type(None), torch.nn.Module)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from tensors_in(item, depth + 1)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The value with its floating-point tensors cast; containers of unknown types are left as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if type(value) in (list, tuple):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, dict):
        changed = {key: cast(item, dtype) for key, item in value.items()}
        if type(value) is dict:
            return changed
        for key, item in changed.items():
            value[key] = item
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            new = cast(item, dtype)
            if new is not item:
                object.__setattr__(value, field.name, new)
    return value


def buffer_bytes(modules: Iterable[nn.Module]) -> int:
    """Memory under modules' own buffers. Those without memory of their own, such as stand-ins of other libraries, count for nothing."""
    buffers = (buffer for module in modules for buffer in torch_private.buffers_of(module))
    keys = {torch_private.storage_key(buffer): buffer for buffer in buffers}
    return sum(buffer.untyped_storage().nbytes() for key, buffer in keys.items() if key)
