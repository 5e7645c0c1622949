"""``shardwise.save`` and ``shardwise.load``: whole training states, for any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.api.arguments import as_list, versions
from shardwise.checkpoint.folders import Keep, place_of
from shardwise.checkpoint.job import Saving, Wish
from shardwise.checkpoint.load import Loaded, Request, check_options, load_state
from shardwise.checkpoint.save import save_state
from shardwise.core.errors import UsageError, UsageTypeError
from shardwise.runtime.registry import engine_of

__all__ = ["Loaded", "Saving", "load", "save"]


def save(  # noqa: PLR0913
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    wait: bool = True,
    overwrite: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Saving:
    """Save a whole training state into a new folder, which any number of ranks can load. A collective: all ranks call it.

    Kept are weights, buffers, the optimizer's state and groups, gradients of a step that is under way, random generators of every
    rank, counters, the plan, and ``extra``. Each rank writes what it owns. The folder is there when all of it is on the disk, or
    not at all.

    Args:
        path: The folder, such as ``run/step-100``; or ``protocol://...`` of a file system that fsspec knows.
        model: A sharded model.
        optimizer: Its optimizer or optimizers.
        extra: By name: schedulers, loss scalers, data loaders and other objects with ``state_dict`` and ``load_state_dict``, or
            plain values.
        step: A number for the checkpoint; the number of updates made, if None.
        wait: Whether to return when it is on the disk; else it is copied and written while training goes on. The next update waits
            for the copy; who changes weights or optimizer state by hand calls ``wait_copied`` of what is returned before.
        overwrite: Whether a checkpoint that is there is replaced.
        keep_last: How many of the newest checkpoints stay in the folder that this one is in; all, if None.
        keep_every: Those of which the step is a multiple of this stay in any case.

    Raises:
        UsageError: It cannot be saved there, or ranks disagree; nothing was written.
        UsageTypeError: ``extra`` holds something that cannot be kept without pickle; nothing was written.
        CheckpointError: It could not be written. Training can go on; older checkpoints are as they were.

    >>> import tempfile, torch, shardwise
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> _ = shardwise.shard(model, optimizer, stage=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = shardwise.save(f"{folder}/first", model, optimizer, extra={"epoch": 3})
    ...     shardwise.load(f"{folder}/first", model, optimizer).extra
    {'epoch': 3}
    """
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise UsageError(f"step must be a whole number from 0 on, but is {step!r}.")
    wish = Wish(place_of(path), step, overwrite, Keep(keep_last, keep_every), versions())
    return save_state(engine_of(model), as_list(optimizer), _checked(extra), wish, wait=wait)


def load(  # noqa: PLR0913
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
    weights_only: bool = False,
    fallback: bool = False,
    gradients: bool = True,
) -> Loaded:
    """Load a training state that any number of ranks has saved, at any stage. A collective: all ranks call it.

    Every rank reads what it owns. All that is read is tested on all ranks first: where something is wrong, nothing is changed.

    Args:
        path: A checkpoint, or a folder that holds some: then the newest that is complete.
        model: A sharded model.
        optimizer: Its optimizer or optimizers, in the order in which they were saved.
        extra: By name: objects with ``load_state_dict``. Values of other names are returned.
        strict: Whether all names must be there, and no others.
        weights_only: Whether to load weights and buffers alone.
        fallback: Whether an older checkpoint is taken if the newest cannot be used; the log says so.
        gradients: Whether gradients of a step that was under way are loaded.

    Raises:
        CheckpointError: It is not there, damaged, or of another model; the text names file or parameters. Nothing was changed.
    """
    request = Request(place_of(path), as_list(optimizer), _checked(extra), strict, weights_only, fallback, gradients)
    check_options(request)
    return load_state(engine_of(model), request)


def _checked(extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if extra is not None and (not isinstance(extra, Mapping) or not all(isinstance(key, str) for key in extra)):
        raise UsageTypeError(f"extra must be a table with names, but is {str(extra)[:100]}.")
    return extra or {}
