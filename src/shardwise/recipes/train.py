"""The training loop behind ``shardwise train``: a plain PyTorch loop, with one call to ``shardwise.shard``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shardwise
from shardwise.core.plan import Plan
from shardwise.core.sizes import format_bytes
from shardwise.recipes.data import Corpus, Sampler
from shardwise.recipes.models import GPT, GPTConfig, generate
from shardwise.recipes.progress import Pace, show_progress

PROMPT = b"def "


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, how long and how.

    Args:
        stage: ZeRO stage 0 to 3.
        steps: Number of optimizer steps.
        seed: Draws the initial weights, the batches and the sample.
        num_sequences: Sequences per rank and step.
        learning_rate: The highest one, reached after the warmup.
        warmup_steps: Steps over which the learning rate rises; at most a tenth of all.
        max_norm: Gradients are clipped to this norm.
        num_validation_batches: Batches per rank for the validation loss.
        sample_bytes: Length of the text that is generated at the end.
        model: Shape of the model.
    """

    stage: int = 3
    steps: int = 500
    seed: int = 0
    num_sequences: int = 4
    learning_rate: float = 2e-3
    warmup_steps: int = 40
    max_norm: float = 1.0
    num_validation_batches: int = 16
    sample_bytes: int = 200
    model: GPTConfig = field(default_factory=GPTConfig)


@dataclass(frozen=True)
class TrainResult:
    """What came out. Losses are means over all ranks, in nats a byte; the last one over the last twentieth of the steps."""

    steps: int
    first_loss: float
    last_loss: float
    validation_loss: float
    seconds: float
    tokens_per_second: float
    peak_bytes: int
    sample: str

    def __str__(self) -> str:
        losses = f"loss {self.first_loss:.4f} -> {self.last_loss:.4f}, validation {self.validation_loss:.4f}"
        speed = f"{self.tokens_per_second:,.0f} tokens/s, {format_bytes(self.peak_bytes)} of model state at most on rank 0"
        sample = "\n".join(f"  | {line}" for line in self.sample.split("\n"))
        return f"{self.steps} steps in {self.seconds:.1f} s: {losses}\n{speed}\nA sample, from {PROMPT.decode()!r}:\n{sample}"


def train(config: TrainConfig, console: Console | None = None) -> TrainResult:
    """Train a byte-level GPT on the source of Python's standard library, on all ranks of the process group.

    Args:
        config: What is trained, how long and how.
        console: Where this rank shows progress, if anywhere.
    """
    start_seconds = time.monotonic()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    corpus = Corpus.standard_library()
    sampler = Sampler(corpus.train, config.num_sequences, config.model.context, config.seed)

    torch.manual_seed(config.seed)
    model = GPT(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
    scheduler = LambdaLR(optimizer, learning_rate_factor(config))
    sharded = shardwise.shard(model, optimizer, stage=config.stage)
    tokens_per_step = num_ranks * config.num_sequences * config.model.context
    if console is not None:
        console.print(_headline(model, num_ranks, tokens_per_step, sharded.plan), highlight=False)

    losses = []
    pace = Pace(config.steps, tokens_per_step)
    with show_progress(console, config.steps, pace) as on_step:
        for step in range(config.steps):
            batch = sampler.draw(step, rank)
            loss = model(batch.tokens, batch.targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(mean_over_ranks(loss))
            on_step(step + 1, losses[-1])

    num_last = max(1, config.steps // 20)
    return TrainResult(
        steps=config.steps,
        first_loss=losses[0],
        last_loss=sum(losses[-num_last:]) / num_last,
        validation_loss=validate(model, corpus, config),
        seconds=time.monotonic() - start_seconds,
        tokens_per_second=pace.tokens_per_second,
        peak_bytes=sharded.ledger.peak_bytes,
        sample=make_sample(model, config),
    )


def learning_rate_factor(config: TrainConfig) -> Callable[[int], float]:
    """By step: a linear warmup to 1, then a cosine down to a tenth.

    >>> factor = learning_rate_factor(TrainConfig(steps=100, warmup_steps=10))
    >>> [round(factor(step), 2) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    warmup_steps = max(1, min(config.warmup_steps, config.steps // 10))

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, config.steps - warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of a scalar over all ranks, on all of them."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def validate(model: GPT, corpus: Corpus, config: TrainConfig) -> float:
    """Mean loss over all ranks on held-out text; the same batches for every seed of the training."""
    sampler = Sampler(corpus.held_out, config.num_sequences, config.model.context, seed=0)
    model.eval()
    with torch.no_grad():
        batches = [sampler.draw(index, dist.get_rank()) for index in range(config.num_validation_batches)]
        loss = torch.stack([model(batch.tokens, batch.targets) for batch in batches]).mean()
    model.train()
    return mean_over_ranks(loss)


def make_sample(model: GPT, config: TrainConfig) -> str:
    """A text from the model, the same on all ranks. Parameters are gathered once, not for every byte."""
    with shardwise.gathered(model):
        text = generate(model, PROMPT, config.sample_bytes, seed=config.seed)
    decoded = text.decode("utf-8", errors="replace").expandtabs(4)
    # A model may well write control characters, which a terminal would obey.
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in decoded)


def _headline(model: GPT, num_ranks: int, tokens_per_step: int, plan: Plan) -> str:
    num_parameters = sum(param.numel() for param in model.parameters())
    ranks = f"{num_ranks} rank" + ("s" if num_ranks > 1 else "")
    return (
        f"Byte-level GPT of {num_parameters / 1e6:.1f}M parameters on Python's standard library\n"
        f"stage {plan.stage}, {ranks}, {tokens_per_step:,} tokens a step, plan {plan.hash}"
    )
