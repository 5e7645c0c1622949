"""What is trained in benchmarks: two GPTs, one bound by compute and one by communication, and deeper ones for limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shardwise.recipes.models import GPT, GPTConfig


@dataclass(frozen=True)
class Workload:
    """A model and the tokens that each rank brings to a step."""

    name: str
    width: int
    num_blocks: int
    num_sequences: int
    num_tokens: int
    vocab_size: int = 8192

    def model(self) -> GPT:
        """The same weights on every rank."""
        torch.manual_seed(0)
        config = GPTConfig(
            vocab_size=self.vocab_size,
            context=max(self.num_tokens, 16),
            width=self.width,
            num_blocks=self.num_blocks,
            num_heads=self.width // 64,
        )
        return GPT(config)

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of one rank in one step, the same for every system."""
        generator = torch.Generator().manual_seed(step * 1_000_003 + rank)
        tokens = torch.randint(self.vocab_size, (self.num_sequences, self.num_tokens + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def deeper(self, factor: int) -> Workload:
        """The same with more blocks."""
        return replace(self, name=f"{self.name} x{factor}", num_blocks=self.num_blocks * factor)


COMPUTE = Workload("compute", width=448, num_blocks=8, num_sequences=2, num_tokens=128)
COMM = Workload("comm", width=640, num_blocks=10, num_sequences=1, num_tokens=16)
LARGE = Workload("large", width=1024, num_blocks=15, num_sequences=1, num_tokens=8)
"""200 million parameters, for checkpoints."""
TINY = Workload("tiny", width=64, num_blocks=1, num_sequences=1, num_tokens=8, vocab_size=64)
SMALL = Workload("small", width=128, num_blocks=2, num_sequences=1, num_tokens=16, vocab_size=256)
WORKLOADS = {workload.name: workload for workload in (COMPUTE, COMM, SMALL, TINY)}


def deep(num_blocks: int) -> Workload:
    """For the question how many layers fit."""
    return Workload(f"deep {num_blocks}", width=512, num_blocks=num_blocks, num_sequences=1, num_tokens=64)
