"""What a recipe needs that may not be there: its data, and optional packages. Asked before any rank starts; no torch."""

from __future__ import annotations

from importlib.util import find_spec

from shardwise.core.errors import UsageError
from shardwise.recipes.config import DigitsRecipe, GPTRecipe, Recipe
from shardwise.recipes.text import HELD_OUT_ONE_IN, find_text


def check_requirements(recipe: Recipe) -> None:
    """Refuse a recipe that cannot be trained here.

    Raises:
        UsageError: Its text is missing, empty, binary, unreadable or too short, or a package is not installed.
    """
    if isinstance(recipe, GPTRecipe):
        source = find_text(recipe.data.path)
        # A twentieth is held out, and must hold one sequence and the byte after it.
        needed = (recipe.model.context + 1) * HELD_OUT_ONE_IN
        if min(source.num_bytes, recipe.data.max_bytes) < needed:
            raise UsageError(
                f"The data {recipe.data.path} holds {source.num_bytes} bytes but at least {needed} are needed: a twentieth is held "
                f"out, and a sequence has {recipe.model.context}. Give more text, or --set model.context=N."
            )
    if isinstance(recipe, DigitsRecipe) and find_spec("sklearn") is None:
        raise UsageError(
            "The recipe digits needs scikit-learn, which is not installed. Install it with: pip install 'shardwise[digits]'."
        )
