"""Bytes as tokens, with a part held out and batches that any rank can draw by itself. Knows nothing of models."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from shardwise.core.errors import UsageError
from shardwise.recipes.text import Text, read_text, standard_library

NUM_BYTE_VALUES = 256


@dataclass(frozen=True)
class Batch:
    """What a model is given and what it should answer; for text, token ids and, for each, the one that follows it."""

    inputs: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class Corpus:
    """Two runs of bytes as tensors: one to train on, one held out."""

    train: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def of(cls, text: Text) -> Corpus:
        """A text that was read."""
        return cls(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (text.train, text.held_out)))

    @classmethod
    def standard_library(cls) -> Corpus:
        """The source of the running Python's standard library, without its tests."""
        source = standard_library()
        return cls.of(read_text(source, source.num_bytes))


def generator_for(*place: int | str) -> torch.Generator:
    """Random numbers that depend on a place, such as (seed, step, rank), alone: a run can go on anywhere.

    >>> first, second = (torch.rand(1, generator=generator_for(0, step, 1)) for step in (5, 6))
    >>> bool(first == torch.rand(1, generator=generator_for(0, 5, 1))), bool(first == second)
    (True, False)
    """
    digest = hashlib.sha256("/".join(map(str, place)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


@dataclass(frozen=True)
class Sampler:
    """Draws batches at random places of a text. Each depends on (seed, step, rank) alone, so that a run can go on anywhere.

    >>> sampler = Sampler(torch.arange(100, dtype=torch.uint8), num_sequences=2, length=8, seed=1)
    >>> batch = sampler.draw(step=5, rank=0)
    >>> torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    True
    >>> torch.equal(batch.inputs, sampler.draw(step=5, rank=0).inputs), torch.equal(batch.inputs, sampler.draw(5, 1).inputs)
    (True, False)
    """

    text: torch.Tensor
    num_sequences: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.text) <= self.length:
            raise UsageError(
                f"A text of {len(self.text)} bytes is too short for sequences of {self.length}. "
                "Give more text, or shorter sequences with --set model.context=N."
            )

    def draw(self, step: int, rank: int) -> Batch:
        """The batch of one rank at one step."""
        generator = generator_for(self.seed, step, rank)
        starts = torch.randint(len(self.text) - self.length, (self.num_sequences, 1), generator=generator)
        windows = self.text[starts + torch.arange(self.length + 1)].long()
        return Batch(windows[:, :-1], windows[:, 1:])
