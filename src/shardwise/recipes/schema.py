"""Checks plain values against typed dataclasses, and writes them out again. Knows no recipe and no torch.

A field's type is all that is declared of it: ``int``, ``float``, ``bool``, ``str``, a ``Literal``, another such dataclass, or
``Annotated[int, Bound(1)]``.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from shardwise.core.errors import UsageError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Bound:
    """The range of a number: from ``low`` to ``high``, or above ``low`` where that is left out."""

    low: float
    high: float = math.inf
    is_low_allowed: bool = True

    def holds(self, number: float) -> bool:
        """Whether a number lies in the range."""
        return (self.low <= number if self.is_low_allowed else self.low < number) and number <= self.high

    def __str__(self) -> str:
        if not self.is_low_allowed:
            return f"above {self.low:g}" + (f" and at most {self.high:g}" if self.high < math.inf else "")
        return f"{self.low:g} or more" if self.high == math.inf else f"from {self.low:g} to {self.high:g}"


def build(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Make a dataclass from plain values.

    Raises:
        UsageError: A key is unknown, missing or ill-typed; the message names it in full, and the nearest known one.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Job:
    ...     steps: Annotated[int, Bound(1)] = 10
    >>> build(Job, {"steps": 3})
    Job(steps=3)
    >>> build(Job, {"stpes": 3})
    Traceback (most recent call last):
    shardwise.core.errors.UsageError: There is no key 'stpes'. Did you mean 'steps'?
    >>> build(Job, {"steps": "many"})
    Traceback (most recent call last):
    shardwise.core.errors.UsageError: steps must be a whole number, 1 or more, but is 'many'.
    """
    hints = get_type_hints(kind, include_extras=True)
    for key in values:
        if key not in hints:
            raise UsageError(unknown_key(prefix + key, [prefix + name for name in keys_of(kind)]))
    missing = [field.name for field in dataclasses.fields(kind) if _is_required(field) and field.name not in values]  # type: ignore[arg-type]
    if missing:
        raise UsageError(f"The key '{prefix}{missing[0]}' is missing. It is {_describe(hints[missing[0]])}.")
    return kind(**{key: _check(hints[key], value, prefix + key) for key, value in values.items()})


def keys_of(kind: Any) -> dict[str, Any]:
    """All keys of a dataclass and of those inside it, as dotted names, and the type of each."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            found |= {f"{name}.{inner}": each for inner, each in keys_of(hint).items()}
        else:
            found[name] = hint
    return found


def unknown_key(key: str, known: list[str]) -> str:
    """What to say of a key that does not exist: the nearest one, by its full name or by its last part."""
    close = difflib.get_close_matches(key, known, n=1)
    if not close:
        by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [by_last[last] for last in difflib.get_close_matches(key.rpartition(".")[2], list(by_last), n=1)]
    return f"There is no key '{key}'. " + (f"Did you mean '{close[0]}'?" if close else f"Known keys: {', '.join(known)}.")


def parse_value(kind: Any, key: str, text: str) -> Any:
    """A value as it is written after ``key=`` on a command line: as in TOML, but text needs no quotes."""
    known = keys_of(kind)
    if key not in known:
        raise UsageError(unknown_key(key, list(known)))
    base = _base(known[key])
    if base is str or get_origin(base) is Literal:
        value: Any = text
    else:
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
    return _check(known[key], value, key)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a value by its dotted name in nested tables."""
    *tables, last = key.split(".")
    for name in tables:
        inner = values.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{name} must be a table, with {key} in it, but is {inner!r}.")
        values = inner
    values[last] = value


def to_toml(values: Mapping[str, Any]) -> str:
    """TOML text: plain keys first, then the tables. Keys without a value are left out."""
    lines = [
        f"{key} = {_write(value)}" for key, value in values.items() if not isinstance(value, Mapping) and value is not None
    ]
    for key, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{key}]", to_toml(table).rstrip("\n")]
    return "\n".join(lines) + "\n"


def hash_of(values: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits over all values, whatever their order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _check(hint: Any, value: Any, key: str) -> Any:
    base, bound = _base(hint), _bound(hint)
    if dataclasses.is_dataclass(base) and isinstance(base, type):
        if not isinstance(value, Mapping):
            raise UsageError(f"{key} must be a table of keys and values but is {value!r}.")
        return build(base, value, f"{key}.")
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if get_origin(base) is Literal:
        is_right = any(value == choice and type(value) is type(choice) for choice in get_args(base))
    else:
        is_right = type(value) is base and (bound is None or bound.holds(value))
    if not is_right or (isinstance(value, float) and not math.isfinite(value)):
        raise UsageError(f"{key} must be {_describe(hint)} but is {value!r}.")
    return value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _describe(hint: Any) -> str:
    base, bound = _base(hint), _bound(hint)
    if get_origin(base) is Literal:
        choices = [str(choice) for choice in get_args(base)]
        return f"one of {', '.join(choices)}"
    name = _NAMES.get(base, "a table of keys and values")
    return f"{name}, {bound}," if bound is not None else name


def _base(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _bound(hint: Any) -> Bound | None:
    found = [extra for extra in get_args(hint)[1:] if isinstance(extra, Bound)] if get_origin(hint) is Annotated else []
    return found[0] if found else None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _write(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
