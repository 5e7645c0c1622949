"""The task `embeddings`: a recommender learns who likes what. Nearly all its parameters are rows of two tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from shardwise.recipes.config import EmbeddingsRecipe, RatingsConfig, RecommenderConfig
from shardwise.recipes.data import Batch, generator_for

_SKEW = 6.0


class Recommender(nn.Module):
    """A row for each user and each item, and two layers that judge the pair."""

    def __init__(self, data: RatingsConfig, config: RecommenderConfig) -> None:
        super().__init__()
        self.users = nn.Embedding(data.num_users, config.dim)
        self.items = nn.Embedding(data.num_items, config.dim)
        self.judge = nn.Sequential(nn.Linear(3 * config.dim, config.width), nn.ReLU(), nn.Linear(config.width, 1))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Logits of a like, for rows of (user, item)."""
        users, items = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        logits: torch.Tensor = self.judge(torch.cat([users, items, users * items], dim=1))
        return logits.squeeze(1)


class EmbeddingsTask:
    """Ratings that follow hidden tastes: a user likes an item if their tastes point the same way. Some are far more popular."""

    item = "ratings"

    def __init__(self, recipe: EmbeddingsRecipe) -> None:
        self._recipe = recipe
        data = recipe.data
        self._user_tastes = torch.randn(data.num_users, data.num_tastes, generator=generator_for("users"))
        self._item_tastes = torch.randn(data.num_items, data.num_tastes, generator=generator_for("items"))
        self.items_per_batch = recipe.train.batch_size

    def make_model(self) -> Recommender:
        """A new recommender."""
        return Recommender(self._recipe.data, self._recipe.model)

    def draw(self, step: int, rank: int) -> Batch:
        """Ratings by chance."""
        return self._rate(self.items_per_batch, generator_for(self._recipe.seed, step, rank))

    def held_out(self, rank: int, num_ranks: int) -> Sequence[Batch]:
        """Other ratings, always the same, dealt out to the ranks."""
        batch = self._rate(self._recipe.data.eval_ratings, generator_for("held out"))
        return [Batch(batch.inputs[rank::num_ranks], batch.targets[rank::num_ranks])]

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Binary cross-entropy."""
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")

    def num_right(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Ratings that were foretold."""
        return ((outputs > 0) == (targets > 0.5)).sum()

    def write_sample(self, model: nn.Module) -> str:
        """A recommender writes nothing."""
        return ""

    def _rate(self, num_ratings: int, generator: torch.Generator) -> Batch:
        sizes = torch.tensor([self._recipe.data.num_users, self._recipe.data.num_items])
        # A power of an even number: low rows come often, most rows seldom, as in real catalogues.
        pairs = (torch.rand(num_ratings, 2, generator=generator, dtype=torch.float64) ** _SKEW * sizes).long()
        likes = (self._user_tastes[pairs[:, 0]] * self._item_tastes[pairs[:, 1]]).sum(1) > 0
        return Batch(pairs, likes.float())
