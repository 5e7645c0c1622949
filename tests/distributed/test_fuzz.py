"""Random models and random loops: whatever users do, every stage gives the same bits: those of plain torch, where it has them.

A seed makes a model out of odd blocks and a list of actions, the same on all ranks. `python -m tests.distributed.test_fuzz 0 500` tries
many seeds and names those that fail.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.testing import World
from tests.distributed.helpers import PLAIN, STAGES, VARIANTS, Stage, assert_same, backward, batch, shard, train_at, weights

pytestmark = pytest.mark.dist
WIDTH = 8
VOCABULARY = 11


# ---------------------------------------------------------------- blocks


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.zeros(1, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) * self.gain + self.shift) + x


class ReadsWithoutCalling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.sin(x), self.inner.weight) + self.other(x) + self.inner.bias


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.parts = nn.ModuleList([Dense(), Scalars()])

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for part in self.parts:
            x = part(x * self.scale)
        return {"x": x, "unused": (x.detach(), [x * 2])}


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(F.relu(self.inner(x), inplace=True)).add_(x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


class Experts(nn.Module):
    """Routes by a number that all ranks know: some experts get nothing in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.at = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts[self.at % 3](x) * 0.5


BLOCKS = (Dense, Scalars, ReadsWithoutCalling, Attention, Nested, InPlace, Convolution, Experts)


class Model(nn.Module):
    """An embedding, random blocks, of which some come twice or are recomputed, and a head that may be tied."""

    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(choice.choice(BLOCKS)() for _ in range(choice.randint(2, 5)))
        self.order = [at for at in range(len(self.blocks)) for _ in range(choice.choice((1, 1, 1, 2)))]
        self.recomputed = {at: choice.choice(("", "", "reentrant", "plain")) for at in range(len(self.blocks))}
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=choice.random() < 0.5)
        if choice.random() < 0.4:
            self.head.weight = self.embedding.weight
        if choice.random() < 0.3:
            self.blocks[0].requires_grad_(False)
        if choice.random() < 0.2:
            self.embedding.requires_grad_(False)
        self.skipped: set[int] = set()
        self.fails = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for at in self.order:
            if at in self.skipped:
                continue
            how = self.recomputed[at] if torch.is_grad_enabled() and self.training and x.requires_grad else ""
            block = self.blocks[at]
            found = block(x) if not how else checkpoint(block, x, use_reentrant=how == "reentrant")
            x = found["x"] if isinstance(found, dict) else found
        if self.fails:
            raise ArithmeticError("planted")
        return self.head(x)


# ---------------------------------------------------------------- actions

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.005, momentum=0.5),
}


def is_narrow(seed: int) -> bool:
    """Whether a seed computes in bf16."""
    return seed % 3 == 2


