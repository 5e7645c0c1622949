"""Nested values as plain JSON, with their tensors beside it. What cannot be told without running code is refused by name."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shardwise.core.errors import CheckpointError, UsageTypeError

_MARK = "!"
"""The key by which a table says that it stands for something else than itself."""
_MOST_DEEP = 100
_NAMED = ("tensor", "array", "number")
"""What stands for a tensor, by its name."""

KeepTensor = Callable[[torch.Tensor], str]
"""Takes a tensor and says under which name it will be found."""
FindTensor = Callable[[str], torch.Tensor]


def encode(value: Any, keep: KeepTensor, path: str) -> Any:
    """Plain values for JSON, from which `decode` makes the same again.

    Args:
        value: Numbers, text, bytes, None, tensors, arrays of numpy, and lists, tuples, sets and tables of these.
        keep: Takes the tensors.
        path: What the value is, for errors.

    Raises:
        UsageTypeError: It holds something else.
    """
    return _encode(value, keep, path, 0)


def _encode(value: Any, keep: KeepTensor, path: str, depth: int) -> Any:
    if depth > _MOST_DEEP:
        raise UsageTypeError(f"{path[:200]} lies more than {_MOST_DEEP} levels deep, or holds itself. Keep flatter values.")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return _marked("number", keep(torch.from_numpy(np.asarray(value)[None].copy())))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _marked("float", repr(float(value)))
    for kind, pack in _LEAVES.items():
        if isinstance(value, kind):
            return pack(value, keep)
    if isinstance(value, Mapping):
        return _encode_table(value, keep, path, depth)
    if isinstance(value, list | tuple | set | frozenset | deque):
        items = [_encode(item, keep, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
        return items if type(value) is list else _marked(_name_of(value, path), items)
    raise _refused(value, path)


def _marked(kind: str, value: Any) -> dict[str, Any]:
    return {_MARK: kind, "is": value}


_LEAVES: dict[type, Callable[[Any, KeepTensor], Any]] = {
    torch.Tensor: lambda value, keep: _marked("tensor", keep(value)),
    np.ndarray: lambda value, keep: _marked("array", keep(torch.from_numpy(value.copy()))),
    bytes: lambda value, keep: _marked("bytes", base64.b64encode(value).decode()),
    torch.dtype: lambda value, keep: _marked("dtype", str(value).removeprefix("torch.")),
    complex: lambda value, keep: _marked("complex", [repr(value.real), repr(value.imag)]),
}


def _encode_table(value: Mapping[Any, Any], keep: KeepTensor, path: str, depth: int) -> Any:
    is_plain = type(value) is dict and all(isinstance(key, str) for key in value) and _MARK not in value
    if is_plain:
        return {key: _encode(item, keep, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    pairs = [
        [_encode(key, keep, f"a key of {path}", depth + 1), _encode(item, keep, f"{path}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]
    return _marked("table" if type(value) is dict else _name_of(value, path), pairs)


_CONTAINERS: dict[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
    "deque": (deque, deque),
    "size": (torch.Size, torch.Size),
    "counter": (Counter, lambda pairs: Counter(dict(_pairs(pairs)))),
    "ordered": (OrderedDict, lambda pairs: OrderedDict(_pairs(pairs))),
    "table": (dict, lambda pairs: dict(_pairs(pairs))),
}


def _name_of(value: Any, path: str) -> str:
    for name, (kind, _) in _CONTAINERS.items():
        if type(value) is kind:
            return name
    raise _refused(value, path)


def _pairs(pairs: list[Any]) -> list[tuple[Any, Any]]:
    return [(key, item) for key, item in pairs]


def _refused(value: Any, path: str) -> UsageTypeError:
    return UsageTypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept without pickle. Keep numbers, text, "
        "tensors, and lists or tables of these; or an object with state_dict and load_state_dict."
    )


def decode(value: Any, find: FindTensor) -> Any:
    """What `encode` was given.

    Raises:
        CheckpointError: It is nothing that `encode` would have made.
    """
    found: dict[str, torch.Tensor] = {}

    def find_once(name: str) -> torch.Tensor:
        if name not in found:  # However often it is named, it is read once.
            found[name] = find(name)
        return found[name]

    try:
        return _decode(value, find_once)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"A value of the checkpoint cannot be read: {error}.") from error


def _decode(value: Any, find: FindTensor) -> Any:
    if isinstance(value, list):
        return [_decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: _decode(item, find) for key, item in value.items()}
    kind, inner = value[_MARK], value["is"]
    if kind in _CONTAINERS:
        items = [_decode(item, find) for item in inner]
        return _CONTAINERS[kind][1](items)
    return _READERS[kind](inner, find)


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return found


_READERS: dict[str, Callable[[Any, FindTensor], Any]] = {
    "tensor": lambda name, find: find(name),
    "array": lambda name, find: find(name).numpy(),
    "number": lambda name, find: find(name).numpy()[0],
    "float": lambda text, find: float(text),
    "bytes": lambda text, find: base64.b64decode(text, validate=True),
    "dtype": lambda name, find: _dtype_of(name),
    "complex": lambda parts, find: complex(float(parts[0]), float(parts[1])),
}


def map_names(value: Any, rename: Callable[[str], str]) -> Any:
    """An encoded value whose tensors go by other names."""
    if isinstance(value, list):
        return [map_names(item, rename) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get(_MARK) in _NAMED:
        return {**value, "is": rename(value["is"])}
    return {key: map_names(item, rename) for key, item in value.items()}


def names_in(value: Any) -> set[str]:
    """The names of the tensors that an encoded value refers to."""
    found: set[str] = set()

    def note(name: str) -> str:
        found.add(name)
        return name

    map_names(value, note)
    return found


def tensor_named(name: str) -> dict[str, Any]:
    """What stands for a tensor of a name."""
    return _marked("tensor", name)


def name_of_tensor(value: Any) -> str | None:
    """The name of the tensor that a value stands for, if it does."""
    return str(value.get("is")) if isinstance(value, dict) and value.get(_MARK) == "tensor" else None
