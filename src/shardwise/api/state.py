"""Values, gradients and averages of a sharded model: ``gathered``, ``no_sync``, ``share``, ``clip_grad_norm_``, ``unshard``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.api.arguments import as_list
from shardwise.core.errors import UsageError
from shardwise.runtime.detach import detach
from shardwise.runtime.flat import ParamState
from shardwise.runtime.opened import Opened, close_all
from shardwise.runtime.registry import engine_of


@contextmanager
def gathered(module: nn.Module) -> Iterator[nn.Module]:
    """Full, plain parameters and gradients of a sharded model or of one of its modules, on all ranks.

    A collective: every rank enters and leaves it. What is written is kept: the same values on every rank, or values that one
    rank alone has written. ``optimizer.step()`` cannot run inside.

    >>> import shardwise
    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = shardwise.shard(model, stage=3)
    >>> with shardwise.gathered(model):
    ...     _ = nn.init.eye_(model.weight)
    >>> with shardwise.gathered(model):
    ...     print(model.weight.sum().item())
    2.0
    """
    engine = engine_of(module)
    if engine.forward.is_open:
        raise UsageError("shardwise.gathered cannot be entered inside a call of the model, whose values are there already.")
    engine.updates.refuse_open("shardwise.gathered was entered")
    engine.come_to_rest()
    wanted = {id(param) for param in module.parameters()}
    flats = {id(s.flat): s.flat for s in engine.params if s.opened is None and id(s.shown) in wanted}
    opened = [Opened(flat, engine.executor) for flat in flats.values()]
    engine.opened.extend(opened)
    try:
        engine.agreement.agree_on_disk()
        yield module
    finally:
        for item in opened:
            engine.opened.remove(item)
        close_all(opened, engine.executor)
    engine.agreement.agree_on_disk()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside accumulate local gradients; the next one outside (or the step) reduces them all at once.

    Works at every stage. It costs full local gradients while it lasts.
    """
    engine = engine_of(model)
    before, engine.is_synced = engine.is_synced, False
    try:
        yield
    finally:
        engine.is_synced = before


def share(model: nn.Module, *, tokens: float | None = None) -> float:
    """Weight this rank's gradients by its number of tokens (or samples), so that averages are over all tokens of all ranks.

    A collective: every rank calls it before its forward. It holds until the next call; ``tokens=None`` makes ranks equal.

    Returns:
        This rank's weight; the weights of all ranks sum to 1.
    """
    engine = engine_of(model)
    is_bad = tokens is not None and not (tokens >= 0 and tokens != float("inf"))
    mine = torch.tensor([float("nan") if is_bad else 1.0 if tokens is None else float(tokens)], dtype=torch.float64)
    handle = engine.lanes.gather.gather_small(mine, label="shares of tokens")
    engine.executor.wait(handle, "use", "")
    counts = mine if handle.result is None else handle.result.flatten().cpu()
    total = float(counts.sum())
    if not total > 0:
        raise UsageError(f"share needs a number of 0 or more on every rank, and more than 0 on one, but got {counts.tolist()}.")
    engine.weight = float(mine[0]) / total if tokens is not None else 1.0 / engine.lanes.size
    return engine.weight


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_``: the norm is over all ranks, with the same bits on each and at every stage."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


def unshard(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
    """Bring plain objects back, in place: full parameters, full gradients, and the optimizer's full state. A collective."""
    engine = engine_of(model)
    if engine.opened or engine.forward.is_open:
        raise UsageError("shardwise.unshard cannot run inside gathered or inside a call of the model.")
    detach(engine, as_list(optimizer))


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, on this machine's device by default. torch's own works with sharded models as well.

    Infinities are found on all ranks together, so that all of them skip the same steps.
    """

    def __init__(self, device: str | None = None, **options: float | int | bool) -> None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        super().__init__(device or (accelerator.type if accelerator is not None else "cpu"), **options)  # type: ignore[arg-type]


def param_states(model: nn.Module) -> list[ParamState]:
    """The states behind a sharded model's parameters, for the layers above."""
    return engine_of(model).params
