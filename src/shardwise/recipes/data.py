"""Bytes as tokens, with a part held out and batches that any rank can draw by itself. Knows nothing of models.

The text is the source of Python's own standard library: every machine has it, so nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.core.errors import UsageError

NUM_BYTE_VALUES = 256
HELD_OUT_ONE_IN = 20
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Batch:
    """Token ids and, for each, the one that follows it; both of shape ``(sequences, length)``."""

    tokens: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class Corpus:
    """Two runs of bytes: one to train on, one held out."""

    train: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def from_folder(cls, folder: Path) -> Corpus:
        """Read all ``.py`` files below a folder, in the order of their paths. A file is held out by a checksum of its path."""
        train, held_out = bytearray(), bytearray()
        for path in find_sources(folder):
            is_held_out = zlib.crc32(path.relative_to(folder).as_posix().encode()) % HELD_OUT_ONE_IN == 0
            (held_out if is_held_out else train).extend(path.read_bytes())
        if not train or not held_out:
            raise UsageError(f"Found too few Python files below {folder} to train on some and to hold out others.")
        return cls(*(torch.frombuffer(text, dtype=torch.uint8) for text in (train, held_out)))

    @classmethod
    def standard_library(cls) -> Corpus:
        """The source of the running Python's standard library, without its tests."""
        return cls.from_folder(Path(sysconfig.get_path("stdlib")))


def find_sources(folder: Path) -> list[Path]:
    """The ``.py`` files below a folder, sorted by path, without tests and installed packages."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [Path(parent, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


@dataclass(frozen=True)
class Sampler:
    """Draws batches at random places of a text. Each depends on (seed, step, rank) alone, so that a run can go on anywhere.

    >>> sampler = Sampler(torch.arange(100, dtype=torch.uint8), num_sequences=2, length=8, seed=1)
    >>> batch = sampler.draw(step=5, rank=0)
    >>> torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    True
    >>> torch.equal(batch.tokens, sampler.draw(step=5, rank=0).tokens), torch.equal(batch.tokens, sampler.draw(5, 1).tokens)
    (True, False)
    """

    text: torch.Tensor
    num_sequences: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.text) <= self.length:
            raise UsageError(f"A text of {len(self.text)} tokens is too short for sequences of {self.length}.")

    def draw(self, step: int, rank: int) -> Batch:
        """The batch of one rank at one step."""
        digest = hashlib.sha256(f"{self.seed}/{step}/{rank}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        starts = torch.randint(len(self.text) - self.length, (self.num_sequences, 1), generator=generator)
        windows = self.text[starts + torch.arange(self.length + 1)].long()
        return Batch(windows[:, :-1], windows[:, 1:])
