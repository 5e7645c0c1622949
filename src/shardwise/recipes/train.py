"""The training loop behind ``shardwise train``: a plain PyTorch loop, with one call to ``shardwise.shard``."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.optim import AdamW

import shardwise
from shardwise.api.recording import DEFAULT_TRACE, Recording
from shardwise.api.shard import Sharded
from shardwise.core.errors import ShardwiseError
from shardwise.core.ledger import Kind
from shardwise.core.records import Phase, StepRecord
from shardwise.core.sizes import format_bytes
from shardwise.devices.memory import peak_resident_bytes
from shardwise.recipes.config import Recipe, TrainConfig
from shardwise.recipes.progress import Pace, Status, show_progress
from shardwise.recipes.rank_table import RankStatus
from shardwise.recipes.run_folder import RunFolder
from shardwise.recipes.task import Task, make_task
from shardwise.recipes.usage import (
    ComputedUse,
    RankUse,
    describe_held,
    held_bytes,
    plain_data_parallelism,
)
from shardwise.telemetry.sink import Sink

_log = logging.getLogger("shardwise")
PLAN_OF_PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"},
    "fp16": {"param_dtype": "float16", "reduce_dtype": "float32", "output_dtype": "float32"},
}
_FIRST_SCALE = 2.0**12


class OutOfMemoryError(ShardwiseError, MemoryError):
    """A rank asked for more memory than there is."""


@dataclass(frozen=True)
class Evaluation:
    """How the model does on held-out data, over all ranks."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class TrainResult:
    """What came out. Losses are means over all ranks; the last one over the last twentieth of the steps.

    Args:
        recipe: Hash of the recipe's effective values.
        plan: Hash of the plan in force.
        num_parameters: Of the model.
        steps: Optimizer steps done: where the data would go on.
        seconds: From the first line to the last.
        items_per_second: Tokens, images or ratings of all ranks, in the training steps.
        ranks: What each rank held and sent.
        plain_ddp: What a rank of plain data parallelism would have held and sent; computed.
        sample: What the model writes, if it does.
        checkpoint: Where its last state is, if it was saved.
    """

    task: str
    recipe: str
    plan: str
    num_parameters: int
    steps: int
    first_loss: float
    last_loss: float
    validation_loss: float
    accuracy: float
    seconds: float
    item: str
    items_per_second: float
    ranks: list[RankUse]
    plain_ddp: ComputedUse
    sample: str = ""
    checkpoint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainResult:
        """Read plain values."""
        ranks = [RankUse(**use) for use in values["ranks"]]
        return cls(**{**values, "ranks": ranks, "plain_ddp": ComputedUse(**values["plain_ddp"])})


@dataclass
class Run:
    """One training on one rank: what it trains with, and what it has measured."""

    recipe: Recipe
    task: Task
    model: nn.Module
    optimizer: AdamW
    sharded: Sharded
    scaler: torch.amp.GradScaler
    folder: RunFolder | None
    losses: list[float] = field(default_factory=list)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    checkpoint: str = ""

    def save(self, *, wait: bool) -> None:
        """Save all that is needed to go on from here. A disk that is full does not end a training."""
        config = self.recipe.train
        if self.folder is None or not config.save_every:
            return
        path = self.folder.checkpoints / f"step-{len(self.losses):06}"
        extra = {"scaler": self.scaler, "losses": self.losses, "sent_bytes": dict(self.sent_bytes)}
        try:
            shardwise.save(
                path, self.model, self.optimizer, extra=extra, step=len(self.losses), wait=wait, overwrite=True,
                keep_last=config.keep_last,
            )  # fmt: skip
        except shardwise.CheckpointError as error:
            if dist.get_rank() == 0:
                _log.warning("%s", error)
            return
        self.checkpoint = str(path)

    def load(self) -> None:
        """Go on from the newest checkpoint of the run folder that can be used."""
        if self.folder is None:
            return
        extra = {"scaler": self.scaler}
        loaded = shardwise.load(self.folder.checkpoints, self.model, self.optimizer, extra=extra, fallback=True)
        self.losses, self.checkpoint = list(loaded.extra["losses"]), loaded.path
        self.sent_bytes = Counter(loaded.extra["sent_bytes"])
        if dist.get_rank() == 0:
            self.folder.adopt_config()
            self.folder.drop_metrics_after(loaded.step)

    def use(self) -> RankUse:
        """What this rank held and sent so far."""
        ledger = self.sharded.ledger
        held, sent = held_bytes(ledger), dict(self.sent_bytes)
        return RankUse(dist.get_rank(), held, ledger.peak_bytes, peak_resident_bytes(), sent, len(self.losses))

    def keep(self, **values: float) -> None:
        """Write a line of metrics, on rank 0."""
        if self.folder is not None and dist.get_rank() == 0:
            self.folder.add_metrics(values)

    def keep_use(self) -> None:
        """Write what this rank held."""
        if self.folder is not None:
            self.folder.write_rank(dist.get_rank(), asdict(self.use()))


