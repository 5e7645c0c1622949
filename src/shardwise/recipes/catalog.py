"""Finds recipes: those that come with the package, by name, and people's own, by path. Imports no torch."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.core.errors import UsageError
from shardwise.recipes.config import RECIPE_OF_TASK, Recipe
from shardwise.recipes.schema import build, parse_value, put

_SUFFIX = ".toml"


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    files = resources.files("shardwise.recipes").iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def load_recipe(name: str, settings: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe and change some of its values.

    Args:
        name: A recipe of the package, or the path of a TOML file such as the ``config.toml`` of an earlier run.
        settings: Values by dotted key, as text.

    Raises:
        UsageError: There is no such recipe, or a key or value of it is wrong.
    """
    values = _parse(name, _read(name))
    kind = _kind_of(name, values)
    for key, text in (settings or {}).items():
        put(values, key, parse_value(kind, key, text))
    try:
        return build(kind, values)
    except UsageError as error:
        raise UsageError(f"Recipe {name}: {error}") from error


def _read(name: str) -> str:
    if name in recipe_names():
        return resources.files("shardwise.recipes").joinpath(name + _SUFFIX).read_text(encoding="utf-8")
    path = Path(name)
    if path.suffix != _SUFFIX and not path.exists():
        names = recipe_names()
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"Did you mean '{close[0]}'?" if close else f"There are {', '.join(names)}, or give the path of a .toml file."
        raise UsageError(f"There is no recipe '{name}'. {hint}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The recipe {name} cannot be read: {error}. Give a TOML file, or one of {recipe_names()}.") from error


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"The recipe {name} is not valid TOML: {error}.") from error


def _kind_of(name: str, values: Mapping[str, Any]) -> type[Recipe]:
    task = values.get("task")
    if not isinstance(task, str) or task not in RECIPE_OF_TASK:
        known = ", ".join(RECIPE_OF_TASK)
        raise UsageError(f"Recipe {name}: the key 'task' must be one of {known} but is {task!r}.")
    return RECIPE_OF_TASK[task]
