"""Ranks that train and save without end, to be killed at any moment."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import torch
import torch._dynamo  # The first optimizer of a process imports it, for seconds: here it is done once for all ranks.
import torch.distributed as dist

import shardwise
from tests.distributed.training import Training

NUM_STEPS = 100_000


def digest_of(training: Training) -> int:
    """A number for all weights and buffers. A collective."""
    digest = 0
    with shardwise.gathered(training.model):
        for tensor in [*training.model.parameters(), *training.model.buffers()]:
            if tensor.numel() and tensor.is_floating_point() and tensor.dim():
                digest = zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(), digest)
    return digest


def join_ranks(rank: int, num_ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)


def save_without_end(rank: int, num_ranks: int, store: str, folder: str, stage: int) -> None:
    """Go on from the newest checkpoint, and save after every step, in turns in both ways."""
    join_ranks(rank, num_ranks, store)
    training = Training(stage, num_steps=NUM_STEPS)
    if any(not name.startswith(".") for name in os.listdir(folder)):
        training.load(folder)
    while True:
        training.steps(1)
        step = training.sharded.num_updates
        training.save(f"{folder}/step-{step}", wait=step % 2 == 0, keep_last=3)


def digests(rank: int, num_ranks: int, store: str, answer: str, num_steps: int) -> None:
    """What the weights are after each step of a training that nobody disturbs."""
    join_ranks(rank, num_ranks, store)
    training = Training(1, num_steps=NUM_STEPS)
    lines = []
    for _ in range(num_steps):
        training.steps(1)
        lines.append(str(digest_of(training)))
    if rank == 0:
        Path(answer).write_text("\n".join(lines))
    dist.destroy_process_group()
