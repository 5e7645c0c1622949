"""What a recipe trains, as the loop sees it: a model, batches, and how answers are judged. One file a task holds the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from shardwise.core.errors import UsageError
from shardwise.recipes.config import DigitsRecipe, EmbeddingsRecipe, GPTRecipe, Recipe
from shardwise.recipes.data import Batch


class Task(Protocol):
    """A model and its data. Batches are pure functions of (step, rank): the position in the data is the number of the step."""

    item: str
    """What is counted: tokens, images, ratings."""
    items_per_batch: int
    """How many of them are in a batch of one rank."""

    def make_model(self) -> nn.Module:
        """A new model, from torch's global random numbers."""

    def draw(self, step: int, rank: int) -> Batch:
        """The batch of one rank at one step."""

    def held_out(self, rank: int, num_ranks: int) -> Sequence[Batch]:
        """One rank's part of the held-out data, in as many batches as any other rank's."""

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of every item, in one row."""

    def num_right(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """How many items were answered rightly."""

    def write_sample(self, model: nn.Module) -> str:
        """What the trained model has to show, if anything. All ranks call it alike."""


def make_task(recipe: Recipe) -> Task:
    """The task of a recipe, with its data at hand."""
    if isinstance(recipe, GPTRecipe):
        from shardwise.recipes.gpt import GPTTask

        return GPTTask(recipe)
    if isinstance(recipe, DigitsRecipe):
        from shardwise.recipes.digits import DigitsTask

        return DigitsTask(recipe)
    if isinstance(recipe, EmbeddingsRecipe):
        from shardwise.recipes.embeddings import EmbeddingsTask

        return EmbeddingsTask(recipe)
    raise UsageError(f"The task {recipe.task} has no code behind it.")
