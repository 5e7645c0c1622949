"""Updates beside the next step: what they save of a step on a simulated accelerator, and what they do to the loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.workloads import WORKLOADS

WAYS = ("exact", "delayed")
STEPS_AT_ONCE = 8
"""One way makes so many steps before the other has its turn: an update of one must not run beside a step of the other."""


def step_times(workload: str, num_rounds: int) -> dict[str, float]:
    """Seconds of a step by either way, with the optimizer on the host, and their ratio; in turns."""
    runs = {way: _runner(workload, way) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(num_rounds + 1):
        for way in WAYS if number % 2 else reversed(WAYS):
            begin = time.perf_counter()
            runs[way](number)
            seconds[way].append((time.perf_counter() - begin) / STEPS_AT_ONCE)
    pairs = zip(seconds["delayed"][1:], seconds["exact"][1:], strict=True)
    found = {f"{way}_seconds": statistics.median(seconds[way][1:]) for way in WAYS}
    return {**found, "ratio": statistics.median(mine / theirs for mine, theirs in pairs)}


def _runner(workload: str, way: str) -> Callable[[int], None]:
    import shardwise

    load = WORKLOADS[workload]
    model = load.model().to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tiers = {"optim": "host", "grad": "host"}
    handle = shardwise.shard(model, optimizer, stage=3, tiers=tiers, sync=way, delay_warmup=0)

    def run(number: int) -> None:
        for step in range(number * STEPS_AT_ONCE, (number + 1) * STEPS_AT_ONCE):
            tokens, targets = (tensor.to("sim") for tensor in load.batch(step, 0))
            model(tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.engine.come_to_rest()  # The last update is a part of it.

    return run


def losses(num_steps: int, seed: int) -> dict[str, float]:
    """Loss of a small byte-level GPT by either way: of the last steps, and on held-out text."""
    from shardwise.recipes.data import Corpus

    corpus = Corpus.standard_library()
    found = {}
    for way in WAYS:
        trained, held_out = _train(corpus, way, num_steps, seed)
        found[f"{way}_trained"], found[f"{way}_held_out"] = trained, held_out
    return found


def _train(corpus: Any, way: str, num_steps: int, seed: int) -> tuple[float, float]:
    import shardwise
    from shardwise.recipes.data import Sampler
    from shardwise.recipes.models import GPT, GPTConfig

    torch.manual_seed(seed)
    model = GPT(GPTConfig(context=64, width=128, num_blocks=4, num_heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    shardwise.shard(model, optimizer, stage=2, sync=way)
    sampler, held_out = Sampler(corpus.train, 8, 64, seed), Sampler(corpus.held_out, 8, 64, 0)
    trained = []
    for step in range(num_steps):
        batch = sampler.draw(step, 0)
        loss = model(batch.inputs, batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        trained.append(loss.item())
    with torch.no_grad():
        batches = [held_out.draw(index, 0) for index in range(16)]
        found = [model(batch.inputs, batch.targets).item() for batch in batches]
    return statistics.mean(trained[-50:]), statistics.mean(found)
