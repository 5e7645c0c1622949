"""The product of what may be combined, and how a case of it is trained.

Training ends in an `Outcome`, as it does in `reference`, so that equal outcomes mean equal bits, whatever the stage, the
prefetch depth and the layout.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import astuple, dataclass, fields
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.devices.pool import Poison
from shardwise.runtime import reduce
from shardwise.wire import torch_comm

NUM_STEPS = 20
MAX_NORM = 0.7
OVERFLOW_STEP = 7
VOCABULARY, WIDTH, LENGTH, BATCH = 37, 24, 5, 2

FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 3, 4),
    "compute": ("fp32", "bf16", "bf16-reduced", "fp16"),
    "optimizer": ("AdamW", "SGD", "Adagrad", "Adafactor", "Muon"),
    "accumulation": ("none", "no_sync", "synced"),
    "stage": (0, 1, 2, 3),
    "prefetch": (0, 1, 2, 3),
    "layout": ("even", "weighted", "whole", "auto"),
}
PRECISION = {
    "fp32": (None, None),
    "bf16": ("bfloat16", "float32"),
    "bf16-reduced": ("bfloat16", "bfloat16"),
    "fp16": ("float16", None),
}
WEIGHTS = {1: (1.0,), 2: (1.0, 2.0), 3: (3.0, 1.0, 2.0), 4: (1.0, 0.0, 2.0, 3.0)}
NEEDS_WHOLE = ("Adafactor", "Muon")


@dataclass(frozen=True, order=True)
class Group:
    """What decides the numbers."""

    ranks: int
    compute: str
    optimizer: str
    accumulation: str


@dataclass(frozen=True, order=True)
class Case(Group):
    """A group, and what must not change its numbers."""

    stage: int
    prefetch: int
    layout: str

    @property
    def group(self) -> Group:
        return Group(*astuple(self)[:4])

    @property
    def is_legal(self) -> bool:
        """Optimizers that need whole matrices take no cuts through them; for the others, `auto` is `even` again."""
        return self.layout in (("whole", "auto") if self.optimizer in NEEDS_WHOLE else ("even", "weighted", "whole"))


def all_cases() -> list[Case]:
    """Every legal combination."""
    product = itertools.starmap(Case, itertools.product(*(FACTORS[field.name] for field in fields(Case))))
    return [case for case in product if case.is_legal]


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Any) -> set[Pair]:
    """All pairs of values of two factors in a case."""
    values = [(field.name, getattr(case, field.name)) for field in fields(case)]
    return set(itertools.combinations(values, 2))


def covering(cases: Sequence[Any]) -> list[Any]:
    """Few of the cases, in which every pair of values occurs that occurs in any of them. Greedy: the most new pairs first."""
    pairs = {case: pairs_of(case) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(pairs, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


# ---------------------------------------------------------------- what is trained


class Block(nn.Module):
    """A transformer block of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.second_norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 45)
        self.down = nn.Linear(45, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.first_norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Gpt(nn.Module):
    """A tied embedding, three blocks, a scalar parameter and a frozen one. Its forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.2)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.temperature = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, VOCABULARY), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.tokens(batch[:, :-1]) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)) * self.temperature + self.shift
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def make_model(seed: int) -> Gpt:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Gpt()


def make_batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def make_optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    params = list(model.parameters())
    matrices = [param for param in params if param.dim() == 2 and param.requires_grad]
    others = [param for param in params if param.dim() != 2 or not param.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    if kind == "AdamW":
        return [torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)]
    if kind == "SGD":
        return [torch.optim.SGD(groups, lr=5e-2, momentum=0.9, weight_decay=0.0)]
    if kind == "Adagrad":
        return [torch.optim.Adagrad(groups, lr=2e-2)]
    if kind == "Adafactor":
        return [torch.optim.Adafactor(groups, lr=2e-2)]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def scaler_options() -> dict[str, Any]:
    return {"init_scale": 256.0, "growth_interval": 6}


def num_micro_steps(group: Group) -> int:
    return 1 if group.accumulation == "none" else 2


def loss_factor(group: Group, step: int, micro: int, rank: int) -> float:
    """Averages micro-steps; and in half precision, one rank overflows in one step."""
    is_overflow = group.compute == "fp16" and (step, micro, rank) == (OVERFLOW_STEP, 0, group.ranks - 1)
    return 1e30 if is_overflow else 1.0 / num_micro_steps(group)


# ---------------------------------------------------------------- what comes out

Outcome = dict[str, str]
"""Facts by name: hashes of bits, and numbers in hexadecimal. Those that begin with `loss` belong to one rank."""


def bits_of(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def states_in(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, str]]:
    names = {param: name for name, param in model.named_parameters()}
    for optimizer in optimizers:
        for param, values in optimizer.state.items():
            for key, value in values.items():
                yield f"{type(optimizer).__name__} {names[param]} {key}", bits_of(torch.as_tensor(value))


def difference(found: Outcome, expected: Outcome) -> str | None:
    """The first fact that differs, in the order in which training makes them."""
    for name in dict.fromkeys([*expected, *found]):
        if found.get(name) != expected.get(name):
            return f"{name}: {found.get(name)} where {expected.get(name)} was expected"
    return None


# ---------------------------------------------------------------- with Shardwise


def train(
    case: Case,
    lanes: Any = None,
    path: str = "auto",
    device: str = "cpu",
    num_steps: int = NUM_STEPS,
    between: Callable[[nn.Module, int, str], None] | None = None,
    **offload: Any,
) -> Outcome:
    """Train a case on this rank; other ranks do the same. Rank 0 decides the initial weights.

    Args:
        between: called with the model, the step, and what has just come to its end: a backward, or the update.
        offload: fields of the plan that say where state rests.
    """
    rank = lanes.rank if lanes is not None else dist.get_rank()
    model = make_model(seed=rank).to(device)
    optimizers = make_optimizers(model, case.optimizer)
    param_dtype, reduce_dtype = PRECISION[case.compute]
    plan = shardwise.Plan(
        stage=case.stage,
        layout=case.layout,
        weights=WEIGHTS[case.ranks] if case.layout == "weighted" else None,
        prefetch=case.prefetch,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        path=path,
        **offload,
    )
    shardwise.shard(model, optimizers, plan=plan, lanes=lanes)
    # Odd stages take Shardwise's scaler, even ones torch's own.
    scaler_class = shardwise.GradScaler if case.stage % 2 else torch.amp.GradScaler
    scaler = scaler_class("cpu", enabled=case.compute == "fp16", **scaler_options())
    facts: Outcome = {}
    for step in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(num_micro_steps(case)):
            is_quiet = case.accumulation == "no_sync" and micro == 0
            with shardwise.no_sync(model) if is_quiet else nullcontext():
                loss = model(make_batch(step, micro, rank).to(device)) * loss_factor(case, step, micro, rank)
                scaler.scale(loss).backward()
            facts[f"loss {step}.{micro} on rank {rank}"] = loss.item().hex()
            if between is not None:
                between(model, step, "backward")
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        facts[f"norm {step}"] = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)).hex()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if between is not None:
            between(model, step, "update")
    facts["scale"] = scaler.get_scale().hex()
    with shardwise.gathered(model):
        facts.update({f"weight {name}": bits_of(param) for name, param in model.named_parameters()})
    shardwise.unshard(model, optimizers)
    facts.update(states_in(model, optimizers))
    for name, param in model.named_parameters():
        if facts[f"weight {name}"] != bits_of(param):
            raise AssertionError(f"{name} has other bits after unshard than inside gathered")
    return facts


def train_all(cases: Sequence[Case], *, path: str = "auto", as_large: bool = False) -> list[Outcome | str]:
    """Train cases one after the other. One that fails alike on all ranks does not keep the others from running.

    Args:
        path: through each other's memory, or through the process group.
        as_large: take the ways of large worlds: recursive halving, and gathers in one collective.
    """
    Poison.enabled = True
    limits = {"EXCHANGE_LIMIT": (reduce, 1), "BROADCAST_LIMIT": (torch_comm, 0)} if as_large else {}
    outcomes: list[Outcome | str] = []
    with ExitStack() as stack:
        for name, (module, limit) in limits.items():
            stack.enter_context(mock.patch.object(module, name, limit))
        for case in cases:
            try:
                outcomes.append(train(case, path=path))
            except (shardwise.ShardwiseError, AssertionError, ValueError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes
