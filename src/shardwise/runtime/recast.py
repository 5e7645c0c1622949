"""Casts after sharding, such as ``model.double()``: buffers that no longer have their parameters' dtype are built anew."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwise.core.errors import UsageError
from shardwise.core.plan import Plan
from shardwise.core.unit import Segment
from shardwise.devices import torch_private
from shardwise.runtime.executor import Executor, UnitState
from shardwise.runtime.flat import HOST, FlatState, ParamState, Precision, lies_at, nothing_of, put_on_disk
from shardwise.runtime.grads import GradFace
from shardwise.runtime.parameter import point_away, point_to


def recast(executor: Executor, plan: Plan) -> None:
    """Bring all buffers in line with the parameters that users see."""
    for unit in executor.units.values():
        changed = [_recast_flat(flat, plan) for flat in unit.flats]
        if any(changed):
            unit.unit = replace(unit.unit, flats=tuple(flat.spec for flat in unit.flats))


def needs_recast(unit: UnitState) -> bool:
    """Whether a user has cast parameters of a unit, or put other memory under them."""
    with torch_private.without_torch_function():
        return any(_has_changed(flat, state) for flat in unit.flats for state in flat.params)


def _has_changed(flat: FlatState, state: ParamState) -> bool:
    if state.resting.dtype != (state.spec.dtype if state.face is not None else flat.precision.compute):
        return True
    return flat.is_aliased and flat.full is not None and not lies_at(state.compute, flat.full, state.spec.offset)


def _recast_flat(flat: FlatState, plan: Plan) -> bool:
    dtypes = {state.resting.dtype for state in flat.params}
    if len(dtypes) > 1:
        names = [f"'{state.spec.name}' is {state.resting.dtype}" for state in flat.params]
        raise UsageError(
            f"Parameters that travel together were cast to different dtypes: {names[0]}, {names[-1]}. Cast the whole model, or "
            "cast parts before shardwise.shard."
        )
    (dtype,) = dtypes
    is_detached = (
        flat.is_aliased and flat.full is not None and any(not lies_at(s.compute, flat.full, s.spec.offset) for s in flat.params)
    )
    if dtype == flat.spec.dtype and not is_detached:
        return False
    _rebuild(flat, dtype, plan)
    return True


def _rebuild(flat: FlatState, dtype: torch.dtype, plan: Plan) -> None:
    if flat.is_aliased and flat.full is not None:
        whole = torch.zeros(flat.layout.numel, dtype=dtype, device=flat.device)
        for state in flat.params:
            state.spec.view(whole).copy_(state.compute.data)
        flat.full, flat.master = whole, whole[slice(*flat.bounds)]
    else:
        _recast_master(flat, dtype)
    params = tuple(replace(param, dtype=dtype) for param in flat.spec.params)
    flat.spec = replace(flat.spec, dtype=dtype, params=params)
    flat.precision = Precision.of(flat.spec, plan)
    if flat.shard is not None:
        flat.shard = flat.shard.to(flat.precision.compute)
        with flat.attempt():
            flat.shard = flat.read_part(*flat.bounds).to(flat.shard.device, flat.precision.compute, copy=True)
    if flat.full is not None and not flat.is_aliased:
        flat.full = flat.full.to(flat.precision.compute)
    for state, spec in zip(flat.params, params, strict=True):
        grad, state.segment.grad = state.segment.grad, None
        state.spec, state.piece = spec, Segment(spec, state.piece.start, state.piece.stop)
        state.segment.data = flat.resting_segment(state.piece)
        if isinstance(grad, GradFace):
            held = grad.buffer
            if held is not None:
                held.widen(flat.precision.reduce)
            state.segment.grad = GradFace(state, held, state.segment)
    if flat.full is not None:
        point_to(flat, flat.full)
    else:
        point_away(flat)


def _recast_master(flat: FlatState, dtype: torch.dtype) -> None:
    if flat.line is None:
        flat.master = flat.master.to(dtype)
        return
    disk, form = flat.line.tier, nothing_of((flat.line.numel,), dtype, HOST)
    values = form.clone()
    with disk.attempt():
        values = flat.read_part(*flat.bounds).to(dtype)
    flat.line, flat.master = None, values  # Where there is no room for them any more, they stay in memory.
    with disk.attempt():
        flat.line = put_on_disk(values, disk, flat.spec.name)
        flat.master = form