def train(
    recipe: Recipe,
    console: Console | None = None,
    folder: RunFolder | None = None,
    trace: Collection[int] = DEFAULT_TRACE,
    sinks: Sequence[Sink] = (),
    *,
    is_resumed: bool = False,
) -> TrainResult:
    """Train what a recipe says, on all ranks of the process group.

    Args:
        recipe: What is trained, how long and how.
        console: Where this rank shows progress, if anywhere.
        folder: Where metrics go, if anywhere.
        trace: Steps that are written down in detail.
        sinks: Who else listens to the records of this rank's steps.
        is_resumed: Whether to go on from the newest checkpoint of the folder.
    """
    start_seconds = time.monotonic()
    with explaining_memory(None):
        run = _prepare(recipe, folder)
    if is_resumed:
        run.load()
        if trace is DEFAULT_TRACE:
            trace = [len(run.losses) + step for step in DEFAULT_TRACE]
    path = None if folder is None else folder.path
    recording = shardwise.record(run.model, path, sinks=sinks, trace=trace, config=recipe.to_dict(), keep_until=len(run.losses))
    num_parameters = sum(param.numel() for param in run.model.parameters())
    if console is not None:
        console.print(_headline(run, num_parameters), highlight=False, soft_wrap=True)
        if is_resumed:
            console.print(f"Going on after step {len(run.losses)}, from {run.checkpoint}", highlight=False, soft_wrap=True)
    with explaining_memory(run), recording:
        pace, evaluation = _loop(run, recording, console)
        run.save(wait=True)
        sample = run.task.write_sample(run.model)
    run.keep_use()
    uses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(uses, run.use())
    num_last = max(1, len(run.losses) // 20)
    return TrainResult(
        task=recipe.task,
        recipe=recipe.hash,
        plan=run.sharded.plan.hash,
        num_parameters=num_parameters,
        steps=len(run.losses),
        first_loss=run.losses[0],
        last_loss=sum(run.losses[-num_last:]) / num_last,
        validation_loss=evaluation.loss,
        accuracy=evaluation.accuracy,
        seconds=time.monotonic() - start_seconds,
        item=run.task.item,
        items_per_second=pace.items_per_second,
        ranks=uses,
        plain_ddp=plain_data_parallelism(uses, run.sharded.plan),
        sample=sample,
        checkpoint=run.checkpoint,
    )


def _prepare(recipe: Recipe, folder: RunFolder | None) -> Run:
    task = make_task(recipe)
    torch.manual_seed(recipe.seed)
    model = task.make_model()
    rate, decay = recipe.train.learning_rate, recipe.train.weight_decay
    optimizer = AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=decay, fused=True)
    precision = recipe.plan.precision
    sharded = shardwise.shard(
        model, optimizer, stage=recipe.plan.stage, prefetch=recipe.plan.prefetch, **PLAN_OF_PRECISION[precision]
    )
    scaler = shardwise.GradScaler(enabled=precision == "fp16", init_scale=_FIRST_SCALE)
    return Run(recipe, task, model, optimizer, sharded, scaler, folder)


def _loop(run: Run, recording: Recording, console: Console | None) -> tuple[Pace, Evaluation]:
    """All steps, and an evaluation now and then; returns the last one."""
    config, num_ranks = run.recipe.train, dist.get_world_size()
    pace = Pace(config.steps, num_ranks * run.task.items_per_batch, run.task.item)
    evaluation = Evaluation(math.nan, math.nan)
    with show_progress(console, config.steps, pace) as on_step:
        first = len(run.losses)
        for step in range(first, config.steps):
            on_step(train_step(run, step, recording))
            if step == first:
                run.keep_use()
            if config.save_every and (step + 1) % config.save_every == 0 and step + 1 < config.steps:
                run.save(wait=False)
            if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
                with pace.paused():
                    evaluation = evaluate(run.task, run.model)
                run.keep(step=step + 1, validation_loss=evaluation.loss, accuracy=evaluation.accuracy)
                if console is not None and step + 1 < config.steps:
                    console.print(f"step {step + 1}: {_describe(evaluation)}", highlight=False)
    return pace, evaluation