class Run:
    """One seed's loop at one stage, and what came of it."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.choice = random.Random(seed)
        self.model = Model(self.choice)
        groups = [{"params": list(self.model.embedding.parameters())}, {"params": list(self.model.blocks.parameters())}]
        own = {id(param) for group in groups for param in group["params"]}
        groups.append({"params": [p for p in self.model.head.parameters() if id(p) not in own], "weight_decay": 0.05})
        self.late = groups.pop() if self.choice.random() < 0.3 else None
        self.optimizer = OPTIMIZERS[self.choice.choice(list(OPTIMIZERS))](groups)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + 0.1 * step))
        if self.late is not None:
            self.schedule = None
        # A third of all seeds in bf16, whose numbers plain torch has no equal of.
        self.options: dict[str, Any] = {"buffers": "local"}
        if is_narrow(seed):
            self.options |= {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
        self.recut = [self.choice.choice(STAGES) for _ in range(8)]
        shard(stage, self.model, self.optimizer, **self.options)
        self.number = 0
        self.seen: list[Any] = []

    def tokens(self) -> torch.Tensor:
        self.number += 1
        return batch(self.number, 3, 5, high=VOCABULARY)

    def route(self) -> None:
        """Choose experts. Not between a forward and its backward, which may run the forward again."""
        for block in self.model.blocks:
            if isinstance(block, Experts):
                block.at = self.number

    def loss(self) -> torch.Tensor:
        tokens = self.tokens()
        torch.manual_seed(self.number)
        return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())

    def update(self, *, clip: float | None = None) -> None:
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            assert bool(torch.isfinite(norm))
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def clear(self) -> None:
        if self.choice.random() < 0.5:
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()

    # Each of these draws the same from `choice` at every stage.

    def step(self) -> None:
        loss = self.loss()
        self.seen.append(loss.detach().clone())
        backward(self.stage, loss, self.model)
        self.update()
        self.clear()

    def accumulate(self) -> None:
        count, is_synced = self.choice.randint(2, 3), self.choice.random() < 0.5
        for index in range(count):
            backward(self.stage, self.loss() / count, self.model, is_synced=is_synced or index == count - 1)
        self.update()
        self.clear()

    def two_forwards(self) -> None:
        first, second = self.loss(), self.loss()
        backward(self.stage, first + 0.5 * second, self.model)
        self.update()
        self.clear()

    def skip(self) -> None:
        self.model.skipped = {self.choice.randrange(len(self.model.blocks))}
        self.step()
        self.model.skipped = set()

    def fail(self) -> None:
        self.model.fails = True
        with pytest.raises(ArithmeticError):
            self.loss()
        self.model.fails = False

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad() if self.choice.random() < 0.5 else torch.inference_mode():
            self.seen.append(self.model(self.tokens()).clone())
        self.model.train()

    def inner(self) -> None:
        """A module of the model alone."""
        at = self.choice.randrange(len(self.model.blocks))
        torch.manual_seed(at)
        found = self.model.blocks[at](batch(at, 2, 3, WIDTH).requires_grad_())
        loss = (found["x"] if isinstance(found, dict) else found).float().square().mean()
        if any(param.requires_grad for param in self.model.blocks[at].parameters()):
            backward(self.stage, loss, self.model)
            self.update()
        self.clear()

    def freeze(self) -> None:
        params = list(self.model.parameters())
        param = params[self.choice.randrange(1, len(params))]
        param.requires_grad_(not param.requires_grad)
        if not any(param.requires_grad for param in self.model.parameters()):
            param.requires_grad_(True)

    def write(self) -> None:
        at = self.choice.randrange(len(list(self.model.parameters())))
        with self.full(), torch.no_grad():
            list(self.model.parameters())[at].mul_(0.9)

    def reshard(self) -> None:
        """Back to plain objects, and sharded anew at another stage."""
        stage = self.recut.pop() if self.recut else 0
        if self.stage != PLAIN:
            shardwise.unshard(self.model, self.optimizer)
            assert all(type(param) is nn.Parameter for param in self.model.parameters())
            shardwise.shard(self.model, self.optimizer, stage=stage, **self.options)

    def closure(self) -> None:
        def run() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            backward(self.stage, loss, self.model)
            return loss

        self.optimizer.step(run)
        self.clear()

    def grow(self) -> None:
        if self.late is not None:
            params = dict(self.model.named_parameters())
            found = [param for name, param in params.items() if name.startswith("head.") and name in params]
            self.optimizer.add_param_group({**self.late, "params": found})
            self.late = None

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        if self.stage == PLAIN:
            yield
        else:
            with shardwise.gathered(self.model):
                yield

    def result(self) -> dict[str, Any]:
        buffers = {name: value.clone() for name, value in self.model.named_buffers() if "num_batches" not in name}
        return {"seen": self.seen, "weights": weights(self.stage, self.model), "buffers": buffers}


ACTIONS = ("step", "step", "step", "accumulate", "two_forwards", "skip", "fail", "evaluate", "inner", "freeze", "write", "reshard",
           "closure", "grow")  # fmt: skip


def run_seed(stage: Stage, seed: int) -> Any:
    run = Run(stage, seed)
    for _ in range(run.choice.randint(6, 12)):
        action = run.choice.choice(ACTIONS)
        run.route()
        try:
            getattr(run, action)()
        except Exception as error:
            raise RuntimeError(f"seed {seed}, stage {stage}, in {action} after {run.number} batches: {error}") from error
    return run.result()


def try_seed(world: World, seed: int) -> None:
    chosen = random.Random(-seed)
    ranks = chosen.choice((1, 2, 3))
    is_reentrant = "reentrant" in Model(random.Random(seed)).recomputed.values()
    # Gradients that reentrant checkpoints bring in more rounds than in the step before are reduced in parts, unit by unit.
    variants = [name for name in VARIANTS if not (is_reentrant and "units" in name)]
    stages: tuple[Stage, ...] = (*STAGES, chosen.choice(variants))
    # A third rounds: gradients that come several times in one backward are weighted one by one, and not as a sum.
    reference = PLAIN if ranks != 3 and not is_reentrant and not is_narrow(seed) else 0
    results = world.run(train_at, run_seed, (reference, *stages), (seed,), ranks=ranks, timeout_seconds=60)
    for rank, by_stage in enumerate(results):
        for stage in stages:
            assert_same(by_stage[stage], by_stage[reference], f"seed {seed}, rank {rank}, stage {stage}")


@pytest.mark.parametrize("seed", range(24))
def test_random_loops_have_the_bits_of_plain_torch(world: World, seed: int) -> None:
    try_seed(world, seed)


if __name__ == "__main__":
    with World(num_ranks_max=3) as pool:
        for number in range(int(sys.argv[1]), int(sys.argv[2])):
            try:
                try_seed(pool, number)
            except Exception as failure:
                lines = str(failure).strip().splitlines()
                print(f"seed {number}: {lines[0]} ... {lines[-1]}", flush=True)
        print("done", flush=True)
