"""The task `digits`: a small convolutional network reads scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from shardwise.recipes.config import ClassifierConfig, DigitsRecipe
from shardwise.recipes.data import Batch, generator_for

NUM_CLASSES = 10


class Classifier(nn.Module):
    """Two convolutions and two layers above them, for images of 8 by 8."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, config.channels, 3, padding=1)
        self.second = nn.Conv2d(config.channels, 2 * config.channels, 3, padding=1)
        self.hidden = nn.Linear(2 * config.channels * 4 * 4, config.width)
        self.head = nn.Linear(config.width, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the classes."""
        x = functional.relu(self.first(images))
        x = functional.max_pool2d(functional.relu(self.second(x)), 2)
        logits: torch.Tensor = self.head(functional.relu(self.hidden(x.flatten(1))))
        return logits


class DigitsTask:
    """1,797 images of digits, of which a part is held out by chance that no seed changes."""

    item = "images"

    def __init__(self, recipe: DigitsRecipe) -> None:
        self._recipe = recipe
        images, labels = _load()
        order = torch.randperm(len(labels), generator=generator_for("digits"))
        num_test = round(len(labels) * recipe.data.test_part)
        self._test = Batch(images[order[:num_test]], labels[order[:num_test]])
        self._train = Batch(images[order[num_test:]], labels[order[num_test:]])
        self.items_per_batch = recipe.train.batch_size

    def make_model(self) -> Classifier:
        """A new classifier."""
        return Classifier(self._recipe.model)

    def draw(self, step: int, rank: int) -> Batch:
        """Images by chance."""
        generator = generator_for(self._recipe.seed, step, rank)
        chosen = torch.randint(len(self._train.targets), (self.items_per_batch,), generator=generator)
        return Batch(self._train.inputs[chosen], self._train.targets[chosen])

    def held_out(self, rank: int, num_ranks: int) -> Sequence[Batch]:
        """This rank's part of the test images."""
        return [Batch(self._test.inputs[rank::num_ranks], self._test.targets[rank::num_ranks])]

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(outputs, targets, reduction="none")

    def num_right(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Images whose digit was found."""
        return (outputs.argmax(-1) == targets).sum()

    def write_sample(self, model: nn.Module) -> str:
        """A classifier writes nothing."""
        return ""


def _load() -> tuple[torch.Tensor, torch.Tensor]:
    # Here, not above: an optional package. `requirements` has asked for it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    return images, torch.from_numpy(digits.target).long()
