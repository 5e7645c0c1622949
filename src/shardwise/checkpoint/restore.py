"""Puts what was read of a checkpoint into the model, its optimizers, gradients, counters and random generators, on one rank."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from shardwise.checkpoint import names
from shardwise.checkpoint.manifest import Entry
from shardwise.checkpoint.match import Match, StateMatch, grad_slots, local_grad_slots, state_slot, state_tensor
from shardwise.checkpoint.reader import Reader
from shardwise.core.errors import CheckpointError
from shardwise.core.ledger import Kind, Tier
from shardwise.runtime.engine import Engine
from shardwise.runtime.flat import FlatState, ParamState
from shardwise.runtime.grad_buffer import GradBuffer
from shardwise.runtime.grads import GradFace
from shardwise.runtime.optimizer import lines_of, state_bytes


def check_values(values: Mapping[str, Any], engine: Engine) -> None:
    """Find out what would fail when it is put in place, before anything is.

    Raises:
        CheckpointError: Something is not what a save would have written.
    """
    try:
        _check_random(values.get(names.RANDOM), engine)
        _counts(values.get(names.ENGINE))
        for name, value in values.items():
            if name.startswith(names.GRADIENT) and not isinstance(value["factor"], torch.Tensor | None):
                raise TypeError(f"the factor of '{name}' is no tensor")
            for group in value if names.is_groups(name) else ():
                if "params" in group["options"] or not isinstance(group["options"], dict):
                    raise TypeError("the options of an optimizer's group are none")
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError, IndexError) as error:
        raise CheckpointError(f"A value of the checkpoint cannot be used: {type(error).__name__}: {error}.") from error


def _check_random(values: Any, engine: Engine) -> None:
    """On generators that nobody draws from."""
    if not isinstance(values, dict):
        return
    torch.Generator().set_state(values["torch"])
    random.Random().setstate(values["python"])
    np.random.RandomState().set_state(values["numpy"])
    if "device" in values and engine.device.type != "cpu" and not isinstance(values["device"], torch.Tensor):
        raise TypeError("the state of the device's random generator is no tensor")


def fill(engine: Engine, optimizers: Sequence[Optimizer], match: Match, values: Mapping[str, Any], reader: Reader) -> None:
    """All that is read from files."""
    for slot in match.slots:
        reader.fill(slot)
    for flat in engine.executor.flats:
        if flat.line is None:
            flat.publish()  # Those on disk have done so as they were written.
    for action in match.after:
        action()
    for name, module in engine.model.named_modules():
        if f"{names.MODULE}{name}" in values:
            module.set_extra_state(values[f"{names.MODULE}{name}"])
    optim_bytes: Counter[str] = Counter()
    for index, found in match.optimizers.items():
        _apply_optimizer(index, optimizers[index], found, values, reader)
        optim_bytes += state_bytes(optimizers[index])
    if match.optimizers:
        engine.book_optimizer(optim_bytes)
    _apply_grads(engine, match, values, reader)


def apply_values(engine: Engine, extra: Mapping[str, Any], values: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """All that is known already; returns the plain ones of ``extra``. Random generators come last: nothing draws from them any more."""
    plain = _apply_extra(extra, values)
    _apply_counts(engine, values.get(names.ENGINE), is_same_world=num_ranks == engine.lanes.size)
    _apply_random(values.get(names.RANDOM), engine, num_ranks)
    return plain


def drop_grads(engine: Engine) -> None:
    """Gradients that are there belong to another state."""
    engine.reducer.abandon()
    for state in engine.params:
        state.segment.grad = None
    engine.grads_changed()
    engine.spent_grads.clear()


def _apply_optimizer(
    index: int, optimizer: Optimizer, found: Sequence[StateMatch], values: Mapping[str, Any], reader: Reader
) -> None:
    on_device: set[int] = set()
    for group, saved in zip(optimizer.param_groups, values[names.groups(index)], strict=False):
        group.update(saved["options"])
        if group.get("fused") or group.get("capturable"):  # Then torch wants the counts of steps there as well.
            on_device.update(map(id, group["params"]))
    for each in found:
        plain = values.get(names.state(index, each.saved_name), {})
        if each.state is None:
            optimizer.state[each.param] = {key: _to_device(value, each.param) for key, value in plain.items()}
            continue
        before = optimizer.state.pop(each.param, {})
        if each.state.piece.numel or not each.state.spec.numel:
            held = _restored(each, each.state, before, plain, reader)
            if id(each.param) in on_device:
                held = {
                    key: value.to(each.param.device) if isinstance(value, torch.Tensor) else value
                    for key, value in held.items()
                }
            if held:
                lines_of(optimizer).put(held, each.state)
                optimizer.state[each.param] = held


def _restored(
    match: StateMatch, state: ParamState, before: Mapping[str, Any], plain: Mapping[str, Any], reader: Reader
) -> dict[str, Any]:
    """An optimizer's state of one segment, in the order of its keys; in the memory of what was there before, where that fits."""
    saved = reader.manifest.tensors.get(f"{names.MODEL}{match.saved_name}")
    held: dict[str, Any] = {}
    for key, entry in match.values.items():
        if isinstance(entry, Entry):
            held[key] = state_tensor(before.get(key), entry, state, None if saved is None else saved.dtype)
            reader.fill(state_slot(held[key], entry, state))
        else:
            held[key] = _to_device(plain[key], before.get(key, state.segment))
    return held


