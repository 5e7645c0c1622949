"""The task `gpt`: a byte-level GPT learns to continue text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

import shardwise
from shardwise.core.errors import UsageTypeError
from shardwise.recipes.config import GPTRecipe
from shardwise.recipes.data import Batch, Corpus, Sampler
from shardwise.recipes.models import GPT, generate
from shardwise.recipes.text import find_text, read_text


class GPTTask:
    """Text, and the model that reads it."""

    item = "tokens"

    def __init__(self, recipe: GPTRecipe) -> None:
        self._recipe = recipe
        corpus = Corpus.of(read_text(find_text(recipe.data.path), recipe.data.max_bytes))
        batch_size, context = recipe.train.batch_size, recipe.model.context
        self._train = Sampler(corpus.train, batch_size, context, recipe.seed)
        # The same for every seed of the training.
        self._held_out = Sampler(corpus.held_out, batch_size, context, seed=0)
        self.items_per_batch = batch_size * context

    def make_model(self) -> GPT:
        """A new GPT."""
        return GPT(self._recipe.model)

    def draw(self, step: int, rank: int) -> Batch:
        """Sequences at random places of the text."""
        return self._train.draw(step, rank)

    def held_out(self, rank: int, num_ranks: int) -> Sequence[Batch]:
        """Sequences of the held-out text, always the same."""
        return [self._held_out.draw(index, rank) for index in range(self._recipe.data.eval_batches)]

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Nats a byte."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")

    def num_right(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Bytes that were held for the likeliest."""
        return (outputs.argmax(-1) == targets).sum()

    def write_sample(self, model: nn.Module) -> str:
        """A text from the model, the same on all ranks. Parameters are gathered once, not for every byte."""
        if not isinstance(model, GPT):
            raise UsageTypeError(f"A sample needs a GPT but got a {type(model).__name__}.")
        sample = self._recipe.sample
        with shardwise.gathered(model):
            text = generate(
                model, sample.prompt.encode(), sample.num_bytes, temperature=sample.temperature, seed=self._recipe.seed
            )
        decoded = text.decode("utf-8", errors="replace").expandtabs(4)
        # A model may well write control characters, which a terminal would obey.
        return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in decoded)
