"""Turns a sharded model back into a plain one, in place, with the optimizer's full state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.core.errors import OffloadError
from shardwise.runtime.engine import Engine
from shardwise.runtime.flat import FlatState, ParamState, forget
from shardwise.runtime.grads import RAW_GRAD, make_plain
from shardwise.runtime.opened import Opened
from shardwise.runtime.optimizer import adopt, lines_of, states_of
from shardwise.runtime.registry import unregister
from shardwise.runtime.state_lines import is_per_element
from shardwise.wire.comm import gather_bytes


def detach(engine: Engine, optimizers: Sequence[Optimizer]) -> None:
    """Gather all state and take the engine off. A collective."""
    if engine.backward.is_running:
        engine.recover()
    engine.come_to_rest()
    engine.executor.wait_until_copied()  # What users do from now on does not pass the engine.
    if engine.disk is not None:
        _bring_all(engine, optimizers)
    for optimizer in optimizers:
        _restore_state(optimizer, engine)
    for unit in engine.executor.units.values():
        for flat in unit.flats:
            _restore_params(flat, engine)
    for handle in engine.handles:
        handle.remove()
    engine.updates.close()
    unregister(engine)
    if engine.disk is not None:
        engine.disk.close()


def _bring_all(engine: Engine, optimizers: Sequence[Optimizer]) -> None:
    """Let all state that rests on disk come to memory, on all ranks, before anything is changed."""
    try:
        for flat in engine.executor.flats:
            flat.bring()
        for optimizer in optimizers:
            for state in states_of(optimizer):
                if state.host is engine and state.segment in optimizer.state:
                    optimizer.state[state.segment] = lines_of(optimizer).whole(optimizer.state[state.segment], state)
    except OffloadError as error:
        if engine.disk is not None:
            engine.disk.fail(error)
    engine.agreement.agree_on_disk()


def _restore_params(flat: FlatState, engine: Engine) -> None:
    opened = Opened(flat, engine.executor)
    for state in flat.params:
        shown = state.opened
        state.opened = None
        if shown is None:
            continue
        forget(state.compute)
        make_plain(state.compute)
        state.compute.data = shown.data.clone()
        RAW_GRAD.__set__(state.compute, shown.grad)
        state.compute.requires_grad_(shown.requires_grad)
        state.show(state.compute)
        state.segment.grad = None
    del opened


def _restore_state(optimizer: Optimizer, engine: Engine) -> None:
    """Put the users' parameters and full state back into an optimizer."""
    adopt(optimizer)  # A group that was added since the last step holds what stands in the modules.
    for state in states_of(optimizer):
        if state.host is not engine:
            continue
        held = optimizer.state.pop(state.segment, {})
        full = _on_device(held, state) if state.flat.is_owned_whole else _gather_state(held, state, engine)
        if full:
            optimizer.state[state.compute] = full
        for group in optimizer.param_groups:
            group["params"] = [state.compute if param is state.segment else param for param in group["params"]]


def _gather_state(held: dict[str, Any], state: ParamState, engine: Engine) -> dict[str, Any]:
    """Every value of one parameter's state: its elements from those who own them, anything else from the first owner."""
    comm = engine.lanes.gather
    mine = {key: _describe(key, value, state) for key, value in held.items()}
    described = [json.loads(text) for text in gather_bytes(comm, json.dumps(mine).encode(), label="optimizer state")]
    owners = [rank for rank, facts in enumerate(described) if facts]
    if not owners:
        return {}
    full: dict[str, Any] = {}
    for key, facts in described[owners[0]].items():
        if facts["kind"] == "plain":
            full[key] = facts["value"]
            continue
        dtype = getattr(torch, facts["dtype"])
        label = f"optimizer state '{key}' of '{state.spec.name}'"
        if facts["kind"] == "elements":
            full[key] = _gather_elements(held.get(key), dtype, state, engine, label)
        else:
            value = held[key].clone() if key in held else torch.empty(facts["shape"], dtype=dtype, device=engine.device)
            line = value.reshape(-1).to(engine.device)
            engine.executor.wait(comm.broadcast(line, owners[0], label=label), "gather", state.flat.spec.unit)
            full[key] = line.view(facts["shape"]).to(facts["device"])
    return full


def _on_device(held: dict[str, Any], state: ParamState) -> dict[str, Any]:
    """State that rested elsewhere, where the parameter is."""
    return {key: value.to(state.flat.device) if is_per_element(key, value, state) else value for key, value in held.items()}


def _describe(key: str, value: Any, state: ParamState) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"kind": "plain", "value": value}
    kind = "elements" if is_per_element(key, value, state) else "tensor"
    shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
    return {"kind": kind, "shape": shape, "dtype": dtype, "device": value.device.type}


def _gather_elements(
    part: torch.Tensor | None, dtype: torch.dtype, state: ParamState, engine: Engine, label: str
) -> torch.Tensor:
    comm, layout, spec = engine.lanes.gather, state.flat.layout, state.spec
    cuts = [min(max(cut, spec.offset), spec.stop) - spec.offset for cut in layout.cuts]
    cuts[-1] = spec.numel
    line = torch.zeros(spec.numel, dtype=dtype, device=engine.device)
    if part is not None and state.piece.numel:
        target = line[state.piece.start - spec.offset : state.piece.stop - spec.offset]
        view = line.as_strided(spec.shape, spec.stride) if state.piece.is_whole else target
        view.copy_(part)
    handle = comm.all_gather(line, cuts, label=label)
    engine.executor.wait(handle, "gather", state.flat.spec.unit)
    handle.receipt.wait()
    return line.as_strided(spec.shape, spec.stride)
