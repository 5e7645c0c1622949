"""What a recipe says: every key, its type and its range, declared here and nowhere else. Imports no torch.

`schema` checks values against these classes; `catalog` finds the files.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from shardwise.core.errors import UsageError
from shardwise.recipes.schema import Bound, hash_of, to_toml

Count = Annotated[int, Bound(1)]
Natural = Annotated[int, Bound(0)]
Positive = Annotated[float, Bound(0, is_low_allowed=False)]
Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class PlanConfig:
    """How the model is sharded.

    Args:
        stage: ZeRO stage 0 to 3.
        precision: Dtype of compute; weights, sums of gradients and optimizer state stay in fp32.
        prefetch: Units gathered ahead of the one that computes, at stage 3.
    """

    stage: Annotated[int, Bound(0, 3)] = 3
    precision: Precision = "fp32"
    prefetch: Natural = 1


@dataclass(frozen=True)
class TrainConfig:
    """How long is trained, and how.

    Args:
        steps: Number of optimizer steps.
        batch_size: Samples (sequences, images, ratings) per rank and step.
        learning_rate: The highest one, reached after the warm-up; it ends at a tenth.
        warmup_steps: Steps over which the learning rate rises; at most a tenth of all.
        weight_decay: As in AdamW.
        max_norm: Gradients are clipped to this norm.
        eval_every: Steps between evaluations on held-out data; the last step is always followed by one.
        save_every: Steps between checkpoints, which are written beside the steps; the last step is followed by one. 0: none.
        keep_last: How many of the newest checkpoints stay.
    """

    steps: Count = 100
    batch_size: Count = 8
    learning_rate: Positive = 1e-3
    warmup_steps: Natural = 10
    weight_decay: Annotated[float, Bound(0)] = 0.01
    max_norm: Positive = 1.0
    eval_every: Count = 100
    save_every: Natural = 50
    keep_last: Count = 2


@dataclass(frozen=True)
class TextConfig:
    """The text of `gpt`.

    Args:
        path: A text file, or a folder of them; the source of Python's standard library, if empty.
        max_bytes: No more than this is read; every rank holds the text.
        eval_batches: Batches per rank of one evaluation.
    """

    path: str = ""
    max_bytes: Count = 256 * 1024**2
    eval_batches: Count = 8


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Args:
        vocab_size: Number of different tokens.
        context: The longest sequence, in tokens.
        width: Size of the hidden state.
        num_blocks: Number of transformer blocks.
        num_heads: Number of attention heads; divides ``width``.
    """

    vocab_size: Annotated[int, Bound(256)] = 256
    context: Annotated[int, Bound(2)] = 128
    width: Count = 160
    num_blocks: Count = 4
    num_heads: Count = 5

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise UsageError(f"width must be a multiple of num_heads, but {self.width} is none of {self.num_heads}.")


@dataclass(frozen=True)
class SampleConfig:
    """The text that `gpt` writes at the end.

    Args:
        prompt: What it begins with.
        num_bytes: How much is written.
        temperature: Lower is safer, higher is bolder.
    """

    prompt: str = "def "
    num_bytes: Natural = 160
    temperature: Positive = 0.7

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("sample.prompt must hold at least one letter but is empty.")


@dataclass(frozen=True)
class DigitsConfig:
    """The images of `digits`.

    Args:
        test_part: Part of the images that is held out for the test.
    """

    test_part: Annotated[float, Bound(0.05, 0.5)] = 0.2


@dataclass(frozen=True)
class ClassifierConfig:
    """The shape of the image classifier.

    Args:
        channels: Channels of the first convolution; the second has twice as many.
        width: Size of the layer before the last.
    """

    channels: Count = 32
    width: Count = 128


@dataclass(frozen=True)
class RatingsConfig:
    """The ratings that `embeddings` makes: likes and dislikes that follow hidden tastes.

    Args:
        num_users: Rows of the table of users.
        num_items: Rows of the table of items.
        num_tastes: Hidden numbers that decide who likes what.
        eval_ratings: Held-out ratings of one evaluation, over all ranks.
    """

    num_users: Annotated[int, Bound(2)] = 100_000
    num_items: Annotated[int, Bound(2)] = 20_000
    num_tastes: Count = 2
    eval_ratings: Annotated[int, Bound(64)] = 16_384


@dataclass(frozen=True)
class RecommenderConfig:
    """The shape of the recommender.

    Args:
        dim: Numbers a row of the embedding tables.
        width: Size of the layers above them.
    """

    dim: Count = 32
    width: Count = 64


@dataclass(frozen=True)
class Recipe:
    """What all recipes have. `data` and `model` are those of the task.

    Args:
        task: What is trained.
        about: One line for people.
        ranks: Processes on this machine.
        seed: Draws the initial weights, the batches and the sample.
        plan: How the model is sharded.
        train: How long is trained, and how.
    """

    task: Literal["gpt", "digits", "embeddings"]
    about: str = ""
    ranks: Count = 2
    seed: Natural = 0
    plan: PlanConfig = field(default_factory=PlanConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def to_dict(self) -> dict[str, Any]:
        """All effective values as plain ones."""
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """All effective values as TOML: a recipe that repeats this one."""
        return to_toml(self.to_dict())

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits over all values but the line for people."""
        return hash_of({key: value for key, value in self.to_dict().items() if key != "about"})


@dataclass(frozen=True)
class GPTRecipe(Recipe):
    """A byte-level GPT on text."""

    data: TextConfig = field(default_factory=TextConfig)
    model: GPTConfig = field(default_factory=GPTConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)


@dataclass(frozen=True)
class DigitsRecipe(Recipe):
    """An image classifier on scikit-learn's digits."""

    data: DigitsConfig = field(default_factory=DigitsConfig)
    model: ClassifierConfig = field(default_factory=ClassifierConfig)


@dataclass(frozen=True)
class EmbeddingsRecipe(Recipe):
    """A recommender with large embedding tables."""

    data: RatingsConfig = field(default_factory=RatingsConfig)
    model: RecommenderConfig = field(default_factory=RecommenderConfig)


RECIPE_OF_TASK: dict[str, type[Recipe]] = {"gpt": GPTRecipe, "digits": DigitsRecipe, "embeddings": EmbeddingsRecipe}
"""Which keys a recipe has, by its task."""