def _to_device(value: Any, like: Any) -> Any:
    """A tensor goes where the one before it was, or the parameter; a number of its own stays on the host unless one was there."""
    if not isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor):
        return value
    return value.to(like.device) if value.dim() or not like.dim() else value


def _apply_grads(engine: Engine, match: Match, values: Mapping[str, Any], reader: Reader) -> None:
    for flat, entries in match.grads:
        low, high = flat.bounds
        room = engine.pool.take(high - low, flat.precision.reduce, flat.grad_device, Kind.GRAD).zero_()
        buffer = GradBuffer(room, low, engine.pool)
        for slot in grad_slots(buffer, flat, entries):
            reader.fill(slot)
        for index in entries:
            state = flat.params[index]
            held: Any = next(
                (values[f"{names.GRADIENT}{name}"] for name in state.spec.names if f"{names.GRADIENT}{name}" in values), {}
            )
            if held.get("factor") is not None:
                buffer.factors[index] = held["factor"]
            state.segment.grad = GradFace(state, buffer, state.segment)
        if flat.rest.grad is Tier.DISK and engine.disk is not None:
            buffer.put_away(engine.disk, f"gradients of {flat.spec.name}")
    for flat, entries in match.local_grads:
        _restore_local(engine, flat, entries, reader)
    if match.local_grads:
        engine.reducer.announce()


def _restore_local(engine: Engine, flat: FlatState, entries: Mapping[int, Entry], reader: Reader) -> None:
    flat.local = engine.pool.take(flat.layout.numel, flat.precision.reduce, flat.device, Kind.FULL_GRAD)
    flat.is_local_pooled = True
    for slot in local_grad_slots(flat.local, flat, entries):
        reader.fill(slot)
    flat.filled = set(entries)


def _apply_extra(extra: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in values.items():
        if not name.startswith(names.EXTRA):
            continue
        key = name.removeprefix(names.EXTRA)
        asked: Any = extra.get(key)
        if hasattr(asked, "load_state_dict"):
            asked.load_state_dict(value)
        else:
            plain[key] = value
    return plain


def _apply_counts(engine: Engine, values: Any, *, is_same_world: bool) -> None:
    if not isinstance(values, dict):
        return
    counts = _counts(values)
    engine.num_updates, engine.meter.num_steps = counts["num_updates"], counts["num_steps"]
    engine.num_nonfinite_steps, engine.num_skipped_in_a_row = counts["num_nonfinite_steps"], counts["num_skipped_in_a_row"]
    if is_same_world:
        engine.weight = float(values.get("weight", 1.0 / engine.lanes.size))


def _counts(values: Any) -> dict[str, int]:
    keys = ("num_updates", "num_steps", "num_nonfinite_steps", "num_skipped_in_a_row")
    table = values if isinstance(values, dict) else {}
    float(table.get("weight", 1.0))
    return {key: int(table.get(key, 0)) for key in keys}


def _apply_random(values: Any, engine: Engine, num_ranks: int) -> None:
    """Set all generators. A rank that there was none of takes the state of another, and seeds anew from it."""
    if not isinstance(values, dict):
        return
    try:
        torch.set_rng_state(values["torch"])
        random.setstate(values["python"])
        np.random.set_state(values["numpy"])
        if "device" in values and engine.device.type != "cpu":
            torch.get_device_module(engine.device).set_rng_state(values["device"], engine.device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"The states of the random generators cannot be used: {error}.") from error
    if engine.lanes.rank >= num_ranks:
        text = values["torch"].numpy().tobytes() + engine.lanes.rank.to_bytes(8, "little")
        seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
