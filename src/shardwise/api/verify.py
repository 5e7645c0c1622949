"""``verify``: a few steps of the user's own model, once at stage 0 and once under the chosen plan, compared bit for bit."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.api.shard import shard
from shardwise.api.state import gathered
from shardwise.core.errors import UsageError, UsageTypeError
from shardwise.core.plan import Plan
from shardwise.runtime.opened import checksum
from shardwise.runtime.registry import engine_of
from shardwise.wire.comm import Lanes, gather_bytes

Build = Callable[[], Any]
LossFunction = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """The first value that differs: which, after which step (0 is before training), seen on which rank."""

    what: str
    parameter: str
    step: int
    rank: int


@dataclass(frozen=True)
class Verdict:
    """What ``verify`` found."""

    equal: bool
    stage: int
    plan_hash: str
    num_ranks: int
    num_steps: int
    num_parameters: int
    first_difference: Difference | None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        head = f"stage {self.stage} (plan {self.plan_hash}) on {ranks}, {steps}"
        if self.first_difference is None:
            return f"Equal to the bit: {head}, {self.num_parameters} parameters, losses and gradients against stage 0."
        found = self.first_difference
        when = "before the first step: the model is not built the same twice" if found.step == 0 else f"after step {found.step}"
        return f"Different: {head}. The first difference is the {found.what} of '{found.parameter}' {when}, seen on rank {found.rank}."


@dataclass
class _Record:
    """Checksums of one run: a table of values for each step."""

    steps: list[dict[str, int]] = field(default_factory=list)


def verify(
    build: Build, *, plan: Plan | None = None, stage: int | None = None, steps: int = 3, lanes: Lanes | None = None
) -> Verdict:
    """Run a model at stage 0 and under a plan, from the same start on the same batches, and compare all bits.

    Args:
        build: Makes ``(model, optimizer, batches)`` or ``(model, optimizer, batches, loss_fn)`` anew at each call. A loss is
            ``loss_fn(model, batch)``; without ``loss_fn`` it is ``model(*batch)``. Random numbers are drawn alike at each call.
        plan: The plan to verify.
        stage: Its stage, instead of or together with a plan.
        steps: Training steps.
        lanes: Collectives to use instead of those of ``torch.distributed``, for tests.

    Returns:
        The verdict, the same on every rank.

    >>> def build():
    ...     model = nn.Linear(3, 1)
    ...     return model, torch.optim.SGD(model.parameters(), 0.1), [torch.ones(2, 3)] * 3, lambda m, x: m(x).sum()
    >>> verify(build, stage=3).equal
    True
    """
    if steps < 1:
        raise UsageError(f"steps must be 1 or more but is {steps}.")
    chosen = (plan or Plan()).replace(**({} if stage is None else {"stage": stage}))
    generator_state = torch.get_rng_state()
    records = []
    for each in (chosen.replace(stage=0), chosen):
        torch.set_rng_state(generator_state)
        records.append(_run(build, each, steps, lanes))
    (reference, _), (record, engine_facts) = records
    difference = _first_difference(reference, record, engine_facts.rank)
    found = _agree(difference, engine_facts.lanes)
    num_parameters = sum(key.startswith("weights/") for key in reference.steps[0])
    return Verdict(found is None, chosen.stage, engine_facts.plan_hash, engine_facts.size, steps, num_parameters, found)


@dataclass(frozen=True)
class _Facts:
    plan_hash: str
    rank: int
    size: int
    lanes: Lanes


def _run(build: Build, plan: Plan, steps: int, lanes: Lanes | None) -> tuple[_Record, _Facts]:
    model, optimizer, batches, loss_fn = _unpack(build())
    shard(model, optimizer, plan=plan, lanes=lanes)
    engine = engine_of(model)
    record = _Record([_checksums(model, None)])
    supply = iter(batches)
    for step in range(1, steps + 1):
        batch = next(supply, None)
        if batch is None:
            raise UsageError(f"build() gave {step - 1} batches but verify needs {steps}. Give more, or ask for fewer steps.")
        loss = loss_fn(model, batch)
        loss.backward()
        table = _checksums(model, loss)
        optimizer.step()
        optimizer.zero_grad()
        record.steps.append({**table, **_checksums(model, None)})
    return record, _Facts(engine.plan.hash, engine.lanes.rank, engine.lanes.size, engine.lanes)


def _unpack(built: Any) -> tuple[nn.Module, Optimizer, Iterable[Any], LossFunction]:
    if not isinstance(built, tuple) or len(built) not in (3, 4) or not isinstance(built[0], nn.Module):
        raise UsageTypeError("build must return (model, optimizer, batches) or (model, optimizer, batches, loss_fn).")
    model, optimizer, batches = built[:3]
    if not isinstance(optimizer, Optimizer):
        raise UsageTypeError(f"build must return a torch optimizer in second place but returned a {type(optimizer).__name__}.")
    return model, optimizer, batches, built[3] if len(built) == 4 else _call_model


def _call_model(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs: Sequence[Any] = batch if isinstance(batch, (tuple, list)) else (batch,)
    loss: torch.Tensor = model(**batch) if isinstance(batch, dict) else model(*inputs)
    return loss


def _checksums(model: nn.Module, loss: torch.Tensor | None) -> dict[str, int]:
    """Checksums of weights; together with a loss, of gradients."""
    table: dict[str, int] = {}
    if loss is not None:
        table["loss/(model)"] = zlib.crc32(loss.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    with gathered(model):
        for name, param in model.named_parameters():
            values = param.grad if loss is not None else param
            kind = "gradients" if loss is not None else "weights"
            if values is not None:
                table[f"{kind}/{name}"] = checksum(values.detach().contiguous().reshape(-1))
    return table


def _first_difference(reference: _Record, record: _Record, rank: int) -> Difference | None:
    for step, (wanted, found) in enumerate(zip(reference.steps, record.steps, strict=True)):
        for key in wanted.keys() | found.keys():
            if wanted.get(key) != found.get(key):
                differing = [k for k in (*wanted, *found) if wanted.get(k) != found.get(k)]
                what, _, parameter = differing[0].partition("/")
                return Difference(what, parameter, step, rank)
    return None


def _agree(difference: Difference | None, lanes: Lanes) -> Difference | None:
    """The earliest difference of all ranks."""
    payload = json.dumps(None if difference is None else asdict(difference)).encode()
    texts = gather_bytes(lanes.gather, payload, label="what verify found")
    found = [Difference(**value) for value in (json.loads(text) for text in texts) if value is not None]
    return min(found, key=lambda each: (each.step, each.rank)) if found else None