def train_step(run: Run, step: int, recording: Recording) -> Status:
    """One step. The position in the data is its number: nothing else says what comes next."""
    config = run.recipe.train
    before = run.sharded.totals.wire_bytes.copy()
    rate = config.learning_rate * learning_rate_factor(config, step)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    batch = run.task.draw(step, dist.get_rank())
    loss = run.task.losses(run.model(batch.inputs), batch.targets).mean()
    run.scaler.scale(loss).backward()
    run.scaler.unscale_(run.optimizer)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.max_norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    for op, num_bytes in run.sharded.totals.wire_bytes.items():
        run.sent_bytes[op] += num_bytes - before[op]
    recording.log(**{"loss": loss.item(), "norm": norm.item(), run.task.item: run.task.items_per_batch})
    mean_loss, ranks = _tell(loss, recording.last)
    run.losses.append(mean_loss)
    run.keep(step=step + 1, loss=mean_loss, norm=norm.item(), learning_rate=rate)
    return Status(step + 1, mean_loss, ranks)


def learning_rate_factor(config: TrainConfig, step: int) -> float:
    """By step: a linear warm-up to 1, then a cosine down to a tenth.

    >>> config = TrainConfig(steps=100, warmup_steps=10)
    >>> [round(learning_rate_factor(config, step), 2) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    warmup_steps = max(1, min(config.warmup_steps, config.steps // 10))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, config.steps - warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def evaluate(task: Task, model: nn.Module) -> Evaluation:
    """Mean loss and accuracy on held-out data, over the items of all ranks."""
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for batch in task.held_out(dist.get_rank(), dist.get_world_size()):
            outputs = model(batch.inputs)
            loss, num_right = task.losses(outputs, batch.targets).sum(), task.num_right(outputs, batch.targets)
            sums += torch.tensor([loss.item(), num_right.item(), batch.targets.numel()], dtype=torch.float64)
    model.train()
    dist.all_reduce(sums)
    return Evaluation(float(sums[0] / sums[2]), float(sums[1] / sums[2]))


@contextmanager
def explaining_memory(run: Run | None) -> Iterator[None]:
    """Turn the end of memory into an error that says what was held, and what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        held = "nothing yet" if run is None else describe_held(held_bytes(run.sharded.ledger))
        at = "while the model was made" if run is None else f"in step {len(run.losses) + 1}"
        raise OutOfMemoryError(
            f"out of memory {at} ({str(error).splitlines()[0][:200]}). The largest items of its ledger: {held}; the process has "
            f"had {format_bytes(peak_resident_bytes())}. Use smaller batches (--set train.batch_size=N), a smaller model, a "
            "higher --stage, or ranks on more machines."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory has run out, on a device or on the host."""
    texts = ("not enough memory", "can't allocate memory", "out of memory", "std::bad_alloc")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in str(error) for text in texts)


def _tell(loss: torch.Tensor, last: StepRecord | None) -> tuple[float, list[RankStatus]]:
    """The mean loss and what every rank did, on all ranks: its memory, and its last step that is known."""
    kinds = list(Kind)
    held: Counter[str] = Counter()  # In all tiers.
    for each in () if last is None else last.held:
        held[each.kind] += each.peak_bytes
    sent = 0 if last is None else last.wire_bytes
    waiting = 0.0 if last is None else last.phases[Phase.COMMUNICATION.value] / (last.seconds or 1.0)
    mine = [loss.item(), peak_resident_bytes(), sent, waiting, *(held[kind.value] for kind in kinds)]
    rows = torch.zeros(dist.get_world_size(), len(mine), dtype=torch.float64)
    rows[dist.get_rank()] = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(rows)
    ranks = [
        RankStatus(
            int(peak), {kind: int(count) for kind, count in zip(kinds, counts, strict=True) if count}, int(sent), waiting
        )
        for _, peak, sent, waiting, *counts in rows.tolist()
    ]
    return float(rows[:, 0].mean()), ranks


def _describe(evaluation: Evaluation) -> str:
    return f"validation loss {evaluation.loss:.4f}, accuracy {evaluation.accuracy:.1%}"


def _headline(run: Run, num_parameters: int) -> str:
    recipe, num_ranks = run.recipe, dist.get_world_size()
    items = num_ranks * run.task.items_per_batch
    ranks = f"{num_ranks} rank" + ("s" if num_ranks > 1 else "")
    return (
        f"{num_parameters:,} parameters, stage {recipe.plan.stage}, {ranks}, {recipe.plan.precision}, "
        f"{items:,} {run.task.item} a step, plan {run.sharded.plan.hash}"
    )
